"""Objects out of files: JSON lists, JSON lines, ArrayRecord files of JSON objects, and TFDS datasets.

Each reader yields (place for messages, object) pairs and holds one file in memory at most.
"""

import contextlib
import gzip
import json
import os
import re
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from etils import epath

from refusion_jax.data.examples import DataError
from refusion_jax.files import fingerprint

_GZIP_MAGIC = b"\x1f\x8b"
# Records decoded at once.
_CHUNK = 1024
# Larger files are told apart by a sample, as reading them whole would take longer than a second.
_WHOLE = 1 << 28


def read_objects(source: str, entry: str) -> Iterator[tuple[str, Any]]:
    """Yields (place for messages, value) for every object of one entry of `data.train_files`.

    Args:
      source: "json", "arrayrecord" or "tfds".
      entry: a file, on disk or `gs://`; of "tfds" a dataset's name, or directory, and split: `gsm8k/main:1.0.0[train]`.

    Raises:
      DataError: when it cannot be read or holds something else; the message names the entry and the place in it.
    """
    return _READERS[source](entry)


def fingerprint_entry(source: str, entry: str) -> str:
    """Returns a hash of what `read_objects` would read: names, sizes and contents of files, of huge ones a sample.

    Raises:
      DataError: when it cannot be read.
    """
    if source == "tfds":
        builder, split = _tfds_builder(entry)
        with _refusing(entry, "the split cannot be read"):
            files = [epath.Path(file) for file in builder.info.splits[split].filepaths]
        prefix = split
    else:
        files, prefix = [epath.Path(entry)], ""
    with _file_errors(entry):
        return prefix + fingerprint(files, files[0].parent, whole=_WHOLE)


@contextlib.contextmanager
def _file_errors(path: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise DataError(f"{path}: there is no such file.") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: expected UTF-8 text, but the byte at offset {error.start} is not.") from None
    except (OSError, EOFError, zlib.error, ImportError) as error:  # ImportError: a file system not installed
        raise DataError(f"{path}: the file cannot be read ({error}).") from None
    except Exception as error:
        if not is_remote(path):
            raise
        # Remote file systems raise errors of their own kinds, such as for missing credentials.
        raise DataError(f"{path}: the file cannot be read ({_first_line(error)}).") from None


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a URI, such as `gs://bucket/file`."""
    return "://" in os.fspath(path)


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0].rstrip(".")[:160] or type(error).__name__


@contextlib.contextmanager
def _refusing(entry: str, problem: str) -> Iterator[None]:
    """Turns whatever a library raises for its input into one sentence."""
    try:
        yield
    except Exception as error:
        raise DataError(f"{entry}: {problem} ({_first_line(error)}).") from None


def _read_json(path: str) -> Iterator[tuple[str, Any]]:
    text = _read_text(path)
    if text.lstrip()[:1] == "[":
        for number, value in enumerate(_parse(text, path, first_line=1), 1):
            yield f"{path}, item {number}", value
        return
    for number, line in enumerate(_lines(text), 1):
        if line.strip():
            yield f"{path}, line {number}", _parse(line, path, first_line=number)


def _lines(text: str) -> Iterator[str]:
    """Yields lines one by one, never a second copy of the text."""
    # Not str.splitlines: JSON strings may hold its other line separators, such as U+2028, unescaped.
    start = 0
    while start < len(text):
        end = text.find("\n", start)
        end = len(text) if end < 0 else end
        yield text[start:end]
        start = end + 1


def _read_text(path: str) -> str:
    with _file_errors(path):
        content = epath.Path(path).read_bytes()
        if content.startswith(_GZIP_MAGIC):
            content = gzip.decompress(content)
        return content.decode("utf-8-sig")


def _parse(text: str, path: str, first_line: int) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line = first_line + error.lineno - 1
        raise DataError(f"{path}, line {line}: expected JSON, but at column {error.colno}: {error.msg}.") from None
    except RecursionError:
        raise DataError(f"{path}, line {first_line}: expected JSON, but it is nested too deeply.") from None


def _read_array_record(path: str) -> Iterator[tuple[str, Any]]:
    from array_record.python.array_record_module import ArrayRecordReader

    with _local_copy(path) as file:
        with _refusing(path, "expected an ArrayRecord file, but it cannot be read as one"):
            reader = ArrayRecordReader(str(file))
            if not reader.ok():
                reader.close()  # raises what is wrong
        try:
            count = reader.num_records()
            for start in range(0, count, _CHUNK):
                with _refusing(path, f"the records from {start + 1} on cannot be read"):
                    records = reader.read(start, min(start + _CHUNK, count))
                for number, record in enumerate(records, start + 1):
                    yield f"{path}, record {number}", _parse_record(record, f"{path}, record {number}")
        finally:
            with contextlib.suppress(RuntimeError):  # repeats what reading has raised
                reader.close()


@contextlib.contextmanager
def _local_copy(path: str) -> Iterator[Path]:
    """A file's place on a local disk: ArrayRecord's own remote reader waits for minutes where there is no network."""
    remote = epath.Path(path)
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        with _file_errors(path):
            if not is_remote(path):
                stack.enter_context(open(path, "rb"))
                file = Path(path)
            else:
                file = Path(directory) / "file"
                remote.copy(file)
        yield file


def _parse_record(record: bytes, place: str) -> Any:
    try:
        return json.loads(record)
    except json.JSONDecodeError as error:
        raise DataError(f"{place}: expected a JSON object, but at column {error.colno}: {error.msg}.") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{place}: expected UTF-8 text, but the byte at offset {error.start} is not.") from None
    except RecursionError:
        raise DataError(f"{place}: expected a JSON object, but it is nested too deeply.") from None


def _tfds_builder(entry: str) -> tuple[Any, str]:
    """Returns the builder of `NAME[SPLIT]`, or of `DIRECTORY[SPLIT]`, and the split."""
    parts = re.fullmatch(r"([^\[]+)\[(.+)\]", entry)
    if parts is None:
        raise DataError(f"{entry}: expected a TFDS name and a split, such as 'gsm8k/main:1.0.0[train]'.")
    name, split = parts.groups()
    import tensorflow_datasets as tfds

    with _refusing(entry, "there is no prepared TFDS dataset in the ArrayRecord format of this name or directory"):
        if (epath.Path(name) / "dataset_info.json").exists():
            return tfds.builder_from_directory(name), split
        builder = tfds.builder(name, file_format="array_record")
        if not builder.info.splits:
            raise FileNotFoundError(f"nothing prepared in {builder.data_dir}")
        return builder, split


def _read_tfds(entry: str) -> Iterator[tuple[str, Any]]:
    builder, split = _tfds_builder(entry)
    with _refusing(entry, "the split cannot be read"):
        records = builder.as_data_source(split=split)
    for start in range(0, len(records), _CHUNK):
        stop = min(start + _CHUNK, len(records))
        with _refusing(entry, f"the records from {start + 1} on cannot be read"):
            values = records.__getitems__(range(start, stop))
        for number, value in enumerate(values, start + 1):
            yield f"{entry}, record {number}", _plain(value)


def _plain(value: Any) -> Any:
    """Turns NumPy's values into Python's, and bytes which are UTF-8 into text."""
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return value  # an image, perhaps; refused when it is a field that must be text
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


_READERS: dict[str, Callable[[str], Iterator[tuple[str, Any]]]] = {
    "json": _read_json,
    "arrayrecord": _read_array_record,
    "tfds": _read_tfds,
}
