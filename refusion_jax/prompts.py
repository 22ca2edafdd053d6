"""From texts, conversations and templates to what the decoder takes."""

import dataclasses
import itertools
import numbers
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from refusion_jax.config import ConfigError, DecodeConfig, ModelConfig
from refusion_jax.data import DataError, Tokenizer
from refusion_jax.data.chat import check_messages, shorten
from refusion_jax.decoding import Hole, Layout
from refusion_jax.decoding.layout import prepare_layout

Prompt = str | Sequence[int] | Mapping[str, Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Prepared:
    """A prompt that has been checked and can be decoded.

    Attributes:
      layout, config: what the decoder takes.
      texts: of a template its fixed texts, None for each hole; None for a plain prompt or without a tokenizer.
      offset: tokens of a shared prefix that stand before it.
    """

    layout: Layout
    config: DecodeConfig
    texts: tuple[str | None, ...] | None = None
    offset: int = 0

    @property
    def prompt_length(self) -> int:
        """Tokens of fixed text."""
        return self.layout.prompt_length

    @property
    def response_length(self) -> int:
        """Tokens to fill."""
        return self.layout.response_length


def brief(value: Any) -> str:
    """A value as messages show it."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def is_whole(value: Any) -> bool:
    """Whether a value is a whole number (NumPy's count, truth values do not)."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def encode(tokenizer: Tokenizer | None, text: str | Sequence[int], name: str = "The prompt") -> list[int]:
    """Token IDs of a text, or of a list that already holds them; `name` is what messages call it.

    Raises:
      ConfigError: for a text without a tokenizer, or when the tokenizer does not know all its characters; for a list
        that does not hold token IDs.
    """
    if not isinstance(text, str):
        if not all(map(is_whole, text)):
            raise ConfigError(f"{name} holds something other than token IDs, which are whole numbers.")
        return [int(token) for token in text]
    if tokenizer is None:
        raise ConfigError("The model has no tokenizer; give prompts as lists of token IDs.")
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ConfigError(f"{name} has half a surrogate pair, which is no Unicode text.")
    tokens = tokenizer.encode(text)
    if tokenizer.unk_token_id in tokens:
        raise ConfigError(f"{name} has characters that the tokenizer does not know.")
    return tokens


def prepare_prompt(
    tokenizer: Tokenizer | None, model: ModelConfig, prompt: Prompt, config: DecodeConfig, prefix_length: int = 0
) -> Prepared:
    """Checks and lays out a prompt: a text, a list of token IDs, a conversation or a template.

    A conversation is a mapping with "messages" and perhaps "enable_thinking", see `conversation`. A template is one
    with "segments": texts or lists of token IDs, and holes, `{"hole": length}` or `Hole`.

    Args:
      prefix_length: tokens of a shared prefix that stand before the prompt.

    Raises:
      ConfigError: when the prompt cannot be decoded, in one sentence.
    """
    if config.stop and tokenizer is None:
        raise ConfigError("decode.stop needs a tokenizer, which the model does not have; leave it out.")
    texts = None
    if isinstance(prompt, Mapping) and "messages" in prompt:
        tokens: Any = encode(tokenizer, _render(tokenizer, prompt, prefix_length), "The conversation in its template")
    elif isinstance(prompt, Mapping):
        segments = _read_segments(tokenizer, prompt)
        tokens = [part if isinstance(part, Hole) else encode(tokenizer, part) for part in segments]
        if tokenizer is not None:
            texts = tuple(_text_of(tokenizer, part) for part in segments)
        if not any(isinstance(part, Hole) for part in tokens):
            tokens = [list(itertools.chain(*tokens))] if any(tokens) else []
    else:
        tokens = encode(tokenizer, prompt)
    return Prepared(prepare_layout(tokens, config, model, prefix_length), config, texts, prefix_length)


def conversation(messages: Any, system: str | None = None, enable_thinking: Any = True) -> dict[str, Any]:
    """A prompt of messages, `{"role": "system" | "user" | "assistant", "content": text}`, that were checked.

    Args:
      messages: the conversation, which the response continues.
      system: content of a system message that is put first where there is none.
      enable_thinking: what the chat template is told.

    Raises:
      ConfigError: when they are no conversation, or none that is to be answered; naming the message.
    """
    checked = _check(messages)
    last = checked[-1]["role"]
    if last not in ("user", "tool"):
        raise ConfigError(
            f"The conversation, message {len(checked)}: the last message is the {last}'s, which leaves nothing to "
            "answer; end with the user's."
        )
    if not isinstance(enable_thinking, bool):
        raise ConfigError(f"'enable_thinking' is {shorten(enable_thinking)}; it must be true or false.")
    if system is not None and checked[0]["role"] != "system":
        checked = _check([{"role": "system", "content": system}, *checked])
    return {"messages": checked, "enable_thinking": enable_thinking}


def _check(messages: Any) -> list[dict[str, Any]]:
    try:
        return check_messages(messages, "The conversation")
    except DataError as error:
        raise ConfigError(str(error)) from error


def _render(tokenizer: Tokenizer | None, prompt: Mapping[str, Any], prefix_length: int) -> str:
    """The text of a conversation up to where the response begins."""
    others = [str(name) for name in prompt if name not in ("messages", "enable_thinking")]
    if others:
        raise ConfigError(
            f'A conversation is {{"messages": [...]}}, perhaps with "enable_thinking"; leave out {", ".join(others)}.'
        )
    if tokenizer is None:
        raise ConfigError("The model has no tokenizer, which conversations need; give prompts as lists of token IDs.")
    if prefix_length:
        raise ConfigError(
            "A shared prefix would stand before the conversation's beginning; put it into a system message instead."
        )
    checked = conversation(**prompt)
    try:
        return tokenizer.render(
            checked["messages"], add_generation_prompt=True, enable_thinking=checked["enable_thinking"]
        )
    except DataError as error:
        raise ConfigError(str(error)) from error


def _read_segments(tokenizer: Tokenizer | None, template: Mapping[str, Any]) -> list[Any]:
    segments = template.get("segments")
    if not isinstance(segments, list | tuple) or len(template) != 1:
        raise ConfigError(
            'A template is {"segments": [...]}: a list of texts and {"hole": length}; a conversation is '
            '{"messages": [...]}.'
        )
    return [_read_segment(segment) for segment in segments]


def _read_segment(segment: Any) -> Any:
    if isinstance(segment, Mapping):
        if set(segment) != {"hole"}:
            raise ConfigError(f'A segment has the fields {", ".join(map(str, segment)) or "none"}; {{"hole": length}} '
                              "has one.")  # fmt: skip
        return Hole(segment["hole"])
    if not isinstance(segment, str | list | tuple | Hole):
        raise ConfigError(f'A segment is {segment!r}; it must be text, token IDs or {{"hole": length}}.')
    return segment


def _text_of(tokenizer: Tokenizer, segment: Any) -> str | None:
    if isinstance(segment, str | Hole):
        return segment if isinstance(segment, str) else None
    return tokenizer.decode(text_tokens(tokenizer, segment))


def text_tokens(tokenizer: Tokenizer, tokens: Iterable[int]) -> list[int]:
    """The tokens that the tokenizer knows; a model's vocabulary may be padded beyond, with tokens that have no text."""
    return [token for token in tokens if token < tokenizer.vocab_size]
