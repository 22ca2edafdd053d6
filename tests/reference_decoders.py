"""The plainest possible ReFusion decoders: the oracle that the fast ones are compared with.

One sequence at a time, NumPy, float32, no KV cache: every forward recomputes the whole buffer. What a cache would have
remembered is kept as visibility instead. Each committed token records which tokens it saw in the forward that
committed it, so recomputing its keys and values gives the ones it was committed with.

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


@dataclass
class DecodeResult:
    committed: list[int]  # response tokens, in position order
    positions: list[int]  # their position IDs
    order: list[int]  # for each, the index of the forward that committed it; the first draft is forward 0
    forwards: int  # paper: verify and draft separately; self-correcting: verify and next draft are one
    committed_eos_cut: bool  # a slot was committed only up to its EOS
    margin: float  # smallest distance of any decision from its opposite
    fused_forwards: int | None = None  # this and the rest: paper only. Verify and next draft counted as one
    fused_order: list[int] | None = None  # `order` in that counting
    infills: int | None = None
    tpf: float | None = None


def decode_paper(
    model: NumpyQwen3,
    prompt: Sequence[int],
    gen_length: int,
    slot_size: int,
    serial_num_blocks: int,
    slot_threshold: float,
    token_threshold: float,
    eos_ids: Sequence[int],
    mask_id: int,
    temperature: float = 0.0,
    gumbel: Noise | None = None,
    suppress: Sequence[int] = (),
) -> DecodeResult:
    """The authors' decoding: draft, select, verify; accept whole slots from the front, else infill in parallel."""
    row = _Row(model, prompt, slot_size, mask_id)
    forwards = fused_forwards = infills = 0
    carried_by = None  # index, in fused counting, of the verification that also computes the coming draft
    tokens_per_forward = []  # one ratio for each acceptance or infill
    ending = False
    for block in _serial_blocks(gen_length, slot_size, serial_num_blocks):
        if ending:
            break
        remaining = block
        while remaining:
            # Draft. Always computed by itself: only the counts know that a verification may have carried it.
            draw = fused_forwards if carried_by is None else carried_by
            fused_forwards += carried_by is None
            forwards += 1
            picked, draft = row.draft_and_select(remaining, slot_threshold, temperature, gumbel, draw, suppress)
            chosen, tokens = [remaining[i] for i in picked], draft[picked]

            # Verify globally: plain causal attention over the concatenated drafts.
            positions, mask = row.positions_of(chosen), _causal(tokens.size)
            logits = row.forward(tokens.ravel(), positions, mask)
            carried_by = fused_forwards
            fused_forwards += 1
            forwards += 1
            first, probability = _first_of_slot(tokens), _probability_at_previous(logits, tokens)
            passed = first | (probability > token_threshold)
            row.note(_threshold_gaps(probability, token_threshold)[_reached(passed) & ~first])
            prefix = _leading(passed.ravel())

            whole, end, found_eos = _accept(tokens, prefix, eos_ids)
            if end:  # accept from the front
                row.commit(tokens.ravel()[:end], positions[:end], mask[:end, :end], forwards - 1, fused_forwards - 1)
                tokens_per_forward.append(slot_size * whole / 2)
                remaining = [slot for slot in remaining if slot not in chosen[:whole]]
                if found_eos:
                    ending = True
                    remaining = [slot for slot in remaining if slot < chosen[whole - 1]]
                if end < tokens.size:  # the masks that followed saw a token that was not committed
                    carried_by = None
                continue

            # Infill: each chosen slot sees the committed tokens and itself, never another chosen slot.
            carried_by = None
            infills += 1
            remaining = [slot for slot in remaining if slot not in chosen]
            number_chosen, rounds = len(chosen), 0
            marks = np.logical_and.accumulate(passed, axis=1)
            while rounds < slot_size:
                rounds += 1
                if marks.all():
                    break
                positions, mask = row.positions_of(chosen), _causal_inside_slots(*tokens.shape)
                visible = np.where(marks, tokens, mask_id)
                logits = row.forward(visible.ravel(), positions, mask)
                scores = scores_of(logits, positions, suppress=suppress)  # never any noise
                row.note(_choice_gaps(scores)[~marks.ravel()])
                tokens = np.where(marks, tokens, scores.argmax(axis=-1).reshape(tokens.shape))

                logits = row.forward(tokens.ravel(), positions, mask)
                forwards += 2
                fused_forwards += 2
                follows_passed = np.hstack([np.ones_like(marks[:, :1]), marks[:, :-1]])
                probability = _probability_at_previous(logits, tokens)
                passed = follows_passed | (probability > token_threshold)
                row.note(_threshold_gaps(probability, token_threshold)[_reached(passed) & ~follows_passed])
                marks = np.logical_and.accumulate(passed, axis=1)

                with_eos = (marks & np.isin(tokens, eos_ids)).any(axis=1)
                if with_eos.any():
                    kept = int(with_eos.argmax()) + 1  # up to the first slot with a passed EOS
                    chosen, tokens, marks = chosen[:kept], tokens[:kept], marks[:kept]
                    marks[-1] = True
                    ending = True
                    remaining = [slot for slot in remaining if slot < chosen[-1]]
            tokens_per_forward.append(slot_size * number_chosen / (2 * rounds))

            _, end, _ = _accept(tokens, tokens.size, eos_ids)
            mask = _causal_inside_slots(*tokens.shape)[:end, :end]
            row.commit(tokens.ravel()[:end], row.positions_of(chosen)[:end], mask, forwards - 1, fused_forwards - 1)

    tpf = float(np.mean(tokens_per_forward))
    result = row.result(forwards, fused_forwards=fused_forwards, infills=infills, tpf=tpf)
    return replace(result, fused_order=row.in_position_order(row.fused_order))


def decode_self_correcting(
    model: NumpyQwen3,
    prompt: Sequence[int],
    gen_length: int,
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
) -> DecodeResult:
    """Draft and select as above; then the model's own next-token choices repair the chosen slots, all causally."""
    row = _Row(model, prompt, slot_size, mask_id)
    forwards = 0
    carried = False  # whether the last forward's mask positions are the coming draft
    ending = False
    for block in _serial_blocks(gen_length, slot_size, serial_num_blocks):
        if ending:
            break
        remaining = block
        while remaining:
            # A carried draft is computed again by itself, uncounted: in causal order nothing differs.
            forwards += not carried
            picked, draft = row.draft_and_select(remaining, slot_threshold, temperature, gumbel, 0, suppress)
            chosen, tokens = [remaining[i] for i in picked], draft[picked]
            remaining = [slot for slot in remaining if slot not in chosen]

            while chosen:
                positions, mask = row.positions_of(chosen), _causal(tokens.size)
                logits = row.forward(tokens.ravel(), positions, mask)
                forwards += 1
                scores = scores_of(logits[:-1], positions[1:], temperature, gumbel, 0, suppress)
                own = tokens.copy()  # a slot's first token has no choice but the draft's
                own.ravel()[1:] = scores.argmax(axis=-1)
                own[:, 0] = tokens[:, 0]
                first, probability = _first_of_slot(tokens), _probability_at_previous(logits, tokens)
                passed = first | (own == tokens) | (probability > token_threshold)
                settled = _leading(passed.ravel())
                row.note(_choice_gaps(scores)[~first.ravel()[1:]])
                doubted = (own != tokens) & (np.arange(tokens.size).reshape(tokens.shape) <= settled)
                row.note(_threshold_gaps(probability, token_threshold)[doubted])

                whole, end, found_eos = _accept(tokens, settled, eos_ids)
                row.commit(tokens.ravel()[:end], positions[:end], mask[:end, :end], forwards - 1)
                carried = end == tokens.size
                if found_eos:
                    ending = True
                    remaining = [slot for slot in remaining if slot < chosen[whole - 1]]
                    break
                tokens.ravel()[settled:] = own.ravel()[settled:]
                chosen, tokens = chosen[whole:], tokens[whole:]
                if redraft and whole and chosen:
                    remaining = sorted(remaining + chosen)
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

    def __init__(self, model, prompt, slot_size, mask_id):
        self.model, self.slot_size, self.mask_id = model, slot_size, mask_id
        self.prompt_length = len(prompt)
        self.tokens = [int(token) for token in prompt]
        self.positions = list(range(len(prompt)))
        self.sees = _causal(len(prompt))
        self.order, self.fused_order = [], []  # of the response tokens only
        self.slot_cut = False
        self.margin = np.inf

    def positions_of(self, slots) -> np.ndarray:
        starts = self.prompt_length + self.slot_size * np.array(slots)
        return (starts[:, None] + np.arange(self.slot_size)).ravel()

    def forward(self, tokens, positions, mask) -> np.ndarray:
        """Logits of a query that sees all that is committed, and itself through `mask`."""
        return self.model.forward(
            self.tokens + [int(token) for token in tokens],
            self.positions + [int(position) for position in positions],
            self._extended(mask),
        )[len(self.tokens) :]

    def draft_and_select(self, slots, slot_threshold, temperature, gumbel, draw, suppress):
        """Proposals for every token of the slots, (slots, slot_size), and the indices of the slots to verify."""
        shape = (len(slots), self.slot_size)
        positions = self.positions_of(slots)
        logits = self.forward([self.mask_id] * len(positions), positions, _causal(len(positions)))
        scores = scores_of(logits, positions, temperature, gumbel, draw, suppress)
        draft, gaps = scores.argmax(axis=-1).reshape(shape), _choice_gaps(scores).reshape(shape)
        first_probability = softmax(logits[:: self.slot_size])[np.arange(len(slots)), draft[:, 0]]

        picked = _select(first_probability, slot_threshold)
        self.note(gaps[:, 0], gaps[picked], _threshold_gaps(first_probability, slot_threshold))
        if len(slots) > 1 and not (first_probability > slot_threshold).any():
            self.note(_choice_gaps(np.log(first_probability)))
        return picked, draft

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
        self.slot_cut |= len(tokens) % self.slot_size != 0

    def _extended(self, mask) -> np.ndarray:
        old, new = len(self.tokens), len(mask)
        sees = np.zeros((old + new, old + new), bool)
        sees[:old, :old] = self.sees
        sees[old:, :old] = True
        sees[old:, old:] = mask
        return sees

    def in_position_order(self, values) -> list[int]:
        """Values of the response tokens, given in the order of commitment."""
        return [values[i] for i in np.argsort(self.positions[self.prompt_length :])]

    def result(self, forwards, **counts) -> DecodeResult:
        response = (self.tokens[self.prompt_length :], self.positions[self.prompt_length :], self.order)
        return DecodeResult(*map(self.in_position_order, response), forwards, self.slot_cut, self.margin, **counts)


def _serial_blocks(gen_length, slot_size, serial_num_blocks) -> list[list[int]]:
    slots = -(-gen_length // slot_size)
    if slots % serial_num_blocks:
        raise ValueError(f"{slots} slots do not divide into {serial_num_blocks} serial blocks")
    return np.arange(slots).reshape(serial_num_blocks, -1).tolist()


def _select(first_probability, slot_threshold) -> list[int]:
    above = np.flatnonzero(first_probability > slot_threshold)
    return above.tolist() if above.size else [int(first_probability.argmax())]


def _accept(tokens, prefix, eos_ids) -> tuple[int, int, bool]:
    """What to commit of slots `tokens` whose first `prefix` tokens are good: (slots, tokens, whether EOS ends them)."""
    slot_size = tokens.shape[1]
    eos = np.flatnonzero(np.isin(tokens.ravel()[:prefix], eos_ids))
    if eos.size:
        return int(eos[0]) // slot_size + 1, int(eos[0]) + 1, True
    return prefix // slot_size, prefix // slot_size * slot_size, False


def _probability_at_previous(logits, tokens) -> np.ndarray:
    """Next-token probability of each query token; those of slots' first tokens mean nothing and are 0."""
    flat = tokens.ravel()
    probability = np.zeros(len(flat), np.float32)
    probability[1:] = softmax(logits[:-1])[np.arange(len(flat) - 1), flat[1:]]
    probability = probability.reshape(tokens.shape)
    probability[:, 0] = 0
    return probability


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


def _reached(passed) -> np.ndarray:
    """Where everything before a token in its slot passed, so that its own pass matters."""
    before = np.logical_and.accumulate(passed, axis=1)[:, :-1]
    return np.hstack([np.ones_like(passed[:, :1]), before])


def _first_of_slot(tokens) -> np.ndarray:
    first = np.zeros(tokens.shape, bool)
    first[:, 0] = True
    return first


def _leading(flags) -> int:
    """Length of the run of true flags at the start."""
    return int(np.logical_and.accumulate(flags).sum())


def _causal(length) -> np.ndarray:
    return np.tril(np.ones((length, length), bool))


def _causal_inside_slots(slots, slot_size) -> np.ndarray:
    return np.kron(np.eye(slots, dtype=bool), _causal(slot_size))


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
