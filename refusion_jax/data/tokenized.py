"""Tokenized examples in flat arrays."""

import dataclasses
import functools
import mmap
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from refusion_jax.data.examples import DataError, Example
from refusion_jax.data.tokenizers import Tokenizer
from refusion_jax.data.whole import encode_whole

# Examples tokenized at once: lists of Python integers take ten times the memory of the array they become.
_CHUNK = 4096


@dataclasses.dataclass(frozen=True)
class TokenizedExamples:
    """Tokenized examples one after another in one flat array.

    Attributes:
      tokens: (total,) int32, for each example its prompt, its response and EOS, once or repeated.
      offsets: (examples + 1,) int64; example `i` is `tokens[offsets[i]:offsets[i + 1]]`.
      prompt_lengths: (examples,) int32, how many of an example's tokens are its prompt; 0 in documents.
      source_ids: (examples,) int32, the index of its text in the list that was tokenized.
      source_sizes: how many of the examples are from the first source, from the next, and so on; () for one source.
    """

    tokens: np.ndarray
    offsets: np.ndarray
    prompt_lengths: np.ndarray
    source_ids: np.ndarray
    source_sizes: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.prompt_lengths)

    @functools.cached_property
    def lengths(self) -> np.ndarray:
        """(examples,) int32: tokens of each example, prompt and response and EOS."""
        return np.diff(self.offsets).astype(np.int32)

    def __getstate__(self) -> dict[str, Any]:
        """Arrays that are files travel to other processes by name and are mapped there, not copied."""
        state = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: _MappedFile(value) if _is_mapped(value) else value for name, value in state.items()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        arrays = {name: value.load() if isinstance(value, _MappedFile) else value for name, value in state.items()}
        self.__dict__.update(arrays)


def _is_mapped(value: Any) -> bool:
    return isinstance(value, np.memmap) and isinstance(value.base, mmap.mmap)  # else part of a file


class _MappedFile:
    """The name of a mapped `.npy` file."""

    def __init__(self, array: np.memmap):
        self.name = str(array.filename)

    def load(self) -> np.ndarray:
        return np.load(self.name, mmap_mode="r")


@dataclasses.dataclass(frozen=True)
class TokenizeCounts:
    """What `tokenize` did: examples `kept`, dropped as `too_long`, dropped as `empty` (no tokens), and the tokens of
    the `shortest` that was too long, 0 without any. Of documents, every piece is a kept example."""

    kept: int = 0
    too_long: int = 0
    empty: int = 0
    shortest: int = 0

    def __add__(self, other: "TokenizeCounts") -> "TokenizeCounts":
        shortest = min(filter(None, (self.shortest, other.shortest)), default=0)
        return TokenizeCounts(
            self.kept + other.kept, self.too_long + other.too_long, self.empty + other.empty, shortest
        )


def tokenize(
    examples: Sequence[Example],
    tokenizer: Tokenizer,
    max_length: int,
    *,
    documents: bool = False,
    pad_responses: int = 0,
) -> tuple[TokenizedExamples, TokenizeCounts]:
    """Tokenizes examples; a response is its tokens and EOS. For rendered ones see `encode_whole`.

    An example whose prompt, response and all EOS together exceed `max_length` tokens is dropped, never cut; so is one
    whose prompt or response has no tokens. Both are counted. No examples give an empty result.

    Args:
      examples: the texts.
      tokenizer: what encodes them.
      max_length: most tokens of an example.
      documents: whether examples are documents: without a prompt, and cut into pieces of `max_length` tokens, each an
        example. Only the piece in which the document ends has EOS; a last piece of EOS alone is left out.
      pad_responses: EOS is repeated until a response's length is a multiple of so many tokens; 0: one EOS. Not of
        documents.

    Raises:
      DataError: when there were examples and every one was dropped; and see `encode_whole`.
    """
    tokenized, counts = tokenize_some(examples, tokenizer, max_length, documents=documents, pad_responses=pad_responses)
    require_some(counts, len(examples), max_length)
    return tokenized, counts


def require_some(counts: TokenizeCounts, examples: int, max_length: int) -> None:
    """Raises `DataError` when there were examples and every one was dropped."""
    if examples and not counts.kept:
        shortest = f" (the shortest has {counts.shortest}; raise max_length)" if counts.too_long else ""
        raise DataError(
            f"None of the {examples} examples can be used: {counts.too_long} are longer than {max_length} tokens"
            f"{shortest}, {counts.empty} have an empty prompt or response."
        )


def tokenize_some(
    examples: Sequence[Example], tokenizer: Tokenizer, max_length: int, *, documents: bool, pad_responses: int
) -> tuple[TokenizedExamples, TokenizeCounts]:
    """Like `tokenize`, but no example may remain: of several files, one may have none of use."""
    chunks, counts = [_concatenated([])], TokenizeCounts()
    encode = _encode_documents if documents else functools.partial(_encode_pairs, pad_responses=pad_responses)
    for start in range(0, len(examples), _CHUNK):
        chunk, count = encode(examples[start : start + _CHUNK], tokenizer, max_length)
        chunks.append(dataclasses.replace(chunk, source_ids=chunk.source_ids + np.int32(start)))
        counts += count
    return _concatenated(chunks), counts


def concatenate(parts: Iterable[TokenizedExamples]) -> TokenizedExamples:
    """Joins the examples of several sources, in order. `source_ids` count within each source."""
    parts = list(parts)
    return dataclasses.replace(_concatenated(parts), source_sizes=tuple(map(len, parts)))


def _concatenated(parts: Sequence[TokenizedExamples]) -> TokenizedExamples:
    lengths = [part.lengths.astype(np.int64) for part in parts]
    return TokenizedExamples(
        np.concatenate([np.zeros(0, np.int32), *(part.tokens for part in parts)]),
        np.concatenate([np.zeros(1, np.int64), np.cumsum(np.concatenate([np.zeros(0, np.int64), *lengths]))]),
        np.concatenate([np.zeros(0, np.int32), *(part.prompt_lengths for part in parts)]),
        np.concatenate([np.zeros(0, np.int32), *(part.source_ids for part in parts)]),
    )


def _encode_pairs(
    examples: Sequence[Example], tokenizer: Tokenizer, max_length: int, pad_responses: int
) -> tuple[TokenizedExamples, TokenizeCounts]:
    rows = _encode_rows(examples, tokenizer)
    prompt_lengths = np.fromiter((len(prompt) for prompt, _ in rows), np.int32, len(rows))
    response_lengths = np.fromiter((len(response) for _, response in rows), np.int32, len(rows))
    empty = (prompt_lengths == 0) | (response_lengths == 1)  # EOS alone
    repeated = -response_lengths % pad_responses if pad_responses else np.zeros_like(response_lengths)
    lengths = prompt_lengths + response_lengths + repeated
    too_long = ~empty & (lengths > max_length)
    kept = np.flatnonzero(~empty & ~too_long)
    shortest = int(lengths[too_long].min(initial=np.iinfo(np.int32).max)) if too_long.any() else 0
    counts = TokenizeCounts(len(kept), int(too_long.sum()), int(empty.sum()), shortest)
    flat = (token for i in kept for part in (*rows[i], repeated[i] * rows[i][1][-1:]) for token in part)
    return _from_lengths(flat, lengths[kept], prompt_lengths[kept], kept), counts


def _encode_rows(examples: Sequence[Example], tokenizer: Tokenizer) -> list[tuple[list[int], list[int]]]:
    """The token IDs of prompt and response, which ends with EOS, of each example."""
    whole = iter(encode_whole([example for example in examples if example.rendered], tokenizer))
    pairs = [example for example in examples if not example.rendered]
    prompts = iter(tokenizer.encode_batch([example.prompt for example in pairs]))
    responses = iter(tokenizer.encode_batch([example.response for example in pairs]))
    eos = tokenizer.eos_token_id
    return [next(whole) if example.rendered else (next(prompts), [*next(responses), eos]) for example in examples]


def _encode_documents(
    examples: Sequence[Example], tokenizer: Tokenizer, max_length: int
) -> tuple[TokenizedExamples, TokenizeCounts]:
    rows = tokenizer.encode_batch([example.response for example in examples])
    pieces = [
        (index, piece)
        for index, row in enumerate(rows)
        for piece in _pieces([*row, tokenizer.eos_token_id], max_length)
        if row
    ]
    counts = TokenizeCounts(len(pieces), empty=sum(not row for row in rows))
    lengths = np.array([len(piece) for _, piece in pieces], np.int32)
    flat = (token for _, piece in pieces for token in piece)
    return _from_lengths(flat, lengths, np.zeros_like(lengths), [index for index, _ in pieces]), counts


def _pieces(tokens: list[int], length: int) -> list[list[int]]:
    """Cuts a document that ends with EOS."""
    end = len(tokens) - 1 if len(tokens) % length == 1 else len(tokens)
    return [tokens[start : start + length] for start in range(0, end, length)]


def _from_lengths(
    flat: Iterable[int], lengths: np.ndarray, prompt_lengths: np.ndarray, source_ids: Sequence[int] | np.ndarray
) -> TokenizedExamples:
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    tokens = np.fromiter(flat, np.int32, int(offsets[-1]))
    return TokenizedExamples(tokens, offsets, prompt_lengths, np.asarray(source_ids, np.int32))
