"""One training step: what it reports, what it updates, and that it compiles once and reuses its memory."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from refusion_jax.config import ConfigError, LoraConfig, MeshConfig, ModelConfig, OptimizerConfig, SlotsConfig
from refusion_jax.modeling import Transformer
from refusion_jax.objectives import hybrid_loss
from refusion_jax.sharding import make_mesh
from refusion_jax.slots import Batch, draw, training_view
from refusion_jax.training.optimizer import make_optimizer
from refusion_jax.training.state import init_state
from refusion_jax.training.step import make_eval_loss, make_train_step

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
    """From whole logits, differentiated by JAX."""

    def loss(params, batch, seed):
        view = training_view(batch, draw(seed, batch, SLOTS), MODULE.config.mask_token_id)
        logits = MODULE.apply({"params": params}, view.tokens, view.position_ids, view.visibility)
        loss = hybrid_loss(logits, view, jnp.sum(batch.response_lengths > 0), SLOTS)
        return loss.total, loss

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


def test_metrics_and_update(compiled, loss_and_gradient):
    make_state, train_step, eval_loss = compiled
    batch, state, kept = make_batch(0), make_state(), make_state()
    new, metrics = train_step(state, batch, SEED)

    (_, loss), gradient = loss_and_gradient(kept.params, batch, SEED)
    for name, value in vars(metrics.loss).items():
        assert float(value) == pytest.approx(float(getattr(loss, name)), rel=1e-4)
    sums = eval_loss(kept.params, batch, SEED)
    assert float(sums.ar / sums.ar_targets) == pytest.approx(float(loss.ar), rel=1e-4)
    assert float(sums.mdm / sums.examples) == pytest.approx(float(loss.mdm), rel=1e-4)
    assert float(loss.total) == pytest.approx(0.5 * float(loss.ar) + float(loss.mdm), rel=1e-5)
    assert int(metrics.num_tokens) == 3 * 16
    assert bool(metrics.finite)
    norm = np.sqrt(sum(np.sum(leaf**2) for leaf in jax.tree.leaves(jax.device_get(kept.params))))
    assert float(metrics.param_norm) == pytest.approx(norm, rel=1e-5)
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
    assert float(together.mdm) == pytest.approx(sum(float(loss.mdm) for loss in alone), rel=1e-5)
    assert float(together.bound) == pytest.approx(sum(float(loss.bound) for loss in alone), rel=1e-5)
    assert [float(together.examples), float(together.tokens)] == [3, sum(float(loss.tokens) for loss in alone)]
    # Each example's term of the bound is its MDM term times its response's tokens.
    for sums in alone:
        assert float(sums.bound) == pytest.approx(float(sums.mdm * sums.tokens), rel=1e-5)


# ---- parts of a batch, and chunks of the loss ------------------------------------------------------------------------


def gradient_by_steps(module=MODULE, **switches):
    """Loss and gradient as the step computes them: plain descent with a learning rate of 1 moves by the gradient."""
    mesh, optimizer = make_mesh(MeshConfig(), jax.devices()[:1]), optax.sgd(1.0)
    state, shardings = init_state(module, optimizer, 0, mesh)
    before = jax.device_get(state.params)
    step = make_train_step(module, optimizer, SLOTS, mesh, shardings, **switches)
    state, metrics = step(state, make_batch(0), SEED)
    return vars(metrics.loss), jax.tree.map(lambda old, new: old - new, before, jax.device_get(state.params))


@pytest.mark.parametrize("tied", [pytest.param(False, marks=pytest.mark.slow), True])
def test_accumulation_and_chunks_change_no_gradient(tied):
    """The last of four rows is empty: parts differ in their counts of examples and targets."""
    module = Transformer(dataclasses.replace(MODULE.config, tie_word_embeddings=tied))
    expected = gradient_by_steps(module)
    assert min(np.abs(leaf).max() for leaf in jax.tree.leaves(expected[1])) > 1e-3
    for switches in ({"accumulate_steps": 2}, {"accumulate_steps": 4, "loss_chunk": 7})[tied:]:
        got = gradient_by_steps(module, **switches)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, expected)


def test_the_model_is_compiled_for_a_part_of_the_batch():
    """Activations of all four rows, 96 positions of width 16, appear nowhere in the program; those of one row do."""
    mesh, optimizer = make_mesh(MeshConfig(), jax.devices()[:1]), optax.sgd(1.0)
    state, shardings = init_state(MODULE, optimizer, 0, mesh)
    step = make_train_step(MODULE, optimizer, SLOTS, mesh, shardings, accumulate_steps=4)
    text = step.lower(state, make_batch(0), SEED).as_text()
    assert "tensor<24x16xf32>" in text and "tensor<96x16xf32>" not in text


def test_parts_that_do_not_divide_the_batch_are_refused():
    mesh, optimizer = make_mesh(MeshConfig(), jax.devices()[:1]), optax.sgd(1.0)
    state, shardings = init_state(MODULE, optimizer, 0, mesh)
    step = make_train_step(MODULE, optimizer, SLOTS, mesh, shardings, accumulate_steps=3)
    with pytest.raises(ConfigError, match="accumulate_steps is 3, which does not divide the 4 of 4 rows"):
        step(state, make_batch(0), SEED)


# ---- steps that must not count ---------------------------------------------------------------------------------------


def test_a_step_that_is_not_finite_changes_nothing_but_the_counts(compiled):
    make_state, train_step, _ = compiled
    state, _ = train_step(make_state(), make_batch(0), SEED)
    state = state.replace(params=state.params | {"norm": {"scale": state.params["norm"]["scale"].at[0].set(np.nan)}})
    before = jax.device_get(state)
    for count in (1, 2):
        state, metrics = train_step(state, make_batch(count), SEED)
        assert not metrics.finite
        assert not np.isfinite(metrics.loss.total)
        assert (int(state.step), int(state.skipped), int(state.skipped_in_a_row)) == (1 + count, count, count)
        after = jax.device_get(state)
        jax.tree.map(np.testing.assert_array_equal, (after.params, after.opt_state), (before.params, before.opt_state))
    repaired = state.replace(params=state.params | {"norm": {"scale": jnp.ones_like(before.params["norm"]["scale"])}})
    state, metrics = train_step(repaired, make_batch(3), SEED)
    assert metrics.finite
    assert (int(state.step), int(state.skipped), int(state.skipped_in_a_row)) == (4, 2, 0)
    assert not np.array_equal(state.params["lm_head"]["kernel"], before.params["lm_head"]["kernel"])


def test_a_gradient_too_large_for_its_norm_skips_the_update_too():
    """A finite loss of 1e30: the squares of its gradient overflow."""
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    state, shardings = init_state(MODULE, OPTIMIZER, 0, mesh)
    before = jax.device_get((state.params, state.opt_state))
    step = make_train_step(MODULE, OPTIMIZER, SlotsConfig(mdm_weight=1e30), mesh, shardings)
    state, metrics = step(state, make_batch(0), SEED)
    assert np.isfinite(metrics.loss.total)
    assert not metrics.finite
    jax.tree.map(np.testing.assert_array_equal, jax.device_get((state.params, state.opt_state)), before)


# ---- adapters --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("accumulate_steps", [1, 2])
def test_only_adapters_are_trained(accumulate_steps):
    lora = LoraConfig(rank=2, targets=("q_proj", "up_proj"))
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    state, shardings = init_state(MODULE, OPTIMIZER, 0, mesh, lora)
    base, adapters = jax.device_get((state.base, state.params))
    step = make_train_step(
        MODULE, OPTIMIZER, SLOTS, mesh, shardings, lora=lora, accumulate_steps=accumulate_steps, loss_chunk=7
    )
    losses = []
    for _ in range(8):
        state, metrics = step(state, make_batch(0), SEED)
        losses.append(float(metrics.loss.total))
    assert losses[-1] < losses[0]
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.base), base)
    moved = jax.tree.map(lambda new, old: np.abs(new - old).max(), jax.device_get(state.params), adapters)
    assert min(jax.tree.leaves(moved)) > 0
    eval_loss = make_eval_loss(MODULE, SLOTS, mesh, shardings)
    merged = eval_loss(state.model_params(lora), make_batch(0), SEED)
    _, metrics = step(state, make_batch(0), SEED)
    assert float(merged.ar / merged.ar_targets) == pytest.approx(float(metrics.loss.ar), rel=1e-4)
    assert float(merged.mdm / merged.examples) == pytest.approx(float(metrics.loss.mdm), rel=1e-4)
