"""What would make a program smaller that is too large for a chip: changes of settings, the least costly first.

Only what takes memory away from this program is named: nothing that is in force already, and nothing that would not be
accepted.
"""

import dataclasses
import math

from refusion_jax.compilation.programs import DecodeShape
from refusion_jax.compilation.report import Report
from refusion_jax.compilation.topologies import CHIPS, Topology
from refusion_jax.config import Config, ConfigError, ModelConfig, TrainConfig
from refusion_jax.decoding.batching import MIN_PROMPT_BUCKET, MIN_RESPONSE_BUCKET, bucket

_LOSS_CHUNK = TrainConfig().loss_chunk
_ADAPTER_RANK = 16
_SHORTEST_ROWS = 256  # whose halves still hold a text
_FLOAT32_BYTES = 4
# The next family with more memory, and the axes that its slices have beyond those of the one before.
_LARGER_CHIPS = {"v5e": ("v6e", ()), "v6e": ("v5p", (1,))}


def training_remedies(config: Config, report: Report) -> list[str]:
    """What makes a training step smaller."""
    found = []
    # What the chips hold between steps does not depend on how a step computes.
    fits_between = sum(report.program.held.values()) < report.topology.chip.hbm_bytes
    if fits_between:
        found += _same_batch(config, report)
    found += _same_numbers(config, report)
    if fits_between:
        found += _less_data(config, report)
    return found + _coarser_parameters(config) + _more_chips(config, report)


def decoding_remedies(model: ModelConfig, shape: DecodeShape, report: Report) -> list[str]:
    """What makes decoding smaller, for a `model` with the vocabulary it is compiled with."""
    found, held, rows = [], report.program.held, shape.batch_size
    fits_empty = held["parameters"] < report.topology.chip.hbm_bytes
    if fits_empty and isinstance(rows, int):
        shares = report.program.mesh["data"] * report.program.mesh["fsdp"]
        if fewer := rows // shares // 2 * shares:
            found.append(f"--batch_size={fewer}")
    if fits_empty and not model.kv_dtype:
        found.append("--kv_dtype=int8")
    if not shape.quantize:
        found.append("--quantize=int8")
    tensor = 2 * report.program.mesh["tensor"]
    widths = (model.num_attention_heads, model.num_key_value_heads, model.intermediate_size)
    if math.gcd(*widths) % tensor == 0 and 2 * report.used <= report.topology.chips:
        found.append(f"--tensor_parallel={tensor}")
    if fits_empty:
        found += _shorter(shape)
    return found + larger_chips(report.topology)


def larger_chips(topology: Topology) -> list[str]:
    """As many chips of the next family with more memory, where there is one."""
    if topology.family not in _LARGER_CHIPS:
        return []
    family, axes = _LARGER_CHIPS[topology.family]
    return [f"--compile_for={_name(family, (*topology.shape, *axes), topology.slices)}, whose chips have more memory"]


def _name(family: str, shape: tuple[int, ...], slices: int) -> str:
    return f"{slices}*" * (slices > 1) + f"{family}:{'x'.join(map(str, shape))}"


def _rows_at_once(config: Config, report: Report) -> int:
    """Rows of a batch whose activations a chip holds at a time."""
    mesh = report.program.mesh
    return config.train.batch_size // (mesh["data"] * mesh["fsdp"]) // config.train.accumulate_steps


def _same_batch(config: Config, report: Report) -> list[str]:
    """Other ways to compute the same gradient."""
    train, model, rows = config.train, config.model, _rows_at_once(config, report)
    found = []
    is_whole = not train.loss_chunk or train.loss_chunk > _LOSS_CHUNK
    if is_whole and rows * config.data.max_length > _LOSS_CHUNK:
        found.append(f"--config.train.loss_chunk={_LOSS_CHUNK}")
    # While its gradient is computed a layer needs its activations: with a single layer nothing is spared.
    if model.remat != "full" and model.num_hidden_layers > 1:
        found.append("--config.model.remat=full")
    parts = next((parts for parts in range(2, rows + 1) if rows % parts == 0), None)
    if parts is not None and _spared_by_parts(config, report, parts) > 0:
        found.append(f"--config.train.accumulate_steps={parts * train.accumulate_steps}")
    return found


def _spared_by_parts(config: Config, report: Report, parts: int) -> float:
    """Bytes, about, by which so many times as many parts make a step smaller: the first ones need room for sums."""
    held = report.program.held
    is_frozen = config.lora.rank > 0
    gradients = 0 if is_frozen else held["parameters"]
    activations = report.hbm_bytes - sum(held.values()) - gradients
    itemsize = _FLOAT32_BYTES if config.model.param_dtype == "float32" else _FLOAT32_BYTES // 2
    sums = gradients * _FLOAT32_BYTES // itemsize if config.train.accumulate_steps == 1 else 0
    return activations * (1 - 1 / parts) - sums


def _same_numbers(config: Config, report: Report) -> list[str]:
    """Other shares of the same state for each chip, and moments in half the bytes."""
    mesh, slices = report.program.mesh, report.topology.slices
    found = []
    fsdp = mesh["fsdp"] * mesh["data"] // slices
    if mesh["data"] > slices and config.model.hidden_size % fsdp == 0:
        found.append(f"--config.mesh.data={slices} --config.mesh.fsdp={fsdp}")
    optimizer = config.optimizer
    # Adafactor's moments are sums over rows and columns, which weigh nothing.
    if optimizer.moments_dtype == "float32" and optimizer.name != "adafactor" and not config.lora.rank:
        found.append("--config.optimizer.moments_dtype=bfloat16")
    return found


def _less_data(config: Config, report: Report) -> list[str]:
    """Smaller batches, and shorter rows."""
    train, rows = config.train, _rows_at_once(config, report)
    found = []
    if rows > 1:
        found.append(f"--config.train.batch_size={train.batch_size // rows * (rows // 2)}")
    if config.data.max_length >= _SHORTEST_ROWS:
        found.append(f"--config.data.max_length={config.data.max_length // 2}")
    return found


def _coarser_parameters(config: Config) -> list[str]:
    found = []
    if config.model.param_dtype == "float32":
        found.append("--config.model.param_dtype=bfloat16")
    if not config.lora.rank and config.train.init_from:
        found.append(f"--config.lora.rank={_ADAPTER_RANK}")
    return found


def _more_chips(config: Config, report: Report) -> list[str]:
    """Twice as many chips, larger ones, four times as many."""
    more = _more_fsdp(config, report)
    return [*more[:1], *larger_chips(report.topology), *more[1:]]


def _more_fsdp(config: Config, report: Report) -> list[str]:
    """Topologies with more chips, over all of which parameters and rows are split."""
    topology, mesh, train = report.topology, report.program.mesh, config.train
    largest, shape = CHIPS[topology.family].largest, topology.shape
    found = []
    for factor, times in ((2, "twice"), (4, "four times")):
        axes = [axis for axis, size in enumerate(shape) if 2 * size <= largest[axis]]
        fsdp = factor * mesh["fsdp"]
        if config.model.hidden_size % fsdp or not axes:
            break
        shortest = min(axes, key=shape.__getitem__)
        shape = tuple(2 * size if axis == shortest else size for axis, size in enumerate(shape))
        settings = [f"--compile_for={_name(topology.family, shape, topology.slices)}"]
        if config.mesh.fsdp != -1:
            settings.append(f"--config.mesh.fsdp={fsdp}")
        if _rows_at_once(config, report) % factor:
            settings.append(f"--config.train.batch_size={factor * train.batch_size}")
        found.append(f"{' '.join(settings)}, {times} as many chips")
    return found


def _shorter(shape: DecodeShape) -> list[str]:
    """Half the room for responses, and for prompts: both are rounded up to powers of two."""
    found = []
    response = bucket(shape.config.rounded_length, MIN_RESPONSE_BUCKET)
    prompt = bucket(shape.prompt_length, MIN_PROMPT_BUCKET)
    if response > MIN_RESPONSE_BUCKET:
        try:
            length = dataclasses.replace(shape.config, gen_length=response // 2).gen_length
            found.append(f"--gen_length={length}")
        except ConfigError:  # which slots or blocks do not divide
            pass
    if prompt > MIN_PROMPT_BUCKET:
        found.append(f"--compile_prompt_length={prompt // 2}")
    return found
