"""Looking up tokens, and the gradient of the table."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from refusion_jax.modeling.embedding import look_up

TABLE = jnp.asarray(np.random.default_rng(0).normal(size=(11, 6)), jnp.float32)
TOKENS = jnp.array([3, 0, 3, 10, 3], jnp.int32)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_are_those_of_the_tokens(dtype):
    rows = look_up(TABLE, TOKENS, dtype)
    assert rows.dtype == dtype
    np.testing.assert_array_equal(rows, TABLE.astype(dtype)[TOKENS])


def test_the_gradient_adds_up_what_a_token_got():
    got = np.random.default_rng(1).normal(size=(len(TOKENS), 6)).astype(np.float32)
    gradient = jax.grad(lambda table: jnp.sum(look_up(table, TOKENS, "float32") * got))(TABLE)
    expected = jax.nn.one_hot(TOKENS, 11).T @ got
    assert gradient.dtype == TABLE.dtype
    np.testing.assert_allclose(gradient, expected, rtol=1e-6)


def test_a_frequent_token_loses_nothing_in_bfloat16():
    """256 + 1 is 256 in bfloat16: a sum of ones in it would never pass 256."""
    tokens = jnp.zeros(3000, jnp.int32)
    gradient = jax.grad(lambda table: jnp.sum(look_up(table, tokens, "bfloat16").astype(jnp.float32)))(TABLE)
    np.testing.assert_allclose(gradient[0], 3000, rtol=0.004)
    assert not gradient[1:].any()
