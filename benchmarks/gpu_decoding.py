"""Forwards of the decode loop and of left-to-right decoding on one device, next to what reading alone would take."""

import statistics
import time
from collections.abc import Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.common import spread
from refusion_jax.config import DecodeConfig, ModelConfig
from refusion_jax.decoding import Rules, Verification, autoregressive
from refusion_jax.decoding.batching import Job, Sizes, make_request
from refusion_jax.decoding.layout import prepare_layout
from refusion_jax.decoding.memory import kv_bytes
from refusion_jax.decoding.method_rows import make_rows
from refusion_jax.decoding.refusion import Program, admit, decode_loop, empty_state
from refusion_jax.methods import Method
from refusion_jax.modeling import Transformer
from refusion_jax.modeling.quantization import quantize

SLOT, ROWS, SMALL_ROWS = 8, (1, 8, 64), (1, 4)
PROMPT, SMALL_PROMPT = 1024, 64
TURNS, FORWARDS = 4, 7  # measured turns of so many forwards; one turn before them compiles


def every_draft(v: Verification) -> jax.Array:
    """Accepts everything."""
    return jnp.ones(v.token.shape, jnp.bool_)


RULES = Rules(accept=every_draft)


def random_params(config: ModelConfig) -> Any:
    """Parameters with random numbers, made on the device one by one in their own type."""
    token = jnp.zeros((1, 1), jnp.int32)
    shapes = nn.meta.unbox(jax.eval_shape(Transformer(config).init, jax.random.key(0), token, token)["params"])
    paths, structure = jax.tree.flatten_with_path(shapes)

    def make(index: int, path: Any, leaf: Any) -> jax.Array:
        if path[-1].key == "scale":
            return jnp.ones(leaf.shape, leaf.dtype)
        make_one = jax.jit(lambda key: config.initializer_range * jax.random.normal(key, leaf.shape, leaf.dtype))
        return make_one(jax.random.key(index))

    return jax.tree.unflatten(structure, [make(index, path, leaf) for index, (path, leaf) in enumerate(paths)])


def read_bytes(params: Any) -> int:
    """Bytes of the parameters that a forward reads: of an embedding table that is no unembedding only a few rows."""
    read = [leaf for path, leaf in jax.tree.leaves_with_path(params) if _is_read_whole(path, params)]
    return sum(leaf.nbytes for leaf in read)


def _is_read_whole(path: Any, params: Any) -> bool:
    return "lm_head" not in params or path[0].key != "embed_tokens"


def prompts(config: ModelConfig, rows: int, length: int) -> list[list[int]]:
    """Random prompts."""
    return np.random.default_rng(0).integers(3, config.vocab_size, (rows, length)).tolist()


def measure_refusion(module: Transformer, params: Any, rows: int, prompt_length: int) -> dict[str, Any]:
    """Forwards that each commit a slot and draft the next: a query of two slots, compiled for exactly that."""
    model, slots = module.config, TURNS * FORWARDS + FORWARDS + 2
    config = DecodeConfig(
        gen_length=slots * SLOT, slot_size=SLOT, serial_num_blocks=slots, slot_threshold=1.0,
        suppress_ids=model.eos_token_ids,
    )  # fmt: skip
    jobs = [
        Job(i, 0, prepare_layout(p, config, model), config) for i, p in enumerate(prompts(model, rows, prompt_length))
    ]
    capacity, suppressed = config.rounded_length, len(model.eos_token_ids)
    program = Program(module, ((2 * SLOT * rows, 2 * SLOT),), RULES, sampling=False, infilling=False)
    state = empty_state(program, rows, capacity, prompt_length + capacity)
    request = jax.device_put(make_request([], rows, capacity, suppressed, 0, model))
    group = max(1, rows // 4)
    for start in range(0, rows, group):
        some = jobs[start : start + group]
        tokens = np.array([job.layout.tokens for job in some], np.int32)
        places = np.array([job.layout.token_position_ids for job in some], np.int32)
        lengths, at = np.full(group, prompt_length, np.int32), np.arange(start, start + group, dtype=np.int32)
        asked = make_request(some, group, capacity, suppressed, 0, model)
        request, state = admit(module, params, None, tokens, places, lengths, at, asked, request, state)
    before, taken, committed = 0, [], 0
    for turn in range(TURNS + 1):
        began = time.perf_counter()
        state, work = decode_loop(program, params, None, request, state, np.int32(1), np.int32(FORWARDS))
        jax.block_until_ready(work)
        if turn:
            taken.append((time.perf_counter() - began) / FORWARDS)
        committed = int(jnp.sum(state.committed))
        before = committed if not turn else before
    per_forward = (committed - before) / rows / (TURNS * FORWARDS)
    middle = prompt_length + (before + committed) // (2 * rows)
    return _record("ReFusion", rows, 2 * SLOT, per_forward, middle, taken)


def measure_plain(module: Transformer, params: Any, rows: int, prompt_length: int) -> dict[str, Any]:
    """Left-to-right forwards, one token each, on the same prompts."""
    length, taken, made = TURNS * FORWARDS, [], 0
    config, model = DecodeConfig(gen_length=length, slot_size=1), module.config
    layouts = [prepare_layout(prompt, config, model) for prompt in prompts(model, rows, prompt_length)]
    jobs = [Job(index, 0, layout, config) for index, layout in enumerate(layouts)]
    sizes = Sizes.of(rows, prompt_length, length, 0)
    asked = jax.device_put(make_rows(jobs, rows, sizes.prompt_length, 0, Method("autoregressive"), model))
    for _ in range(3):
        state = jax.block_until_ready(autoregressive.prefill(module, params, asked, sizes.capacity))
        began = time.perf_counter()
        state = jax.block_until_ready(autoregressive.decode_loop(module, params, asked, state, sampling=False))
        counts = np.asarray(state.responses.forwards)
        made = counts.sum() / counts.max()
        taken.append((time.perf_counter() - began) / counts.max())
    return _record("left to right", rows, 1, made / rows, prompt_length + length // 2, taken[1:])


def _record(
    decoding: str, rows: int, width: int, per_forward: float, committed: int, taken: list[float]
) -> dict[str, Any]:
    return {
        "decoding": decoding, "rows": rows, "query_width": width, "committed": committed,
        "tokens_per_forward": float(per_forward), "forward_seconds": spread(taken),
        "tokens_per_second": rows * float(per_forward) / statistics.median(taken),
    }  # fmt: skip


WAYS = {"ReFusion": measure_refusion, "left to right": measure_plain}


def cases(kind: str, small: bool) -> list[tuple[int, str]]:
    """(rows, way of decoding) of all measurements, in their order."""
    ways = list(WAYS) if kind == "bfloat16" or small else ["ReFusion"]
    return [(rows, way) for rows in (SMALL_ROWS if small else ROWS) for way in ways]


def name_of(case: tuple[int, str]) -> str:
    """What a measurement is called."""
    rows, way = case
    return f"{way}, {rows} {'row' if rows == 1 else 'rows'}"


def measure_decoding(
    model: ModelConfig, kind: str, small: bool, peaks: dict[str, Any], seconds: float
) -> Iterator[dict[str, Any]]:
    """The cases one after another, while there is time for another like the longest so far.

    Args:
      model: its shape. kind: bfloat16, int8 (weights) or int8_kv (weights and KV buffer).
    """
    if kind == "int8_kv":
        model = ModelConfig(**vars(model) | {"kv_dtype": "int8"})
    module, params = Transformer(model), random_params(model)
    params = params if kind == "bfloat16" else quantize(params)
    weights = read_bytes(params)
    began, longest = time.monotonic(), 0.0
    for rows, way in cases(kind, small):
        if time.monotonic() - began + 1.2 * longest > seconds:
            return
        start = time.monotonic()
        record = WAYS[way](module, params, rows, SMALL_PROMPT if small else PROMPT)
        longest = max(longest, time.monotonic() - start)
        needed = weights + kv_bytes(model, rows, record["committed"])
        stats = jax.local_devices()[0].memory_stats() or {}
        yield record | {
            "weight_bytes": weights, "bound_bytes": needed,
            "bound_seconds": needed / peaks["bandwidth"] if peaks else None,
            "peak_memory_bytes": stats.get("peak_bytes_in_use"),
        }  # fmt: skip
