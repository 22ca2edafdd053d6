"""Checkpoints by name: a path on this machine, or the files of a model on the Hugging Face Hub."""

import os
import re

from etils import epath

from refusion_jax.data.tokenizer_files import NAMES as TOKENIZER_FILES
from refusion_jax.huggingface.errors import CheckpointError

# What is read: weights as safetensors, and what describes them and the tokenizer. No pickled weights, no code.
_WEIGHTS = ("model*.safetensors", "model.safetensors.index.json")
_DESCRIPTIONS = ("config.json", *TOKENIZER_FILES)
_ID = re.compile(r"([\w.-]+/[\w.-]+)(?:@([\w./-]+))?", re.ASCII)


def local_directory(path_or_id: str | os.PathLike[str], weights: bool = True) -> epath.Path:
    """The directory of a path, which need not exist, or of a model that is downloaded unless the Hub's cache has it.

    Only a text such as "org/name" or "org/name@revision" that names nothing on this machine is looked up on the Hub;
    without `weights`, only what describes the model is downloaded.

    Raises:
      CheckpointError: when the Hub cannot be asked or does not give the model, saying what to do.
    """
    path = epath.Path(path_or_id)
    match = _ID.fullmatch(path_or_id) if isinstance(path_or_id, str) else None
    if match is None or match[1].startswith(("./", "../")) or path.exists():
        return path
    return epath.Path(_download(match[1], match[2], weights))


def _download(name: str, revision: str | None, weights: bool) -> str:
    try:
        import huggingface_hub
        from huggingface_hub import errors
    except ImportError as error:
        raise CheckpointError(
            f"{name} is not a directory, and the Hugging Face Hub needs huggingface_hub: "
            "pip install 'refusion_jax[hf]', or download it elsewhere and give the directory."
        ) from error
    try:
        wanted = [*_DESCRIPTIONS, *(_WEIGHTS if weights else ())]
        return huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=wanted)
    except errors.GatedRepoError as error:
        problem = "is gated on the Hugging Face Hub: accept its terms there, then hf auth login"
        raise CheckpointError(f"{name} {problem}.") from error
    except errors.RevisionNotFoundError as error:
        raise CheckpointError(f"{name} has no revision {revision!r} on the Hugging Face Hub; name another.") from error
    except errors.RepositoryNotFoundError as error:
        raise CheckpointError(
            f"{name} is neither a directory here nor a model on the Hugging Face Hub; check the name, or "
            "hf auth login if it is private."
        ) from error
    except errors.HFValidationError as error:
        raise CheckpointError(f"{name} is neither a directory here nor a name that the Hub can have.") from error
    except (OSError, errors.OfflineModeIsEnabled) as error:
        raise CheckpointError(
            f"{name} is not a directory here, and the Hugging Face Hub cannot be reached ({_reason(error)}): download "
            "it elsewhere and give the directory."
        ) from error


def _reason(error: BaseException) -> str:
    return str(error).strip().split("\n")[0][:200].rstrip(".") or type(error).__name__
