"""From texts and templates to what the decoder takes, and from its answers back to text."""

import bisect
import dataclasses
import itertools
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from refusion_jax.config import ConfigError, DecodeConfig, ModelConfig
from refusion_jax.data import Tokenizer
from refusion_jax.decoding import Answer, Hole, Layout
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


def is_whole(value: Any) -> bool:
    """Whether a value is a whole number (NumPy's count, truth values do not)."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def encode(tokenizer: Tokenizer | None, text: str | Sequence[int]) -> list[int]:
    """Token IDs of a text, or of a list that already holds them.

    Raises:
      ConfigError: for a text without a tokenizer, or when the tokenizer does not know all its characters; for a list
        that does not hold token IDs.
    """
    if not isinstance(text, str):
        if not all(map(is_whole, text)):
            raise ConfigError("The prompt holds something other than token IDs, which are whole numbers.")
        return [int(token) for token in text]
    if tokenizer is None:
        raise ConfigError("The model has no tokenizer; give prompts as lists of token IDs.")
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ConfigError("The prompt has half a surrogate pair, which is no Unicode text.")
    tokens = tokenizer.encode(text)
    if tokenizer.unk_token_id in tokens:
        raise ConfigError("The prompt has characters that the tokenizer does not know.")
    return tokens


def prepare_prompt(
    tokenizer: Tokenizer | None, model: ModelConfig, prompt: Prompt, config: DecodeConfig, prefix_length: int = 0
) -> Prepared:
    """Checks and lays out a prompt: a text, a list of token IDs, or a template.

    A template is a mapping with "segments": texts or lists of token IDs, and holes, `{"hole": length}` or `Hole`.

    Args:
      prefix_length: tokens of a shared prefix that stand before the prompt.

    Raises:
      ConfigError: when the prompt cannot be decoded, in one sentence.
    """
    if config.stop and tokenizer is None:
        raise ConfigError("decode.stop needs a tokenizer, which the model does not have; leave it out.")
    texts = None
    if isinstance(prompt, Mapping):
        segments = _read_segments(tokenizer, prompt)
        tokens: Any = [part if isinstance(part, Hole) else encode(tokenizer, part) for part in segments]
        if tokenizer is not None:
            texts = tuple(_text_of(tokenizer, part) for part in segments)
        if not any(isinstance(part, Hole) for part in tokens):
            tokens = [list(itertools.chain(*tokens))] if any(tokens) else []
    else:
        tokens = encode(tokenizer, prompt)
    return Prepared(prepare_layout(tokens, config, model, prefix_length), config, texts, prefix_length)


def _read_segments(tokenizer: Tokenizer | None, template: Mapping[str, Any]) -> list[Any]:
    segments = template.get("segments")
    if not isinstance(segments, list | tuple) or len(template) != 1:
        raise ConfigError('A template is {"segments": [...]}: a list of texts and {"hole": length}.')
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
    return _decode(tokenizer, segment)


def _decode(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    # A model's vocabulary may be padded beyond its tokenizer's; such tokens have no text.
    return tokenizer.decode(token for token in tokens if token < tokenizer.vocab_size)


def decode_tokens(tokenizer: Tokenizer | None, tokens: Sequence[int]) -> str | None:
    """The text of response tokens; None without a tokenizer."""
    return None if tokenizer is None else _decode(tokenizer, tokens)


def has_stopped(tokenizer: Tokenizer | None, tokens: Sequence[int], config: DecodeConfig) -> bool:
    """Whether the text of leading response tokens holds a stop text."""
    return bool(config.stop) and tokenizer is not None and _cut(tokenizer, tokens, config.stop) is not None


def _cut(tokenizer: Tokenizer, tokens: Sequence[int], stop: Sequence[str]) -> tuple[list[int], str] | None:
    """The fewest leading tokens that spell a stop text, and the text before it; None when there is none."""
    whole = _decode(tokenizer, tokens)
    if not any(text in whole for text in stop):
        return None

    def spells(count: int) -> bool:
        spelled = _decode(tokenizer, tokens[:count])
        return any(text in spelled for text in stop)

    count = bisect.bisect_left(range(len(tokens)), True, key=spells)
    spelled = _decode(tokenizer, tokens[:count])
    return list(tokens[:count]), spelled[: min(place for place in map(spelled.find, stop) if place >= 0)]


def finish(tokenizer: Tokenizer | None, prepared: Prepared, answer: Answer) -> Answer:
    """Adds texts to an answer and ends it before a stop text."""
    if tokenizer is None:
        return answer
    cuts = [_cut(tokenizer, hole, prepared.config.stop) for hole in answer.holes]
    holes = [hole if cut is None else cut[0] for hole, cut in zip(answer.holes, cuts, strict=True)]
    texts = [_decode(tokenizer, hole) if cut is None else cut[1] for hole, cut in zip(answer.holes, cuts, strict=True)]
    stopped = any(cut is not None for cut in cuts)
    text = "".join(texts)
    if prepared.texts is not None:
        remaining = iter(texts)
        text = "".join(next(remaining) if fixed is None else fixed for fixed in prepared.texts)
    if stopped:
        answer = _without_rest(answer, prepared, [len(hole) for hole in holes])
    return dataclasses.replace(
        answer,
        tokens=[token for hole in holes for token in hole],
        holes=holes,
        text=text,
        hole_texts=texts,
        finish_reason="stop" if stopped and answer.finish_reason != "cancelled" else answer.finish_reason,
    )


def _without_rest(answer: Answer, prepared: Prepared, lengths: Sequence[int]) -> Answer:
    """Leaves of an answer's committed tokens the first so many of each hole.

    What lies behind a stop text, and how long the row went on, depends on when it was noticed.
    """
    layout = prepared.layout
    parts = layout.by_hole(np.arange(layout.response_length))
    wanted = np.concatenate([part[:count] for part, count in zip(parts, lengths, strict=True)])
    positions = set((prepared.offset + layout.position_ids[wanted]).tolist())
    kept = [index for index, position in enumerate(answer.position_ids) if position in positions]
    order = [answer.order[index] for index in kept]
    forwards = max(order) + 1 if order and layout.num_holes == 1 else answer.forwards
    return dataclasses.replace(
        answer,
        committed=[answer.committed[index] for index in kept],
        position_ids=[answer.position_ids[index] for index in kept],
        order=order,
        probabilities=[answer.probabilities[index] for index in kept],
        forwards=forwards,
        tpf=len(kept) / max(forwards, 1),
    )
