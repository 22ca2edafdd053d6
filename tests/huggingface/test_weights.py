"""Tensors become parameters: of every type, shape and place, one at a time; and what does not fit is named at once.

Eight devices are simulated, which has to be asked for before JAX starts: this file is also a script.
"""

import dataclasses
import gc
import json
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from refusion_jax.config import MeshConfig, ModelConfig
from refusion_jax.huggingface import CheckpointError, read_model_config, read_params, weights
from refusion_jax.huggingface.names import get, stored_name, tensor_specs
from refusion_jax.huggingface.rope import write_rope
from refusion_jax.modeling.quantization import quantize
from refusion_jax.sharding import make_mesh
from refusion_jax.training.weights import param_shardings

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
TYPES = {"float32": np.float32, "bfloat16": jnp.bfloat16, "float16": np.float16}
QWEN2 = ModelConfig(
    vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=4, qk_norm=False, biases=("q_proj", "k_proj", "v_proj"),
)  # fmt: skip
# The largest tensor has 1 MiB; all of them more than thirty.
LARGE = ModelConfig(
    vocab_size=1_000, hidden_size=512, intermediate_size=1_024, num_hidden_layers=8, num_attention_heads=8,
    num_key_value_heads=4, head_dim=64, mask_token_id=999, dtype="float32", param_dtype="float32",
)  # fmt: skip


def write_checkpoint(directory, config, model_type="qwen2", dtype="bfloat16", shards=1):
    """Random tensors of a model; returns them by their full names."""
    rng = np.random.default_rng(0)
    tensors = {
        stored_name(spec.name, model_type): rng.standard_normal(spec.shape, np.float32).astype(TYPES[dtype])
        for spec in tensor_specs(config, model_type)
    }
    directory.mkdir(parents=True, exist_ok=True)
    names = list(tensors)
    files = {f"model-{i + 1:05}-of-{shards:05}.safetensors": names[i::shards] for i in range(shards)}
    for file, held in files.items():
        save_file({name: tensors[name] for name in held}, directory / file)
    weight_map = {name: file for file, held in files.items() for name in held}
    (directory / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    c = config
    if model_type == "llada":
        values = {
            "d_model": c.hidden_size, "n_heads": c.num_attention_heads, "n_kv_heads": c.num_key_value_heads,
            "n_layers": c.num_hidden_layers, "mlp_hidden_size": c.intermediate_size, "vocab_size": c.vocab_size,
            "max_sequence_length": c.max_position_embeddings, "weight_tying": c.tie_word_embeddings,
            "rope_theta": c.rope_theta, "rms_norm_eps": c.rms_norm_eps,
        }  # fmt: skip
    else:
        values = {name: value for name, value in dataclasses.asdict(c).items() if "dtype" not in name} | write_rope(c)
    values |= {"model_type": model_type, "eos_token_id": 1, "mask_token_id": c.mask_token_id}
    (directory / "config.json").write_text(json.dumps(values))
    return tensors


def read(directory):
    return read_params(directory, read_model_config(directory))


def assert_equal(got, expected, **tolerance):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **(tolerance or {"rtol": 0})), got, expected)


def assert_same_bits(params, tensors, config, model_type):
    """Every tensor is the layer, transposed if it is a kernel, of its parameter."""
    for spec in tensor_specs(config, model_type):
        leaf = np.asarray(get(params, spec.path))
        leaf = leaf if spec.layer is None else leaf[spec.layer]
        np.testing.assert_array_equal(
            leaf.T if spec.is_transposed else leaf, tensors[stored_name(spec.name, model_type)]
        )


@pytest.fixture(scope="module")
def expected(checkpoint):
    return read(checkpoint)


def test_tensors_become_stacked_transposed_parameters(tensors, expected):
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(expected))
    assert all(len(leaf.sharding.device_set) == 1 for leaf in jax.tree.leaves(expected))
    layers = expected["layers"]
    for layer in range(3):
        prefix = f"model.layers.{layer}"
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            kernel = layers["self_attn"][name]["kernel"][layer]
            assert np.array_equal(kernel, tensors[f"{prefix}.self_attn.{name}.weight"].T)
        assert np.array_equal(
            layers["self_attn"]["k_norm"]["scale"][layer], tensors[f"{prefix}.self_attn.k_norm.weight"]
        )
        assert np.array_equal(layers["mlp"]["up_proj"]["kernel"][layer], tensors[f"{prefix}.mlp.up_proj.weight"].T)
    assert np.array_equal(expected["embed_tokens"]["embedding"], tensors["model.embed_tokens.weight"])
    assert np.array_equal(expected["lm_head"]["kernel"], tensors["lm_head.weight"].T)
    count = sum(leaf.size for leaf in jax.tree.leaves(expected))
    assert count == sum(tensor.size for tensor in tensors.values())


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("qwen2", {}),
        ("Dream", {}),
        ("llama", {"biases": ()}),
        ("llada", {"biases": ()}),
        ("llada", {"biases": (), "tie_word_embeddings": True}),
    ],
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_other_architectures_bit_for_bit(model_type, changes, dtype, tmp_path):
    config = dataclasses.replace(QWEN2, **changes)
    tensors = write_checkpoint(tmp_path, config, model_type, dtype, shards=3)
    assert read_model_config(tmp_path) == dataclasses.replace(config, dtype=dtype, param_dtype=dtype)
    params = read(tmp_path)
    assert all(leaf.dtype == TYPES[dtype] for leaf in jax.tree.leaves(params))
    assert_same_bits(params, tensors, config, model_type)


def test_sharded_files(tensors, expected, write):
    names = sorted(tensors)
    shards = {
        "model-00001-of-00002.safetensors": {name: tensors[name] for name in names[::2]},
        "model-00002-of-00002.safetensors": {name: tensors[name] for name in names[1::2]},
    }
    directory = write(shards)
    weight_map = {name: file for file, content in shards.items() for name in content}
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    assert_equal(read(directory), expected)


def test_names_without_the_model_prefix(tensors, expected, write):
    bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    assert_equal(read(write({WEIGHTS: bare})), expected)


def test_tied_checkpoint(tensors, expected, write):
    tied = {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
    got = read(write({WEIGHTS: tied}, tie_word_embeddings=True))
    assert_equal(got, {name: part for name, part in expected.items() if name != "lm_head"})
    # An output embedding in the file of a tied model is the embedding once more.
    assert_equal(read(write({WEIGHTS: tensors}, tie_word_embeddings=True)), got)


@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.bfloat16, 2**-8), (jnp.float16, 2**-10)])
def test_half_precision_tensors(dtype, tolerance, tensors, expected, write):
    got = read(write({WEIGHTS: {name: tensor.astype(dtype) for name, tensor in tensors.items()}}))
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(got))
    assert_equal(got, expected, rtol=tolerance, atol=1e-6)
    assert np.array_equal(got["norm"]["scale"], tensors["model.norm.weight"].astype(dtype).astype(jnp.float32))


def test_a_narrower_type_than_the_files(checkpoint, tensors):
    got = read_params(checkpoint, read_model_config(checkpoint, dtype="bfloat16"))
    wanted = tensors["lm_head.weight"].T.astype(jnp.bfloat16)
    assert got["lm_head"]["kernel"].dtype == jnp.bfloat16 and np.array_equal(got["lm_head"]["kernel"], wanted)


@pytest.mark.parametrize("rows", [40, 66])
def test_other_rows_than_the_files(rows, checkpoint, tensors):
    """Fewer are the first ones; new ones are the mean of those in the file."""
    config = dataclasses.replace(read_model_config(checkpoint), vocab_size=rows)
    params = read_params(checkpoint, config)
    for got, name in (
        (params["embed_tokens"]["embedding"], "model.embed_tokens.weight"),
        (params["lm_head"]["kernel"].T, "lm_head.weight"),
    ):
        assert got.shape == (rows, 128)
        np.testing.assert_array_equal(got[:64], tensors[name][:rows])
        mean = np.mean(tensors[name], axis=0, dtype=np.float64)
        np.testing.assert_allclose(got[64:], np.broadcast_to(mean, got[64:].shape), rtol=1e-5, atol=1e-8)


# ---- what does not fit ---------------------------------------------------------------------------------------------


def message(directory):
    with pytest.raises(CheckpointError) as caught:
        read(directory)
    return str(caught.value)


def test_missing_misshapen_and_unknown_tensors_are_named_together(tensors, write):
    broken = {name: tensor for name, tensor in tensors.items() if name != "model.layers.1.self_attn.q_norm.weight"}
    broken["model.layers.2.mlp.down_proj.weight"] = jnp.zeros((384, 128))
    broken["model.layers.2.mlp.up_proj.weight"] = jnp.zeros((384, 128), jnp.int8)
    broken["model.layers.3.mlp.up_proj.weight"] = jnp.zeros(1)
    broken["model.layers.0.self_attn.rotary_emb.inv_freq"] = jnp.zeros(16)
    directory = write({WEIGHTS: broken})
    assert message(directory) == (
        f"{directory} does not match its config.json: "
        "model.layers.1.self_attn.q_norm.weight is missing (expected shape (32,)); "
        "model.layers.2.mlp.down_proj.weight has shape (384, 128), not (128, 384); "
        "model.layers.2.mlp.up_proj.weight is of type I8, not one of F32, BF16, F16; "
        "model.layers.3.mlp.up_proj.weight is no part of the model."
    )


def test_constants_of_rope_are_ignored(tensors, expected, write):
    assert_equal(read(write({WEIGHTS: tensors | {"model.rotary_emb.inv_freq": jnp.zeros(16)}})), expected)


def test_an_output_embedding_that_is_missing(tensors, write):
    directory = write({WEIGHTS: {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}})
    assert message(directory) == (
        f"{directory} does not match its config.json: lm_head.weight is missing (expected shape (64, 128); "
        "tie_word_embeddings is false: set it to true if the embeddings are tied, or add the file with the tensor)."
    )


def test_every_shape_is_checked(tensors, write):
    """Transposed, or with one element more, no tensor passes."""
    odd = {name: jnp.zeros([size + 1 for size in tensor.shape]) for name, tensor in tensors.items()}
    assert message(write({WEIGHTS: odd})).endswith(f"and {len(tensors) - 8} more.")


def test_rows_are_those_of_the_configuration(tensors, write):
    assert "model.embed_tokens.weight has shape (64, 128), not (63, 128)" in message(
        write({WEIGHTS: tensors}, vocab_size=63)
    )


def test_more_layers_than_tensors(tensors, write):
    assert "1000000000 layers, but only 36 tensors" in message(write({WEIGHTS: tensors}, num_hidden_layers=10**9))


def test_a_missing_shard(tensors, write):
    names = sorted(tensors)
    assert "is missing" in message(write({"model-00001-of-00002.safetensors": {n: tensors[n] for n in names[::2]}}))


# ---- memory and devices --------------------------------------------------------------------------------------------


def peak_bytes(directory, config, shardings=None):
    """The most that the host held at once, beyond before, while everything was read; and the parameters."""
    read_params(directory, config, shardings)  # compiles, which needs memory of its own
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        params = read_params(directory, config, shardings)
        return tracemalloc.get_traced_memory()[1] - before, params
    finally:
        tracemalloc.stop()


def test_the_host_holds_less_than_two_tensors(tmp_path):
    tensors = write_checkpoint(tmp_path, LARGE, "qwen3", shards=3)
    config = read_model_config(tmp_path, dtype="float32")
    peak, params = peak_bytes(tmp_path, config)
    largest, whole = max(t.nbytes for t in tensors.values()), sum(t.nbytes for t in tensors.values())
    assert peak < 2 * largest < whole / 15
    assert_same_bits(params, tensors, config, "qwen3")


def live_bytes():
    return sum(array.nbytes for array in jax.live_arrays())


def read_int8(directory, config, shardings=None):
    """In int8, and the most bytes of it and of what was not in int8 yet that devices held at once."""
    gc.collect()
    before, seen = live_bytes(), []

    def spy(function):
        def watched(*arguments):
            seen.append(live_bytes() - before)
            return function(*arguments)

        return watched

    reading = mock.patch.object(weights.StoredTensor, "read", spy(weights.StoredTensor.read))
    with reading, mock.patch.object(weights, "quantize_leaf", spy(weights.quantize_leaf)):
        return read_params(directory, config, shardings, "int8"), max(seen)


def is_equal(got, expected):
    """The same numbers, types and places."""

    def same(a, b):
        shares = zip(a.addressable_shards, b.addressable_shards, strict=True)
        return (a.dtype, a.sharding) == (b.dtype, b.sharding) and all(np.array_equal(x.data, y.data) for x, y in shares)

    return jax.tree.structure(got) == jax.tree.structure(expected) and all(
        map(same, *map(jax.tree.leaves, (got, expected)))
    )


@pytest.mark.parametrize("types", [("bfloat16", "bfloat16"), ("float32", "bfloat16"), ("float16", "float32")])
@pytest.mark.parametrize("is_tied", [False, True])
def test_tensors_are_quantised_on_arrival(is_tied, types, tmp_path):
    """Exactly as all of them would be once they are read, where the type changes before that, too."""
    changes = {"biases": (), "tie_word_embeddings": True} if is_tied else {}
    write_checkpoint(tmp_path, dataclasses.replace(QWEN2, **changes), "llama" if is_tied else "qwen2", types[0])
    config = dataclasses.replace(read_model_config(tmp_path, dtype=types[1]), vocab_size=53)
    got = read_params(tmp_path, config, quantize="int8")
    assert got["layers"]["mlp"]["up_proj"]["kernel"].dtype == jnp.int8
    assert ("scale" in got["embed_tokens"]) == is_tied
    assert is_equal(got, quantize(read_params(tmp_path, config)))


@pytest.mark.slow
def test_devices_hold_two_tensors_that_are_not_int8(tmp_path):
    """Beside the embedding, which stays in its type; on devices the file's 1 MiB have 2."""
    write_checkpoint(tmp_path, LARGE, "qwen3", shards=3)
    config = read_model_config(tmp_path, dtype="float32")
    params, peak = read_int8(tmp_path, config)
    sizes = [leaf.nbytes for leaf in jax.tree.leaves(params)]
    largest = 2 * 2**20
    assert sum(sizes) < peak <= sum(sizes) + 2 * largest < 25 * 2**20
    assert is_equal(params, quantize(whole := read_params(tmp_path, config)))
    assert sum(leaf.size * 4 for leaf in jax.tree.leaves(whole)) > 55 * 2**20


def on_devices(directory, rows):
    """Reads vocabularies of so many rows onto a mesh of eight devices; what each has, in plain JSON types."""
    found = {"peak": 0, "equal": True, "equal_int8": True, "peak_int8": 0, "shares": {}}
    tensors = {name: t for file in directory.glob("*.safetensors") for name, t in load_file(file).items()}
    mesh = make_mesh(MeshConfig(data=1, fsdp=2, tensor=4))
    for count in rows:
        config = dataclasses.replace(read_model_config(directory, dtype="float32"), vocab_size=count, mask_token_id=2)
        shardings = param_shardings(config, mesh)
        if not found["shares"]:
            found["peak"], params = peak_bytes(directory, config, shardings)
        else:
            params = read_params(directory, config, shardings)
        shards = jax.tree.map(
            lambda leaf: [(shard.index, np.asarray(shard.data)) for shard in leaf.addressable_shards], params
        )
        for spec in tensor_specs(config, "qwen3"):
            wanted = tensors[stored_name(spec.name, "qwen3")].astype(np.float32)
            if spec.has_vocabulary:
                new = max(count - len(wanted), 0)
                wanted = np.concatenate([wanted, np.repeat(wanted.mean(0, keepdims=True), new, 0)])[:count]
            wanted = wanted.T if spec.is_transposed else wanted
            tolerance = 1e-6 * spec.has_vocabulary
            for index, data in get(shards, spec.path):
                data, index = (data, index) if spec.layer is None else (data[spec.layer], index[1:])
                found["equal"] &= bool(np.allclose(data, wanted[index], rtol=0, atol=tolerance))
            leaf = get(params, spec.path)
            assert leaf.sharding == get(shardings, spec.path)
            found["shares"][f"{count} {'/'.join(spec.path)}"] = get(shards, spec.path)[0][1].size / leaf.size
        int8, peak = read_int8(directory, config, shardings)
        found["equal_int8"] &= is_equal(int8, quantize(params))
        found["peak_int8"] = max(found["peak_int8"], peak - sum(leaf.nbytes for leaf in jax.tree.leaves(int8)))
    return found


def start(directory, devices, *arguments):
    flags = f"--xla_force_host_platform_device_count={devices}"
    root = Path(__file__).parents[2]
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": str(root), "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    }  # fmt: skip
    command = [sys.executable, __file__, str(directory), *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def results(processes):
    finished = [process.communicate(timeout=600) for process in processes]
    assert all(process.returncode == 0 for process in processes), [error[-2000:] for _, error in finished]
    return [json.loads(output.splitlines()[-1]) for output, _ in finished]


def assert_split(found, tensors):
    assert found["equal"] and found["equal_int8"]
    assert 0 < found["peak_int8"] <= 2 * 2 * 2**20
    assert found["peak"] < 2 * max(tensor.nbytes for tensor in tensors.values())
    shares = found["shares"]
    for name in ("1000 layers/mlp/up_proj/kernel", "1000 layers/self_attn/q_proj/kernel", "1000 lm_head/kernel"):
        assert shares[name] == 1 / 8
    assert shares["1000 norm/scale"] == 1 / 2


@pytest.mark.slow
def test_each_device_gets_its_share(tmp_path):
    tensors = write_checkpoint(tmp_path, LARGE, "qwen3", shards=2)
    [found] = results([start(tmp_path, 8, "1000", "1028", "999")])
    assert_split(found, tensors)
    assert found["shares"]["1028 embed_tokens/embedding"] == found["shares"]["1028 lm_head/kernel"] == 1 / 8
    assert found["shares"]["999 embed_tokens/embedding"] == 1 / 2  # four devices cannot share 999 rows


@pytest.mark.slow
def test_two_processes_read_together(tmp_path):
    tensors = write_checkpoint(tmp_path, LARGE, "qwen3", shards=2)
    from free_address import free_address  # not where this file is a script

    address = free_address()
    for found in results([start(tmp_path, 4, "1000", f"{address}/{index}") for index in range(2)]):
        assert_split(found, tensors)


def main(directory, arguments):
    """Reads vocabularies of the rows among the arguments, alone or as one of two processes, ADDRESS/NUMBER."""
    for argument in arguments:
        if "/" in argument:
            address, _, index = argument.partition("/")
            jax.distributed.initialize(address, num_processes=2, process_id=int(index))
    print(json.dumps(on_devices(directory, [int(argument) for argument in arguments if "/" not in argument])))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
