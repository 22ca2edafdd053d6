"""Both decoders against plain NumPy ones, on random models, settings and prompts, position by position."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference_decoders
from reference_decoders import NumpyQwen3, decode_paper, decode_self_correcting

from refusion_jax.config import DecodeConfig, ModelConfig
from refusion_jax.decoding import Hole, batching, decode_prompts
from refusion_jax.decoding.sampling import gumbel_noise
from refusion_jax.huggingface import LAYER_PARAM_PATHS, PARAM_PATHS
from refusion_jax.modeling import Transformer

pytestmark = pytest.mark.usefixtures("quick_compilation", "small_buckets")

CAPACITY, PROMPT_LENGTH, ROWS = 32, 16, 16
MARGIN = 1e-4  # closer decisions may fall differently in two float32 programs

# Few shapes, many weights: what a seed changes compiles nothing. Initial ranges keep probabilities between flat and
# saturated; with several EOS IDs in a small vocabulary an EOS is met everywhere.
SMALL = ModelConfig(
    vocab_size=16,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    max_position_embeddings=64,
    initializer_range=0.6,
)
MODELS = {
    "one_layer": SMALL,
    "two_layers": ModelConfig(
        vocab_size=24,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        initializer_range=0.35,
        eos_token_ids=(5, 9),
        mask_token_id=23,
    ),
    "tied": ModelConfig(
        vocab_size=12,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        initializer_range=0.5,
        tie_word_embeddings=True,
        eos_token_ids=(1, 4, 7),
        mask_token_id=3,
    ),
}


@pytest.fixture(scope="module")
def small_buckets():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batching, "MIN_RESPONSE_BUCKET", CAPACITY)
        patch.setattr(batching, "MIN_PROMPT_BUCKET", PROMPT_LENGTH)
        yield


# ---- models --------------------------------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnums=0)
def _init(module, key):
    return module.init(key, jnp.zeros((1, 1), jnp.int32), jnp.zeros((1, 1), jnp.int32))["params"]


def random_params(config, seed):
    return jax.tree.map(np.array, nn.meta.unbox(_init(Transformer(config), jax.random.key(seed))))


def table_params(config, table):
    """A model that knows bigrams only: a token `t` gives the logits `4 * table[t]`, up to the norm's rounding.

    Each logit is one product, so equal entries give equal logits in whatever order a program adds the zeros up.
    """
    params = jax.tree.map(np.zeros_like, random_params(config, 0))
    params["embed_tokens"]["embedding"] = np.eye(config.vocab_size, config.hidden_size, dtype=np.float32)
    params["norm"]["scale"] = np.ones(config.hidden_size, np.float32)
    params["lm_head"]["kernel"] = np.asarray(table, np.float32)
    return params


def to_numpy(config, params) -> NumpyQwen3:
    """The same model under Hugging Face's names."""

    def tensor(path):
        leaf = np.asarray(functools.reduce(lambda tree, key: tree[key], path, params))
        return leaf.swapaxes(-1, -2) if path[-1] == "kernel" else leaf

    top = {name: path for name, path in PARAM_PATHS.items() if path[0] in params}
    tensors = {name if name.startswith("lm_head") else f"model.{name}": tensor(path) for name, path in top.items()}
    for name, path in LAYER_PARAM_PATHS.items():
        for layer, weights in enumerate(tensor(("layers", *path))):
            tensors[f"model.layers.{layer}.{name}"] = weights
    fields = ("rms_norm_eps", "num_attention_heads", "num_key_value_heads", "head_dim", "rope_theta")
    shape = {field: getattr(config, field) for field in (*fields, "num_hidden_layers", "tie_word_embeddings")}
    return NumpyQwen3(shape, tensors)


# ---- requests ------------------------------------------------------------------------------------------------------


def random_settings(rng) -> DecodeConfig:
    slot_size = int(rng.choice([1, 2, 3, 4, 8]))
    slots = int(rng.integers(1, CAPACITY // slot_size, endpoint=True))
    blocks = int(rng.choice([b for b in (1, 2, 3, 4, 8) if slots % b == 0]))
    return DecodeConfig(
        algorithm=str(rng.choice(["paper", "self_correcting"])),
        gen_length=slots * slot_size - int(rng.integers(slot_size)),
        slot_size=slot_size,
        serial_num_blocks=blocks,
        slot_threshold=float(rng.choice([0, 0.1, 0.3, 0.6, 1])),
        token_threshold=float(rng.choice([0, 0.02, 0.1, 0.3, 0.7, 1])),
        redraft=bool(rng.integers(2)),
        carry_threshold=float(rng.choice([0, 0, 0.01, 0.2, 1])),
        temperature=float(rng.choice([0, 0, 0.4, 1.2])),
        suppress_special=bool(rng.integers(2)),
    )


def random_prompt(rng, config) -> list[int]:
    return rng.integers(config.vocab_size, size=rng.integers(1, PROMPT_LENGTH, endpoint=True)).tolist()


def random_template(rng, config) -> list:
    """Fixed text and one to three holes that fit the buckets; some begin or end with a hole."""
    holes = rng.multinomial(rng.integers(4, CAPACITY), np.ones(3) / 3)
    texts = 1 + rng.multinomial(rng.integers(0, PROMPT_LENGTH - 4), np.ones(4) / 4)
    parts = []
    for text, hole in zip(texts, [*holes, 0], strict=True):
        parts.append(rng.integers(config.vocab_size, size=text).tolist())
        parts += [Hole(int(hole))] if hole else []
    return parts[1:] if rng.integers(4) == 0 and len(parts) > 2 else parts


def row_noise(seed, index, vocab_size):
    """gumbel(position, draw) of a row of `decode_prompts(..., seed)`."""
    key = jax.random.key_data(jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), index), 0))
    positions = np.arange(CAPACITY + PROMPT_LENGTH)

    @functools.cache
    def at(draw):
        keys = np.broadcast_to(key, (len(positions), 2))
        return np.asarray(_draw(keys, np.full(len(positions), draw), positions, vocab_size))

    return lambda position, draw: at(draw)[position]


_draw = jax.jit(gumbel_noise, static_argnums=3)


def oracle(model, config, prompt, settings, gumbel):
    ours = settings.algorithm == "self_correcting"
    names = (
        "gen_length",
        "slot_size",
        "serial_num_blocks",
        "slot_threshold",
        "token_threshold",
        "carry_threshold",
        "temperature",
    )
    segments = [reference_decoders.Hole(part.length) if isinstance(part, Hole) else part for part in prompt]
    return (decode_self_correcting if ours else decode_paper)(
        model,
        segments,
        **{name: getattr(settings, name) for name in names},
        **({"redraft": settings.redraft} if ours else {}),
        eos_ids=config.eos_token_ids,
        mask_id=config.mask_token_id,
        gumbel=gumbel,
        suppress=(config.pad_token_id, config.mask_token_id) if settings.suppress_special else (),
    )


def compare(config, params, prompts, settings, seed, smallest_margin=MARGIN):
    """Decodes both ways; returns the oracle's results, None where a decision was too close to compare."""
    result = decode_prompts(Transformer(config), params, prompts, settings, seed, batch_size=ROWS)
    model, compared = to_numpy(config, params), []
    for row, (prompt, asked) in enumerate(zip(prompts, settings, strict=True)):
        expected = oracle(model, config, prompt, asked, row_noise(seed, row, config.vocab_size))
        if expected.margin < smallest_margin:
            compared.append(None)
            continue
        compared.append(expected)
        paper = asked.algorithm == "paper"
        label = f"row {row} of seed {seed}: {asked}"
        assert result.committed[row] == expected.committed, label
        assert result.position_ids[row] == expected.positions, label
        assert result.order[row] == (expected.fused_order if paper else expected.order), label
        assert result.forwards[row] == (expected.fused_forwards if paper else expected.forwards), label
        tpf = expected.tpf if paper else len(expected.committed) / expected.forwards
        assert result.tpf[row] == pytest.approx(tpf, rel=1e-6), label
    return compared


# ---- tests ---------------------------------------------------------------------------------------------------------


QUICK = "two_layers"
OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in MODELS if name != QUICK]


@pytest.mark.parametrize("name", [QUICK, *OTHERS])
def test_random_models(name):
    config, compared = MODELS[name], []
    for seed in range(5):
        rng = np.random.default_rng((seed, len(name)))
        prompts = [random_prompt(rng, config) for _ in range(ROWS)]
        settings = [random_settings(rng) for _ in range(ROWS)]
        compared += compare(config, random_params(config, seed), prompts, settings, seed)
    kept = [result for result in compared if result is not None]
    assert len(kept) >= 0.9 * len(compared)
    # The cases reach what they are for.
    assert sum(bool(result.infills) for result in kept) >= 5
    assert sum(result.committed_eos_cut for result in kept) >= 5
    holes = [result for result in kept if result.positions[-1] - result.positions[0] >= len(result.positions)]
    assert holes, "no EOS was overtaken by an earlier one"


@pytest.mark.parametrize("name", ["one_layer", *(pytest.param(n, marks=pytest.mark.slow) for n in [*MODELS][1:])])
def test_random_templates(name):
    config, compared = MODELS[name], []
    for seed in range(5):
        rng = np.random.default_rng((seed, len(name), 1))
        prompts = [random_template(rng, config) for _ in range(ROWS)]
        settings = [random_settings(rng) for _ in range(ROWS)]
        compared += compare(config, random_params(config, seed), prompts, settings, seed)
    kept = [result for result in compared if result is not None]
    assert len(kept) >= 0.85 * len(compared)
    assert sum(bool(result.infills) for result in kept) >= 5
    assert sum(result.committed_eos_cut for result in kept) >= 5


def test_ties():
    """Equal probabilities, everywhere or often: the lowest token, the first slot."""
    few = np.random.default_rng(0).choice([0, 0.25, 0.5], size=(2, 16, 16))
    # Columns that look alike to every token: duplicated vocabulary rows.
    few[1, :, 8:] = few[1, :, :8]
    for seed, table in enumerate([np.zeros((16, 16)), *few]):
        rng = np.random.default_rng(seed)
        prompts = [random_prompt(rng, SMALL) for _ in range(ROWS)]
        settings = [random_settings(rng) for _ in range(ROWS)]
        results = compare(SMALL, table_params(SMALL, table), prompts, settings, seed, smallest_margin=0)
        assert any(result.margin == 0 for result in results)


def test_thresholds_are_strict():
    """A certain token does not exceed threshold 1, nor an impossible one threshold 0."""
    certain = 50 * np.eye(16)[np.random.default_rng(5).permutation(16)]
    rng = np.random.default_rng(0)
    prompts = [random_prompt(rng, SMALL) for _ in range(ROWS)]
    settings = [
        DecodeConfig(
            algorithm=algorithm, gen_length=24, slot_size=size, serial_num_blocks=2,
            slot_threshold=slot_threshold, token_threshold=token_threshold,
        )
        for algorithm in ("paper", "self_correcting")
        for size in (3, 4)
        for slot_threshold in (0.0, 1.0)
        for token_threshold in (0.0, 1.0)
    ]  # fmt: skip
    compare(SMALL, table_params(SMALL, certain), prompts, settings, 0, smallest_margin=0)
