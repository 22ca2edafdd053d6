"""The hybrid loss against the sums of its definition, in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from refusion_jax.config import SlotsConfig
from refusion_jax.modeling import Visibility
from refusion_jax.objectives import hybrid_loss
from refusion_jax.slots import NO_TARGET, TrainingView

ROWS, LENGTH, VOCAB = 3, 10, 7
EXAMPLES = 5

compiled_loss = jax.jit(hybrid_loss, static_argnums=3)


def make_view(seed=0, clean=True, masked=True):
    """A third of the positions without a target, a third clean, a third masked, as far as wanted."""
    rng = np.random.default_rng(seed)
    kinds = rng.permutation(np.arange(ROWS * LENGTH) % 3).reshape(ROWS, LENGTH)
    is_masked = (kinds == 2) & masked
    has_target = is_masked | ((kinds == 1) & clean)
    return TrainingView(
        tokens=jnp.zeros((ROWS, LENGTH), jnp.int32),
        position_ids=jnp.zeros((ROWS, LENGTH), jnp.int32),
        targets=jnp.asarray(np.where(has_target, rng.integers(0, VOCAB, (ROWS, LENGTH)), NO_TARGET), jnp.int32),
        is_masked=jnp.asarray(is_masked),
        mdm_weights=jnp.asarray(np.where(is_masked, rng.uniform(0.1, 3, (ROWS, LENGTH)), 0), jnp.float32),
        visibility=Visibility.causal(ROWS, LENGTH),
    )


def make_logits(seed=1):
    return np.random.default_rng(seed).normal(size=(ROWS, LENGTH, VOCAB)).astype(np.float32) * 3


def plain_terms(logits, view, examples):
    exponentials = np.exp(logits.astype(np.float64))
    ar, mdm = [], 0.0
    for place in np.ndindex(ROWS, LENGTH):
        target = int(view.targets[place])
        if target == NO_TARGET:
            continue
        cross_entropy = -np.log(exponentials[place][target] / exponentials[place].sum())
        if view.is_masked[place]:
            mdm += float(view.mdm_weights[place]) * cross_entropy
        else:
            ar.append(cross_entropy)
    return np.mean(ar) if ar else 0.0, mdm / max(examples, 1)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("ar_weight", "mdm_weight"), [(1.0, 1.0), (0.25, 2.0), (0.0, 1.0), (1.0, 0.0)])
def test_terms_and_their_weighted_sum(seed, ar_weight, mdm_weight):
    view, logits = make_view(seed), make_logits(seed)
    loss = compiled_loss(logits, view, EXAMPLES, SlotsConfig(ar_weight=ar_weight, mdm_weight=mdm_weight))
    ar, mdm = plain_terms(logits, view, EXAMPLES)
    assert ar > 1
    assert mdm > 1
    assert (float(loss.ar), float(loss.mdm)) == (pytest.approx(ar, rel=1e-5), pytest.approx(mdm, rel=1e-5))
    assert float(loss.total) == pytest.approx(ar_weight * ar + mdm_weight * mdm, rel=1e-5)


@pytest.mark.parametrize("parts", [{"clean": False}, {"masked": False}, {"clean": False, "masked": False}])
def test_a_term_without_positions_is_zero(parts):
    view = make_view(**parts)
    gradient = jax.jit(jax.grad(lambda x: hybrid_loss(x, view, EXAMPLES, SlotsConfig()).total))(make_logits())
    loss = compiled_loss(make_logits(), view, EXAMPLES, SlotsConfig()).total
    ar, mdm = plain_terms(make_logits(), view, EXAMPLES)
    assert float(loss) == pytest.approx(ar + mdm, rel=1e-5)
    assert np.isfinite(gradient).all()


def test_no_examples_give_zero():
    view = make_view(clean=False, masked=False)
    loss = compiled_loss(make_logits(), view, 0, SlotsConfig())
    assert (float(loss.total), float(loss.ar), float(loss.mdm)) == (0, 0, 0)


def test_only_positions_with_a_target_have_a_gradient():
    view = make_view()
    gradient = jax.grad(lambda x: hybrid_loss(x, view, EXAMPLES, SlotsConfig()).total)(jnp.asarray(make_logits()))
    assert np.array_equal(np.abs(gradient).max(-1) > 0, view.targets != NO_TARGET)


def test_flattened_and_bfloat16_logits():
    view, logits = make_view(), make_logits()
    expected = compiled_loss(logits, view, EXAMPLES, SlotsConfig())
    flat = compiled_loss(logits.reshape(-1, VOCAB), view, EXAMPLES, SlotsConfig())
    assert float(flat.total) == float(expected.total)
    rounded = jnp.asarray(logits, jnp.bfloat16)
    loss = compiled_loss(rounded, view, EXAMPLES, SlotsConfig())
    assert loss.total.dtype == jnp.float32
    # In float32 from the rounded logits on: bfloat16 sums would be off by a hundredth.
    ar, mdm = plain_terms(np.asarray(rounded.astype(jnp.float32)), view, EXAMPLES)
    assert float(loss.total) == pytest.approx(ar + mdm, rel=1e-5)
