"""The plainest possible ReFusion decoders: the oracle that the fast ones are compared with.

One sequence at a time, NumPy, float32, no KV cache: every forward recomputes the whole buffer. What a cache would have
remembered is kept as visibility instead. Each committed token records which tokens it saw in the forward that
committed it, so recomputing its keys and values gives the ones it was committed with.

A prompt may be a template: fixed text with holes in it. All of the text is committed before anything is decoded, so
that the holes see the text after them; position IDs run over text and holes alike. An EOS ends its own hole only.

A verification may carry the next draft: mask tokens behind the drafts, for the slots that come next if every draft is
committed. Here each draft is computed by itself, and only counted as carried, which in causal order is the same.

Two float32 programs can disagree about a decision that hangs by a hair, so a decode also reports its margin: the
smallest distance of any decision from its opposite, in units of logits. Between two tokens that is the difference of
their scores, between a probability and a threshold that of their logarithms.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

Noise = Callable[[int, int], np.ndarray]  # gumbel(position_id, draw) -> (vocab,) float32


class NumpyQwen3:
    """A Qwen3 decoder over one full sequence, from Hugging Face's config and tensor names."""

    def __init__(self, config: dict, tensors: dict[str, np.ndarray]):
        self.config = config
        self.tensors = {name: np.asarray(tensor, np.float32) for name, tensor in tensors.items()}

    def forward(self, tokens, position_ids, mask) -> np.ndarray:
        """Logits (T, vocab). `mask[i, j]` says whether token i sees token j; position IDs matter to RoPE only."""
        config, weights = self.config, self.tensors
        eps = np.float32(config["rms_norm_eps"])
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        head_dim = config.get("head_dim") or config["hidden_size"] // heads
        length = len(tokens)
        cos, sin = _rope_tables(position_ids, head_dim, config["rope_theta"])

        x = weights["model.embed_tokens.weight"][np.asarray(tokens)]
        for layer in range(config["num_hidden_layers"]):
            w = {
                name.removeprefix(f"model.layers.{layer}."): tensor
                for name, tensor in weights.items()
                if name.startswith(f"model.layers.{layer}.")
            }

            h = _rms_norm(x, w["input_layernorm.weight"], eps)
            q = (h @ w["self_attn.q_proj.weight"].T).reshape(length, heads, head_dim)
            k = (h @ w["self_attn.k_proj.weight"].T).reshape(length, kv_heads, head_dim)
            v = (h @ w["self_attn.v_proj.weight"].T).reshape(length, kv_heads, head_dim)
            q = _rotate(_rms_norm(q, w["self_attn.q_norm.weight"], eps), cos, sin)
            k = _rotate(_rms_norm(k, w["self_attn.k_norm.weight"], eps), cos, sin)
            k, v = (np.repeat(a, heads // kv_heads, axis=1) for a in (k, v))
            q, k, v = (a.transpose(1, 0, 2) for a in (q, k, v))
            scores = q @ k.transpose(0, 2, 1) / np.float32(np.sqrt(head_dim))
            attended = softmax(np.where(mask, scores, np.float32(-np.inf))) @ v
            x = x + attended.transpose(1, 0, 2).reshape(length, heads * head_dim) @ w["self_attn.o_proj.weight"].T

            h = _rms_norm(x, w["post_attention_layernorm.weight"], eps)
            gate = h @ w["mlp.gate_proj.weight"].T
            up = h @ w["mlp.up_proj.weight"].T
            x = x + (gate / (1 + np.exp(-gate)) * up) @ w["mlp.down_proj.weight"].T

        x = _rms_norm(x, weights["model.norm.weight"], eps)
        tied = config.get("tie_word_embeddings", False)
        return x @ weights["model.embed_tokens.weight" if tied else "lm_head.weight"].T


def load_reference_model(directory) -> NumpyQwen3:
    from safetensors.numpy import load_file

    directory = Path(directory)
    config = json.loads((directory / "config.json").read_text())
    return NumpyQwen3(config, load_file(directory / "model.safetensors"))


@dataclass(frozen=True)
class Hole:
    """A place in a template where `length` tokens are to be decoded."""

    length: int


# Fixed token IDs and holes. Token IDs alone are a template whose one hole, as long as `gen_length`, follows them.
Prompt = Sequence[int] | Sequence[Sequence[int] | Hole]


@dataclass
class DecodeResult:
    committed: list[int]  # response tokens, in position order
    positions: list[int]  # their position IDs
    order: list[int]  # for each, the index of the forward that committed it; the first draft is forward 0
    forwards: int  # paper: verify and draft separately; self-correcting: a verification may carry the next draft
    committed_eos_cut: bool  # a slot was committed only up to its EOS
    margin: float  # smallest distance of any decision from its opposite
    fused_forwards: int | None = None  # this and the rest: paper only. Also counted so that verifications carry drafts
    fused_order: list[int] | None = None  # `order` in that counting
    infills: int | None = None
    tpf: float | None = None


def decode_paper(
    model: NumpyQwen3,
    prompt: Prompt,
    gen_length: int | None,
    slot_size: int,
    serial_num_blocks: int,
    slot_threshold: float,
    token_threshold: float,
    eos_ids: Sequence[int],
    mask_id: int,
    temperature: float = 0.0,
    gumbel: Noise | None = None,
    suppress: Sequence[int] = (),
    carry_threshold: float = 0.0,
) -> DecodeResult:
    """The authors' decoding: draft, select, verify; accept whole slots from the front, else infill in parallel."""
    row = _Row(model, prompt, gen_length, slot_size, serial_num_blocks, mask_id)
    forwards = fused_forwards = infills = 0
    carried = []  # the slots whose masks the last forward carried, after tokens that were all committed
    tokens_per_forward = []  # one ratio for each acceptance or infill
    while row.open_slots:
        # Draft. Always computed by itself: only the counts know that a verification may have carried it.
        remaining = row.first_block(row.open_slots)
        fused_forwards += not _begins_with(carried, remaining)
        forwards += 1
        chosen, tokens, proposed = row.draft_and_select(
            remaining, slot_threshold, temperature, gumbel, fused_forwards - 1, suppress
        )

        # Verify globally: plain causal attention over the concatenated drafts.
        positions, slots, mask = row.positions_of(chosen), row.slots_of(chosen), _causal(len(tokens))
        first = _first_of_slot(slots)
        carried = row.carry(chosen, proposed[~first], carry_threshold)
        logits = row.forward(tokens, positions, mask)
        forwards += 1
        fused_forwards += 1
        probability = _probability_at_previous(logits, tokens)
        passed = first | (probability > token_threshold)
        row.note(_threshold_gaps(probability, token_threshold)[_reached(passed, slots) & ~first])
        prefix = _leading(passed)

        whole, end, found_eos = _accept(tokens, slots, prefix, eos_ids)
        if end:  # accept from the front
            row.commit(tokens[:end], positions[:end], mask[:end, :end], forwards - 1, fused_forwards - 1)
            tokens_per_forward.append(slot_size * whole / 2)
            row.close(chosen[:whole])
            if found_eos:
                row.end_hole(chosen[whole - 1])
            if end < len(tokens):  # the masks saw a token that was not committed
                carried = []
            continue

        # Infill: each chosen slot sees the committed tokens and itself, never another chosen slot.
        infills += 1
        number_chosen, rounds = len(chosen), 0
        marks = _pass_marks(passed, slots)
        while rounds < slot_size:
            rounds += 1
            if marks.all():
                break
            positions, slots = row.positions_of(chosen), row.slots_of(chosen)
            mask = _causal_inside_slots(slots)
            logits = row.forward(np.where(marks, tokens, mask_id), positions, mask)
            scores = scores_of(logits, positions, suppress=suppress)  # never any noise
            row.note(_choice_gaps(scores)[~marks])
            tokens = np.where(marks, tokens, scores.argmax(axis=-1))
            proposed = _probability_of(logits, tokens)

            # Masks that follow see every chosen slot, as they will once these are committed.
            carried = row.carry(chosen, proposed[~marks], carry_threshold)
            logits = row.forward(tokens, positions, mask)
            forwards += 2
            fused_forwards += 2
            follows_passed = _first_of_slot(slots) | np.append(False, marks[:-1])
            probability = _probability_at_previous(logits, tokens)
            passed = follows_passed | (probability > token_threshold)
            row.note(_threshold_gaps(probability, token_threshold)[_reached(passed, slots) & ~follows_passed])
            marks = _pass_marks(passed, slots)

            with_eos = slots[marks & np.isin(tokens, eos_ids)]
            if with_eos.size:
                last = int(with_eos[0])  # the first slot with a passed EOS
                if last != chosen[-1]:  # the masks saw slots that are given up
                    carried = []
                chosen = [slot for slot in chosen if slot <= last]
                tokens, marks, slots = (values[slots <= last] for values in (tokens, marks, slots))
                marks[slots == last] = True
                row.end_hole(last)
        tokens_per_forward.append(slot_size * number_chosen / (2 * rounds))

        _, end, _ = _accept(tokens, slots, len(tokens), eos_ids)
        positions, mask = row.positions_of(chosen), _causal_inside_slots(slots)
        row.commit(tokens[:end], positions[:end], mask[:end, :end], forwards - 1, fused_forwards - 1)
        row.close(chosen)
        if end < len(tokens):
            carried = []

    tpf = float(np.mean(tokens_per_forward))
    result = row.result(forwards, fused_forwards=fused_forwards, infills=infills, tpf=tpf)
    return replace(result, fused_order=row.in_position_order(row.fused_order))


def decode_self_correcting(
    model: NumpyQwen3,
    prompt: Prompt,
    gen_length: int | None,
    slot_size: int,
    serial_num_blocks: int,
    slot_threshold: float,
    token_threshold: float,
    eos_ids: Sequence[int],
    mask_id: int,
    redraft: bool = False,
    temperature: float = 0.0,
    gumbel: Noise | None = None,
    suppress: Sequence[int] = (),
    carry_threshold: float = 0.0,
) -> DecodeResult:
    """Draft and select as above; then the model's own next-token choices repair the chosen slots, all causally."""
    row = _Row(model, prompt, gen_length, slot_size, serial_num_blocks, mask_id)
    forwards = 0
    carried = []  # as above
    while row.open_slots:
        # A carried draft is computed again by itself, uncounted: in causal order nothing differs.
        remaining = row.first_block(row.open_slots)
        forwards += not _begins_with(carried, remaining)
        chosen, tokens, proposed = row.draft_and_select(remaining, slot_threshold, temperature, gumbel, 0, suppress)
        settled = 0

        while chosen:
            positions, slots, mask = row.positions_of(chosen), row.slots_of(chosen), _causal(len(tokens))
            first = _first_of_slot(slots)
            carried = row.carry(chosen, proposed[settled:][~first[settled:]], carry_threshold)
            logits = row.forward(tokens, positions, mask)
            forwards += 1
            scores = scores_of(logits[:-1], positions[1:], temperature, gumbel, 0, suppress)
            # A slot's first token has no choice but the draft's.
            own = np.where(first, tokens, np.append(tokens[0], scores.argmax(axis=-1)))
            probability = _probability_at_previous(logits, tokens)
            passed = first | (own == tokens) | (probability > token_threshold)
            settled = _leading(passed)
            row.note(_choice_gaps(scores)[~first[1:]])
            doubted = (own != tokens) & (np.arange(len(tokens)) <= settled)
            row.note(_threshold_gaps(probability, token_threshold)[doubted])

            whole, end, found_eos = _accept(tokens, slots, settled, eos_ids)
            row.commit(tokens[:end], positions[:end], mask[:end, :end], forwards - 1)
            row.close(chosen[:whole])
            if end < len(tokens):  # the masks saw a token that was not committed
                carried = []
            if found_eos:
                row.end_hole(chosen[whole - 1])
                break
            tokens[settled:] = own[settled:]
            proposed[settled:] = _probability_at_previous(logits, own)[settled:]
            chosen, tokens, proposed, settled = chosen[whole:], tokens[end:], proposed[end:], settled - end
            if redraft and whole:
                break

    return row.result(forwards)


def softmax(scores: np.ndarray) -> np.ndarray:
    exp = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return exp / exp.sum(axis=-1, keepdims=True)


def choices(logits, positions, temperature=0.0, gumbel: Noise | None = None, draw=0, suppress=()) -> np.ndarray:
    """The token chosen for each of `positions`, which are the chosen tokens' own, not those the logits were read at."""
    return scores_of(logits, positions, temperature, gumbel, draw, suppress).argmax(axis=-1)


def scores_of(logits, positions, temperature=0.0, gumbel: Noise | None = None, draw=0, suppress=()) -> np.ndarray:
    """What the choice is the largest of: logits with noise, without the suppressed tokens."""
    scores = logits.copy()
    scores[:, list(suppress)] = -np.inf
    if temperature > 0:
        if gumbel is None:
            raise ValueError("a temperature needs gumbel noise")
        for score, position in zip(scores, positions, strict=True):
            score += np.float32(temperature) * gumbel(int(position), draw)
    return scores


class _Row:
    """One sequence: its committed tokens in buffer order, and for each which of the others it sees."""

    def __init__(self, model, prompt, gen_length, slot_size, serial_num_blocks, mask_id):
        self.model, self.mask_id = model, mask_id
        self.tokens, self.positions = [], []
        self.slots = []  # the position IDs of each
        self.hole_of = []  # for each, where its hole starts
        length = 0
        for segment in _template(prompt, gen_length, slot_size, serial_num_blocks):
            if isinstance(segment, Hole):
                for start in range(0, segment.length, slot_size):
                    stop = min(start + slot_size, segment.length)
                    self.slots.append(range(length + start, length + stop))
                    self.hole_of.append(length)
                length += segment.length
            else:
                self.tokens += [int(token) for token in segment]
                self.positions += range(length, length + len(segment))
                length += len(segment)
        self.fixed_length = len(self.tokens)
        self.sees = _causal(self.fixed_length)
        self.open_slots = list(range(len(self.slots)))  # neither committed nor dropped
        runs = np.array_split(self.open_slots, serial_num_blocks)
        self.block_of = [block for block, run in enumerate(runs) for _ in run]
        self.order, self.fused_order = [], []  # of the response tokens only
        self.slot_cut = False
        self.margin = np.inf

    def positions_of(self, slots) -> np.ndarray:
        return np.concatenate([self.slots[slot] for slot in slots])

    def slots_of(self, slots) -> np.ndarray:
        """For each token of these slots, its slot."""
        return np.repeat(slots, [len(self.slots[slot]) for slot in slots])

    def first_block(self, slots) -> list[int]:
        """Those of `slots` that are in the first block any of them is in."""
        return [slot for slot in slots if self.block_of[slot] == self.block_of[slots[0]]]

    def close(self, slots):
        self.open_slots = [slot for slot in self.open_slots if slot not in slots]

    def end_hole(self, last):
        """Slot `last` holds an EOS: drop those after it, of its own hole only."""
        self.close([slot for slot in self.open_slots if self.hole_of[slot] == self.hole_of[last] and slot > last])

    def forward(self, tokens, positions, mask) -> np.ndarray:
        """Logits of a query that sees all that is committed, and itself through `mask`."""
        return self.model.forward(
            self.tokens + [int(token) for token in tokens],
            self.positions + [int(position) for position in positions],
            self._extended(mask),
        )[len(self.tokens) :]

    def draft_and_select(self, slots, slot_threshold, temperature, gumbel, draw, suppress):
        """The slots to verify, and for every token of them the proposal and its probability."""
        positions, slot_of = self.positions_of(slots), self.slots_of(slots)
        first = _first_of_slot(slot_of)
        logits = self.forward([self.mask_id] * len(positions), positions, _causal(len(positions)))
        scores = scores_of(logits, positions, temperature, gumbel, draw, suppress)
        draft, gaps = scores.argmax(axis=-1), _choice_gaps(scores)
        probability = _probability_of(logits, draft)

        chosen = [slots[i] for i in _select(probability[first], slot_threshold)]
        of_chosen = np.isin(slot_of, chosen)
        self.note(gaps[first | of_chosen], _threshold_gaps(probability[first], slot_threshold))
        if len(slots) > 1 and not (probability[first] > slot_threshold).any():
            self.note(_choice_gaps(np.log(probability[first])))
        return chosen, draft[of_chosen], probability[of_chosen]

    def carry(self, chosen, proposed, carry_threshold) -> list[int]:
        """The slots whose masks follow a verification of `chosen`: the next draft, should all of `chosen` be committed.

        `proposed` are the probabilities with which the tokens that may yet fail were proposed. Where their product
        does not exceed the threshold, no masks follow. Of a threshold 0 it always does.
        """
        waiting = self.first_block([slot for slot in self.open_slots if slot not in chosen])
        if not waiting or carry_threshold == 0:
            return waiting
        with np.errstate(divide="ignore"):
            lead = np.log(proposed).sum() - np.log(carry_threshold)
        if carry_threshold < 1 and len(proposed):
            self.note(np.abs(lead))
        return waiting if lead > 0 else []

    def note(self, *gaps):
        """Decisions with these distances from their opposites have mattered."""
        self.margin = min(self.margin, *(float(np.min(gap, initial=np.inf)) for gap in gaps))

    def commit(self, tokens, positions, mask, forward_index, fused_index=None):
        """Commit the front of a query; `mask` is what its tokens saw of each other."""
        self.sees = self._extended(mask)
        self.tokens += [int(token) for token in tokens]
        self.positions += [int(position) for position in positions]
        self.order += [forward_index] * len(tokens)
        self.fused_order += [fused_index] * len(tokens)
        self.slot_cut |= len(tokens) > 0 and self.positions[-1] not in [slot[-1] for slot in self.slots]

    def _extended(self, mask) -> np.ndarray:
        old, new = len(self.tokens), len(mask)
        sees = np.zeros((old + new, old + new), bool)
        sees[:old, :old] = self.sees
        sees[old:, :old] = True
        sees[old:, old:] = mask
        return sees

    def in_position_order(self, values) -> list[int]:
        """Values of the response tokens, given in the order of commitment."""
        return [values[i] for i in np.argsort(self.positions[self.fixed_length :])]

    def result(self, forwards, **counts) -> DecodeResult:
        response = (self.tokens[self.fixed_length :], self.positions[self.fixed_length :], self.order)
        return DecodeResult(*map(self.in_position_order, response), forwards, self.slot_cut, self.margin, **counts)


def _template(prompt, gen_length, slot_size, serial_num_blocks) -> list[Sequence[int] | Hole]:
    if not all(isinstance(part, int | np.integer) for part in prompt):
        return list(prompt)
    slots = -(-gen_length // slot_size)
    if slots % serial_num_blocks:
        raise ValueError(f"{slots} slots do not divide into {serial_num_blocks} serial blocks")
    return [prompt, Hole(slots * slot_size)]


def _select(first_probability, slot_threshold) -> list[int]:
    above = np.flatnonzero(first_probability > slot_threshold)
    return above.tolist() if above.size else [int(first_probability.argmax())]


def _accept(tokens, slots, prefix, eos_ids) -> tuple[int, int, bool]:
    """What to commit of tokens whose first `prefix` are good: (slots, tokens, whether EOS ends them)."""
    ends = np.append(np.flatnonzero(_first_of_slot(slots))[1:], len(slots))
    eos = np.flatnonzero(np.isin(tokens[:prefix], eos_ids))
    if eos.size:
        return int((ends <= eos[0]).sum()) + 1, int(eos[0]) + 1, True
    whole = int((ends <= prefix).sum())
    return whole, int(ends[whole - 1]) if whole else 0, False


def _begins_with(carried, remaining) -> bool:
    """Whether masks of slots `carried` have the logits of masks of `remaining` alone: attention is causal."""
    return carried[: len(remaining)] == remaining


def _probability_of(logits, tokens) -> np.ndarray:
    return softmax(logits)[np.arange(len(tokens)), tokens]


def _probability_at_previous(logits, tokens) -> np.ndarray:
    """Next-token probability of each query token; those of slots' first tokens mean nothing."""
    return np.append(np.float32(0), _probability_of(logits[:-1], tokens[1:]))


def _threshold_gaps(probability, threshold) -> np.ndarray:
    """Distances of logarithms. Thresholds 0 and 1 are safe: rounding takes no probability across them."""
    if not 0 < threshold < 1:
        return np.full(probability.shape, np.inf)
    with np.errstate(divide="ignore"):
        return np.abs(np.log(probability) - np.log(threshold))


def _choice_gaps(scores) -> np.ndarray:
    """By how much the largest score leads, along the last axis."""
    second, largest = np.moveaxis(np.partition(scores, -2, axis=-1)[..., -2:], -1, 0)
    return largest - second


def _pass_marks(passed, slots) -> np.ndarray:
    """The passing tokens before which everything in their slot passed."""
    return passed & _reached(passed, slots)


def _reached(passed, slots) -> np.ndarray:
    """Where everything before a token in its slot passed, so that its own pass matters."""
    reached = _first_of_slot(slots)
    for i in range(1, len(reached)):
        reached[i] |= reached[i - 1] and passed[i - 1]
    return reached


def _first_of_slot(slots) -> np.ndarray:
    """Where the first token of a slot is, given each token's slot."""
    return np.append(True, slots[1:] != slots[:-1])


def _leading(flags) -> int:
    """Length of the run of true flags at the start."""
    return int(np.logical_and.accumulate(flags).sum())


def _causal(length) -> np.ndarray:
    return np.tril(np.ones((length, length), bool))


def _causal_inside_slots(slots) -> np.ndarray:
    return (slots[:, None] == slots) & _causal(len(slots))


def _rms_norm(x, weight, eps) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def _rope_tables(position_ids, head_dim, theta) -> tuple[np.ndarray, np.ndarray]:
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    # Invert, then multiply, as Hugging Face does: at large position IDs another order of rounding shows in the logits.
    inverse_frequencies = 1 / np.float32(theta) ** exponents
    angles = np.asarray(position_ids, np.float32)[:, None] * inverse_frequencies
    angles = np.concatenate([angles, angles], axis=-1)[:, None, :]  # the same for every head
    return np.cos(angles), np.sin(angles)


def _rotate(x, cos, sin) -> np.ndarray:
    half = x.shape[-1] // 2
    return x * cos + np.concatenate([-x[..., half:], x[..., :half]], axis=-1) * sin
