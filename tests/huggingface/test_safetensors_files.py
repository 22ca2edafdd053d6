"""Files that are damaged, missing, twice there, or somewhere else."""

import json
import os
import shutil

import numpy as np
import pytest
from safetensors.numpy import save_file

from refusion_jax.huggingface import CheckpointError
from refusion_jax.huggingface.safetensors_files import open_tensors

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def ramp(*shape, dtype=np.float32):
    return np.arange(np.prod(shape), dtype=dtype).reshape(shape)


@pytest.fixture
def sharded(tmp_path):
    """Two files and their index."""
    directory = tmp_path / "model"
    directory.mkdir()
    save_file({"model.a": ramp(2, 3)}, directory / ONE)
    save_file({"model.b": ramp(4), "lm_head.weight": ramp(5, 2)}, directory / TWO)
    write_index(directory, {"model.a": ONE, "model.b": TWO, "lm_head.weight": TWO})
    return directory


def read(tensor, rows=None):
    return tensor.read(np.empty(1_000, np.uint8), rows)


def write_index(directory, weight_map):
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def raw(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def message(directory):
    with pytest.raises(CheckpointError) as caught:
        open_tensors(directory)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_tensors_are_found_and_read(sharded):
    tensors = open_tensors(sharded)
    assert set(tensors) == {"a", "b", "lm_head.weight"}
    assert tensors["a"].name == "model.a" and tensors["a"].dtype_name == "float32"
    np.testing.assert_array_equal(read(tensors["a"]), ramp(2, 3))
    np.testing.assert_array_equal(read(tensors["lm_head.weight"]), ramp(5, 2))
    np.testing.assert_array_equal(read(tensors["lm_head.weight"], rows=2), ramp(2, 2))
    assert (tensors["a"].nbytes(), tensors["lm_head.weight"].nbytes(rows=2)) == (24, 16)
    (sharded / INDEX).unlink()
    assert set(open_tensors(sharded)) == {"a", "b", "lm_head.weight"}
    save_file({"c": ramp(1)}, sharded / WEIGHTS)
    assert set(open_tensors(sharded)) == {"c"}


def test_a_scalar_and_an_empty_tensor(tmp_path):
    save_file({"a": np.array(3, np.float32), "b": np.zeros((0, 4), np.float32)}, tmp_path / WEIGHTS)
    tensors = open_tensors(tmp_path)
    assert read(tensors["a"]) == 3 and read(tensors["b"]).shape == (0, 4)


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"abc", id="short"),
        pytest.param((2**62).to_bytes(8, "little") + b"{}", id="huge header"),
        pytest.param((99_000_000).to_bytes(8, "little") + b"{}", id="large header"),
        pytest.param(raw(b"{nonsense"), id="no JSON"),
        pytest.param(raw([1]), id="a list"),
        pytest.param(raw({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}, b"123"), id="truncated"),
        pytest.param(raw({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 16]}}, bytes(16)), id="wrong size"),
        pytest.param(raw({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, bytes(4)), id="negative"),
        pytest.param(raw({"a": {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 4]}}), id="overflow"),
        pytest.param(raw({"a": {"shape": [1], "data_offsets": [0, 4]}}, bytes(4)), id="no type"),
        pytest.param(raw({"a": 1}), id="no tensor"),
        pytest.param(b"PK\x03\x04" * 100, id="a zip"),
    ],
)
def test_files_that_are_not_whole(content, tmp_path):
    (tmp_path / WEIGHTS).write_bytes(content)
    assert message(tmp_path).startswith(f"{tmp_path / WEIGHTS} is not a readable safetensors file (")


def test_a_damaged_shard_is_named(sharded):
    (sharded / TWO).write_bytes((sharded / TWO).read_bytes()[:-1])
    assert message(sharded).startswith(f"{sharded / TWO} is not a readable safetensors file")


def test_a_file_that_shrinks_while_it_is_read(sharded):
    tensor = open_tensors(sharded)["b"]
    (sharded / TWO).write_bytes((sharded / TWO).read_bytes()[:-44])
    with pytest.raises(CheckpointError, match=f"{TWO} has become shorter while it was read"):
        read(tensor)
    (sharded / TWO).unlink()
    with pytest.raises(CheckpointError, match=rf"{TWO} cannot be read \(No such file"):
        read(tensor)


def test_an_absent_shard(sharded):
    (sharded / ONE).unlink()
    assert f"lacks {ONE}, which {INDEX} names; download it" in message(sharded)


def test_an_index_that_does_not_fit_the_files(sharded):
    write_index(sharded, {"model.a": ONE, "model.b": ONE, "lm_head.weight": TWO})
    assert f"says that model.b is in {ONE}, but it is not" in message(sharded)
    write_index(sharded, {"model.a": ONE, "model.c": TWO})
    assert f"says that model.c is in {TWO}, but it is not" in message(sharded)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}'])
def test_an_index_that_is_none(content, sharded):
    (sharded / INDEX).write_text(content)
    assert message(sharded).startswith(str(sharded / INDEX))


@pytest.mark.parametrize("file", [3, None, "pytorch_model.bin", ["model.safetensors"]])
def test_an_index_of_other_files(file, sharded):
    write_index(sharded, {"model.a": file})
    assert f"is not an index of safetensors files: model.a is in {str(file)!r}." in message(sharded)


def test_a_file_beside_an_index_that_does_not_name_it(sharded):
    save_file({"a": ramp(1)}, sharded / WEIGHTS)
    assert f"holds {WEIGHTS} and {INDEX}, which does not name it; remove the one" in message(sharded)


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_what_is_no_file(make, tmp_path):
    make(tmp_path / WEIGHTS)
    assert message(tmp_path).startswith(f"{tmp_path / WEIGHTS} is not a file, but a directory or a device")


def test_a_tensor_that_is_twice_there(sharded):
    save_file({"a": ramp(1)}, sharded / TWO)
    write_index(sharded, {"model.a": ONE, "a": TWO})
    assert f"holds the tensor a twice, as model.a in {ONE} and as a in {TWO}; remove one." in message(sharded)
    entry = '{"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}'
    (sharded / WEIGHTS).write_bytes(raw(f'{{"a": {entry}, "a": {entry}}}'.encode(), bytes(4)))
    (sharded / INDEX).unlink()
    assert message(sharded) == f"{sharded / WEIGHTS} holds the tensor a twice; remove one."


@pytest.mark.parametrize("name", ["../outside.safetensors", "sub/../../outside.safetensors"])
def test_an_index_that_leads_out(name, sharded, tmp_path):
    save_file({"model.a": ramp(1)}, tmp_path / "outside.safetensors")
    (sharded / "sub").mkdir()
    write_index(sharded, {"model.a": name})
    assert f"leads out of {sharded}" in message(sharded)
    write_index(sharded, {"model.a": str(tmp_path / "outside.safetensors")})
    assert f"leads out of {sharded}" in message(sharded)
    write_index(sharded, {"model.a": "a\0.safetensors"})
    assert "cannot be found" in message(sharded)


def test_links(sharded, tmp_path):
    """They may lead within the directory, and a snapshot's to the blobs of the Hub's cache."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    shutil.move(sharded / ONE, elsewhere / ONE)
    (sharded / ONE).symlink_to(elsewhere / ONE)
    assert f"{sharded / ONE} leads out of {sharded}" in message(sharded)
    (sharded / ONE).unlink()
    shutil.move(elsewhere / ONE, sharded / "blob")
    (sharded / ONE).symlink_to("blob")
    assert set(open_tensors(sharded)) == {"a", "b", "lm_head.weight"}
    (tmp_path / "link").symlink_to(sharded)
    assert set(open_tensors(tmp_path / "link")) == {"a", "b", "lm_head.weight"}
    (sharded / ONE).unlink()
    (sharded / ONE).symlink_to(ONE)
    assert "model" in message(sharded)


def test_a_snapshot_of_the_hubs_cache(sharded, tmp_path):
    cache = tmp_path / "hub" / "models--org--name"
    snapshot = cache / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    shutil.copytree(sharded, cache / "blobs")
    for name in (ONE, TWO, INDEX):
        (snapshot / name).symlink_to(os.path.join("..", "..", "blobs", name))
    assert set(open_tensors(snapshot)) == {"a", "b", "lm_head.weight"}
    shutil.move(cache / "blobs" / ONE, tmp_path / "hub" / ONE)
    (cache / "blobs" / ONE).symlink_to(tmp_path / "hub" / ONE)
    assert f"{snapshot / ONE} leads out" in message(snapshot)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.pt", None])
def test_a_directory_without_safetensors(name, tmp_path):
    if name:
        (tmp_path / name).write_bytes(b"PK")
    said = f"{tmp_path} holds no .safetensors file; weights in other formats (.bin, .pt) cannot be loaded, only"
    assert message(tmp_path).startswith(said)


def test_object_storage():
    assert message("gs://bucket/name").startswith("gs://bucket/name is in object storage; copy the Hugging Face")
