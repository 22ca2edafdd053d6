"""The training view: recorded cases of the authors' code, and the definition checked token by token in plain Python."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from refusion_jax import slots
from refusion_jax.config import MASKING_SCHEDULES, SlotsConfig
from refusion_jax.huggingface import read_model_config, read_params
from refusion_jax.modeling import Transformer
from refusion_jax.objectives import hybrid_loss

pytestmark = pytest.mark.usefixtures("quick_compilation")

REFERENCE = Path(__file__).parent / "data" / "reference"
LENGTH, ROWS = 128, 4


def recorded(case):
    """A recorded batch and its draws, padded to one static shape; one example per row."""
    tokens = np.array(case["input_ids"], np.int32)
    rows, length = tokens.shape
    padded = np.zeros((ROWS, LENGTH), np.int32)
    padded[:rows, :length] = tokens
    totals = np.zeros(ROWS, np.int32)
    totals[:rows] = np.array(case["attention_mask"]).sum(1)
    prompts = np.zeros((ROWS, 1), np.int32)
    prompts[:rows, 0] = case["prompt_lengths"]
    index = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), (ROWS, LENGTH))
    batch = slots.Batch(
        tokens=padded,
        segment_ids=(index < totals[:, None]).astype(np.int32),
        position_ids=index,
        prompt_lengths=prompts,
        response_lengths=totals[:, None] - prompts,
        example_ids=np.zeros((ROWS, 1), np.int32),
        epochs=np.zeros((ROWS, 1), np.int32),
    )
    sizes, p = np.full((ROWS, 1), 4, np.int32), np.full((ROWS, 1), 0.5, np.float32)
    mask_uniforms, order_keys = np.ones((2, ROWS, LENGTH), np.float32)
    for row, draw in enumerate(case["draws"]):
        sizes[row], p[row] = draw["slot_size"], draw["p_mask"]
        for slot, uniform in enumerate(draw["slot_uniforms"]):
            start = prompts[row, 0] + slot * draw["slot_size"]
            span = slice(start, min(start + draw["slot_size"], totals[row]))
            mask_uniforms[row, span] = uniform
            if slot in draw["clean_order"]:
                order_keys[row, span] = draw["clean_order"].index(slot)
    return batch, slots.Draws(sizes, p, mask_uniforms, order_keys)


@pytest.fixture(scope="module")
def cases():
    return json.loads((REFERENCE / "cases" / "training.json").read_text())


@pytest.fixture(scope="module")
def model():
    config = read_model_config(REFERENCE / "checkpoint")
    return Transformer(config), read_params(REFERENCE / "checkpoint", config)


def test_recorded_views(cases):
    view_of = jax.jit(lambda batch, draws: slots.training_view(batch, draws, mask_token_id=2))
    for number, case in enumerate(cases):
        batch, draws = recorded(case)
        view = view_of(batch, draws)
        rows, length = np.array(case["input_ids"]).shape
        for name in ("tokens", "targets", "is_masked", "position_ids"):
            expected = np.array(case["buffer_tokens" if name == "tokens" else name])
            got = np.asarray(getattr(view, name))[:rows, :length]
            assert np.array_equal(got, expected), f"case {number}: {name}"
        assert list(batch.response_lengths[:rows, 0]) == case["response_lengths"]


def test_recorded_losses(cases, model):
    module, params = model

    @jax.jit
    def losses(params, batch, draws, num_examples):
        view = slots.training_view(batch, draws, mask_token_id=2)
        logits = module.apply({"params": params}, view.tokens, view.position_ids, view.visibility)
        return hybrid_loss(logits, view, num_examples, SlotsConfig())

    for number, case in enumerate(cases):
        batch, draws = recorded(case)
        loss = losses(params, batch, draws, len(case["draws"]))
        expected = {"ar": case["ar_loss"] or 0.0, "mdm": case["mdm_loss"]}
        expected["total"] = case["total_loss"] if case["total_loss"] is not None else case["mdm_loss"]
        for name, value in expected.items():
            got = float(getattr(loss, name))
            assert abs(got - value) <= 1e-4 * abs(value) + 1e-6, f"case {number}: {name} {got} is not {value}"


# ---- the same from its definition, token by token ------------------------------------------------------------------

MASK = 2


def make_batch(rows, length=160, segments=6, epoch=0):
    """Lays out rows of examples (example ID, prompt tokens, response tokens), in original order."""
    shape = (len(rows), length)
    tokens, segment_ids = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    position_ids = np.tile(np.arange(length, dtype=np.int32), (len(rows), 1))
    prompts, responses = np.zeros((2, len(rows), segments), np.int32)
    example_ids = np.full((len(rows), segments), -1, np.int32)
    for row, examples in enumerate(rows):
        start = 0
        for segment, (example, prompt, response) in enumerate(examples):
            span = slice(start, start := start + len(prompt) + len(response))
            tokens[row, span] = [*prompt, *response]
            segment_ids[row, span] = segment + 1
            position_ids[row, span] = np.arange(len(prompt) + len(response))
            prompts[row, segment], responses[row, segment] = len(prompt), len(response)
            example_ids[row, segment] = example
    epochs = np.full_like(example_ids, epoch)
    return slots.Batch(tokens, segment_ids, position_ids, prompts, responses, example_ids, epochs)


def random_examples(seed, count):
    """Examples of prompts of 1 to 6 tokens and responses of 1 to 20."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, [7, 21], (count, 2))
    return [(i, *(rng.integers(3, 64, length).tolist() for length in pair)) for i, pair in enumerate(lengths)]


def pack(examples, rows=4, segments=6):
    """Rows of at most `segments` examples, then empty ones."""
    packed = [examples[start : start + segments] for start in range(0, len(examples), segments)]
    return packed + [[]] * (rows - len(packed))


def token_draws(batch, draws):
    """(example ID, response offset) -> (slot size, p, mask uniform, order key) of every response token."""
    found, draws = {}, jax.device_get(draws)
    for row, index in zip(*np.nonzero(batch.segment_ids), strict=True):
        segment = batch.segment_ids[row, index] - 1
        offset = int(batch.position_ids[row, index] - batch.prompt_lengths[row, segment])
        if offset >= 0:
            per_segment = (
                np.asarray(draws.slot_sizes)[row, segment],
                np.asarray(draws.mask_probabilities)[row, segment],
            )
            per_token = (np.asarray(draws.mask_uniforms)[row, index], np.asarray(draws.order_keys)[row, index])
            found[int(batch.example_ids[row, segment]), offset] = tuple(map(float, per_segment + per_token))
    return found


def expected_row(examples, drawn, length=160):
    """The view of one row as a list of (token, position ID, target, is masked, MDM weight, segment)."""
    row = []
    for segment, (example, prompt, response) in enumerate(examples, 1):
        row += [(token, position, -100, False, 0.0, segment) for position, token in enumerate(prompt)]
        size, p = drawn[example, 0][:2]
        clean, masked = [], []
        for start in range(0, len(response), int(size)):
            _, _, uniform, order_key = drawn[example, start]
            slot = [(len(prompt) + offset, token) for offset, token in enumerate(response)][start : start + int(size)]
            (masked if uniform < p else clean).append((order_key, slot))
        for _, slot in sorted(clean):
            followers = [token for _, token in slot[1:]] + [-100]
            row += [(token, at, after, False, 0.0, segment) for (at, token), after in zip(slot, followers, strict=True)]
        for _, slot in masked:
            row += [(MASK, at, token, True, 1 / (p * len(response)), segment) for at, token in slot]
    return row + [(0, at, -100, False, 0.0, 0) for at in range(len(row), length)]


@pytest.fixture(scope="module")
def draw():
    return jax.jit(slots.draw, static_argnums=2)


@pytest.fixture(scope="module")
def view_of():
    return jax.jit(lambda batch, draws: slots.training_view(batch, draws, MASK))


@pytest.mark.parametrize("seed", range(6))
def test_views_of_packed_rows_follow_the_definition(seed, draw, view_of):
    rows = pack(random_examples(seed, 20 - seed))
    batch = make_batch(rows)
    draws = draw(np.int32(seed), batch, SlotsConfig(sizes=(1, 3, 4, 8)))
    drawn = token_draws(batch, draws)
    view = jax.device_get(view_of(batch, draws))
    for index, examples in enumerate(rows):
        expected = list(zip(*expected_row(examples, drawn), strict=True))
        got = (view.tokens, view.position_ids, view.targets, view.is_masked, view.mdm_weights, view.visibility.segment)
        names = ("tokens", "position_ids", "targets", "is_masked", "mdm_weights", "segment")
        for name, values, wanted in zip(names, got, expected, strict=True):
            np.testing.assert_allclose(values[index], wanted, rtol=1e-6, err_msg=f"row {index}: {name}")
        assert np.array_equal(view.visibility.order[index], np.arange(160))
        assert not view.visibility.group[index].any()
    assert view.visibility.in_buffer_order
    total = sum(drawn_p < p for size, p, drawn_p, _ in drawn.values() if size)
    assert 0 < total < len(drawn)
    assert view.is_masked.sum() == total


def test_weights_of_an_example_sum_to_its_masked_share_over_p(draw, view_of):
    examples = random_examples(11, 20)
    batch = make_batch(pack(examples))
    draws = draw(np.int32(3), batch, SlotsConfig())
    view = jax.device_get(view_of(batch, draws))
    for row, segment in zip(*np.nonzero(batch.response_lengths), strict=True):
        there = view.visibility.segment[row] == segment + 1
        share = view.is_masked[row, there].sum() / batch.response_lengths[row, segment]
        p = float(draws.mask_probabilities[row, segment])
        assert view.mdm_weights[row, there].sum() == pytest.approx(share / p, rel=1e-5)


# ---- random draws --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def many_draws(draw):
    """4,800 examples of 16 tokens, as (slot sizes, p, uniforms of the first slots, order keys of the first slots)."""
    batch = make_batch([[(6 * row + i, [3], [4] * 15) for i in range(6)] for row in range(800)])
    draws = jax.device_get(draw(np.int32(0), batch, SlotsConfig()))
    first = np.arange(6) * 16 + 1
    return [
        values.reshape(-1)
        for values in (
            draws.slot_sizes,
            draws.mask_probabilities,
            draws.mask_uniforms[:, first],
            draws.order_keys[:, first],
        )
    ]


def test_slot_sizes_are_uniform_over_the_configured_ones(many_draws):
    values, counts = np.unique(many_draws[0], return_counts=True)
    assert values.tolist() == [4, 8, 16, 32]
    assert np.abs(counts / 1_200 - 1).max() < 0.1  # four standard deviations


def test_uniforms_are_uniform_and_independent(many_draws):
    sizes, p, masks, orders = many_draws
    times = (p - 1e-3) / (1 - 1e-3)
    for values in (times, masks, orders):
        assert 0 <= values.min() < 0.01
        assert 0.99 < values.max() < 1
        gaps = np.sort(values) - np.linspace(0, 1, len(values))
        assert np.abs(gaps).max() < 0.03  # Kolmogorov-Smirnov, a chance of 0.0003
    correlations = np.corrcoef([sizes, times, masks, orders]) - np.eye(4)
    assert np.abs(correlations).max() < 0.06


@pytest.mark.parametrize("epsilon", [0.5, 0.9])
def test_masking_probability(epsilon, draw):
    """`p = (1 - epsilon) * t + epsilon`, with the same `t` whatever `epsilon` is."""
    batch = make_batch(pack(random_examples(1, 24)))
    probabilities = [
        np.asarray(draw(np.int32(0), batch, SlotsConfig(epsilon=e)).mask_probabilities)[batch.response_lengths > 0]
        for e in (1e-3, epsilon)
    ]
    times = [(p - e) / (1 - e) for p, e in zip(probabilities, (1e-3, epsilon), strict=True)]
    np.testing.assert_allclose(*times, atol=1e-5)
    assert probabilities[1].min() >= epsilon


def draws_of(draw, config, rows=200):
    batch = make_batch([[(6 * row + i, [3], [4] * 15) for i in range(6)] for row in range(rows)])
    draws = jax.device_get(draw(np.int32(0), batch, config))
    return draws.slot_sizes.reshape(-1), draws.mask_probabilities.reshape(-1)


def test_slot_sizes_follow_their_weights(draw):
    sizes, _ = draws_of(draw, SlotsConfig(sizes=(2, 4, 8), size_weights=(3.0, 0.0, 1.0)))
    values, counts = np.unique(sizes, return_counts=True)
    assert values.tolist() == [2, 8]
    assert counts[0] / counts.sum() == pytest.approx(0.75, abs=0.05)  # four standard deviations


@pytest.mark.parametrize(
    ("schedule", "inverse"),
    [
        ("linear", lambda m: m),
        ("cosine", lambda m: np.arccos(1 - m) * 2 / np.pi),
        ("quadratic", np.sqrt),
        ("square_root", np.square),
    ],
)
def test_masking_schedules(schedule, inverse, draw):
    """`p = (1 - epsilon) * m(t) + epsilon`, with the same `t` whatever the schedule; the paper's is the default."""
    _, p = draws_of(draw, SlotsConfig(masking_schedule=schedule, epsilon=0.2), rows=20)
    _, default = draws_of(draw, SlotsConfig(), rows=20)
    np.testing.assert_allclose(inverse(np.clip((p - 0.2) / 0.8, 0, 1)), (default - 1e-3) / (1 - 1e-3), atol=1e-3)
    assert set(slots.MASKING) == set(MASKING_SCHEDULES)


def test_an_eos_that_is_also_the_padding_is_learnt(view_of):
    """Responses end in token 0, which pads too: padding is told by its segment, never by its token."""
    rows = [[(0, [5, 0], [6, 7, 0]), (1, [8], [9, 0])]]
    batch = make_batch(rows, length=12, segments=2)
    for masked, expected in ((True, [6, 7, 0, 9, 0]), (False, [7, 0, 0])):
        view = jax.device_get(view_of(batch, given_draws(batch, masked=masked)))
        assert sorted(view.targets[view.targets != -100]) == sorted(expected)
        assert (view.targets[0, 8:] == -100).all()
        assert not view.mdm_weights[0, 8:].any()


def test_draws_belong_to_the_example_wherever_it_stands(draw):
    examples = random_examples(2, 18)
    config, shuffled = SlotsConfig(), [examples[i] for i in np.random.default_rng(0).permutation(18)]

    def drawn(seed, rows, epoch=0):
        batch = make_batch(rows, epoch=epoch)
        return token_draws(batch, draw(np.int32(seed), batch, config))

    expected = drawn(7, pack(examples))
    assert drawn(7, pack(shuffled)) == expected
    alone = [[examples[5]], [], [examples[9]], [examples[0]]]
    assert drawn(7, alone) == {place: draws for place, draws in expected.items() if place[0] in (5, 9, 0)}
    for other in (drawn(7, pack(examples), epoch=1), drawn(8, pack(examples))):
        assert other.keys() == expected.keys()
        assert all(other[place][1:] != draws[1:] for place, draws in expected.items())


def test_draws_are_equal_within_a_slot_and_differ_between(draw):
    batch = make_batch(pack(random_examples(3, 24)))
    by_slot = {}
    for (example, offset), (size, _, *uniforms) in token_draws(batch, draw(np.int32(0), batch, SlotsConfig())).items():
        by_slot.setdefault((example, offset // size), set()).add(tuple(uniforms))
    assert all(len(values) == 1 for values in by_slot.values())
    assert len(set.union(*by_slot.values())) == len(by_slot)


def test_a_typed_key_serves_as_seed(draw):
    batch = make_batch(pack(random_examples(4, 6)))
    by_seed, by_key = draw(np.int32(5), batch, SlotsConfig()), draw(jax.random.key(5), batch, SlotsConfig())
    assert all(map(np.array_equal, jax.tree.leaves(by_seed), jax.tree.leaves(by_key)))


# ---- through the model ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def token_losses(model, draw, view_of):
    """The cross-entropy of every target of a batch: (example ID, position ID) -> loss."""
    module, params = model
    apply = jax.jit(module.apply)

    def losses(rows):
        batch = make_batch(rows)
        view = jax.device_get(view_of(batch, draw(np.int32(0), batch, SlotsConfig(sizes=(4, 8)))))
        logits = apply({"params": params}, view.tokens, view.position_ids, view.visibility)
        log_probabilities = np.asarray(jax.nn.log_softmax(logits))
        found = {}
        for row, index in zip(*np.nonzero(view.targets != -100), strict=True):
            example = batch.example_ids[row, view.visibility.segment[row, index] - 1]
            place = int(example), int(view.position_ids[row, index])
            found[place] = -float(log_probabilities[row, index, view.targets[row, index]])
        return found

    return losses


def test_a_packed_row_is_its_examples_taken_alone(token_losses):
    examples = random_examples(5, 16)
    packed = token_losses(pack(examples))
    alone = {}
    for start in range(0, len(examples), 4):
        alone |= token_losses([[example] for example in examples[start : start + 4]])
    assert packed.keys() == alone.keys()
    assert max(abs(packed[place] - alone[place]) for place in packed) < 1e-4


def given_draws(batch, *, masked, size=4):
    """Every slot masked, or none."""
    shape = batch.prompt_lengths.shape
    uniforms = np.full(batch.tokens.shape, 0.0 if masked else 1.0, np.float32)
    return slots.Draws(np.full(shape, size, np.int32), np.full(shape, 0.5, np.float32), uniforms, uniforms)


@pytest.mark.parametrize(
    ("rows", "masked", "size", "zero"),
    [
        (pack(random_examples(6, 9)), True, 4, ["ar"]),
        (pack(random_examples(6, 9)), False, 4, ["mdm"]),
        (pack(random_examples(6, 9)), False, 1, ["ar", "mdm"]),  # a slot's last token has no target
        ([[]] * 4, True, 4, ["ar", "mdm"]),
    ],
    ids=["no clean slot", "no masked slot", "no target", "empty rows"],
)
def test_a_missing_loss_term_is_zero_with_finite_gradients(rows, masked, size, zero, model, view_of, hybrid_gradient):
    batch = make_batch(rows)
    view = view_of(batch, given_draws(batch, masked=masked, size=size))
    (_, loss), gradient = hybrid_gradient(model[1], view, np.sum(batch.response_lengths > 0))
    values = {name: float(getattr(loss, name)) for name in ("ar", "mdm")}
    assert all((value == 0) if name in zero else (0 < value < 100) for name, value in values.items()), values
    assert float(loss.total) == pytest.approx(sum(values.values()))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))
    assert any(np.any(leaf) for leaf in jax.tree.leaves(gradient)) == (len(zero) < 2)


@pytest.fixture(scope="module")
def hybrid_gradient(model):
    def loss(params, view, num_examples):
        logits = model[0].apply({"params": params}, view.tokens, view.position_ids, view.visibility)
        result = hybrid_loss(logits, view, num_examples, SlotsConfig())
        return result.total, result

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


def test_one_compilation_serves_every_batch():
    traced = []

    @jax.jit
    def view_of(seed, batch):
        traced.append(seed)
        return slots.training_view(batch, slots.draw(seed, batch, SlotsConfig()), MASK)

    for seed, count in ((0, 24), (1, 7), (2, 0)):
        view_of(np.int32(seed), make_batch(pack(random_examples(seed, count)), epoch=seed))
    assert len(traced) == 1


def test_pipeline_arrays_become_a_batch():
    batch = make_batch(pack(random_examples(0, 3)))
    again = slots.batch_from_arrays(dict(vars(batch)))
    assert all(map(np.array_equal, jax.tree.leaves(again), jax.tree.leaves(batch)))
