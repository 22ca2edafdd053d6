"""Which checkpoint answers are of: what an interrupted run must find unchanged to go on."""

from pathlib import Path

from refusion_jax.data.tokenizer_files import NAMES as TOKENIZER_FILES
from refusion_jax.files import fingerprint
from refusion_jax.huggingface import local_directory
from refusion_jax.training.run_directory import CHECKPOINTS_NAME, CONFIG_NAME, TOKENIZER_NAME

# What `load` reads of a Hugging Face directory.
_HUGGING_FACE_FILES = ("config.json", "*.safetensors", "*.safetensors.index.json", *TOKENIZER_FILES)


def checkpoint_identity(name: str) -> dict[str, str]:
    """The directory that `load(name)` reads, and what tells whether its files have changed."""
    directory = Path(local_directory(name)).resolve()
    return {
        "checkpoint": str(directory),
        "checkpoint_content": fingerprint(checkpoint_files(directory), directory),
    }


def checkpoint_files(directory: Path) -> list[Path]:
    """The files that `load` reads; a run's others change when it goes on."""
    checkpoints = directory / CHECKPOINTS_NAME
    if checkpoints.is_dir():
        steps = [int(path.name) for path in checkpoints.iterdir() if path.name.isdecimal()]
        folders = [checkpoints / str(max(steps)) / "params"] if steps else []
        found = [path for folder in [*folders, directory / TOKENIZER_NAME] for path in folder.rglob("*")]
        found.append(directory / CONFIG_NAME)
    else:
        found = [path for pattern in _HUGGING_FACE_FILES for path in directory.glob(pattern)]
    return [path for path in found if path.is_file()]
