"""What each training objective shows the model and asks of it: `make_view`, or `build_view` of given draws.

| objective         | shows                             | visibility             | asks for                        |
| ----------------- | --------------------------------- | ---------------------- | ------------------------------- |
| `hybrid`          | slots reordered, some of masks    | causal in buffer order | next tokens of clean slots, the |
|                   |                                   |                        | masked tokens                   |
| `autoregressive`  | the tokens                        | causal                 | next tokens                     |
| `llada`           | the tokens, some of them masks    | in both directions     | the masked tokens               |
| `dream`           | the tokens, some of them masks    | in both directions     | the masked tokens, each at the  |
|                   |                                   |                        | place before its own            |
| `block_diffusion` | the tokens, then the responses a  | in both directions in  | the masked tokens               |
|                   | second time, some tokens masks    | a block, else causal   |                                 |

All are one `TrainingView`, so that model, loss and trainer do not know the difference. Only responses have targets. The
denoising ones weigh a masked token by `1 / p / response_length`: LLaDA (arXiv 2502.09992, equation 5), Dream (arXiv
2508.15487) and BD3-LM (arXiv 2503.09573, equation 8) with the linear schedule. `p` is an example's, of
`block_diffusion` a block's own.

What stands behind a response's end the denoising objectives learn where the data say so: `data.pad_responses`.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from refusion_jax.config import OBJECTIVES, SlotsConfig
from refusion_jax.modeling.attention import Visibility
from refusion_jax.slots import MASKING, NO_TARGET, Batch, Draws, TrainingView, draw, of_segment, places, training_view


def make_view(objective: str, seed: jax.Array, batch: Batch, config: SlotsConfig, mask_token_id: int) -> TrainingView:
    """Draws what an objective shows of a batch.

    Args:
      objective: one of `config.OBJECTIVES`.
      seed: () int32 or a typed key; with an example's epoch and ID, all that its draws depend on.
      batch: the examples, (rows, length).
      config: slot or block sizes and the masking schedule.
      mask_token_id: what masked tokens are replaced by.

    Returns:
      arrays of (rows, length); of `block_diffusion` (rows, 2 * length).
    """
    return build_view(objective, batch, _DRAWS[objective](seed, batch, config), mask_token_id)


def build_view(objective: str, batch: Batch, draws: Draws, mask_token_id: int) -> TrainingView:
    """Builds what an objective shows of a batch under given draws.

    Args:
      objective: one of `config.OBJECTIVES`.
      batch: the examples, (rows, length).
      draws: of slots for "hybrid", of single tokens for "llada" and "dream"; of single tokens for "block_diffusion"
        too, but with the blocks' lengths as `slot_sizes`, and `mask_probabilities` (rows, length) of each token's
        block. "autoregressive" has no use for any.
      mask_token_id: what masked tokens are replaced by.

    Returns:
      arrays of (rows, length); of `block_diffusion` (rows, 2 * length).
    """
    return _BUILDERS[objective](batch, draws, mask_token_id)


def autoregressive_view(batch: Batch) -> TrainingView:
    """The view of "autoregressive", in which nothing is random and nothing masked; arrays of (rows, length)."""
    in_response = places(batch, jnp.ones_like(batch.prompt_lengths)).in_response
    is_target = _at_place_before(batch, in_response, False)
    nothing = jnp.zeros_like(in_response)
    return TrainingView(
        tokens=batch.tokens,
        position_ids=batch.position_ids,
        targets=jnp.where(is_target, _at_place_before(batch, batch.tokens, 0), NO_TARGET),
        is_masked=nothing,
        mdm_weights=nothing.astype(jnp.float32),
        is_slot_start=nothing,
        visibility=_visibility(batch.segment_ids, None),
    )


def _undrawn(batch: Batch, draws: Draws, mask_token_id: int) -> TrainingView:
    del draws, mask_token_id
    return autoregressive_view(batch)


def _llada(batch: Batch, draws: Draws, mask_token_id: int) -> TrainingView:
    at = places(batch, draws.slot_sizes)
    p = of_segment(draws.mask_probabilities, batch.segment_ids)
    is_masked = at.in_response & (draws.mask_uniforms < p)
    return TrainingView(
        tokens=jnp.where(is_masked, mask_token_id, batch.tokens),
        position_ids=batch.position_ids,
        targets=jnp.where(is_masked, batch.tokens, NO_TARGET),
        is_masked=is_masked,
        mdm_weights=_mdm_weights(batch, is_masked, p),
        is_slot_start=at.is_slot_start,
        visibility=_visibility(batch.segment_ids, jnp.zeros_like(batch.tokens)),
    )


def _dream(batch: Batch, draws: Draws, mask_token_id: int) -> TrainingView:
    view = _llada(batch, draws, mask_token_id)
    return view.replace(
        targets=_at_place_before(batch, view.targets, NO_TARGET),
        is_masked=_at_place_before(batch, view.is_masked, False),
        mdm_weights=_at_place_before(batch, view.mdm_weights, 0.0),
        is_slot_start=_at_place_before(batch, view.is_slot_start, False),
    )


def _block_diffusion(batch: Batch, draws: Draws, mask_token_id: int) -> TrainingView:
    at = places(batch, draws.slot_sizes)
    is_masked = at.in_response & (draws.mask_uniforms < draws.mask_probabilities)
    # A clean block sees what is before it and itself; its noisy copy what is before it, and itself by its group.
    prompt_lengths = of_segment(batch.prompt_lengths, batch.segment_ids)
    before = jnp.where(at.in_response, prompt_lengths + 2 * at.slot, batch.position_ids)
    own_group = jnp.where(at.in_response, at.slot + 1, 0)
    clean, noisy = jnp.zeros_like(own_group), own_group
    no_token = jnp.where(at.in_response, batch.segment_ids, 0)  # prompts have no noisy copy
    return TrainingView(
        tokens=_twice(batch.tokens, jnp.where(is_masked, mask_token_id, batch.tokens)),
        position_ids=_twice(batch.position_ids, batch.position_ids),
        targets=_twice(jnp.full_like(batch.tokens, NO_TARGET), jnp.where(is_masked, batch.tokens, NO_TARGET)),
        is_masked=_twice(jnp.zeros_like(is_masked), is_masked),
        mdm_weights=_twice(
            jnp.zeros(is_masked.shape, jnp.float32), _mdm_weights(batch, is_masked, draws.mask_probabilities)
        ),
        is_slot_start=_twice(jnp.zeros_like(is_masked), at.is_slot_start),
        visibility=Visibility(
            segment=_twice(batch.segment_ids, no_token),
            order=_twice(before + at.in_response, before),
            group=_twice(clean, noisy),
        ),
    )


_BUILDERS: dict[str, Callable[[Batch, Draws, int], TrainingView]] = dict(
    zip(OBJECTIVES, (training_view, _undrawn, _llada, _dream, _block_diffusion), strict=True)
)


def fully_clean_view(seed: jax.Array, batch: Batch, config: SlotsConfig) -> TrainingView:
    """The hybrid view with no slot masked: all of them in random order, each seeing those before it."""
    draws = draw(seed, batch, config)
    none = draws.replace(
        mask_probabilities=jnp.ones_like(draws.mask_probabilities), mask_uniforms=jnp.ones_like(draws.mask_uniforms)
    )
    return training_view(batch, none, 0)


def num_response_tokens(batch: Batch, eos_token_ids: tuple[int, ...]) -> jax.Array:
    """() int32, response tokens up to the first EOS each: those that `data.pad_responses` added do not count."""
    in_response = places(batch, jnp.ones_like(batch.prompt_lengths)).in_response
    is_eos = in_response & jnp.isin(batch.tokens, jnp.array(eos_token_ids))
    same_segment = batch.segment_ids[:, 1:] == batch.segment_ids[:, :-1]
    is_padding = jnp.pad(is_eos[:, 1:] & is_eos[:, :-1] & same_segment, ((0, 0), (1, 0)))
    return jnp.sum(in_response & ~is_padding)


def _token_draws(seed: jax.Array, batch: Batch, config: SlotsConfig) -> Draws:
    return draw(seed, batch, dataclasses.replace(config, sizes=(1,), size_weights=()))


def _block_draws(seed: jax.Array, batch: Batch, config: SlotsConfig) -> Draws:
    """Block sizes per example, masking probabilities (rows, length) per block, and uniforms per token."""
    by_block = draw(seed, batch, dataclasses.replace(config, clean_order="shuffled"))
    by_token = _token_draws(seed, batch, config)
    # Nothing is ordered here, so the uniforms that slots are ordered by serve as the blocks' `t`.
    p = (1 - config.epsilon) * MASKING[config.masking_schedule](by_block.order_keys) + config.epsilon
    return by_token.replace(slot_sizes=by_block.slot_sizes, mask_probabilities=p)


# What "autoregressive" draws nobody reads, so that the compiler leaves it out.
_DRAWS: dict[str, Callable[[jax.Array, Batch, SlotsConfig], Draws]] = dict(
    zip(OBJECTIVES, (draw, draw, _token_draws, _token_draws, _block_draws), strict=True)
)


def _mdm_weights(batch: Batch, is_masked: jax.Array, p: jax.Array) -> jax.Array:
    lengths = of_segment(batch.response_lengths, batch.segment_ids)
    return jnp.where(is_masked, 1 / (p * jnp.maximum(lengths, 1)), 0.0)


def _at_place_before(batch: Batch, values: jax.Array, nothing: float) -> jax.Array:
    """What the next token of the same example has; `nothing` at an example's last token."""
    has_next = jnp.pad(batch.segment_ids[:, 1:] == batch.segment_ids[:, :-1], ((0, 0), (0, 1)))
    return jnp.where(has_next, jnp.pad(values[:, 1:], ((0, 0), (0, 1))), jnp.asarray(nothing, values.dtype))


def _twice(clean: jax.Array, noisy: jax.Array) -> jax.Array:
    return jnp.concatenate([clean, noisy], axis=1)


def _visibility(segment: jax.Array, order: jax.Array | None) -> Visibility:
    """Within each example; causal without an order."""
    index = jnp.broadcast_to(jnp.arange(segment.shape[1], dtype=jnp.int32), segment.shape)
    return Visibility(
        segment=segment,
        order=index if order is None else order,
        group=jnp.zeros_like(segment),
        in_buffer_order=order is None,
    )
