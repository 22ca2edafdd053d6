"""Held-out measurements during a run: loss under fixed draws, and exact match of decoded answers."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from refusion_jax.config import Config, DecodeConfig, loss_terms
from refusion_jax.data import Dataset, make_batches
from refusion_jax.decoding import Generation, Job, decode_prompts
from refusion_jax.decoding.layout import prepare_layout
from refusion_jax.decoding.method_rows import decode_method
from refusion_jax.methods import Method, without_slots
from refusion_jax.modeling import Transformer
from refusion_jax.sharding import local_rows, put_batch
from refusion_jax.slots import Batch, batch_from_arrays
from refusion_jax.training.step import HeldOutSums

BATCH_SIZE = 32  # prompts decoded at once
EVAL_SEED = 0  # the same views at every evaluation, so that the curve is smooth


def held_out_loss(
    evaluate: Callable[[Any, Batch, jax.Array], HeldOutSums], params: Any, dataset: Dataset, config: Config, mesh: Mesh
) -> dict[str, float]:
    """Mean losses over the held-out examples under `train.eval_draws` draws of each, the same at every evaluation.

    Returns:
      eval_ar_loss: mean over clean targets, in nats. eval_mdm_loss: mean over examples, as in training.
      eval_loss: the weighted sum of both.
      eval_mdm_bound: an upper bound on the responses' negative log-likelihood, in nats per token.
      eval_nats_per_token: the responses' negative log-likelihood or a tighter bound on it, see `make_eval_loss`. What
        is masked gives a bound only under the linear masking schedule, and of "hybrid" with shuffled clean slots.
      An objective without next-token loss has no eval_ar_loss, "autoregressive" neither eval_mdm_loss nor its bound.
    """
    rows = config.train.batch_size
    batches = make_batches(config.data, dataset.held_out, seed=EVAL_SEED, batch_size=rows, rows=local_rows(mesh, rows))
    sums = dict.fromkeys((field.name for field in dataclasses.fields(HeldOutSums)), 0.0)
    for index in range(batches.batches_in_epoch(0)):
        batch = put_batch(batch_from_arrays(batches[index]), mesh, rows)
        for number in range(config.train.eval_draws):
            found = jax.device_get(evaluate(params, batch, jnp.int32(EVAL_SEED + number)))
            sums = {name: total + float(getattr(found, name)) for name, total in sums.items()}
    ar, mdm = sums["ar"] / max(sums["ar_targets"], 1.0), sums["mdm"] / sums["examples"]
    terms = loss_terms(config.train.objective)
    found = {"eval_loss": config.slots.ar_weight * ar + config.slots.mdm_weight * mdm}
    if "ar_loss" in terms:
        found["eval_ar_loss"] = ar
    if "mdm_loss" in terms:
        found |= {"eval_mdm_loss": mdm, "eval_mdm_bound": sums["bound"] / sums["tokens"]}
    return found | {"eval_nats_per_token": sums["nats"] / sums["tokens"]}


def held_out_answers(
    module: Transformer,
    params: Any,
    dataset: Dataset,
    config: DecodeConfig,
    count: int,
    seed: int = 0,
    method: Method | None = None,
) -> dict[str, float]:
    """Exact match and tokens per forward, decoding the first `count` held-out prompts that fit the model.

    Documents have no prompt and are left out. `method` says how to decode, by default with ReFusion's decoder.

    A response is right when it equals the example's token for token up to the first EOS, which is included; tokens are
    counted so far too.
    """
    method = Method() if method is None else method
    config = config if method.name == "refusion" else without_slots(config)
    prompts, golds = [], []
    eos_ids = dataset.tokenizer.eos_token_ids
    for index in range(min(count, len(dataset.held_out))):
        prompt, gold = split_example(dataset, index)
        if prompt and len(prompt) + config.rounded_length <= module.config.context_length:
            prompts.append(prompt)
            golds.append(gold[: next(end for end, token in enumerate(gold, 1) if token in eos_ids)])
    if not prompts:
        return {}
    if method.name == "refusion":
        result = decode_prompts(module, params, prompts, [config] * len(prompts), seed=seed)
    else:
        layouts = [prepare_layout(prompt, config, module.config) for prompt in prompts]
        jobs = [Job(index, 0, layout, config, seed) for index, layout in enumerate(layouts)]
        rows = min(BATCH_SIZE, len(jobs))
        result = Generation.of(list(decode_method(module, params, jobs, method, batch_size=rows)))
    return {
        "exact_match": exact_match(result.tokens, golds),
        "tokens_per_forward": sum(map(len, result.tokens)) / sum(result.forwards),
    }


def split_example(dataset: Dataset, index: int) -> tuple[list[int], list[int]]:
    """Prompt and response of held-out example `index`, as token IDs; with EOS, as often as the response has it."""
    start, stop = dataset.held_out.offsets[index : index + 2]
    tokens = dataset.held_out.tokens[start:stop].tolist()
    length = int(dataset.held_out.prompt_lengths[index])
    return tokens[:length], tokens[length:]


def exact_match(responses: Sequence[Sequence[int]], golds: Sequence[Sequence[int]]) -> float:
    """The share of responses equal to what was expected."""
    return sum(list(r) == list(g) for r, g in zip(responses, golds, strict=True)) / len(golds)
