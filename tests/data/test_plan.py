import pathlib

import numpy as np
import pytest

from refusion_jax.data import synthetic
from refusion_jax.data.plan import Mixture, epoch_examples, max_segments, plan_epoch
from refusion_jax.data.records import read_examples
from refusion_jax.data.sentencepiece_tokenizer import train_tokenizer
from refusion_jax.data.tokenized import tokenize

GSM8K = pathlib.Path(__file__).parents[2] / "../shared/data/gsm8k/train.jsonl"


def fill(lengths, **plan):
    rows = plan_epoch(lengths, seed=0, epoch=0, batch_size=1, pack=True, **plan).rows
    return lengths.sum() / (len(rows) * plan["max_length"])


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
    assert [max_segments(length, True) for length in (2, 8, 128, 4096)] == [1, 1, 16, 512]
    assert max_segments(4096, False) == 1


@pytest.mark.parametrize("max_length", [128, 1_024, 4_096])
@pytest.mark.parametrize("longest", [8, 16, 64])
def test_rows_of_short_examples_are_full(max_length, longest):
    lengths = np.random.default_rng(0).integers(8, longest + 1, 10_000)
    assert fill(lengths, max_length=max_length) > 0.95


# The twentieths of the lengths of GSM8K's training examples, under a BPE vocabulary of 1,000 learned on them.
GSM8K_LENGTHS = (
    55, 102, 118, 128, 137, 147, 155, 164, 173, 182, 193, 203, 213, 225, 238, 253, 269, 289, 318, 362, 703
)  # fmt: skip


@pytest.mark.parametrize("batch_size", [1, 16])
def test_rows_of_lengths_like_those_of_gsm8k_are_full(batch_size):
    lengths = np.interp(np.linspace(0, 20, 7_073), range(21), GSM8K_LENGTHS).astype(int)
    plan = plan_epoch(lengths, seed=0, epoch=0, max_length=1_024, batch_size=batch_size, pack=True)
    assert lengths.sum() / (len(plan.rows) * 1_024) > 0.97


def test_synthetic_rows_are_full(tokenizer):
    lengths = tokenize(synthetic.train_examples(0, 10_000), tokenizer, 128)[0].lengths
    assert fill(lengths, max_length=128) > 0.97


@pytest.mark.skipif(not GSM8K.exists(), reason="shared/data/gsm8k is not here")
def test_gsm8k_rows_are_full():
    pairs, _ = read_examples([str(GSM8K)], "question", "answer")
    tokenizer = train_tokenizer([text for pair in pairs for text in (pair.prompt, pair.response)], "bpe", 1_000)
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


def test_without_weights_every_example_comes_once_an_epoch():
    ids, passes = epoch_examples(Mixture((3, 2)), seed=0, epoch=4)
    assert ids.tolist() == [0, 1, 2, 3, 4] and passes.tolist() == [4] * 5


def test_weights_decide_the_share_of_each_source_in_every_epoch():
    mixture = Mixture((60, 30, 10), (1.0, 2.0, 1.0))
    for epoch in range(5):
        ids, passes = epoch_examples(mixture, seed=1, epoch=epoch)
        assert ids.dtype == passes.dtype == np.int32
        assert np.bincount(np.searchsorted([60, 90], ids, side="right")).tolist() == [25, 50, 25]
    again = epoch_examples(mixture, seed=1, epoch=4)
    np.testing.assert_array_equal(again, (ids, passes))
    assert not np.array_equal(epoch_examples(mixture, seed=2, epoch=4)[0], ids)


def test_a_source_is_exhausted_before_an_example_of_it_comes_again():
    mixture = Mixture((7, 50, 4), (3.0, 1.0, 2.0))
    epochs = [epoch_examples(mixture, seed=3, epoch=epoch) for epoch in range(12)]
    ids, passes = (np.concatenate(arrays) for arrays in zip(*epochs, strict=True))
    for first, size in ((0, 7), (7, 50), (57, 4)):
        own = (ids >= first) & (ids < first + size)
        sequence, numbers = ids[own], passes[own]
        assert (numbers == np.arange(len(sequence)) // size).all()
        rounds = [sequence[start : start + size] for start in range(0, len(sequence) - size + 1, size)]
        assert len(rounds) > 0 and all(sorted(one) == list(range(first, first + size)) for one in rounds)
        assert size == 50 or not all((one == rounds[0]).all() for one in rounds)
    # Random draws are keyed by (seed, pass, example): no example has the same twice.
    assert len(set(zip(ids.tolist(), passes.tolist(), strict=True))) == len(ids)


def test_a_source_of_little_weight_still_has_an_example():
    assert np.bincount(epoch_examples(Mixture((9, 1), (1.0, 1e-9)), seed=0, epoch=0)[0] // 9).tolist() == [10, 1]
