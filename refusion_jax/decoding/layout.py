"""Where the tokens of a request stand: fixed text, holes to fill, and the slots and serial blocks of the holes.

A plain prompt is the template `[prompt, Hole(gen_length)]`. Position IDs count through the whole sequence, fixed text
and holes alike. The fixed text is committed at the start, in order, so every hole sees the text on both of its sides.
"""

import dataclasses
import itertools
import numbers
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from refusion_jax.config import ConfigError, DecodeConfig, ModelConfig


@dataclasses.dataclass(frozen=True)
class Hole:
    """A place in a template to be filled with up to `length` tokens; an EOS inside ends this hole only."""

    length: int

    def __post_init__(self) -> None:
        length: Any = self.length
        if isinstance(length, bool) or not isinstance(length, numbers.Integral) or length < 1:
            raise ConfigError(f"A hole has the size {self.length!r}; it must be a whole number of at least 1.")


Template = Sequence[Sequence[int] | Hole]


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """A request's tokens, as arrays.

    Attributes:
      tokens, token_position_ids: (fixed,) int32, the fixed text in order.
      position_ids: (response,) int32, position IDs of the holes' tokens, all holes joined; "offsets" count along it.
      slot_starts: (response,) int32, the offset at which a token's slot begins. A hole's last slot may be short.
      blocks: (response,) int32, serial blocks. The slots of all holes, in order, are divided as equally as can be.
      holes: (response,) int32, the hole a token is in.
    """

    tokens: np.ndarray
    token_position_ids: np.ndarray
    position_ids: np.ndarray
    slot_starts: np.ndarray
    blocks: np.ndarray
    holes: np.ndarray

    @property
    def prompt_length(self) -> int:
        """Tokens of fixed text."""
        return len(self.tokens)

    @property
    def response_length(self) -> int:
        """Tokens of all holes."""
        return len(self.position_ids)

    @property
    def num_holes(self) -> int:
        """Holes to fill; a plain prompt has one."""
        return int(self.holes[-1]) + 1 if self.response_length else 0

    def behind(self, prefix: Sequence[int]) -> "Layout":
        """The layout of the same request with more fixed text before it."""
        own = np.arange(len(prefix))
        return dataclasses.replace(
            self,
            tokens=np.concatenate([prefix, self.tokens]).astype(np.int32),
            token_position_ids=np.concatenate([own, len(prefix) + self.token_position_ids]).astype(np.int32),
            position_ids=len(prefix) + self.position_ids,
        )

    def by_hole(self, offsets: np.ndarray) -> list[np.ndarray]:
        """Cuts ascending `offsets` into those of each hole."""
        return [offsets[self.holes[offsets] == hole] for hole in range(self.num_holes)]


def is_template(prompt: Any) -> bool:
    """Whether a token prompt is a list of segments rather than of token IDs."""
    return any(isinstance(part, Hole) for part in prompt) or any(isinstance(part, list | tuple) for part in prompt)


def lay_out(prompt: Sequence[int] | Template, config: DecodeConfig, positions: int | None = None) -> Layout:
    """Places a prompt, or the segments of a template, under the slot size and blocks of `config`.

    Args:
      positions: the most that it may take, where that matters.

    Raises:
      ConfigError: for an empty prompt, a template without any fixed token, two holes without text between them, or more
        tokens than `positions`.
    """
    template = is_template(prompt)
    segments: list[Any] = [prompt, Hole(config.rounded_length)] if len(prompt) else []
    if template:
        segments = [part for part in prompt if isinstance(part, Hole) or len(part)]  # type: ignore[arg-type]
    if not any(not isinstance(segment, Hole) for segment in segments):
        what = "The template has no fixed text" if segments else "The prompt is empty"
        raise ConfigError(f"{what}; give at least one token.")
    for left, right in itertools.pairwise(segments):
        if isinstance(left, Hole) and isinstance(right, Hole):
            raise ConfigError(
                f"Two holes stand next to each other, of {left.length} and {right.length} tokens; "
                "make them one, or put text between them."
            )
    if positions is not None:
        filled = sum(part.length for part in segments if isinstance(part, Hole))
        given = sum(len(part) for part in segments if not isinstance(part, Hole))
        if given + filled > positions:
            raise ConfigError(
                f"The prompt has {given} tokens, with {filled} to fill that makes {given + filled}, beyond the maximum "
                f"of {positions}; shorten the {'text or the holes' if template else 'prompt or lower gen_length'}."
            )
    tokens: list[int] = []
    fixed: list[int] = []
    response: list[int] = []
    slot_sizes: list[int] = []
    holes: list[int] = []
    position = 0
    for segment in segments:
        length = segment.length if isinstance(segment, Hole) else len(segment)
        places = range(position, position + length)
        position += length
        if isinstance(segment, Hole):
            holes += [len(set(holes))] * length
            response += places
            slot_sizes += [min(config.slot_size, length - start) for start in range(0, length, config.slot_size)]
        else:
            tokens += list(segment)
            fixed += places
    starts = np.cumsum([0, *slot_sizes[:-1]])[: len(slot_sizes)]
    parts = np.array_split(np.arange(len(slot_sizes)), min(config.serial_num_blocks, max(len(slot_sizes), 1)))
    block_of_slot = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    arrays: Any = (
        tokens, fixed, response,
        np.repeat(starts, slot_sizes), np.repeat(block_of_slot, slot_sizes), holes,
    )  # fmt: skip
    return Layout(*(np.asarray(values, np.int32) for values in arrays))


def prepare_layout(
    prompt: Sequence[int] | Template, config: DecodeConfig, model: ModelConfig, prefix_length: int = 0
) -> Layout:
    """Lays out a prompt and refuses what the model cannot decode.

    Args:
      prefix_length: tokens of a shared prefix that stand before it.

    Raises:
      ConfigError: as `lay_out`, or for a token outside the vocabulary.
    """
    segments: Any = [part for part in prompt if not isinstance(part, Hole)] if is_template(prompt) else [prompt]
    check_tokens(itertools.chain(*segments), "Prompt token", model)
    check_tokens(config.suppress_ids, "suppress_ids: token", model)
    if len(set(suppressed_ids(config, model))) == model.vocab_size:
        raise ConfigError(f"All {model.vocab_size} tokens are suppressed; leave at least one out of suppress_ids.")
    try:
        return lay_out(prompt, config, model.context_length - prefix_length)
    except ConfigError as error:
        prefix = f" The shared prefix takes {prefix_length} of the model's {model.context_length} positions."
        raise ConfigError(f"{error}{prefix if prefix_length else ''}") from None


def suppressed_ids(config: DecodeConfig, model: ModelConfig) -> list[int]:
    """The token IDs that are never proposed."""
    special = [model.pad_token_id, model.mask_token_id] if config.suppress_special else []
    return [*config.suppress_ids, *special]


def check_tokens(tokens: Iterable[int], name: str, model: ModelConfig) -> None:
    """Refuses token IDs that the model does not have.

    Raises:
      ConfigError: calling the token `name`.
    """
    for token in tokens:
        if not 0 <= token < model.vocab_size:
            raise ConfigError(f"{name} {token} lies outside the vocabulary of {model.vocab_size} tokens.")
