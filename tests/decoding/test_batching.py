"""Batches: refusals, order of results, independence of rows, buckets."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from refusion_jax.config import ConfigError, DecodeConfig, ModelConfig
from refusion_jax.decoding import batching, decode_prompts
from refusion_jax.decoding.batching import bucket, make_request
from refusion_jax.decoding.refusion import decode_loop, prefill
from refusion_jax.modeling import Transformer

pytestmark = pytest.mark.usefixtures("quick_compilation")

CONFIG = ModelConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    max_position_embeddings=48,
    initializer_range=0.5,
    eos_token_ids=(1, 7),
)
MODULE = Transformer(CONFIG)
GREEDY = [
    DecodeConfig(algorithm="paper", gen_length=16, slot_size=4, slot_threshold=0.2, token_threshold=0.05),
    DecodeConfig(gen_length=12, slot_size=3, serial_num_blocks=2, slot_threshold=0.2, token_threshold=0.1),
    DecodeConfig(algorithm="paper", gen_length=9, slot_size=1, serial_num_blocks=3, slot_threshold=0.5),
    DecodeConfig(gen_length=16, slot_size=8, slot_threshold=0.1, token_threshold=0.5, redraft=True),
    DecodeConfig(gen_length=6, slot_size=2, slot_threshold=0.0, suppress_special=True),
]
SAMPLED = [
    DecodeConfig(algorithm="paper", gen_length=16, slot_size=4, token_threshold=0.3, temperature=0.8),
    *GREEDY[:2],
    DecodeConfig(gen_length=16, slot_size=4, slot_threshold=0.1, token_threshold=0.9, temperature=1.0),
    DecodeConfig(gen_length=12, slot_size=4, slot_threshold=0.1, temperature=0.5, suppress_special=True),
]
PROMPTS = [[5], [9, 8, 3, 20, 31], list(range(8, 28)), [11, 11, 4], [30, 29]]
FIELDS = ("tokens", "committed", "order", "forwards", "finish_reason", "tpf")


@pytest.fixture(scope="module")
def params(quick_compilation):
    variables = jax.jit(MODULE.init)(jax.random.key(3), jnp.zeros((1, 1), jnp.int32), jnp.zeros((1, 1), jnp.int32))
    return nn.meta.unbox(variables)["params"]


def row(result, index):
    return [getattr(result, field)[index] for field in FIELDS]


def test_bucket():
    assert [bucket(size, 32) for size in (0, 1, 32, 33, 64, 65, 1000)] == [32, 32, 32, 64, 64, 128, 1024]
    assert [bucket(size, 1) for size in (1, 2, 3, 5, 8, 9)] == [1, 2, 4, 8, 8, 16]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "Prompt 1: The prompt is empty; give at least one token."),
        ([3, 32], "Prompt 1: Prompt token 32 lies outside the vocabulary of 32 tokens."),
        ([-1], "Prompt 1: Prompt token -1 lies outside the vocabulary of 32 tokens."),
        (
            [4] * 37,
            "Prompt 1: The prompt has 37 tokens, with gen_length 12 that makes 49, beyond the model's maximum of 48; "
            "shorten the prompt or lower gen_length.",
        ),
    ],
    ids=["empty", "beyond", "negative", "long"],
)
def test_unusable_prompts_are_refused(params, prompt, message):
    settings = DecodeConfig(gen_length=10, slot_size=4)
    with pytest.raises(ConfigError) as error:
        decode_prompts(MODULE, params, [[3], prompt, []], [settings] * 3)
    assert str(error.value) == message


def test_the_longest_possible_prompt_is_decoded(params):
    """Up to the model's last position, past a bucket that would hold more."""
    settings = DecodeConfig(gen_length=10, slot_size=4, suppress_special=True)
    result = decode_prompts(MODULE, params, [[4] * 36], [settings])
    assert 1 <= len(result.committed[0]) <= 12


def test_no_prompts(params):
    result = decode_prompts(MODULE, params, [], [])
    assert all(row == [] for row in (getattr(result, field) for field in FIELDS))


def test_prompts_and_settings_must_pair_up(params):
    with pytest.raises(ValueError):
        decode_prompts(MODULE, params, PROMPTS, GREEDY[:2])


@pytest.mark.parametrize("settings", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_rows_do_not_depend_on_batch_size(params, settings):
    finished = []
    whole = decode_prompts(MODULE, params, PROMPTS, settings, seed=5, batch_size=8, on_batch=finished.append)
    assert finished == [5]
    for batch_size, progress in ((1, [1, 2, 3, 4, 5]), (2, [2, 4, 5])):
        finished = []
        result = decode_prompts(
            MODULE, params, PROMPTS, settings, seed=5, batch_size=batch_size, on_batch=finished.append
        )
        assert result == whole, batch_size
        assert finished == progress


@pytest.mark.parametrize("settings", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_rows_do_not_depend_on_companions(params, settings):
    """Row 3 alone keeps its index, on which its draws depend; all others are replaced."""
    before = decode_prompts(MODULE, params, PROMPTS, settings, seed=5)
    prompts, others = [[13], [2, 2, 2], [17] * 9, PROMPTS[3], [6]], [*settings[::-1]]
    others[3] = settings[3]
    after = decode_prompts(MODULE, params, prompts, others, seed=5)
    assert row(after, 3) == row(before, 3)
    assert any(row(after, index) != row(before, index) for index in (0, 1, 2, 4))


def test_results_come_in_input_order(params):
    whole = decode_prompts(MODULE, params, PROMPTS, GREEDY, batch_size=2)
    assert len({tuple(tokens) for tokens in whole.tokens}) == len(PROMPTS)
    for permutation in ([4, 2, 0, 1, 3], [1, 0, 3, 4, 2]):
        result = decode_prompts(
            MODULE, params, [PROMPTS[i] for i in permutation], [GREEDY[i] for i in permutation], batch_size=2
        )
        assert [row(result, place) for place in range(5)] == [row(whole, index) for index in permutation]


def test_seed_and_index_decide_what_is_drawn(params):
    settings = DecodeConfig(gen_length=16, slot_size=4, temperature=1.5)
    same_prompts = [[5, 6]] * 4
    first, again, other = (decode_prompts(MODULE, params, same_prompts, [settings] * 4, seed=s) for s in (0, 0, 1))
    assert first == again
    assert first.committed != other.committed
    assert len({tuple(tokens) for tokens in first.committed}) > 1


def test_tokens_end_at_the_first_eos(params):
    prompts = [[token, 9] for token in range(8, 32)]
    settings = DecodeConfig(
        algorithm="paper", gen_length=16, slot_size=2, slot_threshold=0.5, token_threshold=0.5, temperature=1.0
    )
    result = decode_prompts(MODULE, params, prompts, [settings] * len(prompts), batch_size=8)
    for tokens, committed, order, reason in zip(
        result.tokens, result.committed, result.order, result.finish_reason, strict=True
    ):
        ends = [index for index, token in enumerate(committed) if token in CONFIG.eos_token_ids]
        assert reason == ("eos" if ends else "length")
        assert tokens == (committed[: ends[0] + 1] if ends else committed)
        assert len(order) == len(committed) and (ends or len(committed) == 16)
    assert set(result.finish_reason) == {"eos", "length"}
    assert any(sum(token in CONFIG.eos_token_ids for token in committed) > 1 for committed in result.committed), (
        "no EOS was overtaken by an earlier one"
    )


def device_request(prompts, settings, batch):
    keys = np.zeros((len(prompts), 2), np.uint32)
    request = make_request(prompts, settings, keys, batch, 16, CONFIG)
    tokens, lengths = np.zeros((batch, 32), np.int32), np.zeros(batch, np.int32)
    for index, prompt in enumerate(prompts):
        tokens[index, : len(prompt)], lengths[index] = prompt, len(prompt)
    return jax.device_put((tokens, lengths, request))


def test_filler_rows_are_finished_from_the_start(params):
    for batch, count in ((8, 5), (8, 1)):
        tokens, lengths, request = device_request(PROMPTS[:count], GREEDY[:count], batch)
        state = prefill(MODULE, params, tokens, lengths, request, 48)
        state = jax.device_get(decode_loop(MODULE, params, request, state, (16,)))
        assert not state.committed[count:].any() and not state.forwards[count:].any()
        assert not state.cache.lengths[count:].any()
        result = decode_prompts(MODULE, params, PROMPTS[:count], GREEDY[:count], batch_size=count)
        assert state.forwards[:count].tolist() == result.forwards
        committed = [tokens[there].tolist() for tokens, there in zip(state.tokens, state.committed, strict=True)]
        assert committed[:count] == result.committed


def test_same_buckets_compile_nothing(params, count_compilations):
    decode_prompts(MODULE, params, PROMPTS, SAMPLED, seed=1, batch_size=8)
    with count_compilations() as compiled:
        decode_prompts(MODULE, params, [[3, 4]] * 6, [*GREEDY, SAMPLED[0]], seed=2, batch_size=8)
    assert compiled == []


def test_another_bucket_compiles_one_loop(params, monkeypatch, count_compilations):
    """So the count of compilations can tell."""
    monkeypatch.setattr(batching, "MIN_PROMPT_BUCKET", 8)
    with count_compilations() as compiled:
        decode_prompts(MODULE, params, [[3, 4]], GREEDY[:1], batch_size=1)
    assert compiled.count("jit(decode_loop)") == 1


def test_the_loop_transfers_nothing(params):
    """Nothing comes from the host while it runs, and no callback goes there."""
    tokens, lengths, request = device_request(PROMPTS, SAMPLED, 8)
    params = jax.device_put(params)
    state = prefill(MODULE, params, tokens, lengths, request, 48)
    assert "callback" not in str(decode_loop.trace(MODULE, params, request, state, (16,)).jaxpr)
    with jax.transfer_guard("disallow"):
        state = decode_loop(MODULE, params, request, state, (16,))
    assert not jax.device_get(state.open).any()
