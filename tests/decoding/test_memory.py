"""KV memory: what the formula says, held once; and how many rows fit."""

import dataclasses
import functools
from types import SimpleNamespace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh

from refusion_jax.config import DecodeConfig, ModelConfig
from refusion_jax.decoding import Job, memory
from refusion_jax.decoding.batching import make_request, query_shapes
from refusion_jax.decoding.kv_cache import empty_cache
from refusion_jax.decoding.layout import lay_out
from refusion_jax.decoding.memory import MOST_ROWS, SHARE, fitting_rows, free_bytes, kv_bytes, row_bytes
from refusion_jax.decoding.refusion import Program, admit, decode_loop, empty_state, release
from refusion_jax.modeling import Transformer
from refusion_jax.sharding import AXES

CONFIG = ModelConfig(
    vocab_size=16,
    hidden_size=8,
    intermediate_size=8,
    num_hidden_layers=8,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=32,
)
GIB = 2**30


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_formula_is_what_a_buffer_takes(dtype):
    config = ModelConfig(vocab_size=16, num_hidden_layers=3, num_key_value_heads=2, head_dim=6, dtype=dtype)
    cache = empty_cache(config, batch=5, buffer_length=9)
    assert kv_bytes(config, 5, 9) == cache.keys.nbytes + cache.values.nbytes
    assert kv_bytes(config, 5, 9) == 2 * 3 * 5 * 9 * 2 * 6 * (4 if dtype == "float32" else 2)


def test_a_buffer_in_int8_has_scales():
    config = ModelConfig(vocab_size=16, num_hidden_layers=3, num_key_value_heads=2, head_dim=6, kv_dtype="int8")
    cache = empty_cache(config, batch=5, buffer_length=9)
    buffers = (cache.keys, cache.values, cache.key_scales, cache.value_scales)
    assert kv_bytes(config, 5, 9) == sum(part.nbytes for part in buffers) == 2 * 3 * 5 * 9 * 2 * (6 + 4)
    # The query's own are not in int8.
    exact = dataclasses.replace(config, kv_dtype="")
    saved = kv_bytes(exact, 1, 9) - kv_bytes(config, 1, 9)
    assert row_bytes(exact, 9, 4) - row_bytes(config, 9, 4) == saved


# ---- the compiled programs hold one buffer -------------------------------------------------------------------------

# The buffer is many times what a forward of so small a model computes with, one layer of it included.
ROWS, CAPACITY, BUFFER = 8, 16, 1024
KV = kv_bytes(CONFIG, ROWS, BUFFER)
PROGRAM = Program(Transformer(CONFIG), query_shapes(ROWS, CAPACITY))


@functools.cache
def abstract_arguments():
    tokens = jnp.zeros((1, 1), jnp.int32)
    params = jax.eval_shape(lambda: nn.unbox(PROGRAM.module.init(jax.random.key(0), tokens, tokens))["params"])
    state = jax.eval_shape(lambda: empty_state(PROGRAM, ROWS, CAPACITY, BUFFER))
    request = jax.eval_shape(lambda: make_request([], ROWS, CAPACITY, 4, 0, CONFIG))
    return params, request, state


def check_memory(lowered):
    analysis = lowered.compile().memory_analysis()
    assert analysis.argument_size_in_bytes > KV and analysis.output_size_in_bytes > KV
    # The buffer that comes in is the one that goes out, and there is no other.
    assert analysis.alias_size_in_bytes >= KV
    assert analysis.temp_size_in_bytes < KV / 3
    return analysis


def test_the_case_is_one_where_the_buffer_dominates():
    params, request, state = abstract_arguments()
    assert KV == state.cache.keys.size * 4 * 2 > 32 * 10**6
    others = jax.tree.leaves((params, request, state.replace(cache=None)))
    assert sum(leaf.size * leaf.dtype.itemsize for leaf in others) < KV / 100


@pytest.mark.slow
def test_the_loop_holds_one_buffer():
    params, request, state = abstract_arguments()
    limit = jax.ShapeDtypeStruct((), jnp.int32)
    analysis = check_memory(decode_loop.lower(PROGRAM, params, None, request, state, limit, limit))
    # What a decode takes is what rows are counted by, up to the share of memory that is kept free.
    taken, counted = analysis.argument_size_in_bytes + analysis.temp_size_in_bytes, ROWS * row_bytes(CONFIG, BUFFER, 16)
    assert SHARE * taken < counted < 1.5 * taken


def test_starting_a_prompt_holds_one_buffer():
    params, request, state = abstract_arguments()
    prompts, numbers = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((1, 32), (1,)))
    asked = jax.eval_shape(lambda: make_request([], 1, CAPACITY, 4, 0, CONFIG))
    arguments = prompts, prompts, numbers, numbers, asked
    check_memory(admit.lower(PROGRAM.module, params, None, *arguments, request, state))


def test_ending_a_row_holds_one_buffer():
    analysis = check_memory(release.lower(abstract_arguments()[2], jax.ShapeDtypeStruct((ROWS,), jnp.bool_)))
    assert analysis.temp_size_in_bytes < KV / 100


@pytest.mark.slow
def test_the_buffers_of_a_decode_are_handed_on():
    """At run time as well: what went in is deleted, and the buffer stays where it is."""
    config = ModelConfig(vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, head_dim=8)
    program = Program(Transformer(config), query_shapes(2, 16), sampling=False, infilling=False)
    tokens = jnp.zeros((1, 1), jnp.int32)
    params = nn.unbox(jax.jit(program.module.init)(jax.random.key(0), tokens, tokens))["params"]
    state = empty_state(program, 2, 16, 48)
    place = state.cache.keys.unsafe_buffer_pointer()
    settings = DecodeConfig(gen_length=4, slot_size=4)
    job = Job(0, 0, lay_out([5, 6], settings), settings)
    request = jax.device_put(make_request([], 2, 16, 0, 0, config))
    prompts = np.zeros((2, 1, 32), np.int32)
    prompts[0, 0, :2], prompts[1, 0, :2] = [5, 6], [0, 1]
    arrays = jax.device_put((*prompts, np.array([2]), np.array([1]), make_request([job], 1, 16, 0, 0, config)))
    request, admitted = admit(program.module, params, None, *arrays, request, state)
    assert state.cache.keys.is_deleted()
    limits = jax.device_put((np.int32(1), np.int32(100)))
    after, _ = decode_loop(program, params, None, request, admitted, *limits)
    assert admitted.cache.values.is_deleted() and not request.keys.is_deleted()
    assert after.cache.lengths[1] > 2
    assert admitted.tokens.is_deleted() and after.cache.keys.unsafe_buffer_pointer() == place


# ---- rows that fit -------------------------------------------------------------------------------------------------


def test_rows_that_fit_are_a_power_of_two_and_grow_with_memory():
    rows = [fitting_rows(CONFIG, BUFFER, 128, free) for free in (0, 10**6, *(2**i for i in range(20, 44)))]
    assert rows == sorted(rows)
    assert all(count & (count - 1) == 0 for count in rows)
    assert rows[0] == rows[1] == 1 and rows[-1] == MOST_ROWS
    assert sorted(set(rows)) == [2**i for i in range(MOST_ROWS.bit_length())]


def test_as_many_rows_fit_as_there_is_room_for():
    one = row_bytes(CONFIG, BUFFER, 128)
    for free in (5 * one, 10 * one, 100 * one):
        rows = fitting_rows(CONFIG, BUFFER, 128, free)
        assert rows * one <= free < 4 * rows * one


def test_longer_buffers_and_queries_take_more():
    assert row_bytes(CONFIG, 256, 128) < row_bytes(CONFIG, 512, 128) < row_bytes(CONFIG, 512, 256)
    assert row_bytes(CONFIG, 256, 128) > kv_bytes(CONFIG, 1, 256)
    few, many = (fitting_rows(CONFIG, length, 128, GIB) for length in (2**15, 2**9))
    assert few < many


def test_free_memory_is_the_default(monkeypatch):
    assert free_bytes() > 0
    monkeypatch.setattr(memory, "free_bytes", lambda mesh: 6 * row_bytes(CONFIG, BUFFER, 128))
    assert fitting_rows(CONFIG, BUFFER, 128) == 4


def device(limit, used):
    return SimpleNamespace(memory_stats=lambda: {"bytes_limit": limit, "bytes_in_use": used})


def test_a_mesh_has_the_memory_of_its_fullest_device():
    assert free_bytes(SimpleNamespace(local_devices=[device(100, 30), device(100, 60), device(90, 0)])) == 40
    # CPUs share the machine's.
    cpus = [SimpleNamespace(memory_stats=lambda: None)] * 4
    assert 0 < free_bytes(SimpleNamespace(local_devices=cpus)) < free_bytes() / 2


def test_a_device_holds_its_rows_and_its_part_of_each():
    config = dataclasses.replace(CONFIG, num_attention_heads=8, num_key_value_heads=4)
    mesh = AbstractMesh((3, 2, 4), AXES)
    free = 10 * row_bytes(config, BUFFER, 128)
    alone, split = fitting_rows(config, BUFFER, 128, free), fitting_rows(config, BUFFER, 128, free, mesh)
    assert split % 6 == 0 and split // 6 >= 2 * alone
    assert split // 6 * row_bytes(config, BUFFER, 128, tensor=4) <= free
    # A vocabulary that cannot be divided is on every device.
    whole = dataclasses.replace(config, vocab_size=config.vocab_size + 1)
    fixed = 4 * 3 * 128 * config.vocab_size * 3 // 4
    assert row_bytes(whole, BUFFER, 128, 4) - row_bytes(config, BUFFER, 128, 4) >= fixed
