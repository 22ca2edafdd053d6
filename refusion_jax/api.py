"""The library's front door: load a model, compute logits, generate."""

import dataclasses
import functools
import numbers
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from refusion_jax.config import ConfigError, DecodeConfig, ModelConfig
from refusion_jax.data import DataError, Tokenizer
from refusion_jax.data.tokenizers import MODEL_NAME
from refusion_jax.decoding import Generation, decode_prompts
from refusion_jax.huggingface import CheckpointError, read_model_config, read_params
from refusion_jax.modeling import Transformer
from refusion_jax.training.checkpoint import CHECKPOINTS_NAME, TOKENIZER_NAME, read_run_config, restore_params

Prompt = str | Sequence[int]


@dataclasses.dataclass(frozen=True)
class Model:
    """A model ready to use.

    Attributes:
      config: its shape and special tokens.
      module: the Flax module; a pure function of `params`.
      params: the parameter tree.
      tokenizer: None where the directory has no sentencepiece model.
      decode: the decode settings of the run it came from, or the defaults.
    """

    config: ModelConfig
    module: Transformer
    params: Any
    tokenizer: Tokenizer | None
    decode: DecodeConfig


def load(path: str | Path) -> Model:
    """Loads a run directory of `train.py`, or a Hugging Face directory of a Qwen3-shaped checkpoint.

    Raises:
      CheckpointError: when there is no such directory or it does not hold a usable model.
    """
    directory = Path(path)
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is not a directory; give a run directory or a Hugging Face directory.")
    if (directory / CHECKPOINTS_NAME).is_dir() or (directory / TOKENIZER_NAME).is_dir():
        run = read_run_config(directory)
        params = restore_params(directory, run.model)
        run_tokenizer = _load_tokenizer(directory / TOKENIZER_NAME)
        return Model(run.model, Transformer(run.model), params, run_tokenizer, run.decode)
    config = read_model_config(directory)
    tokenizer = _load_tokenizer(directory) if (directory / MODEL_NAME).is_file() else None
    return Model(config, Transformer(config), read_params(directory, config), tokenizer, DecodeConfig())


def _load_tokenizer(path: Path) -> Tokenizer:
    try:
        return Tokenizer.load(path)
    except DataError as error:
        raise CheckpointError(str(error)) from error


def logits(model: Model, tokens: Any, position_ids: Any) -> jax.Array:
    """Logits of a causal forward in buffer order.

    Args:
      model: a loaded model.
      tokens, position_ids: (batch, length) int; position IDs may be in any order.

    Returns:
      (batch, length, vocab_size) float32.

    Raises:
      ConfigError: when the shapes differ, or a token or position lies outside what the model has.
    """
    tokens, position_ids = jnp.asarray(tokens, jnp.int32), jnp.asarray(position_ids, jnp.int32)
    if tokens.ndim != 2 or tokens.shape != position_ids.shape:
        raise ConfigError(
            f"tokens have shape {tokens.shape} and position_ids {position_ids.shape}; both must be (batch, length)."
        )
    if bool(jnp.any((tokens < 0) | (tokens >= model.config.vocab_size))):
        raise ConfigError(f"tokens must lie in [0, {model.config.vocab_size}), the vocabulary.")
    if bool(jnp.any((position_ids < 0) | (position_ids >= model.config.max_position_embeddings))):
        raise ConfigError(f"position_ids must lie in [0, {model.config.max_position_embeddings}), the model's maximum.")
    return _logits(model.module, model.params, tokens, position_ids)


@functools.partial(jax.jit, static_argnums=0)
def _logits(module: Transformer, params: Any, tokens: jax.Array, position_ids: jax.Array) -> jax.Array:
    return module.apply({"params": params}, tokens, position_ids)


def generate(
    model: Model,
    prompts: Iterable[Prompt],
    config: DecodeConfig | Sequence[DecodeConfig] | None = None,
    *,
    seed: int = 0,
    batch_size: int = 32,
    on_progress: Callable[[int], None] | None = None,
) -> Generation:
    """Decodes a response to every prompt.

    Args:
      model: a loaded model.
      prompts: token-ID lists of any lengths, or texts when the model has a tokenizer.
      config: settings for all prompts or one per prompt; by default the model's own. One batch may mix any settings.
      seed: with a prompt's index, all that sampling depends on.
      batch_size: rows decoded at once.
      on_progress: called with the number of finished prompts after each batch.

    Raises:
      ConfigError: for a prompt or setting that cannot be used, naming the prompt.
    """
    if isinstance(prompts, str):
        raise ConfigError("prompts is a single text; give a list of prompts.")
    prompts = list(prompts)
    if any(_is_whole(prompt) for prompt in prompts):
        raise ConfigError("prompts is a single list of token IDs; give a list of prompts.")
    if not _is_whole(batch_size) or batch_size < 1:
        raise ConfigError(f"batch_size is {batch_size!r}; decode at least one row at once.")
    if not _is_whole(seed) or not 0 <= seed < 2**31:
        raise ConfigError(f"seed is {seed!r}; it must be a whole number in [0, 2**31).")
    config = model.decode if config is None else config
    configs = [config] * len(prompts) if isinstance(config, DecodeConfig) else list(config)
    if not all(isinstance(each, DecodeConfig) for each in configs):
        raise ConfigError("config holds something other than a DecodeConfig; give one, or one per prompt.")
    if len(configs) != len(prompts):
        raise ConfigError(f"{len(configs)} configs for {len(prompts)} prompts; give one, or one per prompt.")
    tokens = [_encode_numbered(model, index, prompt) for index, prompt in enumerate(prompts)]
    result = decode_prompts(model.module, model.params, tokens, configs, seed, batch_size, on_progress)
    if model.tokenizer is None:
        return result
    # A model's vocabulary may be padded beyond its tokenizer's; such tokens have no text.
    size = model.tokenizer.vocab_size
    texts = [model.tokenizer.decode(token for token in response if token < size) for response in result.tokens]
    return dataclasses.replace(result, text=texts)


def _encode_numbered(model: Model, index: int, prompt: Prompt) -> list[int]:
    try:
        return encode_prompt(model, prompt)
    except ConfigError as error:
        raise ConfigError(f"Prompt {index}: {error}") from error


def _is_whole(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def encode_prompt(model: Model, prompt: Prompt) -> list[int]:
    """Token IDs of a prompt.

    Raises:
      ConfigError: for a text when the model has no tokenizer or it does not know all characters; for a list that does
        not hold token IDs.
    """
    if not isinstance(prompt, str):
        if not all(map(_is_whole, prompt)):
            raise ConfigError("The prompt holds something other than token IDs, which are whole numbers.")
        return [int(token) for token in prompt]
    if model.tokenizer is None:
        raise ConfigError("The model has no tokenizer; give prompts as lists of token IDs.")
    if any("\ud800" <= character <= "\udfff" for character in prompt):
        raise ConfigError("The prompt has half a surrogate pair, which is no Unicode text.")
    tokens = model.tokenizer.encode(prompt)
    if model.tokenizer.unk_token_id in tokens:
        raise ConfigError("The prompt has characters that the tokenizer does not know.")
    return tokens
