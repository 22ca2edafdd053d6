"""Training views of all objectives, against their definitions written as plain loops."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from refusion_jax.config import SlotsConfig
from refusion_jax.modeling.attention import visibility_bias
from refusion_jax.slots import NO_TARGET, Batch, draw
from refusion_jax.views import fully_clean_view, make_view, num_response_tokens

pytestmark = pytest.mark.usefixtures("quick_compilation")

MASK, EOS = 2, 1
SEED = jnp.int32(5)
CONFIG = SlotsConfig(sizes=(2, 4))
# (prompt, response) lengths of the examples of each row; the second row's second example is a document.
EXAMPLES = [[(3, 7), (2, 5)], [(4, 8), (0, 6)]]
LENGTH = 20


def make_batch(examples=EXAMPLES, length=LENGTH, seed=0):
    rng, rows, most = np.random.default_rng(seed), len(examples), max(map(len, examples))
    tokens, segment_ids = np.zeros((2, rows, length), np.int32)
    position_ids = np.tile(np.arange(length, dtype=np.int32), (rows, 1))
    prompt_lengths, response_lengths = np.zeros((2, rows, most), np.int32)
    for row, lengths in enumerate(examples):
        start = 0
        for number, (prompt, response) in enumerate(lengths):
            stop = start + prompt + response
            tokens[row, start:stop] = rng.integers(3, 20, stop - start)
            tokens[row, stop - 1] = EOS
            segment_ids[row, start:stop], position_ids[row, start:stop] = number + 1, np.arange(stop - start)
            prompt_lengths[row, number], response_lengths[row, number] = prompt, response
            start = stop
    ids = np.arange(rows * most, dtype=np.int32).reshape(rows, most)
    return Batch(tokens, segment_ids, position_ids, prompt_lengths, response_lengths, ids, np.zeros_like(ids))


_make_view = jax.jit(make_view, static_argnums=(0, 3, 4))


def view_of(objective, batch=None, config=CONFIG):
    return jax.device_get(_make_view(objective, SEED, make_batch() if batch is None else batch, config, MASK))


def places_of(batch):
    """(row, place, prompt length, response length, offset in the response or below 0, is the example's last)."""
    for row, place in np.ndindex(batch.tokens.shape):
        segment = batch.segment_ids[row, place]
        if segment:
            prompt, response = batch.prompt_lengths[row, segment - 1], batch.response_lengths[row, segment - 1]
            position = batch.position_ids[row, place]
            yield row, place, prompt, response, position - prompt, position == prompt + response - 1


def sees(view):
    return np.asarray(visibility_bias(view.visibility)) == 0


def test_autoregressive():
    batch, view = make_batch(), view_of("autoregressive")
    np.testing.assert_array_equal(view.tokens, batch.tokens)
    expected = np.full(batch.tokens.shape, NO_TARGET)
    for row, place, _, _, offset, is_last in places_of(batch):
        if offset >= -1 and not is_last:
            expected[row, place] = batch.tokens[row, place + 1]
    np.testing.assert_array_equal(view.targets, expected)
    assert not view.is_masked.any() and not view.mdm_weights.any()
    assert view.visibility.in_buffer_order
    same = batch.segment_ids[:, :, None] == batch.segment_ids[:, None]
    np.testing.assert_array_equal(sees(view), same & np.tri(LENGTH, dtype=bool))


def test_llada():
    batch, view = make_batch(), view_of("llada")
    draws = jax.device_get(draw(SEED, batch, dataclasses.replace(CONFIG, sizes=(1,))))
    masked = 0
    for row, place, _, response, offset, _ in places_of(batch):
        p = draws.mask_probabilities[row, batch.segment_ids[row, place] - 1]
        is_masked = offset >= 0 and draws.mask_uniforms[row, place] < p
        masked += is_masked
        assert view.is_masked[row, place] == is_masked
        assert view.tokens[row, place] == (MASK if is_masked else batch.tokens[row, place])
        assert view.targets[row, place] == (batch.tokens[row, place] if is_masked else NO_TARGET)
        assert view.mdm_weights[row, place] == pytest.approx(1 / p / response if is_masked else 0)
    assert masked > 3
    np.testing.assert_array_equal(sees(view), batch.segment_ids[:, :, None] == batch.segment_ids[:, None])
    assert not view.is_masked[batch.segment_ids == 0].any()


def test_tokens_are_masked_one_by_one():
    view = view_of("llada", make_batch([[(4, 60)]] * 8, 64))
    changes = (view.is_masked[:, 4:-1] != view.is_masked[:, 5:]).mean(1)
    shares = view.is_masked[:, 4:].mean(1)
    assert np.all(np.abs(changes - 2 * shares * (1 - shares)) < 0.25)


def test_dream_asks_at_the_place_before():
    batch, ours, theirs = make_batch(), view_of("dream"), view_of("llada")
    np.testing.assert_array_equal(ours.tokens, theirs.tokens)
    asked = 0
    for row, place, _, _, _, is_last in places_of(batch):
        following = NO_TARGET if is_last else theirs.targets[row, place + 1]
        assert ours.targets[row, place] == following
        assert ours.mdm_weights[row, place] == (0 if is_last else theirs.mdm_weights[row, place + 1])
        asked += following != NO_TARGET
    document = theirs.is_masked[1, 12]  # its first token has no place before it
    assert asked == theirs.is_masked.sum() - document


def test_block_diffusion_shows_clean_tokens_and_noisy_responses():
    batch, view = make_batch(), view_of("block_diffusion")
    clean, noisy = np.arange(LENGTH), np.arange(LENGTH, 2 * LENGTH)
    np.testing.assert_array_equal(view.tokens[:, clean], batch.tokens)
    np.testing.assert_array_equal(view.position_ids, np.tile(batch.position_ids, (1, 2)))
    assert (view.targets[:, clean] == NO_TARGET).all() and not view.mdm_weights[:, clean].any()
    is_masked = view.is_masked[:, noisy]
    assert is_masked.any()
    np.testing.assert_array_equal(view.tokens[:, noisy], np.where(is_masked, MASK, batch.tokens))
    np.testing.assert_array_equal(view.targets[:, noisy], np.where(is_masked, batch.tokens, NO_TARGET))


def test_block_diffusion_visibility():
    batch, view = make_batch(), view_of("block_diffusion")
    sizes = np.asarray(draw(SEED, batch, CONFIG).slot_sizes)
    seen = sees(view)
    tokens = list(places_of(batch))
    for row, place, *_, offset, _ in tokens:
        for other_row, other, *_, other_offset, _ in tokens:
            if other_row != row:
                continue
            segment = batch.segment_ids[row, place]
            same, size = batch.segment_ids[row, other] == segment, sizes[row, segment - 1]
            block, other_block = offset // size, other_offset // size
            earlier = other_offset < 0 or other_block < block
            if offset < 0:
                assert seen[row, place, other] == (same and other_offset <= offset)
            else:
                assert seen[row, place, other] == (same and (earlier or other_block == block))
                assert seen[row, LENGTH + place, other] == (same and earlier)
                if other_offset >= 0:
                    assert seen[row, LENGTH + place, LENGTH + other] == (same and other_block == block)
            assert not seen[row, place, LENGTH + other]


def test_blocks_have_masking_probabilities_of_their_own():
    batch = make_batch([[(4, 64)]] * 6, 68)
    view = view_of("block_diffusion", batch, SlotsConfig(sizes=(16,)))
    weights = view.mdm_weights[:, 68 + 4 :].reshape(6, 4, 16)
    probabilities = []
    for block in weights.reshape(-1, 16):
        found = np.unique(block[block > 0])
        assert len(found) <= 1
        probabilities += (1 / 64 / found).tolist()
    assert len(set(probabilities)) == len(probabilities) > 12
    assert max(probabilities) <= 1 and min(probabilities) < 0.4 < 0.6 < max(probabilities)


def test_one_block_is_masked_diffusion_behind_a_causal_prompt():
    batch = make_batch([[(3, 7)]], 12)
    view = view_of("block_diffusion", batch, SlotsConfig(sizes=(32,)))
    noisy = sees(view)[0, 12 + 3 : 12 + 10]
    assert noisy[:, 12 + 3 : 12 + 10].all() and noisy[:, :3].all()
    assert noisy.sum() == 7 * 10
    weights = view.mdm_weights[0, 12 + 3 : 12 + 10]
    assert len(np.unique(weights[weights > 0])) == 1


@pytest.mark.parametrize("objective", ["hybrid", "llada", "block_diffusion"])
def test_draws_depend_on_the_example_alone(objective):
    """The same example alone in a row, and behind another one."""
    pair = make_batch([[(3, 7), (2, 5)]], 17)
    alone = Batch(
        pair.tokens[:, 10:], np.ones((1, 7), np.int32), pair.position_ids[:, 10:], pair.prompt_lengths[:, 1:],
        pair.response_lengths[:, 1:], pair.example_ids[:, 1:], pair.epochs[:, 1:],
    )  # fmt: skip
    both, one = view_of(objective, pair), view_of(objective, alone)
    for name in ("tokens", "position_ids", "targets", "is_masked", "mdm_weights", "is_slot_start"):
        of_both = np.concatenate(
            [part[:, 10:] for part in np.split(getattr(both, name), len(one.tokens[0]) // 7, 1)], 1
        )
        np.testing.assert_array_equal(of_both, getattr(one, name), err_msg=name)


def test_clean_slots_in_order():
    batch = make_batch([[(2, 32)]] * 4, 34)
    config = SlotsConfig(sizes=(4,), clean_order="left_to_right")
    view = view_of("hybrid", batch, config)
    shuffled = view_of("hybrid", batch, dataclasses.replace(config, clean_order="shuffled"))
    for row in range(4):
        clean = ~view.is_masked[row]
        assert (np.diff(view.position_ids[row, clean]) > 0).all()
        assert set(view.position_ids[row, clean]) == set(shuffled.position_ids[row, ~shuffled.is_masked[row]])
    assert any((np.diff(shuffled.position_ids[row, ~shuffled.is_masked[row]]) < 0).any() for row in range(4))


def test_fully_clean_view():
    batch = make_batch()
    view = jax.device_get(fully_clean_view(SEED, batch, CONFIG))
    assert not view.is_masked.any() and not view.mdm_weights.any()
    np.testing.assert_array_equal(np.sort(view.tokens, axis=1), np.sort(batch.tokens, axis=1))
    sizes = np.asarray(draw(SEED, batch, CONFIG).slot_sizes)
    firsts = sum(offset >= 0 and offset % sizes[row, batch.segment_ids[row, place] - 1] == 0
                 for row, place, _, _, offset, _ in places_of(batch))  # fmt: skip
    assert view.is_slot_start.sum() == firsts
    assert (view.targets != NO_TARGET).sum() == batch.response_lengths.sum() - firsts


def test_padding_is_no_response_token():
    batch = make_batch()
    batch.tokens[0, 7:10] = EOS  # the first response ends in three of them
    batch.tokens[1, 12] = EOS  # the document begins with one behind the first example's
    assert int(num_response_tokens(batch, (EOS,))) == batch.response_lengths.sum() - 2
