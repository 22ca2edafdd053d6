"""Finding and loading tokenizers of either kind."""

import os

from etils import epath

from refusion_jax.data.examples import DataError
from refusion_jax.data.huggingface_tokenizer import OTHER_NAMES, HuggingFaceTokenizer
from refusion_jax.data.sentencepiece_tokenizer import SentencePieceTokenizer
from refusion_jax.data.tokenizers import JSON_NAME, MODEL_NAME, Tokenizer

# All files that may belong to a tokenizer.
NAMES = (MODEL_NAME, JSON_NAME, *OTHER_NAMES)


def load_tokenizer(path: str | os.PathLike[str], mask_token_id: int | None = None) -> Tokenizer:
    """Reads a tokenizer.

    Args:
      path: a sentencepiece model file, a `tokenizer.json` file, beside which its other files are, or a directory with
        either; on disk or `gs://`. Of a directory with both, `tokenizer.json` counts, unless it is what `export` made
        of the sentencepiece model for other programs.
      mask_token_id: the model's mask token, where its configuration names one; a sentencepiece model has its own.

    Raises:
      DataError: when there is no such file, or it is not a tokenizer with the special tokens that are needed.
    """
    file = epath.Path(path)
    if not file.is_dir():
        return _load_file(file, mask_token_id)
    there = [file / name for name in (JSON_NAME, MODEL_NAME) if (file / name).exists()]
    if not there:
        raise DataError(f"{file}: there is no tokenizer file, neither {JSON_NAME} nor {MODEL_NAME}.")
    exported = _find_exported(file) if len(there) == 2 else None
    return exported or _load_file(there[0], mask_token_id)


def find_tokenizer(directory: str | os.PathLike[str], mask_token_id: int | None = None) -> Tokenizer | None:
    """Returns `load_tokenizer(directory, mask_token_id)`, or None when the directory has no tokenizer file.

    Raises:
      DataError: when it has one that cannot be used.
    """
    there = any((epath.Path(directory) / name).exists() for name in (JSON_NAME, MODEL_NAME))
    return load_tokenizer(directory, mask_token_id) if there else None


def _find_exported(directory: epath.Path) -> SentencePieceTokenizer | None:
    """The sentencepiece model that a directory's `tokenizer.json` was made of, if it was."""
    try:
        tokenizer = SentencePieceTokenizer(_read_file(directory / MODEL_NAME))
    except DataError:
        return None
    return tokenizer if tokenizer.foreign_files().get(JSON_NAME) == _read_file(directory / JSON_NAME) else None


def _load_file(file: epath.Path, mask_token_id: int | None) -> Tokenizer:
    content = _read_file(file)
    if file.suffix != ".json" and content.lstrip()[:1] != b"{":
        return SentencePieceTokenizer(content, source=str(file))
    directory = file.parent
    others = {name: _read_file(directory / name) for name in OTHER_NAMES if (directory / name).exists()}
    return HuggingFaceTokenizer({JSON_NAME: content} | others, str(directory), mask_token_id)


def _read_file(path: epath.Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise DataError(f"{path}: there is no such tokenizer file.") from None
    except (OSError, ImportError) as error:  # ImportError: a file system not installed
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{path}: the tokenizer file cannot be read ({reason}).") from None
