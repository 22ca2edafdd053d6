"""The projection to an 8B model, by numbers computed by hand."""

import pytest

from benchmarks import compare_projection as projection
from benchmarks.compare_projection import Accelerator, Forward, Measured
from refusion_jax.config import ConfigError, ModelConfig

SMALL = ModelConfig(
    vocab_size=10, hidden_size=4, intermediate_size=6, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, head_dim=4,
)  # fmt: skip
# q and o 4 x 8, k and v 4 x 4, three of 4 x 6: 168 numbers a layer, and 40 of the output embedding.
MATRICES = 2 * 168 + 40


def test_bytes_and_flops_of_a_forward():
    forward = Forward(width=5, cached=7)
    kv_entry = 2 * 2 * 1 * 4
    assert projection.forward_bytes(forward, SMALL) == 2 * (MATRICES + 5 * 4 + 12 * kv_entry)
    assert projection.forward_flops(forward, SMALL) == 5 * 2 * MATRICES + 4 * 2 * 2 * 4 * 5 * 12


def test_the_slower_of_memory_and_arithmetic_decides():
    forward = Forward(width=5, cached=7)
    moved, computed = projection.forward_bytes(forward, SMALL), projection.forward_flops(forward, SMALL)
    slow_memory, slow_arithmetic = Accelerator(1e12, 10.0), Accelerator(10.0, 1e12)
    assert projection.projected_tokens_per_second(slow_memory, forward, 3.0, SMALL) == pytest.approx(30 / moved)
    assert projection.projected_tokens_per_second(slow_arithmetic, forward, 3.0, SMALL) == pytest.approx(30 / computed)


def test_an_8b_model_reads_its_weights_once_per_token():
    """192,937,984 numbers a layer, 151,936 x 4,096 of the output embedding, and 147,456 bytes of KV a token."""
    v5e = projection.ACCELERATORS["v5e"]
    moved = projection.forward_bytes(Forward(1, 768))
    assert moved == pytest.approx(2 * (36 * 192_937_984 + 151_936 * 4_096 + 4_096) + 147_456 * 769)
    assert projection.projected_tokens_per_second(v5e, Forward(1, 768), 1) == pytest.approx(819e9 / moved)
    whole = Forward(1_024, 0)
    computed = 1_024 * (2 * 36 * 192_937_984 + 2 * 151_936 * 4_096 + 4 * 36 * 32 * 128 * 1_024)
    assert projection.projected_tokens_per_second(v5e, whole, 1) == pytest.approx(197e12 / computed)


def test_accelerators_are_those_stated():
    stated = {name: (chip.bandwidth / 1e9, chip.flops / 1e12) for name, chip in projection.ACCELERATORS.items()}
    assert stated == {"v5e": (819, 197), "v5p": (2765, 459), "v6e": (1640, 918), "H200": (4800, 989)}


def test_means_are_over_forwards_and_split_by_what_was_whole():
    # Row 1: 2 forwards, of which 1 over prompt 10 and response 8; the other computes 4 and reads 14.
    # Row 2: 3 forwards, 1 over 20 + 8; the others compute 4 and read 24 each.
    measured = Measured.of(8, [10, 20], [2, 3], [18 + 4, 28 + 4 + 4], [14, 48], [1, 1])
    assert measured == Measured(
        gen_length=8,
        prompt_length=(2 * 10 + 3 * 20) / 5,
        prompt_width=(10 + 20) / 5,
        response_width=pytest.approx((8 + 4 + 8 + 4 + 4) / 5),
        prompt_cached=(10 + 20 + 20) / 5,
        response_cached=pytest.approx((4 + 4 + 4) / 5),
    )
    with pytest.raises(ConfigError, match="No row has a forward"):
        Measured.of(8, [10], [0], [0], [0], [0])


BUFFERED = Measured(64, 20.0, 0.0, 24.0, 20.0, 16.0)


@pytest.mark.parametrize(
    ("system", "measured", "expected"),
    [
        ("autoregressive", Measured(64, 20.0, 0.0, 1.0, 20.0, 30.0), Forward(1, 512 + 8 * 30)),
        ("masked_diffusion", Measured(64, 20.0, 20.0, 64.0, 0.0, 0.0), Forward(1_024, 0)),
        ("cached_masked_diffusion", Measured(64, 20.0, 5.0, 28.0, 15.0, 36.0), Forward(128 + 224, 384 + 288)),
        ("refusion", BUFFERED, Forward(8 * 24, 512 + 8 * 16)),
        ("block_diffusion", BUFFERED, Forward(24, 512 + 8 * 16)),
    ],
)
def test_forwards_are_scaled_by_what_they_belong_to(system, measured, expected):
    assert projection.scaled(system, measured) == expected


def test_other_lengths_and_other_systems():
    assert projection.scaled("refusion", BUFFERED, 100, 32) == Forward(12, 100 + 8)
    with pytest.raises(ConfigError, match=r"There is no system 'block'.* Did you mean 'block_diffusion'"):
        projection.scaled("block", BUFFERED)
