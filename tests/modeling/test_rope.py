"""Rotary embedding against multiplication by complex numbers of length 1."""

import jax.numpy as jnp
import numpy as np
import pytest

from refusion_jax.config import ModelConfig
from refusion_jax.modeling.rope import attention_factor, inverse_frequencies, rotary_angles, rotate


def model(head_dim, theta=10_000.0, **rope):
    return ModelConfig(head_dim=head_dim, rope_theta=theta, **{f"rope_{name}": value for name, value in rope.items()})


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
    cos, sin = rotary_angles(jnp.asarray(position_ids), model(head_dim, theta))
    assert cos.shape == sin.shape == (2, 9, 1, head_dim // 2)
    assert cos.dtype == sin.dtype == jnp.float32
    got = rotate(jnp.asarray(heads), cos, sin)
    np.testing.assert_allclose(got, complex_rotation(heads, position_ids, theta), atol=2e-4)


def test_scores_depend_on_distance_alone():
    rng = np.random.default_rng(1)
    query, key = rng.normal(size=(2, 1, 1, 1, 16)).astype(np.float32)

    def score(query_position, key_position):
        angles = [rotary_angles(jnp.full((1, 1), position), model(16)) for position in (query_position, key_position)]
        return float(jnp.sum(rotate(jnp.asarray(query), *angles[0]) * rotate(jnp.asarray(key), *angles[1])))

    assert score(107, 100) == pytest.approx(score(7, 0), abs=1e-4)
    assert score(107, 100) != pytest.approx(score(100, 107), abs=1e-2)


def test_position_zero_changes_nothing_and_the_dtype_is_kept():
    heads = jnp.asarray(np.random.default_rng(2).normal(size=(1, 4, 2, 8)), jnp.bfloat16)
    turned = rotate(heads, *rotary_angles(jnp.zeros((1, 4), jnp.int32), model(8)))
    assert turned.dtype == jnp.bfloat16
    assert jnp.array_equal(turned, heads)


def test_angles_are_float32_for_far_positions():
    """In bfloat16, positions beyond 256 would run into one another."""
    cos, _ = rotary_angles(jnp.asarray([[100_000, 100_001]]), model(4))
    np.testing.assert_allclose(cos[0, :, 0, 0], np.cos([100_000.0, 100_001.0]), atol=1e-3)


def test_scaling_interpolates_positions():
    """With a factor of 4, position 4 n has the angles position n had."""
    positions = jnp.arange(12)[None]
    plain, stretched = rotary_angles(positions, model(8)), rotary_angles(4 * positions, model(8, scaling=4.0))
    for ours, theirs in zip(stretched, plain, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)
    between = rotary_angles(positions, model(8, scaling=4.0))[0]
    np.testing.assert_allclose(between[0, 2, 0, 0], np.cos(0.5), atol=1e-6)


def turns(config, length):
    """How often each pair turns over `length` positions, without any stretching."""
    half = config.head_dim // 2
    return length * config.rope_theta ** (-np.arange(half) / half) / (2 * np.pi)


@pytest.mark.parametrize("kind", ["yarn", "llama3"])
def test_stretching_leaves_fast_pairs_and_divides_slow_ones(kind):
    """Those that turn often in the original length stay, those that turn less than once are interpolated."""
    config = model(64, 1_000_000.0, type=kind, scaling=8.0, original_length=4096)
    share = inverse_frequencies(config) / inverse_frequencies(model(64, 1_000_000.0))
    turned = turns(config, 4096)
    fast, slow = turned > 45, turned < 0.7  # beyond YaRN's whole pairs on either side of its ramp
    assert fast.sum() > 3 and slow.sum() > 5
    np.testing.assert_allclose(share[fast], 1, rtol=1e-6)
    np.testing.assert_allclose(share[slow], 1 / 8, rtol=1e-6)
    assert np.all(np.diff(share) <= 1e-7)
    assert np.any((share > 0.2) & (share < 0.9))


def test_llama3_blends_by_the_rate_of_turning():
    """Between one and four turns the kept share grows evenly with them."""
    config = model(128, 500_000.0, type="llama3", scaling=8.0, original_length=8192)
    turned, plain = turns(config, 8192), inverse_frequencies(model(128, 500_000.0))
    between = (turned > 1) & (turned < 4)
    assert between.sum() > 5
    kept = (turned[between] - 1) / 3
    expected = plain[between] * (kept + (1 - kept) / 8)
    np.testing.assert_allclose(inverse_frequencies(config)[between], expected, rtol=1e-5)


def test_yarn_blends_pair_by_pair():
    """The ramp is even in the pair's number, from the pair that turns 16 times to the one that turns twice."""
    config = model(64, type="yarn", scaling=4.0, original_length=2048, ramp=(16.0, 2.0))
    first, last = (32 * np.log(2048 / (rate * 2 * np.pi)) / np.log(10_000) for rate in (16, 2))
    interpolated = np.clip((np.arange(32) - np.floor(first)) / (np.ceil(last) - np.floor(first)), 0, 1)
    expected = inverse_frequencies(model(64)) * (1 - interpolated + interpolated / 4)
    np.testing.assert_allclose(inverse_frequencies(config), expected, rtol=1e-5)


def test_yarn_scales_cosines_and_sines():
    positions = jnp.asarray([[0, 3]])
    config = model(16, type="yarn", scaling=4.0)
    assert attention_factor(config) == pytest.approx(1.13862944)  # 0.1 ln 4 + 1
    assert rotary_angles(positions, config)[0][0, 0, 0, 0] == pytest.approx(1.13862944)
    given = model(16, type="yarn", scaling=4.0, attention_factor=0.5)
    cos, sin = rotary_angles(positions, given)
    np.testing.assert_allclose(cos**2 + sin**2, 0.25, rtol=1e-5)
    assert attention_factor(model(16, type="llama3", scaling=4.0)) == 1.0


@pytest.mark.parametrize("kind", ["linear", "yarn", "llama3"])
def test_a_factor_of_one_stretches_nothing(kind):
    np.testing.assert_array_equal(inverse_frequencies(model(32, type=kind)), inverse_frequencies(model(32)))
