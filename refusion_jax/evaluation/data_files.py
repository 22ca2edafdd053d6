"""Finding and reading the files of benchmarks: JSON lines, perhaps compressed, in a local folder."""

import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from refusion_jax.config import ConfigError


def find_file(folder: Path, data_set: str, names: Sequence[str]) -> Path:
    """The first file of these names that is in a folder, or in the folder of the data set there.

    Raises:
      ConfigError: when there is none.
    """
    if not folder.is_dir():
        raise ConfigError(f"--data {folder} is not a directory; name the one that has the files of {data_set}.")
    for place in (folder, folder / data_set):
        for name in names:
            if (place / name).is_file():
                return place / name
    raise ConfigError(
        f"No {' or '.join(names)} in {folder} or {folder / data_set}; put the file of {data_set} there, or name its "
        "directory with --data."
    )


def read_objects(path: Path, names: Sequence[str]) -> Iterator[tuple[int, dict[str, str]]]:
    """The numbers, from 1, and objects of the lines that are not empty; each has a string under every name.

    Raises:
      ConfigError: when the file cannot be read or holds something else, naming the line.
    """
    form = "{" + ", ".join(f'"{name}": "..."' for name in names) + "}"
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            for number, text in enumerate(file, 1):
                if not text.strip():
                    continue
                try:
                    line = json.loads(text)
                except (ValueError, RecursionError):
                    line = None
                if not isinstance(line, dict) or not all(isinstance(line.get(name), str) for name in names):
                    raise ConfigError(f"Line {number} of {path} is no JSON object {form} with strings.")
                yield number, line
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path} cannot be read ({reason}); give a readable file of JSON lines.") from error
