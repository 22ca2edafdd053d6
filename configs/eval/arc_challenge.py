"""ARC-Challenge with the slots, blocks and thresholds of the paper's evaluation."""

from refusion_jax.config import DecodeConfig
from refusion_jax.evaluation.settings import EvalConfig


def get_config() -> EvalConfig:
    """Returns the settings of the benchmark."""
    return EvalConfig(
        tasks=("arc_challenge*",),
        decode=DecodeConfig(gen_length=512, slot_size=8, serial_num_blocks=64, slot_threshold=0.8, token_threshold=0.1),
    )
