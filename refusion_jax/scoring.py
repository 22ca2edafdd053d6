"""Log-likelihoods of rows of one request each, as pure functions: what one forward shows, asks for, and finds.

`left_to_right` and `masked` lay rows out, the latter under `draw_masks`; `score` runs the forward and sums.
"""

import functools
from typing import Any

import flax
import jax
import jax.numpy as jnp

from refusion_jax.decoding.placement import split_rows
from refusion_jax.modeling import Transformer
from refusion_jax.modeling.attention import Visibility
from refusion_jax.sharding import constrain_whole, row_shares
from refusion_jax.slots import NO_TARGET, Batch, Draws, places
from refusion_jax.views import autoregressive_view, build_view

ALL_MASKED = -1  # the number of the draw that masks the whole response
CHUNK = 512  # positions whose logits exist at a time, on each device


class Rows(flax.struct.PyTreeNode):
    """What a batch scores, one (request, draw) pair per row.

    Attributes:
      tokens: (rows, length) int32, prompt, response, padding.
      prompt_lengths, response_lengths: (rows,) int32; both 0 in an idle row.
      draws: (rows,) int32, the number of the row's draw, or ALL_MASKED.
    """

    tokens: jax.Array
    prompt_lengths: jax.Array
    response_lengths: jax.Array
    draws: jax.Array


class Questions(flax.struct.PyTreeNode):
    """What one forward is shown and asked for; arrays are (rows, places).

    Attributes:
      tokens, position_ids, visibility: what it is shown.
      targets: int32, the token that a place is asked for, NO_TARGET where none.
      weights: float32, what the place's cross-entropy counts.
    """

    tokens: jax.Array
    position_ids: jax.Array
    visibility: Visibility
    targets: jax.Array
    weights: jax.Array


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def score(
    module: Transformer, way: tuple[str, str], size: int, params: Any, rows: Rows, seed: jax.Array, num_draws: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Runs one forward over the rows.

    Args:
      module, params: the model.
      way: the objective, and "left_to_right" or "bound".
      size: tokens of a slot of "hybrid", or of a block of "block_diffusion"; 1 elsewhere.
      rows: what to score.
      seed, num_draws: () int32, of `draw_masks`.

    Returns:
      nats: (rows,) float32, weighted sums of cross-entropies.
      is_greedy: (rows,) bool, whether every token that is asked for is the most probable one.
    """
    objective, estimate = way
    batch = as_batch(split_rows(rows))
    if estimate == "left_to_right":
        asked = left_to_right(objective, size, batch, module.config.mask_token_id)
    else:
        draws = draw_masks(objective, size, batch, rows.draws, seed, num_draws)
        asked = masked(objective, batch, draws, module.config.mask_token_id)
    hidden, _ = module.apply({"params": params}, asked.tokens, asked.position_ids, asked.visibility, method="encode")
    hidden = hidden.reshape(*asked.tokens.shape, -1)
    return constrain_whole(_compare(module, params, hidden, asked.targets, asked.weights))


def as_batch(rows: Rows) -> Batch:
    """The rows as the training views take them, of one segment each."""
    index = jnp.broadcast_to(jnp.arange(rows.tokens.shape[1], dtype=jnp.int32), rows.tokens.shape)
    prompt_lengths, response_lengths = rows.prompt_lengths[:, None], rows.response_lengths[:, None]
    return Batch(
        tokens=rows.tokens,
        segment_ids=(index < prompt_lengths + response_lengths).astype(jnp.int32),
        position_ids=index,
        prompt_lengths=prompt_lengths,
        response_lengths=response_lengths,
        example_ids=jnp.zeros_like(prompt_lengths),  # these two key draws that nobody makes here
        epochs=jnp.zeros_like(prompt_lengths),
    )


def left_to_right(objective: str, slot_size: int, batch: Batch, mask_token_id: int) -> Questions:
    """What the exact likelihood asks for: next tokens; of "hybrid" within slots, whose first tokens masks predict.

    Those masks stand behind the tokens, one for each slot, at the position of the slot's first token. Each sees what is
    before its slot, and itself: all that a slot's first mask sees when slots are decoded from left to right.
    """
    if objective == "autoregressive":
        view = autoregressive_view(batch)
        weights = (view.targets != NO_TARGET).astype(jnp.float32)
        return Questions(view.tokens, view.position_ids, view.visibility, view.targets, weights)
    length = batch.tokens.shape[1]
    at = places(batch, jnp.full_like(batch.prompt_lengths, slot_size))
    is_inside = _of_next(at.in_response & ~at.is_slot_start)
    slot = jnp.arange(-(-length // slot_size), dtype=jnp.int32)
    exists = slot * slot_size < batch.response_lengths
    start = jnp.where(exists, batch.prompt_lengths + slot * slot_size, 0)
    targets = [
        jnp.where(is_inside, _of_next(batch.tokens), NO_TARGET),
        jnp.where(exists, jnp.take_along_axis(batch.tokens, start, axis=1), NO_TARGET),
    ]
    joined = functools.partial(jnp.concatenate, axis=1)
    asked = joined(targets)
    return Questions(
        tokens=joined([batch.tokens, jnp.full_like(start, mask_token_id)]),
        position_ids=joined([batch.position_ids, start]),
        # A mask's order lies between those of the tokens around it; its group hides it from all others.
        visibility=Visibility(
            segment=joined([batch.segment_ids, exists.astype(jnp.int32)]),
            order=joined([2 * batch.position_ids + 1, 2 * start]),
            group=joined([jnp.zeros_like(batch.tokens), jnp.broadcast_to(slot + 1, start.shape)]),
        ),
        targets=asked,
        weights=(asked != NO_TARGET).astype(jnp.float32),
    )


def masked(objective: str, batch: Batch, draws: Draws, mask_token_id: int) -> Questions:
    """What one draw of the bound asks for: the masked tokens, in the objective's training view."""
    view = build_view(objective, batch, draws, mask_token_id)
    return Questions(
        tokens=view.tokens,
        position_ids=view.position_ids,
        visibility=view.visibility,
        targets=jnp.where(view.is_masked, view.targets, NO_TARGET),
        weights=view.mdm_weights * batch.response_lengths,  # the views' weights are means over the response
    )


def draw_masks(
    objective: str, size: int, batch: Batch, numbers: jax.Array, seed: jax.Array, num_draws: jax.Array
) -> Draws:
    """Draws the masks of the bound, exactly `m` of `n` units: slots of "hybrid", else tokens, of each block its own.

    Draw `i` of `D` has `m = 1 + floor(n * u)` with `u = (i / D + U) mod 1`: over the draws an equally spaced grid with
    one random offset `U`, of each block its own. Which units are masked, and the order of clean slots, are keyed by
    (seed, draw, unit) alone.

    Args:
      objective, size: as of `score`.
      batch: of one example per row.
      numbers: (rows,) int32, of the draw `i`; ALL_MASKED has `m = n`.
      seed, num_draws: () int32, the latter `D`.
    """
    by_slot, by_block = objective == "hybrid", objective == "block_diffusion"
    rows, length = batch.tokens.shape
    at = places(batch, jnp.full_like(batch.prompt_lengths, size if by_slot else 1))
    of_group = size if by_block else -(-length // size) if by_slot else length
    groups = -(-length // size) if by_block else 1
    unit = jnp.arange(groups * of_group, dtype=jnp.int32).reshape(groups, of_group)
    num_units = -(-batch.response_lengths // (size if by_slot else 1))
    exists = unit < num_units[..., None]
    total = jnp.maximum(jnp.sum(exists, axis=-1), 1)

    offset_key, mask_key, order_key = jax.random.split(jax.random.key(seed), 3)
    offsets = _uniforms(offset_key, jnp.arange(groups))
    share = (numbers[:, None] / num_draws + offsets) % 1
    m = jnp.minimum(1 + jnp.floor(total * share).astype(jnp.int32), total)
    m = jnp.where(numbers[:, None] == ALL_MASKED, total, m)

    of_draw = jax.vmap(lambda key, number: _uniforms(jax.random.fold_in(key, number), unit), in_axes=(None, 0))
    number = jnp.maximum(numbers, 0)
    rank = jnp.argsort(jnp.argsort(jnp.where(exists, of_draw(mask_key, number), 2.0), axis=-1), axis=-1)

    def of_token(units: jax.Array) -> jax.Array:
        units = jnp.broadcast_to(units, (rows, groups, of_group)).reshape(rows, -1)
        return jnp.take_along_axis(units, at.slot, axis=1)

    probabilities = m / total
    return Draws(
        slot_sizes=jnp.full_like(batch.prompt_lengths, size),
        mask_probabilities=of_token(probabilities[..., None]) if by_block else probabilities,
        mask_uniforms=of_token((rank + 0.5) / total[..., None]),  # m of them are below m / n
        order_keys=of_token(of_draw(order_key, number)),
    )


def _uniforms(key: jax.Array, indices: jax.Array) -> jax.Array:
    """Float32 in [0, 1), each keyed by its index."""
    flat = jax.vmap(lambda index: jax.random.uniform(jax.random.fold_in(key, index)))(indices.reshape(-1))
    return flat.reshape(indices.shape)


def _of_next(values: jax.Array) -> jax.Array:
    """What the next place has; 0 or False at the last."""
    return jnp.pad(values[:, 1:], ((0, 0), (0, 1)))


def _compare(
    module: Transformer, params: Any, hidden: jax.Array, targets: jax.Array, weights: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Weighted cross-entropy, and whether all targets are most probable, of each row of hidden (rows, places, width).

    Logits exist for a few places of every row at a time, those with a target first, and for no others.
    """
    rows, length = targets.shape
    columns = min(max(CHUNK * row_shares(jax.sharding.get_abstract_mesh()) // rows, 1), length)
    is_asked = targets != NO_TARGET
    counts = jnp.sum(is_asked, axis=1)
    order = jnp.pad(jnp.argsort(~is_asked, axis=1, stable=True), ((0, 0), (0, -length % columns)))

    def add(number: jax.Array, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        at = jax.lax.dynamic_slice_in_dim(order, number * columns, columns, axis=1)
        is_target = number * columns + jnp.arange(columns) < counts[:, None]
        wanted, weight = (jnp.take_along_axis(values, at, axis=1) for values in (targets, weights))
        states = jnp.take_along_axis(hidden, at[..., None], axis=1)
        logits = module.apply({"params": params}, states, method="unembed")
        # The target's own logit by a masked sum: the vocabulary may be split over devices.
        of_target = jnp.sum(jnp.where(wanted[..., None] == jnp.arange(logits.shape[-1]), logits, 0.0), axis=-1)
        losses = jax.nn.logsumexp(logits, axis=-1) - of_target
        is_best = jnp.argmax(logits, axis=-1) == wanted
        nats, greedy = sums
        return (
            nats + jnp.sum(jnp.where(is_target, weight * losses, 0.0), axis=1),
            greedy & jnp.all(is_best | ~is_target, axis=1),
        )

    start = split_rows((jnp.zeros(rows, jnp.float32), jnp.ones(rows, bool)))
    return jax.lax.fori_loop(0, -(-jnp.max(counts) // columns), add, start)
