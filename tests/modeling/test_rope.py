"""Rotary embedding against multiplication by complex numbers of length 1."""

import jax.numpy as jnp
import numpy as np
import pytest

from refusion_jax.modeling.rope import rotary_angles, rotate


def complex_rotation(heads, position_ids, theta):
    """Half-split pairs as complex numbers, each multiplied by exp(i * position * frequency)."""
    half = heads.shape[-1] // 2
    pairs = heads[..., :half].astype(np.float64) + 1j * heads[..., half:].astype(np.float64)
    frequencies = theta ** (-np.arange(half) / half)
    turned = pairs * np.exp(1j * position_ids[:, :, None, None] * frequencies)
    return np.concatenate([turned.real, turned.imag], axis=-1)


@pytest.mark.parametrize(("head_dim", "theta"), [(2, 10_000.0), (8, 10_000.0), (32, 1_000_000.0)])
def test_rotation_is_multiplication_by_a_complex_number(head_dim, theta):
    rng = np.random.default_rng(0)
    heads = rng.normal(size=(2, 9, 3, head_dim)).astype(np.float32)
    position_ids = rng.integers(0, 500, (2, 9))
    cos, sin = rotary_angles(jnp.asarray(position_ids), head_dim, theta)
    assert cos.shape == sin.shape == (2, 9, 1, head_dim // 2)
    assert cos.dtype == sin.dtype == jnp.float32
    got = rotate(jnp.asarray(heads), cos, sin)
    np.testing.assert_allclose(got, complex_rotation(heads, position_ids, theta), atol=2e-4)


def test_scores_depend_on_distance_alone():
    rng = np.random.default_rng(1)
    query, key = rng.normal(size=(2, 1, 1, 1, 16)).astype(np.float32)

    def score(query_position, key_position):
        angles = [
            rotary_angles(jnp.full((1, 1), position), 16, 10_000.0) for position in (query_position, key_position)
        ]
        return float(jnp.sum(rotate(jnp.asarray(query), *angles[0]) * rotate(jnp.asarray(key), *angles[1])))

    assert score(107, 100) == pytest.approx(score(7, 0), abs=1e-4)
    assert score(107, 100) != pytest.approx(score(100, 107), abs=1e-2)


def test_position_zero_changes_nothing_and_the_dtype_is_kept():
    heads = jnp.asarray(np.random.default_rng(2).normal(size=(1, 4, 2, 8)), jnp.bfloat16)
    turned = rotate(heads, *rotary_angles(jnp.zeros((1, 4), jnp.int32), 8, 10_000.0))
    assert turned.dtype == jnp.bfloat16
    assert jnp.array_equal(turned, heads)


def test_angles_are_float32_for_far_positions():
    """In bfloat16, positions beyond 256 would run into one another."""
    cos, _ = rotary_angles(jnp.asarray([[100_000, 100_001]]), 4, 10_000.0)
    np.testing.assert_allclose(cos[0, :, 0, 0], np.cos([100_000.0, 100_001.0]), atol=1e-3)


def test_scaling_interpolates_positions():
    """With a factor of 4, position 4 n has the angles position n had."""
    positions = jnp.arange(12)[None]
    plain, stretched = rotary_angles(positions, 8, 10_000.0), rotary_angles(4 * positions, 8, 10_000.0, 4.0)
    for ours, theirs in zip(stretched, plain, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)
    between = rotary_angles(positions, 8, 10_000.0, 4.0)[0]
    np.testing.assert_allclose(between[0, 2, 0, 0], np.cos(0.5), atol=1e-6)
