"""The parts of `benchmarks/gpu.py`: `python -m benchmarks.gpu_parts NAME OUTPUT` measures one and writes figures."""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import common, gpu_decoding
from benchmarks.common import spread
from refusion_jax.config import Config, DataConfig, ModelConfig, OptimizerConfig, TrainConfig
from refusion_jax.data import max_segments
from refusion_jax.files import write_json
from refusion_jax.modeling import Transformer
from refusion_jax.modeling.sizes import qwen3
from refusion_jax.sharding import batch_sharding, make_mesh
from refusion_jax.slots import Batch
from refusion_jax.training.flops import flops_per_token, peak_flops
from refusion_jax.training.optimizer import make_optimizer
from refusion_jax.training.state import abstract_state, init_state
from refusion_jax.training.step import make_run_step

Record = dict[str, Any]
SMALL = ModelConfig(
    vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=1024, dtype="bfloat16",
)  # fmt: skip
LENGTH, SMALL_LENGTH = 4096, 128
# (rows, remat) by the memory that they take, the most useful first: of those that fit the fastest counts.
TRIALS = ((8, "minimal"), (8, "full"), (16, "full"), (4, "minimal"), (4, "full"), (2, "full"))
STEPS = 6
SPARE = 0.95  # of the memory that JAX has; a program has it in one piece


def seconds_of(function: Callable[[], Any], repeats: int) -> list[float]:
    """Seconds of each of several calls, the first, which compiles, left out."""
    jax.block_until_ready(function())
    taken = []
    for _ in range(repeats):
        began = time.perf_counter()
        jax.block_until_ready(function())
        taken.append(time.perf_counter() - began)
    return taken


def peak_memory() -> int | None:
    """Bytes that this process had at most on its device, where the device tells."""
    return (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def measure_peaks(small: bool) -> Iterator[Record]:
    """FLOP/s of a bfloat16 product, and bytes/s of a copy, read and written ones together."""
    width, numbers = (256, 2**20) if small else (8192, 2**30)
    square = jnp.ones((width, width), jnp.bfloat16)
    product = jax.jit(jnp.matmul)
    matmul = [2 * width**3 / s for s in seconds_of(lambda: product(square, square), 30)]
    source = jnp.ones(numbers, jnp.bfloat16)
    copy = jax.jit(jnp.negative)  # a copy proper might be left out
    bandwidth = [2 * source.nbytes / s for s in seconds_of(lambda: copy(source), 30)]
    yield {
        "flops": statistics.median(matmul), "flops_spread": spread(matmul), "matmul_width": width,
        "bandwidth": statistics.median(bandwidth), "bandwidth_spread": spread(bandwidth), "copied_bytes": source.nbytes,
        "peak_memory_bytes": peak_memory(),
    }  # fmt: skip


def random_batch(config: Config, sharding: Any) -> Batch:
    """Rows of one example each: random tokens, an eighth of them prompt."""
    rows, length = config.train.batch_size, config.data.max_length
    segments = max_segments(length, config.data.pack)
    tokens = np.random.default_rng(0).integers(3, config.model.vocab_size, (rows, length), dtype=np.int32)
    first = np.zeros((rows, segments), np.int32)
    first[:, 0] = 1
    examples = first * np.arange(rows, dtype=np.int32)[:, None]
    places = np.broadcast_to(np.arange(length, dtype=np.int32), (rows, length))
    prompt = length // 8
    arrays = (tokens, np.ones_like(tokens), places, first * prompt, first * (length - prompt), examples, 0 * first)
    return jax.device_put(Batch(*arrays), sharding)


def measure_trial(config: Config, peaks: Record) -> Record:
    """Whole training steps of one configuration; "skipped" where its program needs more memory than there is."""
    mesh = make_mesh(config.mesh)
    module, optimizer = Transformer(config.model), make_optimizer(config.optimizer, config.train.steps)
    state, shardings = abstract_state(module, optimizer, mesh, config.lora)
    step: Any = make_run_step(config, module, optimizer, mesh, shardings)
    batch, seed = random_batch(config, batch_sharding(mesh)), jnp.int32(0)
    length, rows = config.data.max_length, config.train.batch_size
    record: Record = {"batch_size": rows, "length": length, "remat": config.model.remat}
    began = time.perf_counter()
    with jax.set_mesh(mesh):
        compiled = step.lower(state, batch, seed).compile()
        record["compile_seconds"] = time.perf_counter() - began
        memory, limit = compiled.memory_analysis(), (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
        needed = memory.argument_size_in_bytes + memory.temp_size_in_bytes
        record["program_bytes"] = needed
        if limit is not None and needed > SPARE * limit:
            return record | {"skipped": f"needs {needed / 1e9:.1f} GB of {limit / 1e9:.1f} GB"}
        state, _ = init_state(module, optimizer, 0, mesh, config.lora)
        taken = []
        for _ in range(STEPS + 1):
            began = time.perf_counter()
            state, metrics = compiled(state, batch, seed)
            jax.block_until_ready(metrics)
            taken.append(time.perf_counter() - began)
    rate = rows * length / statistics.median(taken[1:])
    flops = rate * flops_per_token(config.model, length)
    sheet = peak_flops(jax.devices()[0].device_kind)
    return record | {
        "step_seconds": spread(taken[1:]), "tokens_per_second": rate, "model_flops_per_second": flops,
        "utilisation_of_measured": flops / peaks["flops"] if peaks else None,
        "utilisation_of_data_sheet": flops / sheet if sheet else None,
        "loss": float(metrics.loss.total), "peak_memory_bytes": peak_memory(),
    }  # fmt: skip


def trials(small: bool) -> tuple[tuple[int, str], ...]:
    """(rows, remat) of all trials, in their order."""
    return TRIALS[-2:] if small else TRIALS


def row_length(small: bool) -> int:
    """Tokens of a row to train on."""
    return SMALL_LENGTH if small else LENGTH


def measure_training(size: str, small: bool, peaks: Record, seconds: float) -> Iterator[Record]:
    """Trials, while there is time for another one like the longest so far."""
    began, longest = time.monotonic(), 0.0
    for rows, remat in trials(small):
        if time.monotonic() - began + 1.2 * longest > seconds:
            break
        start = time.monotonic()
        changes = {"dtype": "bfloat16", "remat": remat}
        length = row_length(small)
        model = ModelConfig(**vars(SMALL) | changes) if small else qwen3(size, **changes)
        config = Config(
            model=model,
            data=DataConfig(max_length=length),
            train=TrainConfig(batch_size=rows),
            optimizer=OptimizerConfig(name="adamw"),
        )
        try:
            record = measure_trial(config, peaks)
        except jax.errors.JaxRuntimeError as error:
            record = {
                "batch_size": rows,
                "length": length,
                "remat": remat,
                "skipped": " ".join(str(error).split())[:200],
            }
        longest = max(longest, time.monotonic() - start)
        yield record


def measurements(name: str, small: bool) -> list[str]:
    """What a part measures, in its order."""
    kind, _, what = name.partition("_")
    if kind == "peaks":
        return ["peaks"]
    if kind == "train":
        return [f"{rows} x {row_length(small)}, remat {remat}" for rows, remat in trials(small)]
    return [gpu_decoding.name_of(case) for case in gpu_decoding.cases(what, small)]


def measure(name: str, small: bool, peaks: Record, seconds: float) -> Iterable[Record]:
    """The records of a part, one after another."""
    kind, _, what = name.partition("_")
    if kind == "peaks":
        return measure_peaks(small)
    if kind == "train":
        return measure_training(what.upper(), small, peaks, seconds)
    model = SMALL if small else qwen3("8B", dtype="bfloat16", param_dtype="bfloat16")
    return gpu_decoding.measure_decoding(model, what, small, peaks, seconds)


def about() -> Record:
    """What it runs on."""
    flags = {name: os.environ[name] for name in ("XLA_FLAGS", "XLA_CLIENT_MEM_FRACTION") if name in os.environ}
    device = jax.devices()[0].device_kind
    return {"commit": common.commit(), "device": device, "versions": common.versions(), "flags": flags}


def main() -> None:
    """Measures one part; its records are written as they come, with the names of what is still left out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("output", type=Path)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--peaks", type=json.loads, default={})
    parser.add_argument("--seconds", type=float, default=600.0)
    args = parser.parse_args()
    if args.name == "about":
        write_json(args.output, about())
        return
    names, records = measurements(args.name, args.small), []
    write_json(args.output, {"records": records, "left_out": names})
    for record in measure(args.name, args.small, args.peaks, args.seconds):
        records.append({"what": names[len(records)]} | record)
        write_json(args.output, {"records": records, "left_out": names[len(records) :]})


if __name__ == "__main__":
    main()
