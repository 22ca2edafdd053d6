"""The programs that training and decoding run, on arrays that are only described."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from refusion_jax.config import Config, ConfigError, DecodeConfig, ModelConfig
from refusion_jax.data import max_segments
from refusion_jax.decoding.batching import Sizes, make_request, query_shapes
from refusion_jax.decoding.kv_cache import CHUNK
from refusion_jax.decoding.memory import fitting_rows
from refusion_jax.decoding.placement import buffer_shardings
from refusion_jax.decoding.refusion import Program, admit, decode_loop, empty_state
from refusion_jax.decoding.rules import Rules
from refusion_jax.huggingface import local_directory, read_model_config
from refusion_jax.modeling import Transformer
from refusion_jax.modeling.quantization import quantize, quantized_shardings
from refusion_jax.sharding import (
    batch_sharding,
    check_mesh,
    check_widths,
    make_mesh,
    replicated,
    row_shares,
    shared_rows,
    tree_shardings,
)
from refusion_jax.slots import Batch
from refusion_jax.training.flops import encoding_flops_per_token, forward_flops_per_token, training_flops_per_token
from refusion_jax.training.optimizer import make_optimizer
from refusion_jax.training.run_directory import read_run_config
from refusion_jax.training.state import abstract_state
from refusion_jax.training.step import make_run_step
from refusion_jax.training.weights import is_begun_run

VOCAB_MULTIPLE = 8


@dataclasses.dataclass(frozen=True)
class AbstractProgram:
    """A program with the shapes of its arguments.

    Attributes:
      name: what it does.
      compile: compiles it.
      mesh: devices by axis.
      held: by kind, bytes that each chip holds of the arguments; what is not named is "other".
      tokens: of one run, over all chips: places of a training batch, padding included, or query positions of a forward.
      model_flops: of one run, over all chips, by the formulas of `training.flops`.
      dynamic_trips: how often loops run whose end depends on data, at most; see `program_cost`.
      least_collectives: bytes that a chip has to exchange in one run, because of how all is split; 0 where that is not
        said.
      least_bytes: bytes that it has to read from its memory; 0 where that is not said.
    """

    name: str
    compile: Callable[[], Any]
    mesh: dict[str, int]
    held: dict[str, int]
    tokens: int
    model_flops: int
    dynamic_trips: tuple[int, ...]
    least_collectives: int = 0
    least_bytes: int = 0


def chip_bytes(tree: Any) -> int:
    """Bytes that one chip holds of a pytree of abstract arrays with shardings."""
    leaves = jax.tree.leaves(tree)
    return sum(leaf.dtype.itemsize * math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in leaves)


def known_vocabulary(config: Config) -> Config:
    """The configuration with a vocabulary: where it is the tokenizer's, of about the size asked for."""
    if config.model.vocab_size:
        return config
    rows = -(-config.data.tokenizer_vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    return dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=rows))


def described_config(path: str) -> Config:
    """The configuration of a run directory, a Hugging Face directory or a model of the Hub, read without its weights.

    Raises:
      CheckpointError: when there is none, or it does not describe a usable model.
    """
    directory = local_directory(path, weights=False)
    if is_begun_run(directory):
        return read_run_config(directory)
    return Config(model=read_model_config(directory))


def train_program(config: Config, devices: Any) -> AbstractProgram:
    """The training step of a run.

    Args:
      config: of the run, with a vocabulary.
      devices: those of a topology.

    Raises:
      ConfigError: when model or batch cannot be split over the configured mesh of these devices.
    """
    mesh, train, length = make_mesh(config.mesh, devices), config.train, config.data.max_length
    check_mesh(mesh, config.model, train.batch_size, train.accumulate_steps)
    module, optimizer = Transformer(config.model), make_optimizer(config.optimizer, train.steps)
    with jax.set_mesh(mesh):  # which says what platform it is
        state, shardings = abstract_state(module, optimizer, mesh, config.lora)
    step: Any = make_run_step(config, module, optimizer, mesh, shardings)

    def array(*shape: int, sharding: Any) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding)

    rows, everywhere = batch_sharding(mesh), replicated(mesh)
    token = array(train.batch_size, length, sharding=rows)
    segment = array(train.batch_size, max_segments(length, config.data.pack), sharding=rows)
    batch = Batch(token, token, token, segment, segment, segment, segment)

    def compile() -> Any:
        with jax.set_mesh(mesh):
            return step.lower(state, batch, array(sharding=everywhere)).compile()

    positions = train.batch_size // train.accumulate_steps * length // row_shares(mesh)
    tokens = train.batch_size * length
    held = {"parameters": chip_bytes((state.params, state.base)), "optimizer": chip_bytes(state.opt_state)}
    return AbstractProgram(
        name="training step",
        compile=compile,
        mesh=dict(mesh.shape),
        held=held,
        tokens=tokens,
        model_flops=tokens * training_flops_per_token(config),
        dynamic_trips=(-(-positions // train.loss_chunk),) if train.loss_chunk else (),
        least_collectives=train.accumulate_steps * _fsdp_bytes(state, mesh, config.model),
    )


def _fsdp_bytes(state: Any, mesh: Mesh, model: ModelConfig) -> int:
    """What fully sharded data parallelism exchanges for one gradient: all parameters gathered for the forward and again
    for the backward pass, and the gradients of the trained ones scattered, in the type of activations.
    """
    if mesh.shape["fsdp"] == 1:
        return 0

    def numbers(tree: Any) -> int:
        shards = [math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in jax.tree.leaves(tree)]
        return mesh.shape["fsdp"] * sum(shards)

    trained, frozen = numbers(state.params), numbers(state.base)
    return (2 * (trained + frozen) + trained) * jnp.dtype(model.dtype).itemsize


@dataclasses.dataclass(frozen=True)
class DecodeShape:
    """What a stream is made for.

    Attributes:
      batch_size: rows, or "auto" for as many as fit. prompt_length: the longest prompt, in tokens.
      config: whose `gen_length` is the longest response. rules: what decides.
      quantize: "int8" for weights in int8, as `load` makes them.
    """

    batch_size: int | str
    prompt_length: int
    config: DecodeConfig
    rules: Rules
    quantize: str = ""


def decode_programs(model: ModelConfig, shape: DecodeShape, mesh: Mesh, free: int) -> list[AbstractProgram]:
    """The two programs of a stream: the prefill that gives rows to prompts, and the decode loop.

    The loop stands for one forward of the widest shape, with as much committed as it can be.

    Args:
      model: with a vocabulary. shape: what the stream is made for.
      mesh: of devices of a topology. free: the memory of each, in bytes.

    Raises:
      ConfigError: when prompt and response are longer than the model's positions, or model or rows cannot be split over
        the mesh.
    """
    needed = shape.prompt_length + shape.config.rounded_length
    if needed > model.context_length:
        raise ConfigError(
            f"--compile_prompt_length {shape.prompt_length} and gen_length {shape.config.gen_length} are together more "
            f"than the {model.context_length} positions of the model; shorten one."
        )
    check_widths(mesh, model)
    where, shares = replicated(mesh), row_shares(mesh)

    def put(leaf: Any, sharding: NamedSharding = where) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    config, module, token, key = shape.config, Transformer(model), jnp.zeros((1, 1), jnp.int32), jax.random.key(0)
    with jax.set_mesh(mesh):  # which says what platform it is
        boxed = jax.eval_shape(module.init, key, token, token)["params"]
    params, shardings = nn.unbox(boxed), tree_shardings(boxed, mesh)
    if shape.quantize:
        params, shardings = jax.eval_shape(quantize, params), quantized_shardings(params, shardings)
    params = jax.tree.map(put, params, shardings)
    suppressed = len(config.suppress_ids) + 2 * config.suppress_special
    sizes_of = functools.partial(
        Sizes.of,
        prompt_length=shape.prompt_length,
        response_length=config.rounded_length,
        suppressed=suppressed,
        shares=shares,
    )
    rows = shape.batch_size
    if rows == "auto":
        one = sizes_of(1)
        rows = fitting_rows(model, one.buffer_length, one.capacity, free - chip_bytes(params), mesh)
    assert isinstance(rows, int)
    rows = shared_rows(mesh, rows)
    sizes = sizes_of(rows)
    capacity, prompt_length, buffer_length = sizes.capacity, sizes.prompt_length, sizes.buffer_length
    infilling = config.algorithm == "paper"
    shapes = query_shapes(rows, capacity, shares)
    program = Program(module, shapes, shape.rules, config.temperature > 0, infilling, split=True)
    with jax.set_mesh(mesh):
        state = jax.eval_shape(lambda: empty_state(program, rows, capacity, buffer_length))
    cache = jax.tree.map(put, state.cache, buffer_shardings(state.cache, mesh))
    state = jax.tree.map(put, state.replace(cache=None)).replace(cache=cache)

    def request(count: int) -> Any:
        return jax.tree.map(put, make_request([], count, capacity, sizes.suppressed, 0, model))

    def numbers(*sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, jnp.int32, sharding=where)

    admission, number = sizes.admission, numbers()
    prompts = numbers(admission, prompt_length)
    few = numbers(admission)
    held = {"parameters": chip_bytes(params), "KV buffer": chip_bytes(state.cache)}
    query, width = program.shapes[-1]

    def compile_admit() -> Any:
        arguments = (prompts, prompts, few, few, request(admission), request(rows), state)
        with jax.set_mesh(mesh):
            return admit.lower(module, params, None, *arguments, split=True).compile()

    def compile_loop() -> Any:
        with jax.set_mesh(mesh):
            return decode_loop.lower(program, params, None, request(rows), state, number, number).compile()

    def described(name: str, compile: Any, tokens: int, flops: int, trips: tuple[int, ...], **least: int) -> Any:
        return AbstractProgram(name, compile, dict(mesh.shape), held, tokens, tokens * flops, trips, **least)

    commits = rows // shares * -(-width // min(CHUNK, width))
    return [
        described(
            "prefill", compile_admit, admission * prompt_length, encoding_flops_per_token(model, prompt_length), ()
        ),
        described(
            "decode forward",
            compile_loop,
            query,
            forward_flops_per_token(model, buffer_length + width),
            (1, commits),
            least_bytes=sum(held.values()),
        ),
    ]
