"""The reference decoders against everything the authors' implementation recorded, and their own extensions."""

import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import reference_decoders
from reference_decoders import Hole, choices, decode_paper, decode_self_correcting, load_reference_model

REFERENCE = Path(__file__).parent / "data" / "reference"
SETTINGS = ("gen_length", "slot_size", "serial_num_blocks", "slot_threshold", "token_threshold")
SPECIAL = {"eos_ids": (1,), "mask_id": 2}
DECODERS = [decode_paper, decode_self_correcting]


@pytest.fixture(scope="module")
def model():
    return load_reference_model(REFERENCE / "checkpoint")


def cases(name):
    return json.loads((REFERENCE / "cases" / name).read_text())


def settings(case):
    return {name: case[name] for name in SETTINGS} | SPECIAL


def noise(position, draw):
    return np.random.default_rng((7, position, draw)).gumbel(size=64).astype(np.float32)


def test_forward(model):
    recorded = np.load(REFERENCE / "cases" / "forward.npz")
    for name in sorted({key.split(".")[0] for key in recorded.files}):
        tokens, position_ids, logits = (recorded[f"{name}.{part}"] for part in ("tokens", "position_ids", "logits"))
        causal = np.tril(np.ones((tokens.shape[1],) * 2, bool))
        for row in range(len(tokens)):
            ours = model.forward(tokens[row], position_ids[row], causal)
            assert ours.dtype == np.float32
            np.testing.assert_allclose(ours, logits[row], rtol=0, atol=1e-4, err_msg=f"{name}, row {row}")


@pytest.mark.parametrize(
    ("name", "count", "forwards", "fused_forwards"),
    [
        ("decode.json", 160, 952, 791),
        ("decode_infill.json", 80, 1052, 980),
        ("decode_eos.json", 40, 760, 722),
        ("decode_fallback.json", 40, 938, 793),
    ],
)
def test_paper_cases(model, name, count, forwards, fused_forwards):
    results = []
    for index, case in enumerate(cases(name)):
        label = f"{name}[{index}] {case['question']}"
        result = decode_paper(model, case["prompt"], **settings(case))
        results.append(result)
        assert case["prompt"] + result.committed == case["expected"], label
        assert result.tpf == pytest.approx(case["tpf"], rel=0, abs=1e-6), label
        assert result.forwards == case["forwards"], label
        check_shape(result, case, label)
        if name in ("decode_infill.json", "decode_eos.json"):
            assert result.infills > 0, label
    assert len(results) == count
    assert sum(result.forwards for result in results) == forwards
    assert sum(result.fused_forwards for result in results) == fused_forwards


def test_self_correcting_cases(model):
    total = 0
    recorded = cases("decode_self_correcting.json")
    for index, case in enumerate(recorded):
        label = f"decode_self_correcting.json[{index}] {case['question']}"
        result = decode_self_correcting(model, case["prompt"], redraft=case["redraft"], **settings(case))
        assert case["prompt"] + result.committed == case["expected"], label
        assert result.forwards == case["forwards"], label
        check_shape(result, case, label)
        total += result.forwards
    assert len(recorded) == 160
    assert total == 589


def check_shape(result, case, label):
    assert len(result.committed) == len(result.positions) == len(result.order), label
    assert result.positions == sorted(set(result.positions)), label
    assert result.positions[0] == len(case["prompt"]), label
    assert max(result.order) == result.forwards - 1, label  # nothing is computed after the last commit


def test_infill_drafts_ignore_noise_and_drafts_draw_by_fused_forward(model):
    """Draws name fused forwards, so they rise from draft to draft and none is used twice."""
    infills = 0
    for index, case in enumerate(cases("decode_infill.json")[:6]):
        label = f"decode_infill.json[{index}]"
        asked = []

        def spy(position, draw, asked=asked):
            asked.append((draw, position))
            return noise(position, draw)

        result = decode_paper(model, case["prompt"], temperature=0.5, gumbel=spy, **settings(case))
        assert asked == sorted(set(asked)), label
        assert asked[0][0] == 0 and asked[-1][0] < result.fused_forwards, label
        infills += result.infills
    assert infills > 0


@pytest.mark.parametrize("decode", DECODERS)
def test_no_noise_is_greedy(model, decode):
    case = cases("decode_infill.json")[1]
    greedy = decode(model, case["prompt"], **settings(case))
    silent = decode(
        model, case["prompt"], temperature=1.0, gumbel=lambda p, d: np.zeros(64, np.float32), **settings(case)
    )
    assert silent == greedy


@pytest.mark.parametrize("decode", DECODERS)
def test_suppressed_tokens_are_never_committed(model, decode):
    for index, case in enumerate(cases("decode.json")[:4]):
        plain = decode(model, case["prompt"], **settings(case))
        suppress = (plain.committed[2], SPECIAL["eos_ids"][0])
        result = decode(model, case["prompt"], suppress=suppress, **settings(case))
        assert not set(suppress) & set(result.committed), f"decode.json[{index}]"
        assert not result.committed_eos_cut
        assert len(result.committed) == -(-case["gen_length"] // case["slot_size"]) * case["slot_size"]


def test_choices_take_the_lowest_of_equals():
    logits = np.array([[0, 3, 3, 1]], np.float32)
    assert choices(logits, [5]).tolist() == [1]
    assert choices(logits, [5], suppress=(1,)).tolist() == [2]


def test_self_correcting_with_temperature_samples_ancestrally_inside_slots(model):
    """At token threshold 1 every token but a slot's first is the noisy choice after all committed before it."""
    for index, case in enumerate(cases("decode.json")[:4]):
        arguments = settings(case) | {"token_threshold": 1.0}
        result = decode_self_correcting(model, case["prompt"], temperature=0.7, gumbel=noise, **arguments)
        start = len(case["prompt"])
        commit_order = sorted(zip(result.order, result.positions, result.committed, strict=True))
        positions = [*range(start), *(position for _, position, _ in commit_order)]
        tokens = [*case["prompt"], *(token for _, _, token in commit_order)]
        logits = model.forward(tokens, positions, np.tril(np.ones((len(tokens),) * 2, bool)))
        chosen = choices(logits[:-1], positions[1:], 0.7, noise)
        for i in range(start, len(tokens)):
            if (positions[i] - start) % case["slot_size"]:
                assert chosen[i - 1] == tokens[i], f"decode.json[{index}], position {positions[i]}"


# ---- drafts carried by verifications -------------------------------------------------------------------------------


class TableModel:
    """Says what its tables say: {position: (token, probability)}, all other tokens being equally likely.

    `masked` has the proposals at mask tokens, `beside` those at mask tokens right behind a visible token where they
    are others, and `following` what is expected next.
    """

    def __init__(self, masked, following, beside=None):
        self.masked, self.following, self.beside = masked, following, masked | (beside or {})

    def forward(self, tokens, positions, mask):
        probability = np.empty((len(tokens), 8), np.float32)
        for i, (token, position) in enumerate(zip(tokens, positions, strict=True)):
            if token != SPECIAL["mask_id"]:
                favourite, share = self.following.get(position + 1, (0, 1 / 8))
            elif i and tokens[i - 1] != SPECIAL["mask_id"] and positions[i - 1] == position - 1:
                favourite, share = self.beside[position]
            else:
                favourite, share = self.masked[position]
            probability[i] = (1 - share) / 7
            probability[i, favourite] = share
        return np.log(probability)


TWO_SLOTS = {"prompt": [5], "gen_length": 6, "slot_size": 3, "slot_threshold": 0.7, "token_threshold": 0.5} | SPECIAL
DRAFT = {1: (3, 0.9), 2: (4, 0.6), 3: (4, 0.75), 4: (3, 0.9), 5: (4, 0.9), 6: (4, 0.9)}
AGREEING = {2: (4, 0.9), 3: (4, 0.9), 5: (4, 0.9), 6: (4, 0.9)}


@pytest.mark.parametrize("decode", DECODERS)
@pytest.mark.parametrize(("carry_threshold", "forwards"), [(0, 3), (0.44, 3), (0.46, 4), (0.7, 4)])
def test_draft_is_carried_when_its_predecessor_is_likely_to_pass(decode, carry_threshold, forwards):
    """All of the first slot passes; its tokens after the first were proposed with 0.6 * 0.75 = 0.45."""
    model = TableModel(DRAFT, AGREEING)
    result = decode(model, serial_num_blocks=2, carry_threshold=carry_threshold, **TWO_SLOTS)
    assert result.committed == [3, 4, 4, 3, 4, 4]
    assert (result.fused_forwards or result.forwards) == forwards
    if carry_threshold:  # the second slot's tokens are as likely, but nothing is left to carry
        assert result.margin <= abs(np.log(0.45) - np.log(carry_threshold)) + 1e-6


@pytest.mark.parametrize(("carry_threshold", "forwards"), [(0, 4), (0.8, 4), (0.9, 5)])
def test_repaired_tokens_count_with_the_repair(carry_threshold, forwards):
    """The first slot's last token is replaced by one of probability 0.85, when the one before has settled."""
    model = TableModel(DRAFT, AGREEING | {3: (6, 0.85)})
    result = decode_self_correcting(model, serial_num_blocks=2, carry_threshold=carry_threshold, **TWO_SLOTS)
    assert result.committed == [3, 4, 6, 3, 4, 4]
    assert result.forwards == forwards


@pytest.mark.parametrize(("carry_threshold", "forwards", "draws"), [(0, 5, {0, 3}), (0.8, 5, {0, 3}), (0.9, 6, {0, 4})])
def test_infill_carries_the_next_draft(carry_threshold, forwards, draws):
    """Forwards: draft, verify, infill draft (of the last token, 0.85) and verify, a draft or not, verify."""
    model = TableModel(DRAFT, AGREEING | {3: (6, 0.85)}, beside={3: (7, 0.85)})
    asked = set()

    def silence(position, draw):
        asked.add(draw)
        return np.zeros(8, np.float32)

    result = decode_paper(
        model, serial_num_blocks=2, carry_threshold=carry_threshold, temperature=1.0, gumbel=silence, **TWO_SLOTS
    )
    assert result.committed == [3, 4, 7, 3, 4, 4]
    assert (result.forwards, result.fused_forwards) == (6, forwards)
    assert asked == draws
    assert result.fused_order == [3, 3, 3, *[forwards - 1] * 3]


@pytest.mark.parametrize(("eos_position", "forwards"), [(6, 5), (5, 6)])
def test_infill_that_cuts_at_an_eos_carries_no_draft(eos_position, forwards):
    """The second slot is infilled first and brings an EOS: as its last token, or with one cut off after it."""
    draft = DRAFT | {1: (3, 0.5), 4: (3, 0.6), eos_position: (1, 0.9)}
    model = TableModel(draft, AGREEING | {eos_position: (7, 0.9)})
    result = decode_paper(model, serial_num_blocks=1, **TWO_SLOTS)
    assert result.positions == list(range(1, eos_position + 1))
    assert result.committed[eos_position - 1] == 1
    assert result.committed_eos_cut == (eos_position == 5)
    assert (result.infills, result.forwards, result.fused_forwards) == (1, 6, forwards)


@pytest.mark.parametrize("decode", DECODERS)
def test_carry_threshold_moves_nothing_but_counts(model, decode):
    first = last = 0
    for index, case in enumerate(cases("decode_infill.json")[2:5] + cases("decode_fallback.json")[:3]):
        results = [
            decode(model, case["prompt"], carry_threshold=carry_threshold, **settings(case))
            for carry_threshold in (0.0, 0.5, 0.9, 1.0)
        ]
        counts = [result.fused_forwards or result.forwards for result in results]
        assert counts == sorted(counts), f"case {index}"
        first, last = first + counts[0], last + counts[-1]
        if decode is decode_paper:  # at 1 no verification carries anything
            assert counts[-1] == results[-1].forwards, f"case {index}"
        for result in results:
            assert result.committed == results[0].committed, f"case {index}"
            assert result.positions == results[0].positions, f"case {index}"
    assert first < last


@pytest.mark.parametrize("decode", DECODERS)
def test_carried_masks_have_the_logits_of_the_next_draft(model, decode, monkeypatch):
    """What is only counted elsewhere: masks behind the verified tokens, computed with them."""
    carried = []

    class WatchedRow(reference_decoders._Row):
        behind, logits = [], None

        def carry(self, *arguments):
            self.behind = super().carry(*arguments)
            return self.behind

        def forward(self, tokens, positions, mask):
            if self.behind:
                masks, length = self.positions_of(self.behind), len(tokens)
                both = np.tril(np.ones((length + len(masks),) * 2, bool))
                both[:length, :length] = mask
                query = [*tokens, *[self.mask_id] * len(masks)]
                self.logits = super().forward(query, [*positions, *masks], both)[length:]
                self.behind = []
            return super().forward(tokens, positions, mask)

        def draft_and_select(self, slots, *arguments):
            if carried[-1]:
                masks = self.positions_of(slots)
                alone = self.forward([self.mask_id] * len(masks), masks, np.tril(np.ones((len(masks),) * 2, bool)))
                np.testing.assert_allclose(self.logits[: len(masks)], alone, rtol=0, atol=2e-4)
            return super().draft_and_select(slots, *arguments)

    def watched_begins_with(*slots, begins_with=reference_decoders._begins_with):
        carried.append(begins_with(*slots))
        return carried[-1]

    monkeypatch.setattr(reference_decoders, "_Row", WatchedRow)
    monkeypatch.setattr(reference_decoders, "_begins_with", watched_begins_with)
    for case in cases("decode_infill.json")[:4] + cases("decode_eos.json")[:4]:
        decode(model, case["prompt"], **settings(case))
        decode(model, template_of(case), None, 4, 2, 0.9, 0.9, **MANY_EOS)
    assert set(carried) == {True, False}


# ---- templates -----------------------------------------------------------------------------------------------------

MANY_EOS = {"eos_ids": (1, 34, 46), "mask_id": 2}
TEXT = [9, 10, 11, 12, 13]


def template_of(case, *holes):
    first, second = holes or (14, 11)
    return [case["prompt"][:-2], case["prompt"][-2:], Hole(first), TEXT, Hole(second)]


class Moved:
    """A model that is told other position IDs than it uses: `ids[i]` for `i`."""

    def __init__(self, model, ids):
        self.model, self.ids = model, ids

    def forward(self, tokens, positions, mask):
        return self.model.forward(tokens, [self.ids[position] for position in positions], mask)


def moved_result(result, ids):
    return replace(result, positions=[ids[position] for position in result.positions])


@pytest.mark.parametrize("decode", DECODERS)
def test_plain_prompt_is_a_template_with_its_hole_at_the_end(model, decode):
    for case in cases("decode.json")[:3] + cases("decode_eos.json")[:2]:
        plain = decode(model, case["prompt"], **settings(case))
        slots = -(-case["gen_length"] // case["slot_size"])
        template = [case["prompt"][:3], [], case["prompt"][3:], Hole(slots * case["slot_size"])]
        assert decode(model, template, **settings(case) | {"gen_length": None}) == plain


@pytest.mark.parametrize("decode", DECODERS)
def test_holes_see_all_fixed_text_in_its_own_places(model, decode):
    """The plain decoding of a response after both texts, position IDs moved, is that of a hole between the texts."""
    for case in cases("decode.json")[:3] + cases("decode_infill.json")[:3]:
        prompt, size, blocks = case["prompt"], case["slot_size"], case["serial_num_blocks"]
        arguments = settings(case) | {"gen_length": size * blocks * 2}
        start, length = len(prompt), size * blocks * 2
        ids = [*range(start), *range(start + length, start + length + len(TEXT)), *range(start, start + length)]
        plain = decode(Moved(model, ids), prompt + TEXT, **arguments)
        assert decode(model, [prompt, Hole(length), TEXT], **arguments) == moved_result(plain, ids)


@pytest.mark.parametrize("decode", DECODERS)
@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_slots_of_all_holes_are_one_response(model, decode, blocks):
    """Without EOS, two holes of whole slots are decoded as one response is, but for the position IDs."""
    for case in cases("decode_infill.json")[:3]:
        prompt, arguments = case["prompt"], (4, blocks, 0.9, 0.9, (), 2)
        start, after = len(prompt), len(prompt) + 12
        ids = [*range(start), *range(after, after + len(TEXT))]
        ids += [*range(start, after), *range(after + len(TEXT), after + len(TEXT) + 12)]
        plain = decode(Moved(model, ids), prompt + TEXT, 24, *arguments)
        assert decode(model, [prompt, Hole(12), TEXT, Hole(12)], None, *arguments) == moved_result(plain, ids)


@pytest.mark.parametrize("decode", DECODERS)
def test_eos_does_not_end_the_next_hole(model, decode):
    """A hole per block: the second is a plain response to the texts and what the first hole got, EOS and all."""
    ended = compared = 0
    for index, case in enumerate(cases("decode.json")[:12]):
        prompt, arguments = case["prompt"], {"slot_threshold": 0.6, "token_threshold": 0.3} | MANY_EOS
        both = decode(model, [prompt, Hole(8), TEXT, Hole(8)], None, 4, 2, **arguments)
        first = decode(model, [prompt, Hole(8), TEXT], None, 4, 1, **arguments)
        if first.infills:  # slots that did not see one another: no prompt is like that
            continue
        start, after = len(prompt), len(prompt) + 8
        committed = sorted(zip(first.order, first.positions, first.committed, strict=True))
        _, first_ids, first_tokens = zip(*committed, strict=True)
        ids = [*range(start), *range(after, after + len(TEXT)), *first_ids]
        ids += range(after + len(TEXT), after + len(TEXT) + 8)
        second = decode(Moved(model, ids), [*prompt, *TEXT, *first_tokens], 8, 4, 1, **arguments)
        second = moved_result(second, ids)
        assert both.positions == first.positions + second.positions, f"decode.json[{index}]"
        assert both.committed == first.committed + second.committed, f"decode.json[{index}]"
        assert both.forwards in (first.forwards + second.forwards, first.forwards + second.forwards - 1)
        compared += 1
        ended += len(first.committed) < 8
    assert 0 < ended < compared


@pytest.mark.parametrize("decode", DECODERS)
@pytest.mark.parametrize("blocks", [1, 3])
def test_every_hole_is_filled_or_ends_in_eos(model, decode, blocks):
    missing_of = []
    for index, case in enumerate(cases("decode_eos.json")[:8] + cases("decode.json")[:8]):
        result = decode(model, template_of(case), None, 4, blocks, 0.6, 0.6, **MANY_EOS)
        start = len(case["prompt"])
        missing = []
        for hole in (range(start, start + 14), range(start + 14 + len(TEXT), start + 25 + len(TEXT))):
            tokens = [t for t, p in zip(result.committed, result.positions, strict=True) if p in hole]
            missing.append(len(hole) - len(tokens))
            assert not missing[-1] or set(tokens) & set(MANY_EOS["eos_ids"]), f"case {index}"
        missing_of.append(tuple(size > 0 for size in missing))
    assert {(True, False), (True, True)} <= set(missing_of)


def test_short_slot_is_a_slot_of_its_length(model):
    for case in cases("decode_infill.json")[:6]:
        template, thresholds = [case["prompt"], Hole(3), TEXT], (1, 0.9, 0.9)
        for decode in DECODERS:
            short = decode(model, template, None, 8, *thresholds, **SPECIAL)
            whole = decode(model, template, None, 3, *thresholds, **SPECIAL)
            if decode is decode_paper:  # slots have the same weight in it, however short
                assert short.tpf == pytest.approx(whole.tpf * 8 / 3)
            assert replace(short, tpf=whole.tpf) == whole


def test_hole_ends_in_a_short_slot(model):
    """A slot per block: 4 + 4 + 2 tokens are a response of 8 and then one of 2 to that."""
    arguments = {"slot_threshold": 0.9, "token_threshold": 0.9, "eos_ids": (), "mask_id": 2}
    for case in cases("decode_infill.json")[:4]:
        prompt = case["prompt"]
        result = decode_self_correcting(model, [prompt, Hole(10)], None, 4, 3, **arguments)
        front = decode_self_correcting(model, prompt, 8, 4, 2, **arguments)
        back = decode_self_correcting(model, prompt + front.committed, 2, 2, 1, **arguments)
        assert result.committed == front.committed + back.committed
        assert result.positions == front.positions + back.positions
        assert not result.committed_eos_cut


@pytest.mark.parametrize("decode", DECODERS)
@pytest.mark.parametrize(
    ("holes", "blocks", "sizes"),
    [((14, 11), 2, [14, 11]), ((18,), 2, [12, 6]), ((6, 6), 3, [6, 4, 2]), ((7,), 8, [4, 3])],
)
def test_blocks_are_an_even_split_of_all_slots(model, decode, holes, blocks, sizes):
    """Slots of 4, the larger runs first; a run is committed before the next is begun."""
    case = cases("decode.json")[0]
    template = [case["prompt"], *(part for hole in holes for part in (Hole(hole), TEXT))]
    result = decode(model, template, None, 4, blocks, 0.9, 0.9, eos_ids=(), mask_id=2)
    assert len(result.committed) == sum(sizes)
    ends = np.cumsum(sizes)
    runs = [result.order[end - size : end] for end, size in zip(ends, sizes, strict=True)]
    assert all(max(before) < min(after) for before, after in itertools.pairwise(runs))
