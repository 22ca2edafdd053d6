"""Held-out measurements during a run: loss under fixed draws, and exact match of decoded answers."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from refusion_jax.config import Config, DecodeConfig
from refusion_jax.data import Dataset, make_batches
from refusion_jax.decoding import decode_prompts
from refusion_jax.modeling import Transformer
from refusion_jax.objectives import HybridLoss
from refusion_jax.slots import Batch, batch_from_arrays

EVAL_SEED = 0  # the same views at every evaluation, so that the curve is smooth


def held_out_loss(
    evaluate: Callable[[Any, Batch, jax.Array], HybridLoss], params: Any, dataset: Dataset, config: Config
) -> dict[str, float]:
    """Mean losses over the held-out examples, batches weighted by their number of examples."""
    batches = make_batches(config.data, dataset.held_out, seed=EVAL_SEED, batch_size=config.train.batch_size)
    totals, count = np.zeros(3), 0
    for index in range(batches.batches_in_epoch(0)):
        batch = batch_from_arrays(batches[index])
        examples = int(np.sum(batch.response_lengths > 0))
        loss = jax.device_get(evaluate(params, batch, jnp.int32(EVAL_SEED)))
        totals += examples * np.array([loss.total, loss.ar, loss.mdm])
        count += examples
    return dict(zip(("eval_loss", "eval_ar_loss", "eval_mdm_loss"), (totals / count).tolist(), strict=True))


def held_out_answers(
    module: Transformer, params: Any, dataset: Dataset, config: DecodeConfig, count: int, seed: int = 0
) -> dict[str, float]:
    """Exact match and tokens per forward, decoding the first `count` held-out prompts that fit the model.

    A response is right when it equals the example's token for token, EOS included; tokens are counted up to the first
    EOS.
    """
    prompts, golds = [], []
    for index in range(min(count, len(dataset.held_out))):
        prompt, gold = split_example(dataset, index)
        if len(prompt) + config.rounded_length <= module.config.max_position_embeddings:
            prompts.append(prompt)
            golds.append(gold)
    if not prompts:
        return {}
    result = decode_prompts(module, params, prompts, [config] * len(prompts), seed=seed)
    return {
        "exact_match": exact_match(result.tokens, golds),
        "tokens_per_forward": sum(map(len, result.tokens)) / sum(result.forwards),
    }


def split_example(dataset: Dataset, index: int) -> tuple[list[int], list[int]]:
    """Prompt and response (with EOS) of held-out example `index`, as token IDs."""
    start, stop = dataset.held_out.offsets[index : index + 2]
    tokens = dataset.held_out.tokens[start:stop].tolist()
    length = int(dataset.held_out.prompt_lengths[index])
    return tokens[:length], tokens[length:]


def exact_match(responses: Sequence[Sequence[int]], golds: Sequence[Sequence[int]]) -> float:
    """The share of responses equal to what was expected."""
    return sum(list(r) == list(g) for r, g in zip(responses, golds, strict=True)) / len(golds)
