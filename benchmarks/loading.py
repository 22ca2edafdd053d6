"""Host memory and time of loading a large Hugging Face checkpoint.

    python benchmarks/loading.py
    python benchmarks/loading.py --gigabytes=1 --shards=2

Writes a checkpoint of random bfloat16 tensors into a temporary directory, and loads it in a fresh process. What counts
is the most memory that process held while it loaded, beyond what it had before and the parameters themselves: on CPUs
these are in the same memory. The files were just written, so that reading them mostly tells the speed of memory, not of
a disk. Prints the figures; --output gets the same as JSON.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from safetensors.numpy import save_file

sys.path.append(str(Path(__file__).resolve().parents[1]))  # a script finds its own directory only

import refusion_jax as rf
from benchmarks import common
from benchmarks.common import of, spread
from refusion_jax import command_line
from refusion_jax.config import ConfigError, ModelConfig
from refusion_jax.files import write_json
from refusion_jax.huggingface.export import describe
from refusion_jax.huggingface.names import TensorSpec, stored_name, tensor_specs

FLAGS = flags.FlagValues()
flags.DEFINE_float("gigabytes", 4.0, "Size of the checkpoint, about, in 10**9 bytes.", 0.0, flag_values=FLAGS)
flags.DEFINE_integer("shards", 8, "Files that it is split into.", 1, flag_values=FLAGS)
flags.DEFINE_integer("hidden_size", 4096, "Width of the model, a multiple of 512.", 512, flag_values=FLAGS)
flags.DEFINE_integer("rounds", 3, "Loads to measure, each in a process of its own.", 1, flag_values=FLAGS)
flags.DEFINE_string("load", None, "Only load this directory and print figures as JSON.", flag_values=FLAGS)
flags.DEFINE_string("write", None, "Only write the checkpoint, into this directory.", flag_values=FLAGS)
flags.DEFINE_string("output", None, "Default: benchmarks/results/loading_BACKEND.json.", flag_values=FLAGS)


def make_config(hidden_size: int, gigabytes: float) -> ModelConfig:
    """A Qwen3 of this width and as many layers as make this size.

    Raises:
      ConfigError: for a width that its heads do not divide.
    """
    if hidden_size % 512:
        raise ConfigError(f"--hidden_size is {hidden_size}, not a multiple of 512; use {hidden_size // 512 * 512}.")

    def config(layers: int) -> ModelConfig:
        return ModelConfig(
            vocab_size=8 * hidden_size, hidden_size=hidden_size, intermediate_size=3 * hidden_size,
            num_hidden_layers=layers, num_attention_heads=hidden_size // 128, num_key_value_heads=hidden_size // 512,
            head_dim=128, max_position_embeddings=40_960, dtype="bfloat16", param_dtype="bfloat16",
        )  # fmt: skip

    one, two = (sum(map(_bytes, tensor_specs(config(layers), "qwen3"))) for layers in (1, 2))
    return config(max(1, 1 + round((1e9 * gigabytes - one) / (two - one))))


def _bytes(spec: TensorSpec) -> int:
    return 2 * int(np.prod(spec.shape))


def write_checkpoint(directory: Path, config: ModelConfig, shards: int) -> None:
    """Writes random tensors, one file after another."""
    specs = tensor_specs(config, "qwen3")
    total, done, rng = sum(map(_bytes, specs)), 0, np.random.default_rng(0)
    groups: list[list[TensorSpec]] = [[] for _ in range(shards)]
    for spec in specs:
        groups[min(done * shards // total, shards - 1)].append(spec)
        done += _bytes(spec)
    weight_map = {}
    for number, group in enumerate(groups, 1):
        file = f"model-{number:05}-of-{shards:05}.safetensors"
        tensors = {}
        for spec in group:
            bits = rng.integers(0, 2**16, spec.shape, np.uint16) & np.uint16(0xBFFF)  # numbers between -2 and 2
            tensors[stored_name(spec.name, "qwen3")] = bits.view(jnp.bfloat16)
        save_file(tensors, directory / file)
        weight_map |= dict.fromkeys(tensors, file)
    write_json(directory / "model.safetensors.index.json", {"weight_map": weight_map})
    write_json(directory / "config.json", describe(config, "bfloat16"))


def measure(directory: Path) -> dict[str, float]:
    """Loads the directory in this process."""
    jax.block_until_ready(jnp.zeros(1))  # the backend has started
    before, began = common.peak_rss_mib(), time.perf_counter()
    model = jax.block_until_ready(rf.load(directory).params)
    seconds = time.perf_counter() - began
    parameters = sum(leaf.nbytes for leaf in jax.tree.leaves(model)) / 2**20
    peak = common.peak_rss_mib()
    return {"seconds": seconds, "before_mib": before, "peak_mib": peak, "above_mib": peak - before - parameters}


def main(args: flags.FlagValues) -> None:
    """Measures, prints and writes the result."""
    if args.load is not None:
        print(json.dumps(measure(Path(args.load))))
        return
    config = make_config(args.hidden_size, args.gigabytes)
    if args.write is not None:
        write_checkpoint(Path(args.write), config, args.shards)
        return
    output = common.result_path(args.output, "loading")
    result: dict[str, Any] = {"commit": common.commit(), "machine": common.machine()}
    common.warn_if_busy(result["machine"])
    with tempfile.TemporaryDirectory() as directory:
        # A process is charged with the memory of the one that started it, so this one writes nothing itself.
        settings = [f"--{name}={getattr(args, name)}" for name in ("gigabytes", "hidden_size", "shards")]
        subprocess.run([sys.executable, __file__, f"--write={directory}", *settings], check=True)
        command = [sys.executable, __file__, f"--load={directory}"]
        runs = [subprocess.run(command, stdout=subprocess.PIPE, check=True) for _ in range(args.rounds)]
    rounds = [json.loads(run.stdout.splitlines()[-1]) for run in runs]
    figures = {name: spread([each[name] for each in rounds]) for name in rounds[0]}
    sizes = [_bytes(spec) for spec in tensor_specs(config, "qwen3")]
    size, largest = sum(sizes), max(sizes)
    figures["gigabytes_per_second"] = spread([size / each["seconds"] / 1e9 for each in rounds])
    header = ["", "median (min to max)"]
    rows = [
        ["seconds", of(figures["seconds"], ".2f")],
        ["GB/s", of(figures["gigabytes_per_second"], ".2f")],
        ["host memory before, MiB", of(figures["before_mib"], ",.0f")],
        ["at most while loading, MiB", of(figures["peak_mib"], ",.0f")],
        ["beyond before and the parameters, MiB", of(figures["above_mib"], ",.0f")],
    ]
    print(f"{size / 1e9:.2f} GB in {args.shards} files, the largest tensor {largest / 2**20:,.0f} MiB\n")
    print(common.table(header, rows))
    names = ("gigabytes", "shards", "hidden_size", "rounds")
    result |= {"versions": common.versions(), "settings": {name: getattr(args, name) for name in names}}
    write_json(output, result | {"bytes": size, "largest_tensor_bytes": largest} | figures)
    print(f"\nWritten to {output}.")


if __name__ == "__main__":
    command_line.run(main, FLAGS)
