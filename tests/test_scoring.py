"""The draws of the bound, and what the exact likelihood shows the model, against plain loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from refusion_jax.modeling.attention import visibility_bias
from refusion_jax.scoring import ALL_MASKED, Rows, as_batch, draw_masks, left_to_right
from refusion_jax.slots import NO_TARGET

pytestmark = pytest.mark.usefixtures("quick_compilation")

LENGTH, PROMPT, MASK = 16, 3, 2
DRAWS = 40
_draw_masks = jax.jit(draw_masks, static_argnums=(0, 1))


def make_rows(response_length, draws, length=LENGTH):
    """Rows of the same request."""
    tokens = np.tile(np.arange(10, 10 + length, dtype=np.int32), (len(draws), 1))
    each = np.ones(len(draws), np.int32)
    return Rows(tokens, PROMPT * each, response_length * each, np.array(draws, np.int32))


def masks_of(objective, size, response_length, draws, seed=0, length=LENGTH):
    """(draws, response_length) bool, and n / m of every token."""
    rows = make_rows(response_length, draws, length)
    drawn = _draw_masks(objective, size, as_batch(rows), rows.draws, jnp.int32(seed), jnp.int32(DRAWS))
    masked = np.asarray(drawn.mask_uniforms < drawn.mask_probabilities)
    inside = slice(PROMPT, PROMPT + response_length)
    return masked[:, inside], np.broadcast_to(1 / np.asarray(drawn.mask_probabilities), masked.shape)[:, inside]


@pytest.mark.parametrize(
    ("objective", "size", "units"),
    [
        ("hybrid", 3, [[(0, 1, 2), (3, 4, 5), (6, 7, 8), (9,)]]),
        ("llada", 1, [[(at,) for at in range(10)]]),
        ("block_diffusion", 4, [[(at,) for at in range(start, min(start + 4, 10))] for start in (0, 4, 8)]),
    ],
)
def test_exactly_m_of_n_units_are_masked(objective, size, units):
    """For every group of units: `m` as often as any other up to one, whole units, and each of them."""
    masked, weights = masks_of(objective, size, 10, range(DRAWS))
    for group in units:
        of_units = np.stack([masked[:, list(unit)] for unit in group if len(unit) == len(group[0])], axis=1)
        assert (of_units == of_units[:, :, :1]).all()
        counts = np.stack([masked[:, unit[0]] for unit in group], axis=1).sum(1)
        n = len(group)
        frequency = np.bincount(counts, minlength=n + 1)
        assert frequency[0] == 0 and (np.abs(frequency[1:] - DRAWS / n) <= 1).all()
        for unit in group:
            np.testing.assert_allclose(weights[:, list(unit)], (n / counts)[:, None].repeat(len(unit), 1), rtol=1e-6)
            assert 0.2 < masked[:, unit[0]].mean() < 0.95
    everything, weights = masks_of(objective, size, 10, [ALL_MASKED])
    assert everything.all() and (weights == 1).all()


def test_blocks_are_masked_independently():
    masked, _ = masks_of("block_diffusion", 4, 8, range(DRAWS))
    counts = masked.reshape(DRAWS, 2, 4).sum(2)
    assert len({tuple(pair) for pair in counts}) > 4
    assert (masked[:, :4] != masked[:, 4:]).any()


@pytest.mark.parametrize(("objective", "size"), [("hybrid", 2), ("llada", 1), ("block_diffusion", 4)])
def test_draws_depend_on_seed_draw_and_unit(objective, size):
    masked, _ = masks_of(objective, size, 10, range(DRAWS))
    some, _ = masks_of(objective, size, 10, [7, 3], length=32)
    np.testing.assert_array_equal(some, masked[[7, 3]])
    assert (masks_of(objective, size, 10, range(DRAWS), seed=1)[0] != masked).any()
    assert len({row.tobytes() for row in masked}) > 8


def test_clean_slots_change_their_order():
    rows = make_rows(10, range(DRAWS))
    keys = _draw_masks("hybrid", 2, as_batch(rows), rows.draws, jnp.int32(0), jnp.int32(DRAWS)).order_keys
    keys = np.asarray(keys)[:, PROMPT : PROMPT + 10]
    np.testing.assert_array_equal(keys[:, ::2], keys[:, 1::2])
    firsts = np.bincount(keys[:, ::2].argmin(1), minlength=5)
    assert (firsts > 0).all()


@pytest.mark.parametrize("size", [1, 3, 32])
def test_a_slots_mask_sees_what_is_before_the_slot_and_itself(size):
    response = 8
    asked = left_to_right("hybrid", size, as_batch(make_rows(response, [0, 0])), MASK)
    sees = np.asarray(visibility_bias(asked.visibility))[1] == 0
    targets, tokens, positions = (np.asarray(values)[1] for values in (asked.targets, asked.tokens, asked.position_ids))
    end, found = PROMPT + response, {}
    for place in range(end):
        assert set(np.flatnonzero(sees[place])) == set(range(place + 1))
    for slot in range(-(-response // size)):
        mask, start = LENGTH + slot, PROMPT + slot * size
        assert tokens[mask] == MASK and positions[mask] == start
        assert set(np.flatnonzero(sees[mask])) == {*range(start), mask}
        found[start] = targets[mask]
    for place in range(PROMPT, end - 1):
        if (place + 1 - PROMPT) % size:
            found[place + 1] = targets[place]
    assert found == {place: 10 + place for place in range(PROMPT, end)}
    assert (targets != NO_TARGET).sum() == response == asked.weights[1].sum()
