"""From response tokens to text: whole answers, and what can be shown of those that are not finished."""

import bisect
import dataclasses
from collections.abc import Sequence

import numpy as np

from refusion_jax.data import Tokenizer
from refusion_jax.decoding import Answer
from refusion_jax.decoding.events import Beginning
from refusion_jax.prompts import Prepared, text_tokens


@dataclasses.dataclass(frozen=True)
class Detokenizer:
    """Turns response tokens into text, without the tokens that end a response, whatever text a tokenizer has for them.

    Attributes:
      tokenizer: the model's.
      eos_token_ids: the model's.
    """

    tokenizer: Tokenizer
    eos_token_ids: tuple[int, ...]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of a finished response's tokens; bytes that are no character become U+FFFD."""
        return self.tokenizer.decode(self._with_text(tokens))

    def decode_part(self, tokens: Sequence[int]) -> str:
        """The text of tokens from anywhere, without the characters that their ends cut."""
        return self.tokenizer.decode_whole(self._with_text(tokens))

    def decode_beginning(self, tokens: Sequence[int]) -> str:
        """The text of a response's leading tokens, without a character that their end cuts.

        Whatever tokens follow, their text begins with it.
        """
        return self.tokenizer.decode_whole(self._with_text(tokens), at_start=True)

    def _with_text(self, tokens: Sequence[int]) -> list[int]:
        return [token for token in text_tokens(self.tokenizer, tokens) if token not in self.eos_token_ids]

    def cut(self, beginning: Beginning, stop: Sequence[str]) -> tuple[list[int], str] | None:
        """The fewest leading tokens of a hole that spell a stop text, and the text before it; None without one."""
        tokens = beginning.tokens

        def text(count: int) -> str:
            is_all = beginning.is_finished and count == len(tokens)
            return self.decode(tokens) if is_all else self.decode_beginning(tokens[:count])

        def spells(count: int) -> bool:
            spelled = text(count)
            return any(each in spelled for each in stop)

        if not stop or not spells(len(tokens)):
            return None
        count = bisect.bisect_left(range(len(tokens)), True, key=spells)
        spelled = text(count)
        return tokens[:count], spelled[: min(place for place in map(spelled.find, stop) if place >= 0)]

    def show(self, beginning: Beginning, stop: Sequence[str]) -> tuple[list[int], str]:
        """What is sure of a hole: its tokens, at most those that spell a stop text, and the text before it.

        More tokens only add to the text; so an end that a stop text may begin with is left out until that is known.
        """
        cut = self.cut(beginning, stop)
        if cut is not None:
            return cut
        if beginning.is_finished:
            return beginning.tokens, self.decode(beginning.tokens)
        text = self.decode_beginning(beginning.tokens)
        return beginning.tokens, text[: len(text) - _possible_stop(text, stop)]


def _possible_stop(text: str, stop: Sequence[str]) -> int:
    """How many characters at the end of a text may be the beginning of a stop text."""
    return max((size for each in stop for size in range(1, len(each)) if text.endswith(each[:size])), default=0)


def finish(detokenizer: Detokenizer | None, prepared: Prepared, answer: Answer) -> Answer:
    """Adds texts to an answer and ends it before a stop text."""
    if detokenizer is None:
        return answer
    beginnings = [Beginning(hole, answer.finish_reason != "cancelled") for hole in answer.holes]
    cuts = [detokenizer.cut(each, prepared.config.stop) for each in beginnings]
    shown = [cut or detokenizer.show(each, ()) for each, cut in zip(beginnings, cuts, strict=True)]
    holes, texts = [tokens for tokens, _ in shown], [text for _, text in shown]
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
