"""The idea of ReFusion's training as pure functions: partition, mask, reorder, position IDs, targets (paper section 3).

A response is cut into slots of `k` consecutive tokens. Each slot is either clean or masked. In the buffer the prompt
comes first, then the clean slots in random order, then the masked slots in original order; every token keeps its
original position ID. Clean tokens predict the next token of their slot, masked tokens predict themselves. Decoding
meets exactly this layout: finished slots moved ahead of the ones still masked.

Rows may pack several examples; each is a segment, reordered on its own. Everything is per token, so one stable sort by
(segment, prompt / clean / masked, slot rank, slot, offset) reorders any batch.
"""

from collections.abc import Callable
from typing import Any

import flax
import jax
import jax.numpy as jnp

from refusion_jax.config import SlotsConfig
from refusion_jax.modeling.attention import Visibility

NO_TARGET = -100

_PROMPT, _CLEAN, _MASKED = 0, 1, 2

# From t in [0, 1) to the share of slots that is masked, before `epsilon`; all rise from 0 to 1.
MASKING: dict[str, Callable[[jax.Array], jax.Array]] = {
    "linear": lambda t: t,
    "cosine": lambda t: 1 - jnp.cos(jnp.pi / 2 * t),
    "quadratic": jnp.square,
    "square_root": jnp.sqrt,
}


class Batch(flax.struct.PyTreeNode):
    """Packed rows in original order.

    Attributes:
      tokens: (rows, length) int32.
      segment_ids: (rows, length) int32, 1, 2, ... for the row's examples, 0 for padding.
      position_ids: (rows, length) int32, index within the example; for padding within the row.
      prompt_lengths, response_lengths: (rows, segments) int32, 0 where the row has no such segment.
      example_ids, epochs: (rows, segments) int32; with the seed they key the example's random draws.
    """

    tokens: jax.Array
    segment_ids: jax.Array
    position_ids: jax.Array
    prompt_lengths: jax.Array
    response_lengths: jax.Array
    example_ids: jax.Array
    epochs: jax.Array


class Draws(flax.struct.PyTreeNode):
    """The random choices of a training view; the per-token values are equal within a slot.

    Attributes:
      slot_sizes: (rows, segments) int32.
      mask_probabilities: (rows, segments) float32, the `p` of each example.
      mask_uniforms: (rows, length) float32; a slot is masked when its value is below `p`.
      order_keys: (rows, length) float32; clean slots are ordered by this value.
    """

    slot_sizes: jax.Array
    mask_probabilities: jax.Array
    mask_uniforms: jax.Array
    order_keys: jax.Array


class TrainingView(flax.struct.PyTreeNode):
    """What the model is trained on, in buffer order; arrays are (rows, length).

    Attributes:
      tokens: int32, masked slots replaced by the mask token.
      position_ids: int32, original.
      targets: int32, NO_TARGET where there is none.
      is_masked: bool.
      mdm_weights: float32, `1 / p / response_length` at masked positions, else 0.
      is_slot_start: bool, the first token of a slot.
      visibility: causal in buffer order within each segment.
    """

    tokens: jax.Array
    position_ids: jax.Array
    targets: jax.Array
    is_masked: jax.Array
    mdm_weights: jax.Array
    is_slot_start: jax.Array
    visibility: Visibility


def of_segment(values: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """Spreads (rows, segments) values over the tokens (rows, length) of each segment; padding reads the first."""
    return jnp.take_along_axis(values, jnp.maximum(segment_ids - 1, 0), axis=1)


class Places(flax.struct.PyTreeNode):
    """Where tokens stand in their response; arrays are (rows, length), 0 or False outside responses.

    Attributes:
      in_response: bool.
      slot: int32, the number of the token's slot. is_slot_start: bool, whether it is the slot's first token.
    """

    in_response: jax.Array
    slot: jax.Array
    is_slot_start: jax.Array


def places(batch: Batch, slot_sizes: jax.Array) -> Places:
    """Cuts the responses of a batch into slots of the sizes (rows, segments) int32."""
    offset = batch.position_ids - of_segment(batch.prompt_lengths, batch.segment_ids)
    in_response = (offset >= 0) & (batch.segment_ids > 0)
    size = of_segment(slot_sizes, batch.segment_ids)
    return Places(in_response, jnp.where(in_response, offset // size, 0), in_response & (offset % size == 0))


def draw(seed: jax.Array, batch: Batch, config: SlotsConfig) -> Draws:
    """Draws slot size, masking probability, masks and order for every example (paper section 3, training).

    Each draw is keyed by (seed, epoch, example, slot) alone: the same example in the same epoch meets the same draws in
    any row, batch or process.

    Args:
      seed: () int32 or a typed key.
      batch: the examples.
      config: slot sizes to choose from and their weights, and the masking schedule `m` and `epsilon` in
        `p = (1 - epsilon) * m(t) + epsilon`, `t ~ U(0, 1)`.
    """
    schedule = MASKING[config.masking_schedule]
    shares = None
    if config.size_weights:
        shares = jnp.array(config.size_weights, jnp.float32) / sum(config.size_weights)
    root = seed if jnp.issubdtype(seed.dtype, jax.dtypes.prng_key) else jax.random.key(seed)

    def example_draws(epoch: jax.Array, example: jax.Array) -> tuple[jax.Array, ...]:
        key = jax.random.fold_in(jax.random.fold_in(root, epoch), example)
        size_key, t_key, mask_key, order_key = jax.random.split(key, 4)
        size = jax.random.choice(size_key, jnp.array(config.sizes, jnp.int32), p=shares)
        p = (1 - config.epsilon) * schedule(jax.random.uniform(t_key)) + config.epsilon
        return size, p, jax.random.key_data(mask_key), jax.random.key_data(order_key)

    sizes, p, mask_keys, order_keys = jax.vmap(jax.vmap(example_draws))(batch.epochs, batch.example_ids)
    slot = places(batch, sizes).slot

    def slot_uniforms(keys: jax.Array) -> jax.Array:
        segment = jnp.maximum(batch.segment_ids - 1, 0)
        per_token = jnp.take_along_axis(keys, segment[..., None], axis=1)
        fold = jax.vmap(
            jax.vmap(lambda key, j: jax.random.uniform(jax.random.fold_in(jax.random.wrap_key_data(key), j)))
        )
        return fold(per_token, slot)

    order = slot_uniforms(order_keys)
    if config.clean_order == "left_to_right":
        order = jnp.zeros_like(order)
    return Draws(sizes, p, slot_uniforms(mask_keys), order)


def training_view(batch: Batch, draws: Draws, mask_token_id: int) -> TrainingView:
    """Builds the view of a batch under given draws (paper section 3, training).

    Padding goes last, keeps its tokens and has no target.

    Args:
      batch: the examples in original order.
      draws: from `draw`, or recorded ones.
      mask_token_id: what masked tokens are replaced by.
    """
    at = places(batch, draws.slot_sizes)
    in_response, slot = at.in_response, at.slot
    p = of_segment(draws.mask_probabilities, batch.segment_ids)
    is_masked = in_response & (draws.mask_uniforms < p)
    kind = jnp.where(is_masked, _MASKED, jnp.where(in_response, _CLEAN, _PROMPT))

    same_slot = (batch.segment_ids[:, 1:] == batch.segment_ids[:, :-1]) & (slot[:, 1:] == slot[:, :-1])
    has_next = jnp.pad(same_slot, ((0, 0), (0, 1)))
    next_token = jnp.pad(batch.tokens[:, 1:], ((0, 0), (0, 1)))
    clean_target = jnp.where((kind == _CLEAN) & has_next, next_token, NO_TARGET)
    targets = jnp.where(is_masked, batch.tokens, clean_target)
    lengths = of_segment(batch.response_lengths, batch.segment_ids)
    mdm_weights = jnp.where(is_masked, 1 / (p * jnp.maximum(lengths, 1)), 0.0)

    last = jnp.iinfo(jnp.int32).max
    segment_rank = jnp.where(batch.segment_ids > 0, batch.segment_ids, last)
    order_key = jnp.where(kind == _CLEAN, draws.order_keys, 0.0)
    index = jnp.broadcast_to(jnp.arange(batch.tokens.shape[1]), batch.tokens.shape)
    keys = (segment_rank, kind, order_key, slot, index)
    *_, permutation = jax.lax.sort(keys, num_keys=5)

    def reorder(values: jax.Array) -> jax.Array:
        return jnp.take_along_axis(values, permutation, axis=1)

    return TrainingView(
        tokens=reorder(jnp.where(is_masked, mask_token_id, batch.tokens)),
        position_ids=reorder(batch.position_ids),
        targets=reorder(targets),
        is_masked=reorder(is_masked),
        mdm_weights=reorder(mdm_weights),
        is_slot_start=reorder(at.is_slot_start),
        visibility=Visibility(
            segment=reorder(batch.segment_ids),
            order=index.astype(jnp.int32),
            group=jnp.zeros_like(batch.segment_ids),
            in_buffer_order=True,
        ),
    )


def batch_from_arrays(arrays: dict[str, Any]) -> Batch:
    """Wraps the data pipeline's arrays."""
    return Batch(**arrays)
