"""Training steps and held-out sums of every objective, against whole logits differentiated by JAX."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from refusion_jax.config import OBJECTIVES, MeshConfig, ModelConfig, OptimizerConfig, SlotsConfig
from refusion_jax.modeling import Transformer
from refusion_jax.objectives import hybrid_loss
from refusion_jax.sharding import make_mesh
from refusion_jax.slots import NO_TARGET, Batch
from refusion_jax.training.optimizer import make_optimizer
from refusion_jax.training.state import init_state
from refusion_jax.training.step import make_eval_loss, make_train_step
from refusion_jax.views import fully_clean_view, make_view

pytestmark = pytest.mark.usefixtures("quick_compilation")

MASK, EOS = 2, 1
CONFIG = SlotsConfig(sizes=(2, 4), ar_weight=0.5, mdm_weight=0.75)
MODULE = Transformer(
    ModelConfig(
        vocab_size=24,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        initializer_range=0.3,
        mask_token_id=MASK,
        eos_token_ids=(EOS,),
    )
)
OPTIMIZER = make_optimizer(OptimizerConfig(warmup_steps=0, learning_rate=1e-2), 100)
SEED = np.int32(4)
PROMPT, RESPONSE, EXAMPLES = 4, 9, 6


def often(*objectives):
    """All objectives, those not named with the slow tests: they are views of the same kind as others."""
    return [pytest.param(each, marks=[] if each in objectives else pytest.mark.slow) for each in OBJECTIVES]


def make_batch(tokens):
    """Every row one example: a prompt of 4 tokens, the rest its response."""
    rows, length = tokens.shape
    each = np.ones((rows, 1), np.int32)
    return Batch(
        tokens=tokens.astype(np.int32),
        segment_ids=np.ones((rows, length), np.int32),
        position_ids=np.tile(np.arange(length, dtype=np.int32), (rows, 1)),
        prompt_lengths=PROMPT * each,
        response_lengths=(length - PROMPT) * each,
        example_ids=np.arange(rows, dtype=np.int32)[:, None],
        epochs=0 * each,
    )


@pytest.fixture(scope="module")
def batch():
    tokens = np.random.default_rng(0).integers(3, 24, (EXAMPLES, PROMPT + RESPONSE))
    tokens[:, -1] = EOS
    return make_batch(tokens)


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(MeshConfig(), jax.devices()[:1])


@pytest.fixture(scope="module")
def start(mesh):
    state, shardings = init_state(MODULE, OPTIMIZER, 0, mesh)
    initial = jax.device_get(state)
    return initial, shardings


def losses_of(params, view):
    """Cross-entropy of every target, (rows, length), 0 where there is none."""
    logits = MODULE.apply({"params": params}, view.tokens, view.position_ids, view.visibility)
    of_target = jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.maximum(view.targets, 0)[..., None], -1)[..., 0]
    return jnp.where(view.targets != NO_TARGET, -of_target, 0)


@pytest.mark.parametrize("objective", often("hybrid", "autoregressive", "llada", "block_diffusion"))
def test_loss_and_gradient(objective, batch, mesh, start):
    def loss_of(params):
        view = make_view(objective, SEED, batch, CONFIG, MASK)
        logits = MODULE.apply({"params": params}, view.tokens, view.position_ids, view.visibility)
        return hybrid_loss(logits, view, EXAMPLES, CONFIG).total

    initial, shardings = start
    loss, gradient = jax.jit(jax.value_and_grad(loss_of))(initial.params)
    step = make_train_step(MODULE, OPTIMIZER, CONFIG, mesh, shardings, objective=objective)
    state, metrics = step(jax.device_put(initial, shardings), batch, SEED)
    np.testing.assert_allclose(metrics.loss.total, loss, rtol=1e-5)
    np.testing.assert_allclose(
        metrics.grad_norm, np.sqrt(sum((g**2).sum() for g in jax.tree.leaves(gradient))), rtol=1e-4
    )
    assert int(metrics.num_tokens) == EXAMPLES * (PROMPT + RESPONSE)  # block diffusion counts them once, too
    parts = 0.5 * metrics.loss.ar + 0.75 * metrics.loss.mdm
    np.testing.assert_allclose(metrics.loss.total, parts, rtol=1e-5)
    assert (float(metrics.loss.ar) > 0) == (objective in ("hybrid", "autoregressive"))
    assert (float(metrics.loss.mdm) > 0) == (objective != "autoregressive")
    assert int(state.step) == 1


@pytest.mark.slow
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_held_out_nats(objective, batch, mesh, start):
    initial, shardings = start
    evaluate = make_eval_loss(MODULE, CONFIG, mesh, shardings, objective=objective)
    sums = jax.device_get(evaluate(jax.device_put(initial.params, shardings.params), batch, SEED))
    view = make_view(objective, SEED, batch, CONFIG, MASK)
    losses = losses_of(initial.params, view)
    weights = view.mdm_weights * RESPONSE
    np.testing.assert_allclose(sums.bound, jnp.sum(weights * losses), rtol=1e-5)
    if objective == "hybrid":
        inside = losses_of(initial.params, fully_clean_view(SEED, batch, CONFIG)).sum()
        expected = inside + jnp.sum(weights * losses * view.is_slot_start)
    else:
        expected = losses.sum() if objective == "autoregressive" else sums.bound
    np.testing.assert_allclose(sums.nats, expected, rtol=1e-5)
    assert float(sums.tokens) == EXAMPLES * RESPONSE


@pytest.mark.slow
def test_nats_of_slots_is_the_mean_over_their_orders(mesh, start):
    """Two slots of two tokens: the chain rule along either order, each half of the time."""
    initial, shardings = start
    prompt, response = [5, 6, 7, 8], [9, 10, 11, EOS]
    slots = [(0, 1), (2, 3)]

    def chain(order):
        total = 0.0
        for rank, slot in enumerate(order):
            seen = [offset for earlier in order[:rank] for offset in slots[earlier]]
            first, second = slots[slot]
            masks = [offset for later in sorted(order[rank:]) for offset in slots[later]]
            for tokens, offsets, read in (
                ([MASK] * len(masks), masks, masks.index(first)),
                ([response[first]], [first], 0),
            ):
                line = prompt + [response[offset] for offset in seen] + tokens
                places = [*range(PROMPT), *(PROMPT + offset for offset in [*seen, *offsets])]
                logits = MODULE.apply({"params": initial.params}, np.array([line]), np.array([places]))[0]
                target = response[first if offsets is masks else second]
                total -= jax.nn.log_softmax(logits[PROMPT + len(seen) + read])[target]
        return float(total)

    expected = np.mean([chain(order) for order in itertools.permutations(range(2))])
    batch = make_batch(np.tile(prompt + response, (4096, 1)))
    evaluate = make_eval_loss(MODULE, SlotsConfig(sizes=(2,)), mesh, shardings)
    sums = evaluate(jax.device_put(initial.params, shardings.params), batch, SEED)
    assert float(sums.nats) / 4096 == pytest.approx(expected, rel=0.01)
