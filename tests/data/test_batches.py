import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from refusion_jax.config import SlotsConfig
from refusion_jax.data.batches import Batches
from refusion_jax.data.examples import DataError, Example
from refusion_jax.data.plan import max_segments
from refusion_jax.data.tokenized import TokenizedExamples, concatenate, tokenize
from refusion_jax.slots import NO_TARGET, batch_from_arrays, draw, training_view


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


@pytest.mark.parametrize("processes", [1, 2, 8])
@pytest.mark.parametrize("interleaved", [False, True])
def test_parts_of_processes_join_to_the_same_batch(examples, processes, interleaved):
    whole = make(examples)
    rows = np.arange(8).reshape(-1, processes).T if interleaved else np.arange(8).reshape(processes, -1)
    parts = [Batches(examples, seed=3, batch_size=8, max_length=128, pack=True, rows=own) for own in rows]
    for step in (0, 7, whole.batches_in_epoch(0) + 3):
        expected, pieces = whole[step], [part[step] for part in parts]
        for name, array in expected.items():
            assert pieces[0][name].shape == (8 // processes, *array.shape[1:])
            joined = np.empty_like(array)
            for own, piece in zip(rows, pieces, strict=True):
                joined[own] = piece[name]
            np.testing.assert_array_equal(joined, array)


@pytest.mark.parametrize("rows", [[8], [-1], [0.5], [[0]], 3])
def test_refuses_rows_that_the_batch_does_not_have(examples, rows):
    with pytest.raises(DataError, match="not all rows of a batch of 8"):
        Batches(examples, seed=3, batch_size=8, max_length=128, pack=True, rows=np.array(rows))


def test_pickled_batches_continue(examples):
    batches = make(examples)
    copy = pickle.loads(pickle.dumps(batches))
    for step in (0, 90):
        for name, array in batches[step].items():
            np.testing.assert_array_equal(copy[step][name], array)


def test_a_mixture_draws_sources_by_weight(tokenizer):
    parts = [tokenize([Example(letter, str(i)) for i in range(count)], tokenizer, 16)[0] for letter, count in
             (("a", 6), ("b", 30))]  # fmt: skip
    examples = concatenate(parts)
    batches = Batches(examples, seed=0, batch_size=2, max_length=16, pack=True, weights=(2.0, 1.0))
    for epoch in range(3):
        first = sum(batches.batches_in_epoch(before) for before in range(epoch))
        seen = [batches[first + step] for step in range(batches.batches_in_epoch(epoch))]
        ids = np.concatenate([batch["example_ids"] for batch in seen])
        passes = np.concatenate([batch["epochs"] for batch in seen])
        assert ((ids >= 0) & (ids < 6)).sum() == 24 and (ids >= 6).sum() == 12
        assert sorted(set(passes[(ids >= 0) & (ids < 6)])) == [4 * epoch + i for i in range(4)]
        assert (passes[ids < 0] == epoch).all() and set(passes[ids >= 6]) == {12 * epoch // 30, (12 * epoch + 11) // 30}
    with pytest.raises(DataError, match="3 weights for the examples of 2 sources"):
        Batches(examples, seed=0, batch_size=2, max_length=16, pack=True, weights=(1.0, 1.0, 1.0))
    with pytest.raises(DataError, match="Source 2 of 2 has a weight but no example that can be used"):
        empty = concatenate([parts[0], tokenize([], tokenizer, 16)[0]])
        Batches(empty, seed=0, batch_size=2, max_length=16, pack=True, weights=(1.0, 1.0))


class EosIsPad:
    """A tokenizer whose EOS is its pad token and has the ID that empty places hold, as some models have it."""

    pad_token_id = eos_token_id = 0
    eos_token_ids = (0,)

    def encode_batch(self, texts):
        return [[ord(character) for character in text] for text in texts]


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("documents", [False, True])
def test_eos_is_learned_even_when_it_is_the_pad_token(documents):
    pairs = [Example("" if documents else "pq", "xyz"), Example("" if documents else "r", "xy")]
    examples, _ = tokenize(pairs, EosIsPad(), 16, documents=documents)
    arrays = Batches(examples, seed=0, batch_size=1, max_length=16, pack=True)[0]
    assert (arrays["tokens"][arrays["segment_ids"] > 0] == 0).sum() == 2
    assert arrays["response_lengths"].sum() == 7
    batch = batch_from_arrays({name: jnp.asarray(array) for name, array in arrays.items()})

    @jax.jit
    def view(batch, uniform):
        draws = draw(jnp.int32(0), batch, SlotsConfig(sizes=(32,)))
        return training_view(batch, draws.replace(mask_uniforms=jnp.full_like(draws.mask_uniforms, uniform)), 999)

    masked = view(batch, 0.0)
    assert sorted(int(target) for target in masked.targets.ravel() if target != NO_TARGET) == sorted(
        [0, *map(ord, "xyz"), 0, *map(ord, "xy")]
    )
    assert int((view(batch, 1.0).targets == 0).sum()) == 2


@pytest.mark.usefixtures("quick_compilation")
def test_documents_without_a_prompt_make_whole_views(tokenizer):
    texts = ["ab>c" * 9, "de", "fgh"]
    examples, _ = tokenize([Example("", text) for text in texts], tokenizer, 16, documents=True)
    arrays = Batches(examples, seed=0, batch_size=4, max_length=16, pack=True)[0]
    assert not arrays["prompt_lengths"].any() and arrays["response_lengths"].sum() == examples.lengths.sum()
    batch = batch_from_arrays({name: jnp.asarray(array) for name, array in arrays.items()})
    view = jax.jit(lambda batch: training_view(batch, draw(jnp.int32(0), batch, SlotsConfig(sizes=(4,))), 2))(batch)
    view = jax.tree.map(np.asarray, view)
    used = arrays["segment_ids"] > 0
    assert bool(view.is_masked.any()) and not bool(view.is_masked[~used.any(1)].any())
    for row in range(4):  # every token is in the view, at its own position
        places = view.visibility.segment[row] > 0
        expected = zip(arrays["segment_ids"][row][used[row]], arrays["position_ids"][row][used[row]], strict=True)
        found = zip(view.visibility.segment[row][places], view.position_ids[row][places], strict=True)
        assert sorted((int(s), int(p)) for s, p in found) == sorted((int(s), int(p)) for s, p in expected)
