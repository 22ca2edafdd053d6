"""Decoding on several devices: the tokens of one, and no device is sent another's part of the buffer.

The devices are simulated, which has to be asked for before JAX starts: `results_of` runs this file as a script.
"""

import dataclasses
import functools
import json
import math
import re
import sys
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from simulated_devices import results_of_script

import refusion_jax as rf
from refusion_jax.compilation.programs import DecodeShape, decode_programs
from refusion_jax.config import ConfigError, DecodeConfig, MeshConfig, ModelConfig
from refusion_jax.decoding import Rules, Stream, batching
from refusion_jax.decoding.batching import query_shapes
from refusion_jax.modeling import Transformer, backends
from refusion_jax.modeling.buffer_attention import BufferedRows
from refusion_jax.modeling.quantization import quantize
from refusion_jax.sharding import decoding_mesh, make_mesh, tree_shardings

MESHES = {"1x1x2": (1, 1, 2), "2x1x1": (2, 1, 1), "2x1x2": (2, 1, 2), "4x1x2": (4, 1, 2), "1x2x2": (1, 2, 2)}
NAMES = (*MESHES, "2x1x2 in int8", "1x2x2 in int8", "kernel")
MODEL = ModelConfig(
    vocab_size=32, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=128, initializer_range=0.6,
)  # fmt: skip
INT8 = dataclasses.replace(MODEL, kv_dtype="int8")
KERNEL = dataclasses.replace(MODEL, head_dim=128, num_hidden_layers=1, attention="pallas")
OURS = DecodeConfig(gen_length=16, slot_size=4, slot_threshold=0.2, token_threshold=0.3)
SETTINGS = [
    OURS,
    dataclasses.replace(OURS, algorithm="paper"),
    dataclasses.replace(OURS, temperature=0.7, top_p=0.9, suppress_special=True),
    dataclasses.replace(OURS, algorithm="paper", temperature=0.5, top_k=5),
]
FIELDS = ("committed", "position_ids", "order", "forwards", "finish_reason")


def prompts():
    """More than there are rows, of several lengths; and two with holes."""
    random = np.random.default_rng(0)
    plain = [random.integers(3, 32, length).tolist() for length in random.integers(2, 9, 12)]
    return [*plain, {"segments": [[5, 6], {"hole": 7}, [9], {"hole": 4}]}, {"segments": [[7], {"hole": 3}, [4]]}]


@functools.cache
def boxed_params(config):
    tokens = jnp.zeros((1, 1), jnp.int32)
    return jax.jit(Transformer(config).init)(jax.random.key(3), tokens, tokens)["params"]


def make_model(config, mesh=None):
    boxed = boxed_params(dataclasses.replace(config, kv_dtype=""))
    params = nn.unbox(boxed)
    if mesh is not None:
        params = jax.device_put(params, tree_shardings(boxed, mesh))
    if config.kv_dtype:
        params = quantize(jax.tree.map(jnp.copy, params))
    return rf.Model(config, Transformer(config), params, None, DecodeConfig(), mesh)


def answers(config, mesh=None, **options):
    """In plain JSON types; and how often the loop was compiled."""
    count = []

    def listen(event, duration, fun_name="", **_):
        count.append(event == "/jax/core/compile/backend_compile_duration" and "decode_loop" in fun_name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    configs = [SETTINGS[index % len(SETTINGS)] for index in range(len(prompts()))]
    out = rf.generate(make_model(config, mesh), prompts(), configs, batch_size=4 if mesh is None else 8, **options)
    jax.monitoring.unregister_event_duration_listener(listen)
    return {name: getattr(out, name) for name in FIELDS} | {"loops": sum(count)}


def collectives(mesh):
    """Bytes of the largest collective of the prefill and of the loop; and of a layer of the buffer, over all rows."""
    config = dataclasses.replace(MODEL, max_position_embeddings=2048)
    shape = DecodeShape(8, 1000, dataclasses.replace(OURS, suppress_ids=(3,)), Rules())
    largest = []
    for program in decode_programs(config, shape, mesh, 2**30):
        text = program.compile().as_text()
        found = re.findall(r"= (.*?) (?:all-\w+|collective-permute|reduce-scatter)(?:-start)?\(", text)
        sizes = [re.findall(r"\w(\d+)\[([\d,]*)\]", shapes) for shapes in found]
        bytes_of = [
            sum(int(bits) // 8 * math.prod(map(int, filter(None, dims.split(",")))) for bits, dims in arrays)
            for arrays in sizes
        ]
        largest.append(max(bytes_of))
    layer = 8 * config.num_key_value_heads * (1024 + batching.MIN_RESPONSE_BUCKET) * config.head_dim * 4
    return largest, layer


@pytest.fixture(scope="module")
def results_of(tmp_path_factory):
    """What happened on a mesh, and on one device beside it."""
    path = tmp_path_factory.mktemp("sharded") / "results.json"
    return results_of_script(__file__, path, NAMES, timeout=900).__getitem__


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_answers_are_those_of_one_device(name, results_of):
    """Mixed settings, sampling, infilling, holes, a shared prefix, more prompts than rows; and compiled once.

    In int8 these are weights and buffer both.
    """
    result = results_of(name)
    assert len(result["one"]["committed"]) == len(prompts())
    for field in FIELDS:
        assert result["split"][field] == result["one"][field], field
    assert result["split"]["loops"] == 1
    assert len(set(map(tuple, result["one"]["order"]))) > 5


@pytest.mark.slow
def test_the_kernel_answers_like_xla(results_of):
    """On devices that have two rows and one head each; a buffer that rows share is XLA's, so there is no prefix."""
    result = results_of("kernel")
    assert result["kernels"] > 0
    assert result["split"] == result["one"]


@pytest.mark.slow
def test_only_activations_are_exchanged(results_of):
    largest, layer = results_of("4x1x2")["collectives"]
    assert all(0 < size < layer / 8 for size in largest)


@pytest.mark.slow
def test_each_device_has_its_rows_and_heads(results_of):
    assert results_of("4x1x2")["buffer_share"] == [2, 2, 1]  # layers, rows, heads


def test_rows_of_several_devices_are_not_packed():
    assert all(tokens == 16 * width for tokens, width in query_shapes(16, 64, shares=4))
    assert set(query_shapes(16, 64, shares=4)) < set(query_shapes(16, 64))


@pytest.mark.slow
def test_rows_that_devices_cannot_share_are_refused(results_of):
    assert results_of("4x1x2")["refused"] == [
        "batch_size is 3, fewer rows than the 4 devices they are split over; use at least 4.",
        "rows is 2, not divisible by the 4 devices that its rows are split over (mesh.data x mesh.fsdp); use 4.",
    ]


def test_a_model_that_devices_cannot_share_is_refused():
    mesh = jax.sharding.AbstractMesh((1, 1, 4), ("data", "fsdp", "tensor"))
    with pytest.raises(ConfigError, match=r"^mesh\.tensor is 4, .* 4 query heads, 2 key heads .* it may be 1, 2\.$"):
        Stream(Transformer(MODEL), {}, rows=8, prompt_length=8, response_length=8, mesh=mesh)


@pytest.mark.slow
def test_the_batch_is_as_large_as_every_device_holds(results_of):
    rows = results_of("4x1x2")["auto_rows"]
    assert rows >= 4 and rows % 4 == 0


@pytest.mark.slow
def test_the_batch_is_rounded_down_to_equal_shares(results_of):
    assert results_of("4x1x2")["rounded_rows"] == 4


@pytest.mark.slow
def test_scales_are_split_like_what_they_scale(results_of):
    shares = results_of("2x1x2 in int8")["shares"]
    heads, width, layers, vocabulary = 4 * 16, 32, 2, 32
    assert shares["q_proj"] == [[layers, width, heads // 2], [layers, heads // 2]]
    assert shares["o_proj"] == [[layers, heads // 2, width], [layers, width]]
    assert shares["lm_head"] == [[width, vocabulary // 2], [vocabulary // 2]]
    for numbers, scales in (shares["keys"], shares["values"]):
        assert numbers[:-1] == scales and scales[:3] == [layers, 4, 1]  # of 8 rows and 2 heads


def refusals(mesh):
    found = []
    model = make_model(MODEL, mesh)
    for attempt in (
        lambda: rf.generate(model, [[5]], OURS, batch_size=3),
        lambda: Stream(model.module, model.params, rows=2, prompt_length=8, response_length=8, mesh=mesh),
    ):
        try:
            attempt()
        except ConfigError as error:
            found.append(str(error))
    return found


def kernel_results(mesh):
    """Answers of XLA and of the kernel, and how often the kernel was traced."""
    plain, traced = answers(dataclasses.replace(KERNEL, attention="xla"), mesh), []

    def plan(*arguments):
        own, shared = chosen(*arguments)
        traced.append(isinstance(shared, BufferedRows))
        return own, shared

    chosen, backends.plan = backends.plan, plan
    return {"one": plain, "split": answers(KERNEL, mesh), "kernels": sum(traced)}


def int8_shares(mesh):
    """Shapes that a device has of numbers and scales: of kernels, and of the buffer."""
    model = make_model(INT8, mesh)
    cache = make_stream(model, mesh)._state.cache
    attention = model.params["layers"]["self_attn"]
    pairs = {name: (module["kernel"], module["scale"]) for name, module in attention.items() if "kernel" in module}
    pairs["lm_head"] = (model.params["lm_head"]["kernel"], model.params["lm_head"]["scale"])
    pairs |= {"keys": (cache.keys, cache.key_scales), "values": (cache.values, cache.value_scales)}
    return {name: [leaf.addressable_shards[0].data.shape for leaf in pair] for name, pair in pairs.items()}


def make_stream(model, mesh):
    return Stream(model.module, model.params, rows=8, prompt_length=8, response_length=8, mesh=mesh)


def main(path, names):
    """Decodes on each mesh, and on one device."""
    batching.MIN_RESPONSE_BUCKET = batching.MIN_WIDTH  # one query width to compile
    results, prefix = {}, [4, 5, 6]
    one = answers(MODEL, prefix=prefix)
    for name in names:
        if name == "kernel":
            results[name] = kernel_results(decoding_mesh(4, 2, jax.devices()))
            continue
        sizes = MESHES[name.removesuffix(" in int8")]
        mesh = make_mesh(MeshConfig(*sizes), jax.devices()[: math.prod(sizes)])
        if "int8" in name:
            found = {"one": answers(INT8, prefix=prefix), "split": answers(INT8, mesh, prefix=prefix)}
            results[name] = found | {"shares": int8_shares(mesh)}
            continue
        results[name] = {"one": one, "split": answers(MODEL, mesh, prefix=prefix)}
        if name == "4x1x2":
            model = make_model(MODEL, mesh)
            share = make_stream(model, mesh)._state.cache.keys.addressable_shards[0].data.shape
            results[name] |= {
                "collectives": collectives(mesh),
                "buffer_share": share[:3],
                "refused": refusals(mesh),
                "auto_rows": rf.api._rows(model, "auto", 8, 8, rf.Method()),
                "rounded_rows": rf.api._rows(model, 6, 8, 8, rf.Method()),
            }
    path.write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
