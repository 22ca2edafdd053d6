"""Safetensors files: found, checked, and read one tensor at a time by its place in the file."""

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from refusion_jax.huggingface.directories import file_inside, on_disk, read_object
from refusion_jax.huggingface.errors import CheckpointError, shown

WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
DTYPES: dict[str, Any] = {
    "F32": np.dtype(np.float32),
    "BF16": np.dtype(jnp.bfloat16),
    "F16": np.dtype(np.float16),
}


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file.

    Attributes:
      file: where it is.
      name: its full name there.
      dtype: its type in the format's spelling, such as BF16.
      shape: its shape.
      offset: of its first byte in the file.
    """

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def dtype_name(self) -> str | None:
        """The name of its type, such as bfloat16; None for one that cannot be loaded."""
        return DTYPES[self.dtype].name if self.dtype in DTYPES else None

    def nbytes(self, rows: int | None = None) -> int:
        """Bytes of it, or of its first `rows` rows."""
        return math.prod(self._shape(rows)) * DTYPES[self.dtype].itemsize

    def read(self, buffer: np.ndarray, rows: int | None = None) -> np.ndarray:
        """Reads it, or its first `rows` rows, in the file's type.

        Args:
          buffer: (bytes,) uint8, at least `nbytes`; what is returned lies in it.
          rows: how many.

        Raises:
          CheckpointError: when the file has become shorter or cannot be read.
        """
        part = buffer[: self.nbytes(rows)]
        try:
            with self.file.open("rb") as opened:
                opened.seek(self.offset)
                count = opened.readinto(part.data)
        except OSError as error:
            raise CheckpointError(f"{self.file} cannot be read ({error.strerror}).") from error
        if count != part.size:
            raise CheckpointError(f"{self.file} has become shorter while it was read; restore it.")
        return part.view(DTYPES[self.dtype]).reshape(self._shape(rows))

    def _shape(self, rows: int | None) -> tuple[int, ...]:
        return self.shape if rows is None else (rows, *self.shape[1:])


def open_tensors(directory: Path) -> dict[str, StoredTensor]:
    """All tensors of a directory, by their names without a leading `model.`; no tensor is read.

    Raises:
      CheckpointError: when there are no weights, a file is damaged or leads out of the directory, the index does not
        fit the files, or a tensor is there twice.
    """
    directory = on_disk(directory)
    index = file_inside(directory, INDEX_NAME)
    weight_map = _read_index(index) if index.is_file() else None
    tensors: dict[str, StoredTensor] = {}
    for file in _files(directory, weight_map):
        for tensor in _read_header(file):
            name = tensor.name.removeprefix("model.")
            if name in tensors:
                first = tensors[name]
                raise CheckpointError(
                    f"{directory} holds the tensor {name} twice, as {first.name} in {first.file.name} and as "
                    f"{tensor.name} in {file.name}; remove one."
                )
            tensors[name] = tensor
    for name, file_name in (weight_map or {}).items():
        found = tensors.get(name.removeprefix("model."))
        if found is None or found.file.name != Path(file_name).name or found.name != name:
            raise CheckpointError(f"{index} says that {name} is in {file_name}, but it is not; restore that file.")
    return tensors


def _read_index(path: Path) -> dict[str, str]:
    weight_map = read_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path} is not an index of safetensors files: it has no weight_map.")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not file.endswith(".safetensors"):
            where = f"{shown(name)} is in {shown(str(file))!r}"
            raise CheckpointError(f"{path} is not an index of safetensors files: {where}.")
    return weight_map


def _files(directory: Path, weight_map: dict[str, str] | None) -> list[Path]:
    if weight_map is not None:
        if file_inside(directory, WEIGHTS_NAME).exists() and WEIGHTS_NAME not in weight_map.values():
            raise CheckpointError(
                f"{directory} holds {WEIGHTS_NAME} and {INDEX_NAME}, which does not name it; remove the one that is "
                "not the model."
            )
        files = [file_inside(directory, name) for name in sorted(set(weight_map.values()))]
        missing = [file for file in files if not file.is_file()]
        if missing:
            name = str(missing[0].relative_to(directory))
            raise CheckpointError(
                f"{directory} lacks {shown(name)}, which {INDEX_NAME} names; download it, or the whole checkpoint "
                "again."
            )
        return files
    # One file of all weights counts alone: others beside it are the same in another form.
    whole = file_inside(directory, WEIGHTS_NAME)
    names = [WEIGHTS_NAME] if whole.is_file() else sorted(path.name for path in directory.glob("*.safetensors"))
    if not names:
        raise CheckpointError(
            f"{directory} holds no .safetensors file; weights in other formats (.bin, .pt) cannot be loaded, only "
            "safetensors."
        )
    return [file_inside(directory, name) for name in names]


def _read_header(file: Path) -> Iterator[StoredTensor]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="numpy"):  # checks the header, and that the file has all of its bytes
            pass
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            pairs = json.loads(opened.read(length), object_pairs_hook=list)
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(
            f"{file} is not a readable safetensors file ({error}); it is damaged or incomplete, download it again."
        ) from error
    seen: set[str] = set()
    for name, items in pairs:
        if name == "__metadata__":
            continue
        if name in seen:
            raise CheckpointError(f"{file} holds the tensor {name} twice; remove one.")
        seen.add(name)
        values = dict(items)
        yield StoredTensor(file, name, values["dtype"], tuple(values["shape"]), 8 + length + values["data_offsets"][0])
