"""Conversations that a chat template has written whole: where in their tokens the response begins and ends."""

import functools
from collections.abc import Sequence

from refusion_jax.data.examples import DataError, Example
from refusion_jax.data.tokenizers import Tokenizer

# What messages show of a text on each side of a difference.
_SHOWN = 30


def encode_whole(examples: Sequence[Example], tokenizer: Tokenizer) -> list[tuple[list[int], list[int]]]:
    """Returns the token IDs of (prompt, response) of examples whose prompt and response are rendered as one text.

    A response ends with an EOS: the last one that only white space follows, such as a template's line end, which is cut
    off; where there is none, it is added.

    Raises:
      DataError: when the token IDs of a prompt are not the first of the whole; it shows where they part.
    """
    wholes = tokenizer.encode_batch([example.rendered for example in examples])
    texts = list(dict.fromkeys(example.prompt for example in examples))
    prompts = dict(zip(texts, tokenizer.encode_batch(texts), strict=True))
    is_space = functools.cache(lambda token: tokenizer.decode([token]).isspace())
    eos = set(tokenizer.eos_token_ids)
    rows = []
    for example, whole in zip(examples, wholes, strict=True):
        prompt = prompts[example.prompt]
        if whole[: len(prompt)] != prompt:
            raise _not_a_prefix(example, prompt, whole)
        end = len(whole)
        while end > len(prompt) and is_space(whole[end - 1]):
            end -= 1
        ended = end > len(prompt) and whole[end - 1] in eos
        rows.append((prompt, whole[len(prompt) : end] if ended else [*whole[len(prompt) :], tokenizer.eos_token_id]))
    return rows


def _not_a_prefix(example: Example, prompt: list[int], whole: list[int]) -> DataError:
    where = example.place or "A conversation"
    remedy = "use another template, or data.template 'prompt', which tokenizes the response by itself"
    place = _difference(example.prompt, example.rendered)
    if place < len(example.prompt):
        return DataError(
            f"{where}: the chat template does not begin a conversation with what it writes before its response: "
            f"{_around(example.prompt, place)} became {_around(example.rendered, place)}; {remedy}."
        )
    place = _difference(prompt, whole)
    first, last, end = max(place - 2, 0), place + 2, len(example.prompt)
    return DataError(
        f"{where}: the prompt's token IDs are not the first of the whole conversation's: "
        f"{_around(example.prompt, end)} has "
        f"{prompt[first:last]} where {_around(example.rendered, end)} has {whole[first:last]}; {remedy}."
    )


def _difference(one: Sequence[object], other: Sequence[object]) -> int:
    """The index of the first item in which `other` differs from `one`; the length of `one` when it has all of it."""
    pairs = zip(one, other, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _around(text: str, place: int) -> str:
    """The text around a place, quoted."""
    start, stop = max(place - _SHOWN, 0), place + _SHOWN
    return repr(("..." if start else "") + text[start:stop] + ("..." if stop < len(text) else ""))
