"""RoPE's settings in all their spellings, and back."""

import pytest

from refusion_jax.config import ModelConfig, from_dict
from refusion_jax.huggingface import CheckpointError
from refusion_jax.huggingface.fields import Fields
from refusion_jax.huggingface.rope import read_rope, write_rope


def read(**values):
    fields = Fields({"rope_theta": 1e4, "max_position_embeddings": 1024} | values, "config.json")
    return from_dict(ModelConfig, read_rope(fields) | {"max_position_embeddings": 1024})


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
    "original_max_position_embeddings": 512,
}  # fmt: skip


@pytest.mark.parametrize(
    ("values", "got"),
    [
        ({}, {}),
        ({"rope_scaling": None, "rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, {"rope_theta": 7.0}),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, {"rope_scaling": 2.0}),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2, "rope_theta": 3}}, {"rope_scaling": 2}),
        (
            {"rope_scaling": YARN},
            {"rope_type": "yarn", "rope_scaling": 4, "rope_original_length": 512, "rope_ramp": (32, 1),
             "rope_attention_factor": 0},
        ),
        ({"rope_parameters": YARN | {"beta_fast": 16, "beta_slow": 2}}, {"rope_ramp": (16, 2)}),
        ({"rope_scaling": YARN | {"beta_fast": None, "attention_factor": 1.5}}, {"rope_attention_factor": 1.5}),
        ({"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}}, {"rope_attention_factor": 1}),
        (
            {"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}},
            {"rope_attention_factor": pytest.approx(1.1386294361119891 / 1.0693147180559945)},
        ),
        ({"rope_scaling": YARN | {"mscale": 1.0, "truncate": True}}, {"rope_attention_factor": 0}),
        ({"rope_scaling": YARN | {"factor": None}}, {"rope_scaling": 2}),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, {"rope_original_length": 0}),
        ({"rope_scaling": YARN, "original_max_position_embeddings": 256}, {"rope_original_length": 256}),
        (
            {"rope_scaling": LLAMA3},
            {"rope_type": "llama3", "rope_scaling": 8, "rope_original_length": 512, "rope_ramp": (4, 1)},
        ),
    ],
)  # fmt: skip
def test_spellings(values, got):
    config = read(**values)
    assert {name: getattr(config, name) for name in got} == got


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, "in rope_scaling sets rope_type to 'dynamic'"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "in rope_parameters sets rope_type to 'longrope'"),
        (
            {"rope_scaling": {"type": "mrope", "mrope_section": [1]}},
            "sets rope_type to 'mrope', which is not supported",
        ),
        ({"rope_scaling": {"type": "linear", "mrope_section": [1]}}, "sets mrope_section to [1]"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "sets full_attention to {"),
        ({"rope_scaling": YARN | {"truncate": False}}, "sets truncate to False, which is not supported; only True is."),
        ({"partial_rotary_factor": 0.5}, "sets partial_rotary_factor to 0.5"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "sets partial_rotary_factor to 0.5"),
        ({"rope_scaling": {"type": "linear"}}, "has no field 'factor'"),
        ({"rope_scaling": {"type": "yarn"}}, "has no field 'factor'"),
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": None}}, "has null for 'low_freq_factor'"),
        ({"rope_scaling": YARN | {"factor": "4"}}, "has factor '4'; it must be a number."),
        ({"rope_scaling": YARN | {"attention_factor": 0}}, "has attention_factor 0; it must be positive."),
        ({"rope_scaling": "yarn"}, "has rope_scaling 'yarn'; it must be an object."),
        ({"rope_scaling": {"type": 3}}, "has type 3; it must be a text."),
    ],
)
def test_what_is_refused(values, sentence):
    with pytest.raises(CheckpointError) as caught:
        read(**values)
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"rope_theta": 5e5, "rope_scaling": 2.0},
        {"rope_type": "yarn", "rope_scaling": 4.0, "rope_original_length": 512, "rope_ramp": (32.0, 1.0)},
        {"rope_type": "yarn", "rope_scaling": 4.0, "rope_original_length": 9, "rope_ramp": (8.0, 2.0),
         "rope_attention_factor": 1.25},
        {"rope_type": "llama3", "rope_scaling": 8.0, "rope_original_length": 512, "rope_ramp": (4.0, 1.0)},
    ],
)  # fmt: skip
def test_what_is_written_reads_back(settings):
    config = ModelConfig(max_position_embeddings=1024, **settings)
    assert read(**write_rope(config)) == config


def test_defaults_are_written_out():
    yarn = write_rope(ModelConfig(rope_type="yarn", rope_scaling=2.0))["rope_scaling"]
    assert yarn == YARN | {"factor": 2.0, "beta_fast": 32.0, "beta_slow": 1.0}
    llama3 = write_rope(ModelConfig(rope_type="llama3", rope_scaling=8.0))["rope_scaling"]
    assert llama3 == LLAMA3
