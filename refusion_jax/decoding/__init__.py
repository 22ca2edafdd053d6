"""Decoding: one compiled loop over a batch, on a static KV buffer."""

from refusion_jax.decoding.batching import Generation, decode_prompts

__all__ = ["Generation", "decode_prompts"]
