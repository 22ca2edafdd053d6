"""One training step: what it reports, what it updates, and that it compiles once and reuses its memory."""

import jax
import numpy as np
import pytest

from refusion_jax.config import MeshConfig, ModelConfig, OptimizerConfig, SlotsConfig
from refusion_jax.modeling import Transformer
from refusion_jax.sharding import make_mesh
from refusion_jax.slots import Batch
from refusion_jax.training.state import init_state, make_optimizer
from refusion_jax.training.step import batch_loss, make_eval_loss, make_train_step

pytestmark = pytest.mark.usefixtures("quick_compilation")

SLOTS = SlotsConfig(sizes=(2, 4), ar_weight=0.5)
MODULE = Transformer(
    ModelConfig(
        vocab_size=24,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        initializer_range=0.2,
    )
)
OPTIMIZER = make_optimizer(OptimizerConfig(warmup_steps=0, learning_rate=1e-2, clip_norm=0.1), 100)
SEED = np.int32(4)


def make_batch(number, rows=4, length=24):
    """Rows of one example, prompts of 4 and responses of 12 tokens, but for an empty last row."""
    index = np.broadcast_to(np.arange(length, dtype=np.int32), (rows, length))
    there = (index < 16) & (np.arange(rows) < rows - 1)[:, None]
    lengths = there.sum(1, keepdims=True).astype(np.int32)
    return Batch(
        tokens=np.where(there, np.random.default_rng(number).integers(3, 24, (rows, length)), 0).astype(np.int32),
        segment_ids=there.astype(np.int32),
        position_ids=index,
        prompt_lengths=np.minimum(lengths, 4),
        response_lengths=np.maximum(lengths - 4, 0),
        example_ids=np.arange(rows, dtype=np.int32)[:, None] + 10 * number,
        epochs=np.zeros((rows, 1), np.int32),
    )


@pytest.fixture(scope="module")
def compiled():
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    state, shardings = init_state(MODULE, OPTIMIZER, 0, mesh)
    initial = jax.device_get(state)
    return (
        lambda: jax.device_put(initial, shardings),
        make_train_step(MODULE, OPTIMIZER, SLOTS, mesh, shardings),
        make_eval_loss(MODULE, SLOTS, mesh, shardings),
    )


@pytest.fixture(scope="module")
def loss_and_gradient():
    def loss(params, batch, seed):
        loss = batch_loss(MODULE, params, batch, seed, SLOTS)
        return loss.total, loss

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


def test_metrics_and_update(compiled, loss_and_gradient):
    make_state, train_step, eval_loss = compiled
    batch, state, kept = make_batch(0), make_state(), make_state()
    new, metrics = train_step(state, batch, SEED)

    (_, loss), gradient = loss_and_gradient(kept.params, batch, SEED)
    for name, value in vars(metrics.loss).items():
        assert float(value) == pytest.approx(float(getattr(loss, name)), rel=1e-4)
        assert float(getattr(eval_loss(kept.params, batch, SEED), name)) == pytest.approx(float(value), rel=1e-4)
    assert float(loss.total) == pytest.approx(0.5 * float(loss.ar) + float(loss.mdm), rel=1e-5)
    assert int(metrics.num_tokens) == 3 * 16
    norm = np.sqrt(sum(np.sum(leaf**2) for leaf in jax.tree.leaves(jax.device_get(gradient))))
    assert norm > 0.1  # so it is clipped, and reported as it was before
    assert float(metrics.grad_norm) == pytest.approx(norm, rel=1e-4)

    updates, _ = jax.jit(OPTIMIZER.update)(gradient, kept.opt_state, kept.params)
    got, before, updates = jax.device_get((new.params, kept.params, updates))
    jax.tree.map(lambda a, b, c: np.testing.assert_allclose(a, b + c, atol=1e-4), got, before, updates)
    assert min(np.abs(leaf).max() for leaf in jax.tree.leaves(updates)) > 1e-3
    assert int(new.step) == 1


def test_state_is_donated_and_steps_compile_once(compiled):
    make_state, train_step, _ = compiled
    state = make_state()
    for number in range(4):
        before = state
        state, _ = train_step(state, make_batch(number), SEED)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before))
    assert int(state.step) == 4
    assert train_step._cache_size() == 1


def test_steps_repeat_exactly_and_depend_on_the_seed(compiled):
    make_state, train_step, _ = compiled
    first, again, other = (float(train_step(make_state(), make_batch(0), np.int32(s))[1].loss.total) for s in (4, 4, 5))
    assert first == again
    assert first != other


def test_mdm_counts_examples_not_rows(compiled):
    """An empty row, or not, leaves the denoising loss of the others as it is."""
    make_state, _, eval_loss = compiled
    params, batch = make_state().params, make_batch(0)
    alone = [
        eval_loss(params, jax.tree.map(lambda a, row=row: np.where(np.arange(4)[:, None] == row, a, 0), batch), SEED)
        for row in range(3)
    ]
    # A row without its example has the draws of example 0, but no tokens to use them on.
    together = eval_loss(params, batch, SEED)
    assert float(together.mdm) == pytest.approx(np.mean([float(loss.mdm) for loss in alone]), rel=1e-5)
