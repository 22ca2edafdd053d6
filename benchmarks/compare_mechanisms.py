"""Where the difference between the paper's decoding and self-correcting decoding comes from.

The same prompts are decoded by the paper's algorithm with parts of its infilling repaired, one or several at a time:
see `compare_repairs`. "All three" are the first three. With all five it is self-correcting decoding, but for that this
also settles the model's own choices at or below the threshold as soon as everything before them has settled.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

import refusion_jax as rf
from benchmarks import common
from benchmarks.compare_repairs import Decoded, Network, Origin, Repairs, decode

BATCH_SIZE = 16  # of self-correcting decoding
PAPER, ALL_THREE, ALL_FIVE, SELF_CORRECTING = "paper", "all three", "all five", "self-correcting"
VARIANTS = {
    PAPER: Repairs(),
    "checked": Repairs(checked=True),
    "next-token proposals": Repairs(next_token=True),
    "recomputed KV": Repairs(recomputed=True),
    "checked, next-token proposals": Repairs(checked=True, next_token=True),
    "checked, recomputed KV": Repairs(checked=True, recomputed=True),
    "next-token proposals, recomputed KV": Repairs(next_token=True, recomputed=True),
    ALL_THREE: Repairs(checked=True, next_token=True, recomputed=True),
    "slots in view, settled in order": Repairs(in_view=True, in_order=True),
    "checked, next-token proposals, slots in view": Repairs(checked=True, next_token=True, in_view=True),
    ALL_FIVE: Repairs(checked=True, next_token=True, in_view=True, in_order=True),  # KV in causal order, without more
}
ERRORS_OF = (PAPER, ALL_THREE)
ORIGINS = {
    Origin.FRONT_FIRST: "first of its slot, accepted from the front",
    Origin.FRONT: "accepted from the front, above the threshold",
    Origin.INFILLED_FIRST: "first of its slot, infilled",
    Origin.INFILLED: "infilled, above the threshold",
    Origin.CHOICE: "infilled, at or below the threshold, but the model's own choice",
    Origin.UNCHECKED: "infilled, unchecked: at or below the threshold, and not the model's own choice",
}


def mechanisms(
    model: rf.Model,
    examples: Sequence[tuple[list[int], list[int]]],
    *,
    slot_sizes: Sequence[int] = (8, 32),
    gen_length: int = 96,
    slot_threshold: float = 0.9,
    token_threshold: float = 0.9,
) -> dict[str, Any]:
    """Decodes prompts greedily, in one block, by all variants and by self-correcting decoding.

    Args:
      model: what decodes.
      examples: prompt tokens and the right response with EOS.
      slot_sizes: results are given for each.
      gen_length, slot_threshold, token_threshold: as in `DecodeConfig`.

    Returns:
      JSON types: the settings, and in "slot_sizes" by slot size

      - "variants": by name, "exact_match" (share of responses that are the right one through its EOS), "tokens" (of
        responses, through the first EOS), "forwards" with every draft a forward of its own and "fused_forwards" with
        drafts riding along with verifications, tokens by either of them, and "unchecked" tokens (see `Origin`);
      - "errors": for those of `ERRORS_OF`, by the lower-case name of each `Origin`, how many of all response "tokens"
        have it, how many of the "wrong" tokens of wrong responses, how often the "first" wrong token, in the order of
        positions, and how often the "earliest" one, in the order in which tokens were committed;
      - "same_as_product": of how many prompts `rf.generate` has the same "paper" tokens and forwards, a share.
    """
    prompts, golds = [prompt for prompt, _ in examples], [gold for _, gold in examples]
    results = {}
    for size in slot_sizes:
        config = rf.DecodeConfig(
            gen_length=gen_length, slot_size=size, slot_threshold=slot_threshold, token_threshold=token_threshold
        )
        network = Network(model, max(map(len, prompts)), config.rounded_length)
        unrepaired = [decode(network, prompt, config, Repairs()) for prompt in prompts]
        decoded = {
            name: [
                decode(network, prompt, config, repairs) if each.is_infilled else each
                for prompt, each in zip(prompts, unrepaired, strict=True)
            ]
            for name, repairs in VARIANTS.items()
        }
        product = _Product(model, prompts, config)
        variants = {name: _figures(model, golds, found) for name, found in decoded.items()}
        variants[SELF_CORRECTING] = _summary(golds, product.answers, product.forwards, product.fused_forwards, 0)
        results[str(size)] = {
            "variants": variants,
            "errors": {name: _errors(model, golds, decoded[name]) for name in ERRORS_OF},
            "same_as_product": product.share_of_same(unrepaired),
        }
    return {
        "prompts": len(examples),
        "gen_length": gen_length,
        "slot_threshold": slot_threshold,
        "token_threshold": token_threshold,
        "slot_sizes": results,
    }


def text(result: dict[str, Any]) -> str:
    """Markdown tables of what `mechanisms` returns."""
    parts = []
    for size, found in result["slot_sizes"].items():
        variants = [
            [
                name, f"{each['exact_match']:.3f}", f"{each['fused_tokens_per_forward']:.2f}",
                f"{each['tokens_per_forward']:.2f}", f"{each['fused_forwards']:,}", f"{each['forwards']:,}",
                f"{each['unchecked']:,}",
            ]
            for name, each in found["variants"].items()
        ]  # fmt: skip
        header = [f"slots of {size}", "exact match", "tokens/forward", "without riding drafts", "forwards",
                  "without riding drafts", "unchecked tokens"]  # fmt: skip
        parts.append(common.table(header, variants))
        for name, errors in found["errors"].items():
            rows = [
                [ORIGINS[origin], *(f"{count:,}" for count in errors[origin.name.lower()].values())]
                for origin in Origin
            ]
            header = [f"slots of {size}, {name}: why a token stands", "tokens", "wrong tokens of wrong answers",
                      "first wrong token", "wrong token committed first"]  # fmt: skip
            parts.append(common.table(header, rows))
    return "\n\n".join(parts)


class _Product:
    """What `rf.generate` makes of the prompts: by self-correcting decoding, and by the paper's for a check."""

    def __init__(self, model: rf.Model, prompts: Sequence[list[int]], config: rf.DecodeConfig):
        paper = dataclasses.replace(config, algorithm="paper")
        alone = dataclasses.replace(config, carry_threshold=1.0)  # no draft rides along
        configs = [each for each in (paper, config, alone) for _ in prompts]
        found, count = rf.generate(model, [*prompts] * 3, configs, batch_size=BATCH_SIZE), len(prompts)
        self._committed, self._forwards = found.committed[:count], found.forwards[:count]
        self.answers = [list(tokens) for tokens in found.tokens[count : 2 * count]]
        self.fused_forwards, self.forwards = sum(found.forwards[count : 2 * count]), sum(found.forwards[2 * count :])

    def share_of_same(self, unrepaired: Sequence[Decoded]) -> float:
        """Of prompts for which the paper's decoding committed the same tokens in as many forwards here and there."""
        same = [
            each.tokens[each.tokens >= 0].tolist() == list(tokens) and each.fused_forwards == forwards
            for each, tokens, forwards in zip(unrepaired, self._committed, self._forwards, strict=True)
        ]
        return sum(same) / len(same)


def _figures(model: rf.Model, golds: Sequence[list[int]], decoded: Sequence[Decoded]) -> dict[str, Any]:
    ends = [_end(model, each.tokens) for each in decoded]
    answers = [each.tokens[:end].tolist() for each, end in zip(decoded, ends, strict=True)]
    unchecked = sum(
        int(np.sum(each.origins[:end] == Origin.UNCHECKED)) for each, end in zip(decoded, ends, strict=True)
    )
    forwards, fused = sum(each.forwards for each in decoded), sum(each.fused_forwards for each in decoded)
    return _summary(golds, answers, forwards, fused, unchecked)


def _summary(
    golds: Sequence[list[int]], answers: Sequence[list[int]], forwards: int, fused_forwards: int, unchecked: int
) -> dict[str, Any]:
    right = [answer == gold for answer, gold in zip(answers, golds, strict=True)]
    tokens = sum(map(len, answers))
    return {
        "exact_match": sum(right) / len(right),
        "tokens": tokens,
        "forwards": forwards,
        "fused_forwards": fused_forwards,
        "tokens_per_forward": tokens / forwards,
        "fused_tokens_per_forward": tokens / fused_forwards,
        "unchecked": unchecked,
    }


def _errors(model: rf.Model, golds: Sequence[list[int]], decoded: Sequence[Decoded]) -> dict[str, dict[str, int]]:
    counts = {origin: dict.fromkeys(("tokens", "wrong", "first", "earliest"), 0) for origin in Origin}
    for each, gold in zip(decoded, golds, strict=True):
        end = _end(model, each.tokens)
        for origin in each.origins[:end]:
            counts[Origin(origin)]["tokens"] += 1
        wrong = [i for i in range(end) if i >= len(gold) or each.tokens[i] != gold[i]]
        for i in wrong:
            counts[Origin(each.origins[i])]["wrong"] += 1
        if wrong:
            counts[Origin(each.origins[wrong[0]])]["first"] += 1
            earliest = min(wrong, key=lambda i: (each.order[i], i))
            counts[Origin(each.origins[earliest])]["earliest"] += 1
    return {origin.name.lower(): found for origin, found in counts.items()}


def _end(model: rf.Model, tokens: np.ndarray) -> int:
    """Tokens of a response through its first EOS, or all of them. Before an EOS nothing is missing."""
    eos = np.flatnonzero(np.isin(tokens, model.config.eos_token_ids))
    return int(eos[0]) + 1 if eos.size else len(tokens)
