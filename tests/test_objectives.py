"""The hybrid loss against the sums of its definition, in NumPy; in chunks, against the loss of whole logits.

What eight devices do is looked up in a process of its own, this file run as a script: they are simulated, which has to
be asked for before JAX starts.
"""

import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from refusion_jax.config import MeshConfig, SlotsConfig, TrainConfig
from refusion_jax.modeling import Visibility
from refusion_jax.objectives import hybrid_loss, hybrid_loss_from_hidden, num_clean_targets, weighted_cross_entropy
from refusion_jax.sharding import make_mesh
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
        is_slot_start=jnp.zeros((ROWS, LENGTH), jnp.bool_),
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


# ---- in chunks -------------------------------------------------------------------------------------------------------

WIDTH = 6


def make_hidden(dtype=np.float32):
    rng = np.random.default_rng(2)
    hidden, unembedding = rng.normal(size=(ROWS * LENGTH, WIDTH)), rng.normal(size=(WIDTH, VOCAB))
    return jnp.asarray(hidden, dtype), jnp.asarray(unembedding, jnp.float32)


def value_and_gradients(loss, *inputs):
    """Losses, and the gradients of the total."""

    def total(*inputs):
        result = loss(*inputs)
        return result.total, result

    (_, losses), gradients = jax.jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True))(*inputs)
    return losses, gradients


def plain(view, config, vocab_axis):
    def loss(hidden, unembedding):
        matrix = unembedding if vocab_axis else unembedding.T
        return hybrid_loss(jnp.matmul(hidden, matrix, precision="highest"), view, EXAMPLES, config)

    return loss


def chunked(view, config, vocab_axis, chunk):
    def loss(hidden, unembedding):
        return hybrid_loss_from_hidden(hidden, unembedding, view, EXAMPLES, config, vocab_axis=vocab_axis, chunk=chunk)

    return loss


def assert_close(got, wanted):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6), got, wanted)


@pytest.mark.parametrize("vocab_axis", [0, 1], ids=["tied", "untied"])
@pytest.mark.parametrize("chunk", [0, 1, 7, 10, 29, 30, 64])
def test_chunks_change_neither_loss_nor_gradient(chunk, vocab_axis):
    view, config = make_view(), SlotsConfig(ar_weight=0.3, mdm_weight=1.7)
    hidden, unembedding = make_hidden()
    inputs = hidden, unembedding if vocab_axis else unembedding.T
    expected = value_and_gradients(plain(view, config, vocab_axis), *inputs)
    assert min(float(np.abs(leaf).max()) for leaf in expected[1]) > 0.1
    assert_close(value_and_gradients(chunked(view, config, vocab_axis, chunk), *inputs), expected)
    assert_close(jax.jit(chunked(view, config, vocab_axis, chunk))(*inputs), expected[0])


@pytest.mark.parametrize("parts", [{"clean": False}, {"masked": False}, {"clean": False, "masked": False}])
@pytest.mark.parametrize(("ar_weight", "mdm_weight"), [(1.0, 1.0), (0.0, 1.0), (1.0, 0.0)])
def test_chunks_with_missing_terms_and_weights(parts, ar_weight, mdm_weight):
    view, config, inputs = make_view(**parts), SlotsConfig(ar_weight=ar_weight, mdm_weight=mdm_weight), make_hidden()
    got = value_and_gradients(chunked(view, config, 1, 7), *inputs)
    assert_close(got, value_and_gradients(plain(view, config, 1), *inputs))


def test_parts_of_a_batch_add_up():
    """Given the whole batch's counts, losses and gradients of its rows sum to its own."""
    view, (hidden, unembedding) = make_view(), make_hidden()
    expected = value_and_gradients(plain(view, SlotsConfig(), 1), hidden, unembedding)
    total = None
    for row in range(ROWS):
        part = jax.tree.map(lambda leaf, row=row: leaf[row : row + 1], view)

        def loss(hidden, unembedding, part=part):
            counts = {"num_targets": num_clean_targets(view)}
            return hybrid_loss_from_hidden(
                hidden, unembedding, part, EXAMPLES, SlotsConfig(), vocab_axis=1, chunk=4, **counts
            )

        losses, gradients = value_and_gradients(loss, hidden[row * LENGTH : (row + 1) * LENGTH], unembedding)
        np.testing.assert_allclose(
            gradients[0], expected[1][0][row * LENGTH : (row + 1) * LENGTH], rtol=2e-5, atol=2e-6
        )
        summed = losses, gradients[1]
        total = summed if total is None else jax.tree.map(jnp.add, total, summed)
    assert_close(total, (expected[0], expected[1][1]))


def test_bfloat16_hidden_states():
    """Gradients have the types of what they belong to, and stay close to those in float32."""
    view, (exact, unembedding) = make_view(), make_hidden()
    losses, (d_hidden, d_unembedding) = value_and_gradients(
        chunked(view, SlotsConfig(), 1, 7), exact.astype(jnp.bfloat16), unembedding
    )
    assert (losses.total.dtype, d_hidden.dtype, d_unembedding.dtype) == (jnp.float32, jnp.bfloat16, jnp.float32)
    expected = value_and_gradients(plain(view, SlotsConfig(), 1), exact, unembedding)
    assert float(losses.total) == pytest.approx(float(expected[0].total), rel=0.02)
    for got, wanted in zip((d_hidden, d_unembedding), expected[1], strict=True):
        assert np.linalg.norm(np.asarray(got, np.float32) - wanted) < 0.02 * np.linalg.norm(wanted)


def cross_entropy_inputs(positions=24, with_target=10):
    rng = np.random.default_rng(3)
    hidden, unembedding = rng.normal(size=(positions, WIDTH)), rng.normal(size=(WIDTH, VOCAB))
    there = rng.permutation(positions) < with_target
    targets = np.where(there, rng.integers(0, VOCAB, positions), NO_TARGET).astype(np.int32)
    weights = rng.uniform(0.5, 2, positions)  # also where there is no target, where they must not count
    return *(jnp.asarray(array, jnp.float32) for array in (hidden, unembedding)), targets, jnp.asarray(weights)


def test_cross_entropy_of_every_position():
    hidden, unembedding, targets, weights = cross_entropy_inputs()
    total, losses = weighted_cross_entropy(hidden, unembedding, targets, weights, vocab_axis=1, chunk=5)
    logits = np.asarray(hidden, np.float64) @ np.asarray(unembedding, np.float64)
    expected = np.log(np.exp(logits).sum(1)) - logits[np.arange(24), np.maximum(targets, 0)]
    expected = np.where(targets == NO_TARGET, 0, expected)
    np.testing.assert_allclose(losses, expected, rtol=1e-5, atol=1e-6)
    assert float(total) == pytest.approx(float(np.sum(expected * np.asarray(weights))), rel=1e-5)


def test_the_gradient_scales_with_what_follows():
    inputs = cross_entropy_inputs()

    def loss(hidden, scale):
        return scale * weighted_cross_entropy(hidden, *inputs[1:], vocab_axis=1, chunk=5)[0] ** 2

    value = weighted_cross_entropy(*inputs, vocab_axis=1)[0]
    once = jax.grad(lambda hidden: weighted_cross_entropy(hidden, *inputs[1:], vocab_axis=1)[0])(inputs[0])
    np.testing.assert_allclose(jax.grad(loss)(inputs[0], 3.0), 6 * value * once, rtol=1e-4, atol=1e-5)


def test_losses_of_positions_have_no_gradient():
    inputs = cross_entropy_inputs()

    def loss(hidden):
        return jnp.sum(weighted_cross_entropy(hidden, *inputs[1:], vocab_axis=1, chunk=5)[1])

    assert not np.any(jax.grad(loss)(inputs[0]))


def test_chunks_without_a_target_are_not_computed():
    """What is never read may be anything: whole chunks of positions without a target are NaN."""
    hidden, unembedding, targets, weights = cross_entropy_inputs(24, with_target=10)
    hidden = jnp.where(targets[:, None] == NO_TARGET, jnp.nan, hidden)

    def loss(hidden, unembedding, chunk):
        return weighted_cross_entropy(hidden, unembedding, targets, weights, vocab_axis=1, chunk=chunk)[0]

    gradients = jax.jit(jax.grad(loss, argnums=(0, 1)), static_argnums=2)
    assert all(np.isfinite(leaf).all() for leaf in gradients(hidden, unembedding, 5))
    assert not all(np.isfinite(leaf).all() for leaf in gradients(hidden, unembedding, 6))


def test_a_frozen_unembedding_costs_no_gradient():
    """Two matrix products in the chunk instead of three."""
    inputs = cross_entropy_inputs()

    def products(argnums):
        loss = jax.grad(lambda *inputs: weighted_cross_entropy(*inputs, vocab_axis=1, chunk=5)[0], argnums=argnums)
        return str(jax.make_jaxpr(loss)(*inputs)).count("dot_general[")

    assert (products((0,)), products((0, 1))) == (2, 3)


def test_whole_logits_never_exist():
    """Qwen3's vocabulary, 4,096 positions, the default chunk: a quarter of the float32 logits would be 622 MB."""
    vocabulary, positions, width = 151_936, 4_096, 256
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    inputs = shape((positions, width)), shape((width, vocabulary)), shape((positions,)), shape((positions,))
    inputs = (*inputs[:2], jax.ShapeDtypeStruct((positions,), jnp.int32), inputs[3])

    def loss(*inputs):
        return weighted_cross_entropy(*inputs, vocab_axis=1, chunk=TrainConfig().loss_chunk)[0]

    compiled = jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(*inputs).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 0.25 * 4 * positions * vocabulary


# ---- on eight devices ------------------------------------------------------------------------------------------------


def on_eight_devices():
    """The loss on a 2 x 4 mesh, and how many collectives its loop over chunks and the rest of the program have."""
    mesh = make_mesh(MeshConfig(data=2, fsdp=4))
    inputs = cross_entropy_inputs(positions=8 * 24, with_target=100)
    # The output embedding is split along the residual width, as the trainer does it.
    inputs = jnp.pad(inputs[0], ((0, 0), (0, 2))), jnp.pad(inputs[1], ((0, 2), (0, 0))), *inputs[2:]
    rows, split = (NamedSharding(mesh, PartitionSpec(axes)) for axes in (("data", "fsdp"), "fsdp"))

    def loss(*inputs):
        return weighted_cross_entropy(*inputs, vocab_axis=1, chunk=5)[0]

    gradient = jax.value_and_grad(loss, argnums=(0, 1))
    expected = jax.jit(gradient)(*inputs)
    placed = [
        jax.device_put(array, sharding) for array, sharding in zip(inputs, (rows, split, rows, rows), strict=True)
    ]
    with jax.set_mesh(mesh):
        compiled = jax.jit(gradient, in_shardings=(rows, split, rows, rows)).lower(*placed).compile()
    got = compiled(*placed)
    errors = [
        float(np.abs(np.asarray(a) - b).max()) for a, b in zip(*map(jax.tree.leaves, (got, expected)), strict=True)
    ]
    collective = re.compile(r" (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)\(")
    loops = re.findall(r"body=%?([\w.\-]+)", compiled.as_text())
    bodies = [part for part in compiled.as_text().split("\n\n") if part.lstrip("%").startswith(tuple(loops))]
    return {
        "errors": errors,
        "bodies": len(bodies),
        "in_loop": sum(len(collective.findall(body)) for body in bodies),
        "in_all": len(collective.findall(compiled.as_text())),
    }


def test_devices_keep_to_their_own_positions(tmp_path):
    """Nothing travels between devices from chunk to chunk; the output embedding and its gradient do so once."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "PYTHONPATH": str(Path(__file__).parents[1]),
    }
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert max(result["errors"]) < 1e-4
    assert result["bodies"] >= 1
    assert result["in_loop"] == 0
    assert result["in_all"] >= 2


if __name__ == "__main__":
    print(json.dumps(on_eight_devices()))
