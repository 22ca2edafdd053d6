"""The projection to an 8B model, by numbers computed by hand."""

from types import SimpleNamespace

import pytest

from benchmarks import compare_projection as projection
from benchmarks.compare_loads import loads_of
from benchmarks.compare_projection import Accelerator, Forward, Load
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
    assert projection.forward_seconds(slow_memory, forward, SMALL) == pytest.approx(moved / 10)
    assert projection.forward_seconds(slow_arithmetic, forward, SMALL) == pytest.approx(computed / 10)


def test_an_8b_model_reads_its_weights_once_per_token():
    """192,937,984 numbers a layer, 151,936 x 4,096 of the output embedding, and 147,456 bytes of KV a token."""
    v5e = projection.ACCELERATORS["v5e"]
    moved = projection.forward_bytes(Forward(1, 768))
    assert moved == pytest.approx(2 * (36 * 192_937_984 + 151_936 * 4_096 + 4_096) + 147_456 * 769)
    assert projection.forward_seconds(v5e, Forward(1, 768)) == pytest.approx(moved / 819e9)
    computed = 1_024 * (2 * 36 * 192_937_984 + 2 * 151_936 * 4_096 + 4 * 36 * 32 * 128 * 1_024)
    assert projection.forward_seconds(v5e, Forward(1_024, 0)) == pytest.approx(computed / 197e12)


def test_accelerators_are_those_stated():
    stated = {name: (chip.bandwidth / 1e9, chip.flops / 1e12) for name, chip in projection.ACCELERATORS.items()}
    assert stated == {"v5e": (819, 197), "v5p": (2765, 459), "v6e": (1640, 918), "H200": (4800, 989)}


@pytest.mark.parametrize(
    ("load", "expected"),
    [
        (Load("causal", 1, 10, 1), Forward(1, 512 + 80)),
        (Load("whole", 64, 0, 1), Forward(1_024, 0)),
        (Load("rest", 40, 24, 1), Forward(320, 512 + 192)),
        (Load("window", 8, 56, 1), Forward(8, 1_016)),
        (Load("slots", 48, 16, 1), Forward(384, 512 + 128)),
        (Load("block", 12, 20, 1), Forward(12, 512 + 160)),
    ],
    ids=lambda value: value.kind if isinstance(value, Load) else None,
)
def test_forwards_are_scaled_by_what_they_compute(load, expected):
    """A response of 64 becomes one of 512, eight times as long."""
    assert projection.scaled(load, 64) == expected


def test_a_kind_that_is_none():
    with pytest.raises(ConfigError, match=r"There is no kind 'slot' of forwards to project\. Did you mean 'slots'"):
        projection.scaled(Load("slot", 1, 1, 1), 64)
    with pytest.raises(ConfigError, match="No row has a forward, so there is nothing to project"):
        projection.projected_tokens_per_second(projection.ACCELERATORS["v6e"], [], 64, 1.0)


def test_every_kind_of_forward_takes_its_own_time():
    chip = projection.ACCELERATORS["v5e"]
    wide, narrow = Load("whole", 64, 0, 1), Load("window", 8, 56, 3)
    seconds = [projection.forward_seconds(chip, projection.scaled(load, 64)) for load in (wide, narrow)]
    got = projection.projected_tokens_per_second(chip, [wide, narrow], 64, 2.0)
    assert got == pytest.approx(2 / ((seconds[0] + 3 * seconds[1]) / 4))
    mean = projection.mean_forward([wide, narrow], 64)
    assert mean == Forward((1_024 + 3 * 8) / 4, 3 * 1_016 / 4)
    assert got < 2 / projection.forward_seconds(chip, mean)


def test_a_prompt_is_computed_once_where_it_is_kept():
    chip = projection.ACCELERATORS["v6e"]
    one = projection.forward_seconds(chip, projection.scaled(Load("causal", 1, 10, 1), 64))
    prompt = projection.forward_seconds(chip, Forward(512, 0))
    got = projection.projected_tokens_per_second(chip, [Load("causal", 1, 10, 5)], 64, 1.0)
    assert got == pytest.approx(512 / (512 * one + prompt))


# ---- which forwards there were -------------------------------------------------------------------------------------


def answers(**columns):
    return SimpleNamespace(**columns)


def count(settings, method, found, needed=0, cached=0, prompts=(5,)):
    statistics = SimpleNamespace(needed_positions=needed, cached=cached)
    return loads_of({"gen_length": 8} | settings, method, prompts, found, statistics, (1,))


def test_forwards_from_left_to_right():
    found = count({}, {"name": "autoregressive"}, answers(forwards=[2, 1]))
    assert found == [Load("causal", 1, 0, 2), Load("causal", 1, 1, 1)]


def test_forwards_without_and_with_a_cache():
    assert count({}, {"name": "llada"}, answers(forwards=[3, 4])) == [Load("whole", 8, 0, 7)]
    # Two blocks of four begun: two forwards over 5 + 8 tokens; two more of a window of 4, which read the other 9.
    found = answers(forwards=[4], position_ids=[[5, 6, 7, 8, 9, 10]])
    method = {"name": "dream", "block_length": 4, "cache": "dual"}
    expected = [Load("whole", 8, 0, 2), Load("window", 4, 4, 2)]
    assert count({}, method, found, needed=2 * 13 + 2 * 4, cached=2 * 9) == expected
    assert count({}, method | {"cache": "prefix"}, found, 2 * 13 + 2 * 4, 2 * 9)[1].kind == "rest"


def test_forwards_of_blocks():
    assert count({}, {"name": "block_diffusion"}, answers(forwards=[4]), needed=24, cached=32) == [
        Load("block", 6, 3, 4)
    ]


def test_forwards_of_slots():
    """Slots of two: the first is committed by forward 0, the third, with EOS, by 1, the second by 2; one is dropped."""
    settings = {"algorithm": "self_correcting", "slot_size": 2}
    found = answers(forwards=[3], position_ids=[[5, 6, 7, 8, 9]], committed=[[7, 7, 7, 7, 1]], order=[[0, 0, 2, 2, 1]])
    expected = [Load("slots", 2, 3, 1), Load("slots", 6, 2, 1), Load("slots", 8, 0, 1)]
    assert count(settings, {"name": "refusion"}, found) == expected
    paper = count(settings | {"algorithm": "paper"}, {"name": "refusion"}, found, needed=12)
    assert paper == [Load("slots", 4, (2 + 2 + 1) / 3, 3)]
