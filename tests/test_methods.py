"""Methods of decoding: what goes together, what a checkpoint takes, and how blocks and steps divide a response."""

import pytest

from refusion_jax.config import OBJECTIVES, ConfigError, DecodeConfig
from refusion_jax.methods import METHOD_OF, METHODS, OBJECTIVE_OF, Method, choose_method, methods_of, settings_of

LLADA = {"name": "llada"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "bert"}, "method.name is 'bert'"),
        ({"name": 3}, "method.name is 3"),
        (
            {"block_length": 4},
            "method.block_length is 4, but method.name is 'refusion'; it belongs to llada, dream, bl",
        ),
        ({"name": "autoregressive", "steps": 4}, "method.steps is 4, but method.name is 'autoregressive'"),
        ({"name": "autoregressive", "ordering": "margin"}, "method.ordering is 'margin', but"),
        ({"name": "block_diffusion", "cache": "dual"}, "method.cache is 'dual', but method.name is 'block_diffusion'"),
        ({"name": "block_diffusion", "guidance": 1.0}, "it belongs to llada, dream: leave it out"),
        (LLADA | {"steps": -1}, "method.steps is -1"),
        (LLADA | {"block_length": 1.5}, "method.block_length is 1.5"),
        (LLADA | {"threshold": 1.5}, r"method.threshold is 1.5; a score lies in \[0, 1\]"),
        (LLADA | {"threshold": 1e-40}, "threshold is 1e-40; a score lies in .*: give 0 for none, or at least 1e-30"),
        (LLADA | {"factor": 1e6}, "method.factor is 1000000.0; it can be at most 100,000"),
        (LLADA | {"guidance": 1e6, "unconditional": "mask"}, "method.guidance is 1000000.0; it can be at most"),
        (LLADA | {"ordering": "best"}, "method.ordering is 'best'"),
        (LLADA | {"cache": "all"}, "method.cache is 'all'"),
        (LLADA | {"steps": 4, "threshold": 0.5}, "method.steps and method.threshold are set; each says"),
        (LLADA | {"factor": 1.0, "threshold": 0.5}, "method.threshold and method.factor are set"),
        (LLADA | {"ordering": "random", "factor": 1.0}, "method.ordering is 'random', which has no scores"),
        (LLADA | {"guidance": 1.0}, "method.guidance is 1 without an unconditional prompt"),
        (LLADA | {"unconditional": "mask"}, "method.unconditional is 'mask' without guidance"),
        (LLADA | {"unconditional": "none", "guidance": 1.0}, "method.unconditional is 'none'"),
        (LLADA | {"unconditional": "mask", "guidance": 1.0, "cache": "dual"}, "method.guidance is 1 with method.cache"),
    ],
)
def test_what_does_not_go_together_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        Method(**settings)


def test_every_method_is_for_one_objective():
    assert [Method(name).objective for name in METHODS] == list(OBJECTIVES)
    assert {METHOD_OF[OBJECTIVE_OF[name]] for name in METHODS} == set(METHODS)


def test_the_ordering_is_that_of_the_system():
    assert [Method(name).scores for name in ("llada", "dream", "block_diffusion")] == [
        "confidence", "entropy", "confidence",
    ]  # fmt: skip
    assert Method("dream", ordering="margin").scores == "margin"


@pytest.mark.parametrize(
    ("block_length", "steps", "gen_length", "expected"),
    [(0, 0, 12, (12, 12)), (4, 0, 12, (4, 4)), (4, 6, 12, (4, 2)), (4, 3, 12, (4, 1)), (0, 5, 12, (12, 5))],
)
def test_blocks_and_steps_share_a_response(block_length, steps, gen_length, expected):
    assert Method("llada", block_length=block_length, steps=steps).blocks(gen_length) == expected


@pytest.mark.parametrize(
    ("block_length", "steps", "gen_length", "message"),
    [
        (8, 0, 12, r"block_length is 8, which does not divide gen_length \(12\): use gen_length 8 or 16"),
        (16, 0, 12, "use gen_length 16, or another"),
        (4, 5, 12, "steps is 5, which 3 blocks of 4 tokens cannot share equally.*: use one of 3, 6, 9, 12."),
        (4, 2, 12, "use one of 3, 6, 9, 12."),
        (0, 64, 32, r"use one of 1, 2, 3, 4, 5, 6, \.\.\., 30, 31, 32."),
    ],
)
def test_what_does_not_divide_is_refused_with_what_does(block_length, steps, gen_length, message):
    with pytest.raises(ConfigError, match=message):
        Method("block_diffusion", block_length=block_length, steps=steps).blocks(gen_length)


# ---- which method a checkpoint takes -------------------------------------------------------------------------------


def test_by_default_a_checkpoint_is_decoded_as_it_was_trained_for():
    assert [choose_method(objective, block_lengths=(4,)).name for objective in OBJECTIVES] == list(METHODS)
    assert choose_method("").name == "refusion"
    assert methods_of("") == ("refusion", "autoregressive")
    method = Method("dream", steps=4)
    assert choose_method("dream", method) is choose_method("dream", method, "dream") is method
    assert choose_method("", Method("autoregressive")).name == "autoregressive"


@pytest.mark.parametrize(
    ("objective", "name", "allowed", "message"),
    [
        ("hybrid", "llada", None, "method is 'llada', but the checkpoint was trained with the objective 'hybrid'; use "
                                  "'refusion', or allow_objective='hybrid' to decode it all the same."),
        ("hybrid", "autoregressive", None, "use 'refusion', or"),
        ("", "dream", None, "with the objective 'unknown'; use 'refusion' or 'autoregressive', or allow_objective='u"),
        ("hybrid", "llada", "llada", "allow_objective is 'llada', but the checkpoint was trained with the objective "
                                     "'hybrid'; say that one, or leave it out."),
        ("hybrid", "refusion", "", "allow_objective is '', but"),
    ],
)  # fmt: skip
def test_a_method_for_another_objective_is_refused(objective, name, allowed, message):
    with pytest.raises(ConfigError, match=message):
        choose_method(objective, Method(name), allowed)


def test_a_method_for_another_objective_can_be_allowed():
    assert choose_method("hybrid", Method("llada"), "hybrid").name == "llada"
    assert choose_method("", Method("dream"), "unknown").name == "dream"


def test_block_diffusion_decodes_in_blocks_it_was_trained_in():
    trained = {"block_lengths": (4, 16, 8)}
    assert choose_method("block_diffusion", **trained) == Method("block_diffusion", block_length=16)
    assert choose_method("block_diffusion", Method("block_diffusion", threshold=0.5), **trained).block_length == 16
    assert choose_method("block_diffusion", Method("block_diffusion", block_length=8), **trained).block_length == 8
    assert choose_method("block_diffusion", Method("block_diffusion", block_length=5)).block_length == 5
    other = Method("block_diffusion", block_length=5)
    with pytest.raises(ConfigError, match="block_length is 5, but the checkpoint was trained in blocks of 4, 8, 16; u"):
        choose_method("block_diffusion", other, **trained)
    assert choose_method("block_diffusion", other, "block_diffusion", **trained) is other
    with pytest.raises(ConfigError, match="block_length is 0, and it is not known in which blocks the checkpoint was"):
        choose_method("block_diffusion")


def test_a_method_by_its_name_alone_is_refused():
    with pytest.raises(ConfigError, match=r"method is 'llada'; give a Method, such as Method\('dream'\)"):
        choose_method("dream", "llada")


def test_settings_about_slots_mean_nothing_to_other_methods():
    config = DecodeConfig(gen_length=7, slot_size=4, serial_num_blocks=2, slot_threshold=0.3, redraft=True, top_k=3)
    assert settings_of(config, Method()) is config
    own = settings_of(config, Method("autoregressive"))
    assert own == DecodeConfig(gen_length=7, slot_size=1, top_k=3) and own.rounded_length == 7
    assert settings_of(own, Method("autoregressive")) == own
    with pytest.raises(ConfigError, match="algorithm is 'paper', which the method 'autoregressive' does not have"):
        settings_of(DecodeConfig(algorithm="paper"), Method("autoregressive"))
    with pytest.raises(ConfigError, match="block_length is 4, which does not divide"):
        settings_of(config, Method("llada", block_length=4))
