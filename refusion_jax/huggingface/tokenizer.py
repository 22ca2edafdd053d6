"""The tokenizer of a Hugging Face directory."""

import os

from refusion_jax.data.examples import DataError
from refusion_jax.data.tokenizer_files import NAMES, find_tokenizer
from refusion_jax.data.tokenizers import Tokenizer
from refusion_jax.huggingface.architectures import stated_mask_token_id
from refusion_jax.huggingface.directories import file_inside, on_disk
from refusion_jax.huggingface.errors import CheckpointError


def read_tokenizer(directory: os.PathLike[str] | str) -> Tokenizer | None:
    """The tokenizer beside a `config.json`, with the mask token that this names; None where there is none.

    Raises:
      CheckpointError: when a file of it leads out of the directory or cannot be used.
    """
    place = on_disk(directory)
    there = [file_inside(place, name).exists() for name in NAMES]  # all of them, whichever is first
    if not any(there):
        return None
    try:
        return find_tokenizer(place, stated_mask_token_id(place))
    except DataError as error:
        raise CheckpointError(str(error)) from error
