"""Log-likelihoods against loops over `logits`, and bounds against their expectations over all draws."""

import dataclasses
import functools
import itertools
import json
import math
import sys
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_models import TIED, UNTIED, random_model
from simulated_devices import results_of_script

import refusion_jax as rf
from refusion_jax.config import MeshConfig
from refusion_jax.modeling import Transformer, Visibility
from refusion_jax.modeling.quantization import quantize
from refusion_jax.sharding import make_mesh, tree_shardings

pytestmark = pytest.mark.usefixtures("quick_compilation")

REFERENCE = Path(__file__).parent / "data" / "reference"
# Few tokens, so that all responses can be enumerated.
SMALL = dataclasses.replace(UNTIED, vocab_size=6, num_hidden_layers=1, eos_token_ids=(3,), mask_token_id=5)
PROMPT, RESPONSE = [4, 11, 6], [8, 1, 15, 7, 0]


def model_of(objective="hybrid", config=UNTIED, seed=0, **changes):
    module, params, _ = random_model(config, seed)
    return rf.Model(config, module, params, None, rf.DecodeConfig(slot_size=2), None, objective, **changes)


def log_probabilities(model, rows, position_ids=None):
    """(rows, length, vocabulary) float64, of rows of any lengths where attention is causal.

    Sizes are rounded up, which spares compilations; what stands behind a row is not seen by it.
    """
    is_causal = model.objective not in ("llada", "dream")
    shape = (-len(rows) % 8, -max(map(len, rows)) % 32) if is_causal else (0, 0)
    length = max(map(len, rows)) + shape[1]
    tokens = [[*row, *[0] * (length - len(row))] for row in rows] + [[0] * length] * shape[0]
    positions = np.tile(np.arange(length), (len(tokens), 1))
    if position_ids is not None:
        positions[: len(rows), : position_ids.shape[1]] = position_ids
    logits = np.asarray(rf.logits(model, tokens, positions), np.float64)[: len(rows)]
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def slot_by_slot(model, prompt, response, size):
    """The likelihood of filling slots from left to right, and the own choice at each of its places."""
    mask, total, choices = model.config.mask_token_id, 0.0, []
    starts = range(0, len(response), size)
    rows = [prompt + response[:start] + [mask] for start in starts] + [prompt + response]
    table = log_probabilities(model, rows)
    for offset, token in enumerate(response):
        slot, inside = divmod(offset, size)
        at = table[-1, len(prompt) + offset - 1] if inside else table[slot, len(prompt) + offset]
        total += at[token]
        choices.append(int(at.argmax()))
    return total, choices


def by_left_neighbour(model, prompt, response):
    table = log_probabilities(model, [prompt + response])[0]
    return sum(table[len(prompt) + offset - 1, token] for offset, token in enumerate(response))


# ---- exact ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", [PROMPT, []], ids=["prompt", "no prompt"])
@pytest.mark.parametrize("size", [1, 2, 3, 64])
def test_slots_from_left_to_right(prompt, size):
    model = model_of()
    out = rf.log_likelihood(model, [prompt], [RESPONSE], slot_size=size)
    assert out.values[0] == pytest.approx(slot_by_slot(model, prompt, RESPONSE, size)[0], abs=1e-4)
    assert out.estimate == "left_to_right" and out.standard_errors == [0.0] and out.num_tokens == [5]


def test_the_slot_size_is_the_models_by_default():
    model = model_of(objective="")  # of a directory that does not tell it
    own = rf.log_likelihood(model, [PROMPT], [RESPONSE])
    assert own == rf.log_likelihood(model, [PROMPT], [RESPONSE], slot_size=2)
    assert own != rf.log_likelihood(model, [PROMPT], [RESPONSE], slot_size=3)


@pytest.mark.slow
def test_recorded_checkpoint():
    model = rf.load(REFERENCE / "checkpoint")
    cases = json.loads((REFERENCE / "cases" / "decode.json").read_text())[:3]
    prompts = [case["prompt"] for case in cases]
    responses = [case["expected"][len(case["prompt"]) :] for case in cases]
    out = rf.log_likelihood(model, prompts, responses, slot_size=4)
    expected = [slot_by_slot(model, *pair, 4)[0] for pair in zip(prompts, responses, strict=True)]
    assert out.values == pytest.approx(expected, rel=1e-4, abs=1e-4)
    others = rf.log_likelihood(model, prompts, [response[::-1] for response in responses], slot_size=4)
    assert all(np.array(out.values) > np.array(others.values) + 10)


@pytest.mark.parametrize("config", [UNTIED, TIED], ids=["untied", "tied"])
def test_autoregressive(config):
    model = model_of("autoregressive", config)
    responses = [[token % config.vocab_size for token in RESPONSE], [2]]
    prompts = [[1, 4], [3]]
    out = rf.log_likelihood(model, prompts, responses)
    expected = [by_left_neighbour(model, *pair) for pair in zip(prompts, responses, strict=True)]
    assert out.values == pytest.approx(expected, abs=1e-4)


def test_weights_in_int8():
    full = model_of("autoregressive")
    model = dataclasses.replace(full, params=quantize(jax.tree.map(jnp.array, full.params)))
    out = rf.log_likelihood(model, [PROMPT], [RESPONSE])
    assert out.values[0] == pytest.approx(by_left_neighbour(model, PROMPT, RESPONSE), abs=1e-4)
    assert out.values != rf.log_likelihood(full, [PROMPT], [RESPONSE]).values


@pytest.mark.parametrize(("objective", "size"), [("hybrid", 2), ("autoregressive", None), ("block_diffusion", 1)])
def test_probabilities_sum_to_one(objective, size):
    """Blocks of one token have a bound that is exact."""
    responses = list(itertools.product(range(SMALL.vocab_size), repeat=3))
    model = model_of(objective, SMALL)
    out = rf.log_likelihood(model, [[4, 1]] * len(responses), responses, slot_size=size, batch_size=256)
    assert np.exp(out.values).sum() == pytest.approx(1, abs=1e-5)
    assert not any(out.standard_errors)


# ---- the bound -----------------------------------------------------------------------------------------------------


def hybrid_costs(model, prompt, response, size, masked):
    """Of masking these slots, for every order of the clean ones."""
    slots = [list(range(start, min(start + size, len(response)))) for start in range(0, len(response), size)]
    last = [offset for slot in sorted(masked) for offset in slots[slot]]
    rows, positions = [], []
    for order in itertools.permutations(sorted(set(range(len(slots))) - set(masked))):
        clean = [offset for slot in order for offset in slots[slot]]
        shown = [response[offset] for offset in clean] + [model.config.mask_token_id] * len(last)
        rows.append(prompt + shown)
        positions.append([*range(len(prompt)), *(len(prompt) + offset for offset in clean + last)])
    table = log_probabilities(model, rows, np.array(positions))[:, len(rows[0]) - len(last) :]
    return [-sum(of_row[at, response[offset]] for at, offset in enumerate(last)) for of_row in table]


def token_cost(model, prompt, response, masked):
    shown = [model.config.mask_token_id if offset in masked else token for offset, token in enumerate(response)]
    table = log_probabilities(model, [prompt + shown])[0]
    shift = 1 if model.objective == "dream" else 0
    return -sum(table[len(prompt) + offset - shift, response[offset]] for offset in masked)


@functools.partial(jax.jit, static_argnums=0)
def _block_causal(module, params, tokens, positions, seen):
    return jax.nn.log_softmax(module.apply({"params": params}, tokens, positions, seen))


def block_cost(model, prompt, response, size, block, masked):
    """Of masking these offsets of a block that stands behind clean ones; in both directions within each block."""
    start, stop = block * size, min((block + 1) * size, len(response))
    before = prompt + response[:start]
    shown = [model.config.mask_token_id if start + at in masked else response[start + at] for at in range(stop - start)]
    tokens = np.array([before + shown])
    order = [*range(len(prompt)), *(len(prompt) + offset // size for offset in range(stop))]
    seen = Visibility.causal(*tokens.shape)
    seen = seen.replace(order=jnp.array([order], jnp.int32), in_buffer_order=False)
    positions = np.arange(tokens.shape[1])[None]
    table = np.asarray(_block_causal(model.module, model.params, tokens, positions, seen), np.float64)
    return -sum(table[0, len(prompt) + offset, response[offset]] for offset in masked)


def expected_cost(units, cost):
    """The mean over m of n / m times the mean cost of m of the units masked."""
    n = len(units)
    by_m = [n / m * np.mean([cost(masked) for masked in itertools.combinations(units, m)]) for m in range(1, n + 1)]
    return float(np.mean(by_m))


def exact_bound(model, prompt, response, size):
    if model.objective == "hybrid":
        slots = range(-(-len(response) // size))
        return expected_cost(slots, lambda masked: np.mean(hybrid_costs(model, prompt, response, size, masked)))
    if model.objective != "block_diffusion":
        return expected_cost(range(len(response)), lambda masked: token_cost(model, prompt, response, masked))
    return sum(
        expected_cost(
            range(block * size, min((block + 1) * size, len(response))),
            lambda masked, block=block: block_cost(model, prompt, response, size, block, masked),
        )
        for block in range(-(-len(response) // size))
    )


@pytest.mark.parametrize(
    ("objective", "size"),
    [
        ("hybrid", 2),
        pytest.param("llada", 1, marks=pytest.mark.slow),
        pytest.param("dream", 1, marks=pytest.mark.slow),
        ("block_diffusion", 3),
    ],
)
def test_bound_is_the_expectation_over_all_draws(objective, size):
    model, short = model_of(objective), RESPONSE[:1]
    slot_size = None if objective in ("llada", "dream") else size
    options = {"estimate": "bound", "slot_size": slot_size, "batch_size": 64, "num_draws": 2048}
    out = rf.log_likelihood(model, [PROMPT, PROMPT], [RESPONSE, short], **options)
    expected = [-exact_bound(model, PROMPT, response, size) for response in (RESPONSE, short)]
    assert 0 < out.standard_errors[0] < 0.02 * abs(expected[0])
    assert abs(out.values[0] - expected[0]) < 3 * out.standard_errors[0]
    assert out.values[1] == pytest.approx(expected[1], abs=1e-4)  # a single unit has a single draw
    assert out.standard_errors[1] == 0 and out.estimate == "bound"
    other = rf.log_likelihood(model, [PROMPT], [RESPONSE], **options, seed=1)
    assert other.values != out.values[:1]


def test_bound_of_one_token_is_exact():
    model = model_of()
    bound = rf.log_likelihood(model, [PROMPT], [[7]], estimate="bound", slot_size=1, num_draws=2)
    exact = rf.log_likelihood(model, [PROMPT], [[7]], slot_size=1)
    assert bound.values == pytest.approx(exact.values, abs=1e-5) and bound.is_greedy == exact.is_greedy


def test_a_single_draw_has_no_standard_error():
    out = rf.log_likelihood(model_of("llada"), [PROMPT], [RESPONSE], num_draws=1)
    assert math.isnan(out.standard_errors[0]) and out.values[0] < 0


# ---- batches -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("estimate", "longest"), [("left_to_right", 30), ("bound", 12)])
def test_a_value_depends_on_its_request_alone(estimate, longest):
    """Not on the list, its order or the batch; the longest prompt of the one estimate is in another bucket."""
    rng, model = np.random.default_rng(0), model_of(config=dataclasses.replace(UNTIED, num_hidden_layers=1))
    prompts = [rng.integers(0, 16, length).tolist() for length in (3, 0, longest, 5, 2)]
    responses = [rng.integers(0, 16, length).tolist() for length in (4, 7, 9, 0, 3)]
    options = {"estimate": estimate, "num_draws": 5}
    out = rf.log_likelihood(model, prompts, responses, batch_size=16, **options)
    assert out.num_tokens == [4, 7, 9, 0, 3]
    assert (out.values[3], out.is_greedy[3], out.standard_errors[3]) == (0, True, 0)
    counts = []
    options["batch_size"] = 4
    backwards = rf.log_likelihood(model, prompts[::-1], responses[::-1], on_progress=counts.append, **options)
    assert counts == [1, 2, 3, 4, 5]
    assert backwards.values[::-1] == pytest.approx(out.values, abs=1e-4)
    alone = rf.log_likelihood(model, prompts[:1], responses[:1], **options)
    assert alone.values == pytest.approx(out.values[:1], abs=1e-4)
    assert backwards.standard_errors[::-1] == pytest.approx(out.standard_errors, abs=1e-4)


def test_no_requests():
    assert rf.log_likelihood(model_of(), [], []) == rf.LogLikelihood([], [], [], [], "left_to_right")


def test_texts(chat_model):
    tokens = [chat_model.tokenizer.encode(text) for text in ("How many?", "Three")]
    texts = rf.log_likelihood(chat_model, ["How many?"], ["Three"], batch_size="auto")
    assert texts == rf.log_likelihood(chat_model, tokens[:1], np.array(tokens[1:]))
    assert texts.num_tokens == [len(tokens[1])]


# ---- greedy --------------------------------------------------------------------------------------------------------


def changed(response, at):
    return [*response[:at], (response[at] + 1) % UNTIED.vocab_size, *response[at + 1 :]]


def check_greedy(model, prompt, response, **options):
    """A greedy response is told from those that differ in one token; all of one length, so compiled once."""
    responses = [response, *(changed(response, at) for at in range(len(response)))]
    out = rf.log_likelihood(model, [prompt] * len(responses), responses, num_draws=2, **options)
    assert out.is_greedy == [True] + [False] * len(response)


@pytest.mark.parametrize("estimate", ["left_to_right", pytest.param("bound", marks=pytest.mark.slow)])
def test_slots_decoded_from_left_to_right_are_greedy(estimate):
    model = model_of()
    config = rf.DecodeConfig(gen_length=6, slot_size=2, serial_num_blocks=3, token_threshold=1.0)
    response = rf.generate(model, [PROMPT], config).tokens[0]
    assert slot_by_slot(model, PROMPT, response, 2)[1] == response
    check_greedy(model, PROMPT, response, estimate=estimate)


def test_decoded_tokens_are_greedy():
    model = model_of("autoregressive")
    check_greedy(model, PROMPT, rf.generate(model, [PROMPT], rf.DecodeConfig(gen_length=6)).tokens[0])


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["llada", "dream", "block_diffusion"])
def test_what_is_proposed_for_a_masked_response_is_greedy(objective):
    """In one step; of blocks in one each."""
    blocks = {"block_length": 2, "steps": 2} if objective == "block_diffusion" else {"steps": 1}
    model = model_of(objective, block_lengths=(2,) if "block_length" in blocks else ())
    answer = rf.generate(model, [PROMPT], rf.DecodeConfig(gen_length=4), method=rf.Method(objective, **blocks))
    check_greedy(model, PROMPT, answer.tokens[0])


# ---- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("objective", "changes", "message"),
    [
        ("hybrid", {"estimate": "exact"}, "estimate is 'exact'; it must be 'left_to_right' or 'bound'"),
        ("llada", {"estimate": "left_to_right"}, "'llada' has no likelihood from left to right; use 'bound'"),
        ("dream", {"estimate": "left_to_right"}, "'dream' has no likelihood from left to right; use 'bound'"),
        ("block_diffusion", {"estimate": "left_to_right", "slot_size": 2}, "'block_diffusion' has no .* use 'bound'"),
        ("autoregressive", {"estimate": "bound"}, "'autoregressive' masks nothing.*use 'left_to_right'"),
        ("hybrid", {"slot_size": 0}, "slot_size is 0; it must be a whole number of at least 1"),
        ("hybrid", {"slot_size": 2.5}, "slot_size is 2.5; it must be a whole number"),
        ("llada", {"slot_size": 2}, "slot_size is 2, but the objective 'llada' has neither slots nor blocks"),
        ("block_diffusion", {}, "not known in which blocks the model was trained"),
        ("hybrid", {"num_draws": 0}, "num_draws is 0"),
        ("hybrid", {"seed": -1}, "seed is -1"),
        ("hybrid", {"batch_size": 0}, "batch_size is 0; score at least one row at once"),
        ("hybrid", {"on_progress": 3}, "on_progress is 3; give a function"),
        ("hybrid", {"prompts": "ab"}, "prompts is 'ab', no list"),
        ("hybrid", {"responses": [1, 2]}, "responses is a single list of token IDs"),
        ("hybrid", {"responses": [[1], [2]]}, "1 prompts for 2 responses"),
        ("hybrid", {"responses": [None]}, "Request 0: The response is None"),
        ("hybrid", {"responses": [["a"]]}, "Request 0: The response holds something other than token IDs"),
        ("hybrid", {"prompts": ["text"]}, "Request 0: The model has no tokenizer"),
        ("hybrid", {"responses": [[16]]}, "Request 0: Response token 16 lies outside the vocabulary of 16"),
        ("hybrid", {"prompts": [[1], [1]], "responses": [[2], [2] * 64]}, "Request 1: .*1 tokens and the response 64"),
        ("autoregressive", {"prompts": [[]]}, "Request 0: The prompt is empty.*'autoregressive'.*at least one token"),
        ("dream", {"prompts": [[]]}, "Request 0: The prompt is empty.*'dream'"),
    ],
)  # fmt: skip
def test_refusals(objective, changes, message):
    arguments = {"prompts": [[1, 2]], "responses": [[3, 4]]} | changes
    with pytest.raises(rf.ConfigError, match=message):
        rf.log_likelihood(model_of(objective), **arguments)


def test_blocks_of_another_length_than_trained_are_refused():
    model = model_of("block_diffusion", block_lengths=(2, 4))
    with pytest.raises(rf.ConfigError, match="slot_size is 3, but the model was trained in blocks of 2, 4"):
        rf.log_likelihood(model, [[1]], [[2]], slot_size=3)
    with pytest.raises(rf.ConfigError, match="model is 'demo'; give what load"):
        rf.log_likelihood("demo", [[1]], [[2]])


def test_all_positions_can_be_used():
    longest = [1] * (UNTIED.max_position_embeddings - 2)
    model = model_of("autoregressive")
    out = rf.log_likelihood(model, [[1, 2]], [longest])
    assert out.values[0] == pytest.approx(by_left_neighbour(model, [1, 2], longest), abs=1e-3)


# ---- meshes --------------------------------------------------------------------------------------------------------

MESHES = {"rows": (2, 1, 1), "rows and heads": (2, 1, 2)}


def on_mesh(objective, mesh=None):
    config = dataclasses.replace(UNTIED, num_hidden_layers=1, initializer_range=0.6)
    tokens = jnp.zeros((1, 1), jnp.int32)
    boxed = jax.jit(Transformer(config).init)(jax.random.key(3), tokens, tokens)["params"]
    params = nn.unbox(boxed)
    if mesh is not None:
        params = jax.device_put(params, tree_shardings(boxed, mesh))
    model = rf.Model(config, Transformer(config), params, None, rf.DecodeConfig(slot_size=2), mesh, objective)
    out = rf.log_likelihood(model, [PROMPT] * 3, [RESPONSE, [1], [2, 3]], num_draws=3, batch_size=4)
    return dataclasses.asdict(out)


@pytest.fixture(scope="module")
def results_on_meshes(tmp_path_factory):
    path = tmp_path_factory.mktemp("likelihood") / "results.json"
    return results_of_script(__file__, path, ("hybrid", "llada"), timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["hybrid", "llada"])
def test_values_on_a_mesh_are_those_of_one_device(objective, results_on_meshes):
    one, *others = results_on_meshes[objective]
    assert len(others) == len(MESHES)
    for other in others:
        assert other["values"] == pytest.approx(one["values"], abs=1e-4)
        assert other["is_greedy"] == one["is_greedy"]


def main(path, *objectives):
    devices, results = jax.devices(), {}
    for objective in objectives:
        meshes = [make_mesh(MeshConfig(*sizes), devices[: math.prod(sizes)]) for sizes in MESHES.values()]
        results[objective] = [on_mesh(objective, mesh) for mesh in (None, *meshes)]
    Path(path).write_text(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
