import pathlib

import numpy as np
import pytest

from refusion_jax.data import synthetic
from refusion_jax.data.plan import Batches, TokenizedExamples, max_segments, plan_epoch, tokenize
from refusion_jax.data.records import DataError, Example, read_examples
from refusion_jax.data.tokenizers import train_tokenizer

GSM8K = pathlib.Path(__file__).parents[2] / "../shared/data/gsm8k/train.jsonl"


def texts(examples):
    return [text for example in examples for text in (example.prompt, example.response)]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(texts(synthetic.train_examples(0, 200)), "char", 1_000)


@pytest.fixture(scope="module")
def examples(tokenizer):
    return tokenize(synthetic.train_examples(0, 1_000), tokenizer, 128)[0]


def fill(lengths, **plan):
    rows = plan_epoch(lengths, seed=0, epoch=0, batch_size=1, pack=True, **plan).rows
    return lengths.sum() / (len(rows) * plan["max_length"])


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


@pytest.mark.parametrize("pack", [True, False])
def test_every_example_has_one_place_in_every_epoch(examples, pack):
    plans = [
        plan_epoch(examples.lengths, seed=1, epoch=epoch, max_length=128, batch_size=16, pack=pack).rows
        for epoch in range(3)
    ]
    for rows in plans:
        assert sorted(rows[rows >= 0]) == list(range(len(examples)))
        assert len(rows) % 16 == 0 and rows.shape[1] == (16 if pack else 1)
        filled = np.where(rows >= 0, examples.lengths[rows], 0).sum(1)
        assert filled.max() <= 128
        assert (filled[:-16] > 0).all()  # only the last batch has empty rows
    assert not np.array_equal(plans[0][:50], plans[1][:50])


def test_plan_is_a_function_of_seed_and_epoch(examples):
    def plan(seed, epoch):
        return plan_epoch(examples.lengths, seed=seed, epoch=epoch, max_length=128, batch_size=4, pack=True).rows

    assert np.array_equal(plan(1, 2), plan(1, 2))
    assert not np.array_equal(plan(1, 2)[:50], plan(2, 1)[:50])
    # Written down: a run that continues with another version of NumPy must find the same rows.
    lengths = np.arange(4, 12)
    rows = plan_epoch(lengths, seed=7, epoch=3, max_length=24, batch_size=2, pack=True).rows
    assert rows.tolist() == [[5, 4, 3], [7, 6, -1], [2, 1, 0], [-1, -1, -1]]


def test_a_row_never_holds_more_examples_than_the_bound():
    lengths = np.full(1_000, 2)
    rows = plan_epoch(lengths, seed=0, epoch=0, max_length=64, batch_size=1, pack=True).rows
    assert rows.shape == (125, 8) and (rows >= 0).all()
    assert [max_segments(length, True) for length in (2, 8, 128, 4096)] == [1, 1, 16, 64]
    assert max_segments(4096, False) == 1


def test_synthetic_rows_are_full(tokenizer):
    lengths = tokenize(synthetic.train_examples(0, 10_000), tokenizer, 128)[0].lengths
    assert fill(lengths, max_length=128) > 0.97


@pytest.mark.skipif(not GSM8K.exists(), reason="shared/data/gsm8k is not here")
def test_gsm8k_rows_are_full():
    pairs, _ = read_examples([str(GSM8K)], "question", "answer")
    tokenizer = train_tokenizer(texts(pairs), "bpe", 1_000)
    lengths = tokenize(pairs, tokenizer, 1_024)[0].lengths
    assert fill(lengths[lengths <= 512], max_length=512) > 0.97
    assert fill(lengths, max_length=1_024) > 0.97


def test_short_and_long_examples_come_mixed(tokenizer):
    lengths = tokenize(synthetic.train_examples(0, 10_000), tokenizer, 128)[0].lengths
    rows = plan_epoch(lengths, seed=0, epoch=0, max_length=128, batch_size=1, pack=True).rows
    means = [lengths[part[part >= 0]].mean() for part in np.array_split(rows, 10)]
    assert max(means) - min(means) < 0.1 * np.mean(means)
    # Tokens of neighbouring rows' first examples are as unlike as those of any two rows.
    first = lengths[rows[:, 0]]
    assert abs(np.corrcoef(first[1:], first[:-1])[0, 1]) < 0.05


def make(examples, pack=True, batch_size=8, seed=3):
    return Batches(examples, seed=seed, batch_size=batch_size, max_length=128, pack=pack)


@pytest.mark.parametrize("pack", [True, False])
def test_batches_hold_the_examples_they_name(examples, pack):
    batches, segments = make(examples, pack), max_segments(128, pack)
    seen = []
    for step in range(batches.batches_in_epoch(0)):
        batch = batches[step]
        for name, array in batch.items():
            assert array.dtype == np.int32, name
            assert array.shape == ((8, 128) if name in ("tokens", "segment_ids", "position_ids") else (8, segments))
        for row in range(8):
            end = 0
            for segment, example in enumerate(batch["example_ids"][row]):
                lengths = batch["prompt_lengths"][row, segment], batch["response_lengths"][row, segment]
                if example < 0:
                    assert lengths == (0, 0)
                    continue
                seen.append(example)
                start, end = end, end + sum(lengths)
                expected = examples.tokens[examples.offsets[example] : examples.offsets[example + 1]]
                np.testing.assert_array_equal(batch["tokens"][row, start:end], expected)
                np.testing.assert_array_equal(batch["position_ids"][row, start:end], np.arange(end - start))
                assert (batch["segment_ids"][row, start:end] == segment + 1).all()
                assert lengths[0] == examples.prompt_lengths[example]
            assert not batch["tokens"][row, end:].any() and not batch["segment_ids"][row, end:].any()
            np.testing.assert_array_equal(batch["position_ids"][row, end:], np.arange(end, 128))
        assert not batch["epochs"].any()
    assert sorted(seen) == list(range(len(examples)))


def test_a_far_step_is_the_same_however_it_is_reached(examples):
    walked, jumped = make(examples), make(examples)
    last = sum(walked.batches_in_epoch(epoch) for epoch in range(4)) + 1
    expected = [walked[step] for step in range(last + 1)][last]
    assert jumped.locate(last) == (4, 1)
    for name, array in jumped[last].items():
        np.testing.assert_array_equal(array, expected[name])
    assert (expected["epochs"] == 4).all()
    np.testing.assert_array_equal(jumped[0]["tokens"], walked[0]["tokens"])


def test_locate_counts_through_epochs_of_different_lengths(examples):
    batches = make(examples, batch_size=1)
    counts = [batches.batches_in_epoch(epoch) for epoch in range(6)]
    assert len(set(counts)) > 1
    expected = [(epoch, batch) for epoch, count in enumerate(counts) for batch in range(count)]
    assert [make(examples, batch_size=1).locate(len(expected) - 1)] == expected[-1:]
    assert [batches.locate(step) for step in range(len(expected))] == expected
    with pytest.raises(IndexError, match="-1 is negative"):
        batches[-1]


def test_a_batch_may_be_changed_without_harm(examples):
    batches = make(examples)
    before = batches[0]
    for array in batches[0].values():
        array[:] = 99
    for name, array in batches[0].items():
        np.testing.assert_array_equal(array, before[name])


def test_refuses_no_examples_and_rows_too_short(examples):
    none = TokenizedExamples(*(np.zeros(size, np.int32) for size in (0, 1, 0, 0)))
    with pytest.raises(DataError, match="no examples"):
        make(none)
    with pytest.raises(DataError, match="does not fit a row of 16 tokens"):
        Batches(examples, seed=0, batch_size=1, max_length=16, pack=True)
