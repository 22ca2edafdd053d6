"""Left-to-right decoding against a plain loop that recomputes the whole sequence for every token."""

import functools

import flax.linen as nn
import jax
import numpy as np
import pytest
from reference_decoders import NumpyQwen3

from refusion_jax.config import ConfigError, ModelConfig
from refusion_jax.decoding import autoregressive, batching
from refusion_jax.decoding.autoregressive import decode_autoregressive
from refusion_jax.huggingface import LAYER_PARAM_PATHS, PARAM_PATHS
from refusion_jax.modeling import Transformer

pytestmark = pytest.mark.usefixtures("quick_compilation", "small_buckets")

PROMPT_LENGTH, CAPACITY, ROWS = 8, 16, 8
MARGIN = 1e-4  # closer decisions may fall differently in two float32 programs
# With several EOS IDs in a small vocabulary an EOS is met now and then.
UNTIED = ModelConfig(
    vocab_size=16, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=64, eos_token_ids=(5, 9), mask_token_id=15,
)  # fmt: skip
TIED = ModelConfig(
    vocab_size=12, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=1, head_dim=8, max_position_embeddings=64, tie_word_embeddings=True, eos_token_ids=(3, 7),
)  # fmt: skip
MODELS = {"untied": UNTIED, "tied": TIED}


@pytest.fixture(scope="module")
def small_buckets():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batching, "MIN_RESPONSE_BUCKET", CAPACITY)
        patch.setattr(batching, "MIN_PROMPT_BUCKET", PROMPT_LENGTH)
        yield


@functools.cache
def random_model(name, seed):
    """The same random weights as this package's parameters and under Hugging Face's names."""
    config, rng = MODELS[name], np.random.default_rng(seed)
    ones = np.ones((1, 1), np.int32)
    shapes = nn.meta.unbox(jax.eval_shape(Transformer(config).init, jax.random.key(0), ones, ones)["params"])
    params = jax.tree.map(lambda leaf: rng.normal(0, 0.4, leaf.shape).astype(np.float32), shapes)
    tensors = {}
    for hf_name, path in PARAM_PATHS.items():
        if path[0] in params:
            tensors[hf_name if path[0] == "lm_head" else f"model.{hf_name}"] = _tensor(params, path)
    for hf_name, path in LAYER_PARAM_PATHS.items():
        for layer, weights in enumerate(_tensor(params, ("layers", *path))):
            tensors[f"model.layers.{layer}.{hf_name}"] = weights
    fields = ("rms_norm_eps", "num_attention_heads", "num_key_value_heads", "head_dim", "rope_theta")
    shape = {field: getattr(config, field) for field in (*fields, "num_hidden_layers", "tie_word_embeddings")}
    return Transformer(config), params, NumpyQwen3(shape, tensors)


def _tensor(params, path):
    leaf = functools.reduce(lambda tree, key: tree[key], path, params)
    return leaf.swapaxes(-1, -2) if path[-1] == "kernel" else leaf


def plain_decode(model, prompt, length, eos_ids):
    """Returns the response and the smallest distance of any choice from the next best."""
    tokens, margin = list(prompt), np.inf
    while len(tokens) < len(prompt) + length:
        causal = np.tri(len(tokens), dtype=bool)
        logits = model.forward(tokens, np.arange(len(tokens)), causal)[-1]
        second, first = np.sort(logits)[-2:]
        margin = min(margin, first - second)
        tokens.append(int(logits.argmax()))
        if tokens[-1] in eos_ids:
            break
    return tokens[len(prompt) :], margin


def random_requests(rng, config, count):
    sizes = rng.integers(1, PROMPT_LENGTH, size=count, endpoint=True)
    lengths = rng.integers(1, CAPACITY, size=count, endpoint=True).tolist()
    return [rng.integers(config.vocab_size, size=size).tolist() for size in sizes], lengths


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("seed", range(3))
def test_random_models(name, seed):
    module, params, model = random_model(name, seed)
    eos_ids = module.config.eos_token_ids
    prompts, lengths = random_requests(np.random.default_rng(seed), module.config, 2 * ROWS - 3)
    result = decode_autoregressive(module, params, prompts, lengths, batch_size=ROWS)
    assert len(result.tokens) == len(result.finish_reason) == len(prompts)
    compared, reasons = 0, set()
    for prompt, length, tokens, reason in zip(prompts, lengths, result.tokens, result.finish_reason, strict=True):
        expected, margin = plain_decode(model, prompt, length, eos_ids)
        if margin < MARGIN:
            continue
        compared += 1
        reasons.add(reason)
        assert tokens == expected
        assert reason == ("eos" if expected[-1] in eos_ids else "length")
    # The cases reach what they are for.
    assert compared >= 0.8 * len(prompts) and reasons == {"eos", "length"}


@pytest.mark.parametrize("batch_size", [1, 3, 64])
def test_a_response_does_not_depend_on_its_batch(batch_size):
    module, params, _ = random_model("untied", 0)
    prompts, lengths = random_requests(np.random.default_rng(7), module.config, 2 * ROWS - 3)
    expected = decode_autoregressive(module, params, prompts, lengths, batch_size=ROWS)
    assert decode_autoregressive(module, params, prompts, lengths, batch_size=batch_size) == expected


def test_one_length_for_all_prompts():
    module, params, _ = random_model("untied", 0)
    prompts, _ = random_requests(np.random.default_rng(3), module.config, 3)
    result = decode_autoregressive(module, params, prompts, 4)
    assert result == decode_autoregressive(module, params, prompts, [4, 4, 4])
    assert decode_autoregressive(module, params, [], 4) == autoregressive.Continuation([], [])


def test_buckets_compile_once(count_compilations):
    module, params, _ = random_model("tied", 0)
    with count_compilations() as names:
        for size, length in ((3, 9), (PROMPT_LENGTH, CAPACITY), (1, 1)):
            decode_autoregressive(module, params, [[4] * size] * 4, length)
        # Beyond the smallest bucket: a longer buffer, another compilation.
        decode_autoregressive(module, params, [[4] * (PROMPT_LENGTH + 1)] * 4, CAPACITY + 1)
    assert names.count("jit(decode_loop)") == names.count("jit(prefill)") == 2


@pytest.mark.parametrize(
    ("prompt", "length", "message"),
    [([], 4, "empty"), ([99], 4, "vocabulary"), ([1] * 62, 4, "maximum of 64"), ([1], 0, "gen_length")],
)
def test_unusable_prompts_are_named(prompt, length, message):
    module, params, _ = random_model("tied", 0)
    with pytest.raises(ConfigError, match=f"Prompt 1: .*{message}"):
        decode_autoregressive(module, params, [[1], prompt], [4, length])
