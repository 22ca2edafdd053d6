"""The recorded checkpoint, and directories made of it."""

import json
from pathlib import Path

import pytest
from safetensors.flax import load_file, save_file

CHECKPOINT = Path(__file__).parents[1] / "data" / "reference" / "checkpoint"


@pytest.fixture(scope="session")
def checkpoint() -> Path:
    return CHECKPOINT


@pytest.fixture(scope="session")
def tensors():
    return load_file(CHECKPOINT / "model.safetensors")


@pytest.fixture
def write(tmp_path):
    """Writes a directory of changed `config.json` values (Ellipsis removes one) and the given weight files."""

    def write(files, **changes):
        values = json.loads((CHECKPOINT / "config.json").read_text()) | changes
        values = {name: value for name, value in values.items() if value is not Ellipsis}
        (tmp_path / "config.json").write_text(json.dumps(values))
        for name, content in files.items():
            save_file(content, tmp_path / name)
        return tmp_path

    return write
