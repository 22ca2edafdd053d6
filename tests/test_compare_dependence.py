"""Dependence of masked tokens against a loop in NumPy that computes one sequence at a time."""

import collections
import statistics

import flax.linen as nn
import jax
import numpy as np
import pytest
from reference_decoders import NumpyQwen3, softmax

from benchmarks.compare_dependence import dependence_by_distance, draw_masks
from refusion_jax.config import ConfigError, ModelConfig
from refusion_jax.huggingface import LAYER_PARAM_PATHS, PARAM_PATHS
from refusion_jax.modeling import Transformer

pytestmark = pytest.mark.usefixtures("quick_compilation")

CONFIG = ModelConfig(
    vocab_size=12, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, head_dim=8, max_position_embeddings=64, mask_token_id=11,
)  # fmt: skip
LENGTH = 14
PROMPT_LENGTHS, LENGTHS = np.array([2, 5, 3, 1, 4]), np.array([14, 9, 8, 13, 5])  # the last has one token: no pair


@pytest.fixture(scope="module")
def models():
    """The same random weights here and for NumPy."""
    module, rng = Transformer(CONFIG), np.random.default_rng(0)
    ones = np.ones((1, 1), np.int32)
    shapes = nn.meta.unbox(jax.eval_shape(module.init, jax.random.key(0), ones, ones)["params"])
    params = jax.tree.map(lambda leaf: rng.normal(0, 0.8, leaf.shape).astype(np.float32), shapes)
    tensors = {name if name.startswith("lm_head") else f"model.{name}": tensor(params, path)
               for name, path in PARAM_PATHS.items()}  # fmt: skip
    for name, path in LAYER_PARAM_PATHS.items():
        if path[0] in params["layers"]:
            for layer, weights in enumerate(tensor(params, ("layers", *path))):
                tensors[f"model.layers.{layer}.{name}"] = weights
    fields = ("rms_norm_eps", "num_attention_heads", "num_key_value_heads", "head_dim", "rope_theta")
    return module, params, NumpyQwen3({f: getattr(CONFIG, f) for f in (*fields, "num_hidden_layers")}, tensors)


def tensor(params, path):
    for name in path:
        params = params[name]
    return np.swapaxes(params, -1, -2) if path[-1] == "kernel" else params


@pytest.fixture(scope="module")
def tokens():
    return np.random.default_rng(1).integers(0, 11, (len(LENGTHS), LENGTH))


def probabilities(model, sequence):
    length = len(sequence)
    return softmax(model.forward(sequence, np.arange(length), np.ones((length, length), bool)).astype(np.float64))


def test_equals_a_loop_over_sequences(models, tokens):
    module, params, model = models
    draws, seed = 6, 7
    examples = [e for e in range(4) for _ in range(draws)]
    masks, reveals = draw_masks(seed, PROMPT_LENGTHS[examples], LENGTHS[examples], LENGTH)
    of_examples = collections.defaultdict(lambda: collections.defaultdict(list))
    for e, masked, i in zip(examples, masks, reveals, strict=True):
        sequence = tokens[e, : LENGTHS[e]].copy()
        sequence[masked[: LENGTHS[e]]] = CONFIG.mask_token_id
        before = probabilities(model, sequence)
        sequence[i] = tokens[e, i]
        after = probabilities(model, sequence)
        for j in np.flatnonzero(masked):
            if j != i:
                of_examples[abs(i - j)][e].append(sum(after[j] * np.log(after[j] / before[j])))
    expected = {}
    for distance, by_example in of_examples.items():
        means = [statistics.mean(values) for values in by_example.values()]
        if len(means) > 1:
            error = statistics.stdev(means) / len(means) ** 0.5
            expected[distance] = (statistics.mean(means), error, len(means))
    got = dependence_by_distance(module, params, tokens, PROMPT_LENGTHS, LENGTHS, draws=draws, seed=seed, batch_size=5)
    assert got.keys() == expected.keys() and len(got) > 4
    for distance, values in expected.items():
        assert got[distance] == pytest.approx(values, rel=1e-3, abs=1e-6)
    assert max(count for _, _, count in got.values()) == 4


def test_what_follows_a_response_and_the_batch_change_nothing(models, tokens):
    module, params, _ = models
    padded = np.where(np.arange(LENGTH) < LENGTHS[:, None], tokens, 7)
    one, other = (
        dependence_by_distance(module, params, rows, PROMPT_LENGTHS, LENGTHS, batch_size=size)
        for rows, size in ((tokens, 4), (padded, 16))
    )
    assert one.keys() == other.keys()
    assert all(one[distance] == pytest.approx(other[distance], rel=1e-4) for distance in one)


def test_masks_are_drawn_in_responses_in_shares_of_all_sizes():
    prompt_lengths, lengths = np.full(2_000, 3), np.full(2_000, 13)
    masked, revealed = draw_masks(0, prompt_lengths, lengths, 16)
    assert not masked[:, :3].any() and not masked[:, 13:].any()
    assert masked[np.arange(2_000), revealed].all()
    counts = np.bincount(masked.sum(axis=1), minlength=11)
    # With a uniform share every count from 0 to 10 is as likely; 0 and 1 are drawn again.
    assert counts[:2].sum() == 0 and counts[2:].min() > 170 and counts[2:].max() < 280
    places = np.bincount(revealed, minlength=16)[3:13]
    assert places.min() > 150 and places.max() < 250


def test_refuses_examples_without_pairs(models, tokens):
    module, params, _ = models
    with pytest.raises(ConfigError, match="Of 5 examples no two have a pair of masked tokens at one distance"):
        dependence_by_distance(module, params, tokens, LENGTHS - 1, LENGTHS)
