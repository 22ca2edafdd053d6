"""Decoding with the methods of other systems: from jobs to rows, batch by batch, and from responses to answers.

Sizes are rounded up to the buckets of ReFusion's decoder, so that another batch of the same buckets compiles nothing.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from refusion_jax.config import ModelConfig
from refusion_jax.decoding import autoregressive, block_diffusion
from refusion_jax.decoding.batching import Bounds, Job, Sizes, beside, limit_of, row_keys, suppressed_table
from refusion_jax.decoding.generation import Answer, Row, Statistics, read_row
from refusion_jax.decoding.masked_diffusion import decode_masked
from refusion_jax.decoding.rows import Responses, Rows
from refusion_jax.methods import Method
from refusion_jax.modeling import Transformer
from refusion_jax.sharding import check_rows, check_widths


def decode_method(
    module: Transformer,
    params: Any,
    jobs: Iterable[Job],
    method: Method,
    *,
    batch_size: int,
    statistics: Statistics | None = None,
    mesh: Mesh | None = None,
) -> Iterator[Answer]:
    """Decodes jobs of plain prompts, so many at once, and yields the answers of a batch when all of it is finished.

    Args:
      module, params: the model.
      jobs: what to decode, in a layout of slots of one token; taken one batch at a time.
      method: any but "refusion".
      batch_size: rows of a batch; the last one has idle rows, so that it compiles nothing.
      statistics: an object to add to.
      mesh: one of `sharding.make_mesh`, over which the parameters are split.

    Raises:
      ConfigError: when the mesh cannot split the rows, or the model, evenly; when the method's blocks or steps do not
        divide a response.
    """
    if mesh is not None:
        check_rows(mesh, batch_size, "rows")
        check_widths(mesh, module.config)
    measured = Statistics() if statistics is None else statistics
    remaining = iter(jobs)
    while batch := list(itertools.islice(remaining, batch_size)):
        with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
            responses = _respond(module, params, batch, batch_size, method, measured)
        yield from _answers(responses, batch, module.config, measured)


def query_width(method: Method, prompt_length: int, capacity: int) -> int:
    """Query tokens of a row's longest forward in the loop, for prompts and responses of so many tokens."""
    if method.name == "refusion":
        return capacity
    if method.name == "autoregressive":
        return 1
    if method.name == "block_diffusion":
        return 2 * method.block_length or capacity
    return prompt_length + capacity


def make_rows(
    jobs: Sequence[Job], rows: int, prompt_length: int, suppressed: int, method: Method, model: ModelConfig
) -> Rows:
    """Lays prompts and settings out as arrays; rows beyond the jobs are finished from the start.

    Args:
      jobs: at most `rows`.
      prompt_length: the longest prompt there is room for. suppressed: suppressed IDs per row.
      model: for its special tokens.

    Raises:
      ConfigError: when the method's blocks or steps do not divide a response.
    """
    configs, idle = [job.config for job in jobs], rows - len(jobs)
    lengths = [job.layout.response_length for job in jobs]
    blocks = [method.blocks(length) for length in lengths]
    prompts = np.full((rows, prompt_length), model.pad_token_id, np.int32)
    for row, job in zip(prompts, jobs, strict=False):
        row[: job.layout.prompt_length] = job.layout.tokens

    def per_row(values: Sequence[Any], dtype: Any, idle_value: Any = 0) -> Any:
        return np.array([*values, *[idle_value] * idle], dtype)

    draws = method.scores == "random" or any(config.temperature > 0 for config in configs)
    tables: dict[str, Any] = {
        "prompts": prompts,
        "keys": row_keys(jobs, rows) if draws else np.zeros((rows, 2), np.uint32),
        "suppressed_ids": suppressed_table(configs, rows, suppressed, model),
    }
    return Rows(
        prompt_lengths=per_row([job.layout.prompt_length for job in jobs], np.int32),
        lengths=per_row(lengths, np.int32),
        block_lengths=per_row([length for length, _ in blocks], np.int32),
        block_steps=per_row([steps for _, steps in blocks], np.int32),
        thresholds=per_row([method.threshold] * len(jobs), np.float32),
        factors=per_row([method.factor] * len(jobs), np.float32),
        guidances=per_row([method.guidance] * len(jobs), np.float32),
        temperatures=per_row([config.temperature for config in configs], np.float32),
        top_ps=per_row([config.top_p for config in configs], np.float32, 1),
        top_ks=per_row([limit_of(config, model) for config in configs], np.int32, model.vocab_size),
        eos_ids=per_row([model.eos_token_ids] * len(jobs), np.int32, model.eos_token_ids),
        **tables,
    )


def _respond(
    module: Transformer, params: Any, jobs: Sequence[Job], rows: int, method: Method, statistics: Statistics
) -> Responses:
    """The responses to a batch, on the host."""
    bounds = Bounds.of((job.layout, job.config) for job in jobs)
    sizes = Sizes.of(rows, bounds.prompt_length, bounds.response_length, bounds.suppressed)
    with statistics.timed("prefill_seconds"):
        asked = make_rows(jobs, rows, sizes.prompt_length, sizes.suppressed, method, module.config)
        asked = beside(params, asked)
        state: Any = None
        if method.name == "autoregressive":
            state = autoregressive.prefill(module, params, asked, sizes.capacity)
        elif method.name == "block_diffusion":
            state = block_diffusion.prefill(module, params, asked, sizes.capacity)
        jax.block_until_ready(state)  # to tell prefill from decoding
    with statistics.timed("decode_seconds"):
        if method.name == "autoregressive":
            responses = autoregressive.decode_loop(module, params, asked, state, bounds.sampling).responses
        elif method.name == "block_diffusion":
            shape = method.block_length, method.scores
            responses = block_diffusion.decode_loop(module, params, asked, state, *shape, bounds.sampling).responses
        else:
            responses = decode_masked(module, params, asked, method, sizes.capacity, bounds.sampling)
        return jax.device_get(responses)


def _answers(responses: Any, jobs: Sequence[Job], model: ModelConfig, statistics: Statistics) -> Iterator[Answer]:
    iterations = int(responses.forwards.max())
    statistics.iterations += iterations
    statistics.row_forwards += iterations * len(responses.forwards)
    statistics.positions += int(responses.positions.sum())
    statistics.needed_positions += int(responses.positions.sum())
    statistics.cached += int(responses.cached.sum())
    none = np.zeros(1, np.int32)
    for index, job in enumerate(jobs):
        row = Row(
            responses.tokens[index],
            responses.probabilities[index],
            responses.committed[index],
            responses.commit_forwards[index],
            int(responses.forwards[index]),
            accepted=none,
            events=0,
        )
        answer = read_row(row, job.layout, job.config, model.eos_token_ids, job.index, job.sample, None)
        answer = dataclasses.replace(answer, tpf=len(answer.tokens) / max(answer.forwards, 1))
        statistics.prompts += 1
        statistics.tokens += len(answer.tokens)
        statistics.forwards += answer.forwards
        yield answer
