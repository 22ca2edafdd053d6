import pickle

import numpy as np
import pytest

from refusion_jax.data.examples import DataError, Example
from refusion_jax.data.tokenized import TokenizedExamples, concatenate, tokenize


def test_tokenize_keeps_prompt_response_and_eos(tokenizer):
    tokenized, counts = tokenize([Example("A:kt?", "kt."), Example("a", "b")], tokenizer, 9)
    assert len(tokenized) == counts.kept == 2
    assert tokenized.tokens.dtype == tokenized.prompt_lengths.dtype == tokenized.lengths.dtype == np.int32
    assert tokenized.offsets.tolist() == [0, 9, 12] and tokenized.offsets.dtype == np.int64
    assert tokenized.tokens.tolist() == [*tokenizer.encode("A:kt?kt."), 1, *tokenizer.encode("ab"), 1]
    assert tokenized.prompt_lengths.tolist() == [5, 1] and tokenized.lengths.tolist() == [9, 3]


def test_tokenize_drops_and_counts_what_does_not_fit(tokenizer):
    pairs = [Example("aaaa", "bbb"), Example("aaaa", "bbbb"), Example("", "b"), Example("a", ""), Example("c", "d")]
    tokenized, counts = tokenize(pairs, tokenizer, 8)
    assert (counts.kept, counts.too_long, counts.empty) == (2, 1, 2)
    assert tokenized.source_ids.tolist() == [0, 4]
    with pytest.raises(DataError, match=r"None of the 4 .* 2 are longer than 7 tokens .* 2 have an empty"):
        tokenize(pairs[:4], tokenizer, 7)
    assert len(tokenize([], tokenizer, 8)[0]) == 0


def test_responses_are_filled_up_with_eos(tokenizer):
    pairs = [Example("a", "bb"), Example("a", "bbb"), Example("a", "bbbb"), Example("a", ""), Example("aaaaaa", "b")]
    tokenized, counts = tokenize(pairs, tokenizer, 9, pad_responses=4)
    assert (counts.kept, counts.too_long, counts.empty, counts.shortest) == (3, 1, 1, 10)
    a, b = tokenizer.encode("a"), tokenizer.encode("b")
    rows = [[*a, *b * 2, 1, 1], [*a, *b * 3, 1], [*a, *b * 4, 1, 1, 1, 1]]
    assert tokenized.tokens.tolist() == [token for row in rows for token in row]
    assert tokenized.lengths.tolist() == [5, 5, 9] and tokenized.prompt_lengths.tolist() == [1, 1, 1]
    once = tokenize(pairs, tokenizer, 9)[0]
    np.testing.assert_array_equal(tokenize(pairs, tokenizer, 9, pad_responses=1)[0].tokens, once.tokens)
    with pytest.raises(DataError, match=r"2 are longer than 4 tokens \(the shortest has 5"):
        tokenize(pairs[:2], tokenizer, 4, pad_responses=4)


def test_documents_have_no_prompt_and_are_cut(tokenizer):
    texts = ["a" * 9, "b", "c" * 8, "", "d" * 7, "e" * 16]
    documents = [Example("", text) for text in texts]
    tokenized, counts = tokenize(documents, tokenizer, 8, documents=True)
    a, b, c, d, e = (tokenizer.encode(letter) for letter in "abcde")
    pieces = [a * 8, [*a, 1], [*b, 1], c * 8, [*d * 7, 1], e * 8, e * 8]
    assert [
        tokenized.tokens[start:end].tolist()
        for start, end in zip(tokenized.offsets[:-1], tokenized.offsets[1:], strict=True)
    ] == pieces
    assert not tokenized.prompt_lengths.any() and tokenized.source_ids.tolist() == [0, 0, 1, 2, 4, 5, 5]
    assert (counts.kept, counts.too_long, counts.empty) == (7, 0, 1)
    with pytest.raises(DataError, match=r"None of the 1 .* 1 have an empty prompt or response"):
        tokenize(documents[3:4], tokenizer, 8, documents=True)


def test_long_lists_are_tokenized_in_parts(tokenizer, monkeypatch):
    pairs = [Example("a" * (i % 5), "b" * (i % 3)) for i in range(20)]
    for documents in (False, True):
        whole, counts = tokenize(pairs, tokenizer, 6, documents=documents)
        with monkeypatch.context() as patch:
            patch.setattr("refusion_jax.data.tokenized._CHUNK", 7)
            parts, part_counts = tokenize(pairs, tokenizer, 6, documents=documents)
        assert counts == part_counts
        for name in ("tokens", "offsets", "prompt_lengths", "source_ids"):
            np.testing.assert_array_equal(getattr(parts, name), getattr(whole, name))
            assert getattr(parts, name).dtype == getattr(whole, name).dtype


def test_concatenate_keeps_sizes_and_joins_offsets(tokenizer):
    one, _ = tokenize([Example("a", "b"), Example("c", "dd")], tokenizer, 8)
    joined = concatenate([one, tokenize([], tokenizer, 8)[0], one])
    assert joined.source_sizes == (2, 0, 2) and joined.lengths.tolist() == [3, 4, 3, 4]
    assert joined.tokens.tolist() == one.tokens.tolist() * 2


def test_pickles_name_mapped_files_and_carry_other_arrays(examples, tmp_path):
    np.save(tmp_path / "tokens.npy", examples.tokens)
    mapped = TokenizedExamples(
        np.load(tmp_path / "tokens.npy", mmap_mode="r"), examples.offsets, examples.prompt_lengths, examples.source_ids
    )
    content = pickle.dumps(mapped)
    assert len(content) < examples.tokens.nbytes / 2 < len(pickle.dumps(examples))
    for copy in (pickle.loads(content), pickle.loads(pickle.dumps(examples))):
        np.testing.assert_array_equal(copy.tokens, examples.tokens)
        np.testing.assert_array_equal(copy.lengths, examples.lengths)
    part = TokenizedExamples(mapped.tokens[5:8], np.array([0, 3]), np.zeros(1, int), np.zeros(1, int))
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(part)).tokens, examples.tokens[5:8])
