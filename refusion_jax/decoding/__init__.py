"""Decoding: one compiled loop over a batch, on a static KV buffer, fed by a stream of prompts."""

from refusion_jax.decoding.batching import Job, Stream, decode_jobs, decode_prompts
from refusion_jax.decoding.generation import Answer, Generation, Statistics
from refusion_jax.decoding.layout import Hole, Layout
from refusion_jax.decoding.rules import Rules, SlotScore, Verification

__all__ = [
    "Answer",
    "Generation",
    "Hole",
    "Job",
    "Layout",
    "Rules",
    "SlotScore",
    "Statistics",
    "Stream",
    "Verification",
    "decode_jobs",
    "decode_prompts",
]
