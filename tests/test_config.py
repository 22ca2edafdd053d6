"""Every setting validates itself, in a sentence that names the value, the limit and the remedy."""

import dataclasses
import json
import math
import re

import pytest

from refusion_jax.config import (
    CheckpointConfig,
    Config,
    ConfigError,
    DataConfig,
    DecodeConfig,
    LoraConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    SlotsConfig,
    TrainConfig,
    from_dict,
    nearest,
    to_dict,
)

REFUSED = [
    (ModelConfig, {"hidden_size": 0}, "model.hidden_size is 0; it must be a number of at least 1."),
    (ModelConfig, {"rope_theta": 0.0}, "model.rope_theta is 0.0; it must be positive."),
    (ModelConfig, {"rms_norm_eps": -1.0}, "model.rms_norm_eps is -1.0; it must be positive."),
    (ModelConfig, {"head_dim": 33}, "model.head_dim is 33; RoPE rotates pairs, make it even."),
    (ModelConfig, {"num_attention_heads": 3}, "model.num_attention_heads is 3, not a multiple of"),
    (ModelConfig, {"dtype": "float23"}, "model.dtype is 'float23'.* Did you mean 'float32'?"),
    (ModelConfig, {"attention": "spalsh"}, "model.attention is 'spalsh', not one of auto, .* Did you mean 'splash'?"),
    (ModelConfig, {"remat": "fulll"}, "model.remat is 'fulll'.* Did you mean 'full'?"),
    (ModelConfig, {"remat": "q_proj,atention"}, "model.remat is 'atention'.* Did you mean 'attention'?"),
    (ModelConfig, {"remat": "everything"}, "model.remat is 'everything', not one of none, .*q_proj, .*attention"),
    (ModelConfig, {"remat": "q_proj,full"}, "'full' stands alone, only activations can be listed: q_proj"),
    (ModelConfig, {"remat": ""}, "model.remat is ''"),
    (ModelConfig, {"rope_scaling": 0.5}, "model.rope_scaling is 0.5; it must be a number of at least 1."),
    (ModelConfig, {"rope_type": "dynamic"}, "model.rope_type is 'dynamic', not one of linear, yarn, llama3"),
    (ModelConfig, {"rope_ramp": (32.0, 1.0)}, "model.rope_ramp is \\(32.0, 1.0\\) with model.rope_type 'linear'"),
    (ModelConfig, {"rope_type": "yarn", "rope_ramp": (1.0, 32.0)}, "give a high and a low rate"),
    (ModelConfig, {"rope_type": "yarn", "rope_ramp": (1.0,)}, "give a high and a low rate"),
    (ModelConfig, {"rope_attention_factor": 1.2}, "model.rope_attention_factor is 1.2 .* only yarn has one"),
    (ModelConfig, {"rope_original_length": -1}, "model.rope_original_length is -1"),
    (ModelConfig, {"biases": ("qproj",)}, "model.biases is 'qproj'.* Did you mean 'q_proj'?"),
    (ModelConfig, {"eos_token_ids": ()}, "model.eos_token_ids is empty"),
    (ModelConfig, {"mask_token_id": 1}, "model.mask_token_id is 1, which is also an EOS"),
    (ModelConfig, {"vocab_size": 2}, "model.mask_token_id is 2, outside the vocabulary of 2 tokens."),
    (ModelConfig, {"pad_token_id": -1}, "model.pad_token_id is -1, outside the vocabulary"),
    (DataConfig, {"source": "jsn"}, "data.source is 'jsn'.* Did you mean 'json'?"),
    (DataConfig, {"source": "json"}, "data.train_files is empty"),
    (DataConfig, {"prompt_field": "response"}, "they must be two different field names."),
    (DataConfig, {"source": "arrayrecord"}, "data.train_files is empty; data.source 'arrayrecord'"),
    (DataConfig, {"format": "message"}, "data.format is 'message'.* Did you mean 'messages'?"),
    (DataConfig, {"format": "text"}, "data.source 'synthetic' makes pairs"),
    (DataConfig, {"synthetic_tasks": ""}, "data.synthetic_tasks is ''; give one or more of the letters RSQA46"),
    (DataConfig, {"synthetic_tasks": "RX"}, "data.synthetic_tasks is 'RX'; give one or more"),
    (DataConfig, {"synthetic_tasks": "RSR"}, "data.synthetic_tasks is 'RSR'.* each once."),
    (DataConfig, {"pad_responses": -1}, "data.pad_responses is -1"),
    (DataConfig, {"pad_responses": 128}, r"data.pad_responses is 128.* data.max_length \(128\): lower it."),
    (
        DataConfig,
        {"source": "json", "train_files": ("a",), "format": "text", "pad_responses": 8},
        "data.pad_responses is 8, but data.format 'text' has documents",
    ),
    (DataConfig, {"turns": "first"}, "data.turns is 'first', not one of last, all"),
    (DataConfig, {"template": "chat"}, "data.template is 'chat', not one of auto, prompt, whole"),
    (DataConfig, {"text_field": ""}, "data.text_field is empty"),
    (DataConfig, {"messages_field": ""}, "data.messages_field is empty"),
    (DataConfig, {"workers": -1}, "data.workers is -1"),
    (DataConfig, {"weights": (1.0,)}, "data.weights has 1 entries and data.train_files 0, of data.source 'synthetic'"),
    (
        DataConfig,
        {"source": "json", "train_files": ("a", "b"), "weights": (1.0,)},
        "data.weights has 1 entries and data.train_files 2.* give one weight per file",
    ),
    (
        DataConfig,
        {"source": "json", "train_files": ("a", "b"), "weights": (1.0, 0.0)},
        "data.weights gives b 0.0; a weight must be positive",
    ),
    (
        DataConfig,
        {"source": "json", "train_files": ("a", "b"), "weights": (-1.0, 1.0)},
        "data.weights gives a -1.0",
    ),
    (
        DataConfig,
        {"source": "json", "train_files": ("a",), "weights": (float("nan"),)},
        "data.weights gives a nan",
    ),
    (DataConfig, {"max_length": 1}, "data.max_length is 1; it must be a number of at least 2."),
    (SlotsConfig, {"sizes": ()}, "give at least one slot size"),
    (SlotsConfig, {"sizes": (4, 0)}, r"slots.sizes is \(4, 0\)"),
    (SlotsConfig, {"size_weights": (1.0,)}, "slots.size_weights has 1 weights for 4 slots.sizes; give one for each"),
    (SlotsConfig, {"sizes": (4,), "size_weights": (0.0,)}, "weights must be finite, not negative, and not all 0."),
    (SlotsConfig, {"sizes": (4, 8), "size_weights": (-1.0, 2.0)}, "weights must be finite, not negative"),
    (SlotsConfig, {"masking_schedule": "cosin"}, "slots.masking_schedule is 'cosin'.* Did you mean 'cosine'?"),
    (SlotsConfig, {"epsilon": 1.0}, "slots.epsilon is 1.0; it must lie strictly between 0 and 1."),
    (SlotsConfig, {"ar_weight": 0.0, "mdm_weight": 0.0}, "one of the loss terms must count."),
    (TrainConfig, {"steps": 0}, "train.steps is 0 and train.epochs 0; one of them says how long a run is: give at"),
    (TrainConfig, {"steps": 6, "epochs": 3}, "train.steps is 6 and train.epochs 3; .* and 0 for the other."),
    (TrainConfig, {"steps": 0, "epochs": -1}, "train.epochs is -1; it must be a number of at least 0."),
    (TrainConfig, {"accumulate_steps": 0}, "train.accumulate_steps is 0; it must be a number of at least 1."),
    (TrainConfig, {"loss_chunk": -1}, "train.loss_chunk is -1; it must be a number of at least 0."),
    (
        TrainConfig,
        {"batch_size": 12, "accumulate_steps": 5},
        r"accumulate_steps is 5, which does not divide train.batch_size \(12\); use one of 1, 2, 3, 4, 6, 12.",
    ),
    (OptimizerConfig, {"name": "adam"}, "optimizer.name is 'adam'.* Did you mean 'adamw'?"),
    (OptimizerConfig, {"schedule": "cosin"}, "optimizer.schedule is 'cosin'.* Did you mean 'cosine'?"),
    (OptimizerConfig, {"schedule": "wsd"}, "optimizer.decay_steps is 0 with schedule 'wsd'"),
    (OptimizerConfig, {"decay_steps": 5}, "optimizer.decay_steps is 5 with schedule 'cosine'"),
    (OptimizerConfig, {"moments_dtype": "bfloat"}, "optimizer.moments_dtype is 'bfloat'.* Did you mean 'bfloat16'?"),
    (LoraConfig, {"rank": -1}, "lora.rank is -1; it must be a number of at least 0."),
    (LoraConfig, {"alpha": 32.0}, "lora.rank is 0, which turns adapters off, but lora.alpha is set"),
    (LoraConfig, {"rank": 4, "alpha": 0.0}, "lora.alpha is 0.0; it must be positive and finite."),
    (LoraConfig, {"rank": 4, "targets": ("q_prj",)}, "lora.targets is 'q_prj'.* Did you mean 'q_proj'?"),
    (LoraConfig, {"rank": 4, "targets": ("lm_head",)}, "lora.targets is 'lm_head', not one of q_proj, .*down_proj"),
    (LoraConfig, {"rank": 4, "targets": ("q_proj", "q_proj")}, "name each once."),
    (LoraConfig, {"rank": 4, "targets": ()}, "lora.targets is empty with lora.rank 4; name what to adapt: q_proj"),
    (LoraConfig, {"rank": 4, "dtype": "int8"}, "lora.dtype is 'int8', not one of float32, bfloat16."),
    (OptimizerConfig, {"learning_rate": math.nan}, "optimizer.learning_rate is nan"),
    (OptimizerConfig, {"beta2": 1.0}, r"optimizer.beta2 is 1.0; it must lie in \[0, 1\)."),
    (OptimizerConfig, {"clip_norm": 0.0}, "optimizer.clip_norm is 0.0; it must be positive."),
    (CheckpointConfig, {"keep": 0}, "checkpoint.keep is 0; it must be a number of at least 1."),
    (MeshConfig, {"data": 0}, "mesh.data is 0; give a number of devices"),
    (MeshConfig, {"data": -1, "fsdp": -1}, "only one can be the rest."),
    (DecodeConfig, {"algorithm": "papr"}, "decode.algorithm is 'papr'.* Did you mean 'paper'?"),
    (DecodeConfig, {"slot_threshold": 1.5}, r"decode.slot_threshold is 1.5; .* must lie in \[0, 1\]."),
    (DecodeConfig, {"gen_length": 0}, "decode.gen_length is 0; it must be a number of at least 1."),
    (DecodeConfig, {"carry_threshold": -0.1}, r"decode.carry_threshold is -0.1; .* must lie in \[0, 1\]."),
    (DecodeConfig, {"carry_threshold": math.nan}, "decode.carry_threshold is nan"),
    (DecodeConfig, {"temperature": -0.5}, "decode.temperature is -0.5; it must be a number of at least 0."),
    (DecodeConfig, {"temperature": math.inf}, "decode.temperature is inf"),
    (DecodeConfig, {"top_k": 0}, "decode.top_k is 0; it must be at least 1, or -1 for no limit."),
    (DecodeConfig, {"top_k": -2}, "decode.top_k is -2; it must be at least 1"),
    (DecodeConfig, {"top_k": 5.0}, "decode.top_k is 5.0; it must be of type int."),
    (DecodeConfig, {"top_p": 0.0}, r"decode.top_p is 0.0; it must lie in \(0, 1\]."),
    (DecodeConfig, {"top_p": 1.5}, r"decode.top_p is 1.5; it must lie in \(0, 1\]."),
    (DecodeConfig, {"top_p": math.nan}, "decode.top_p is nan"),
    (DecodeConfig, {"suppress_ids": (3, -1)}, "decode.suppress_ids holds -1; token IDs are not negative."),
    (DecodeConfig, {"suppress_ids": 3}, "decode.suppress_ids is 3; it must be a tuple of int."),
    (DecodeConfig, {"stop": ("a", "")}, "decode.stop holds an empty text, which would end every response"),
    (DecodeConfig, {"stop": "ab"}, "decode.stop is 'ab'; it must be a tuple of str."),
    (DecodeConfig, {"redraft": 1}, "decode.redraft is 1; it must be of type bool."),
]


@pytest.mark.parametrize(("section", "values", "sentence"), REFUSED)
def test_unusable_values_are_refused_in_one_sentence(section, values, sentence):
    with pytest.raises(ConfigError, match=sentence) as caught:
        section(**values)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "values",
    [
        {"top_k": -1, "top_p": 1.0},
        {"top_k": 1, "top_p": 1e-6, "temperature": 0.5},
        {"top_k": 10**6},
        {"carry_threshold": 0.0},
        {"carry_threshold": 1.0},
        {"suppress_ids": (0, 7), "stop": ("\n", "END")},
    ],
)
def test_the_ends_of_the_ranges_can_be_used(values):
    config = DecodeConfig(**values)
    assert {name: getattr(config, name) for name in values} == values


def test_decoding_is_greedy_and_unrestricted_by_default():
    config = DecodeConfig()
    assert (config.temperature, config.top_k, config.top_p) == (0, -1, 1)
    assert (config.carry_threshold, config.suppress_ids, config.stop) == (0, (), ())


def test_every_decode_setting_has_a_line_of_help():
    for field in dataclasses.fields(DecodeConfig):
        assert field.metadata["help"], field.name


def test_sections_must_agree():
    with pytest.raises(ConfigError, match=r"data.max_length is 256, beyond model.max_position_embeddings \(128\)"):
        Config(model=ModelConfig(max_position_embeddings=128), data=DataConfig(max_length=256))
    with pytest.raises(ConfigError, match=r"beyond .* \(128 x rope_scaling 1.5\); .* with model.rope_scaling 2.01\.$"):
        Config(model=ModelConfig(max_position_embeddings=128, rope_scaling=1.5), data=DataConfig(max_length=257))
    stretched = ModelConfig(max_position_embeddings=128, rope_scaling=2.01)
    assert ModelConfig(max_position_embeddings=128, rope_scaling=4.0, rope_original_length=16).context_length == 128
    assert ModelConfig(max_position_embeddings=40, rope_scaling=4.0, rope_original_length=32).context_length == 128
    assert Config(model=stretched, data=DataConfig(max_length=257)).model.context_length == 257
    with pytest.raises(ConfigError, match=r"warmup_steps \(100\) and optimizer.decay_steps \(950\) are more than"):
        Config(optimizer=OptimizerConfig(schedule="wsd", decay_steps=950))
    with pytest.raises(ConfigError, match=r"optimizer.warmup_steps is 100, more than train.steps \(50\)"):
        Config(train=TrainConfig(steps=50))
    with pytest.raises(ConfigError, match=r"decode.gen_length is 100, in whole slots 112; .*, 112: lower"):
        Config(
            model=ModelConfig(max_position_embeddings=112),
            data=DataConfig(max_length=64),
            decode=DecodeConfig(gen_length=100),
        )


@pytest.mark.parametrize(
    ("gen_length", "slot_size", "serial_num_blocks", "rounded", "block"),
    [(64, 16, 1, 64, 64), (65, 16, 1, 80, 80), (1, 16, 1, 16, 16), (60, 16, 2, 64, 32), (7, 1, 7, 7, 1)],
)
def test_gen_length_is_rounded_up_to_whole_slots(gen_length, slot_size, serial_num_blocks, rounded, block):
    config = DecodeConfig(gen_length=gen_length, slot_size=slot_size, serial_num_blocks=serial_num_blocks)
    assert (config.rounded_length, config.block_length) == (rounded, block)


def test_blocks_that_cannot_share_the_slots_name_both_remedies():
    with pytest.raises(ConfigError) as caught:
        DecodeConfig(gen_length=90, slot_size=16, serial_num_blocks=4)
    message = str(caught.value)
    assert "gen_length 64 or 128" in message
    assert "serial_num_blocks 1, 2, 3, 6" in message
    for remedy in ({"gen_length": 64}, {"gen_length": 128}, {"serial_num_blocks": 3}):
        DecodeConfig(**{"gen_length": 90, "slot_size": 16, "serial_num_blocks": 4, **remedy})


def test_more_blocks_than_slots_suggest_no_empty_length():
    with pytest.raises(ConfigError, match=r"use gen_length 64, or serial_num_blocks 1, 2\."):
        DecodeConfig(gen_length=32, slot_size=16, serial_num_blocks=4)


def test_a_config_survives_json():
    config = Config(
        data=DataConfig(source="json", train_files=("a.jsonl", "b.jsonl")),
        slots=SlotsConfig(sizes=(4, 8)),
        optimizer=OptimizerConfig(learning_rate=1e-4),
        decode=DecodeConfig(top_k=5, top_p=0.5, temperature=1.0, suppress_ids=(4, 9), stop=("\n", "é")),
    )
    values = json.loads(json.dumps(to_dict(config)))
    assert values["slots"]["sizes"] == [4, 8]
    assert (values["decode"]["suppress_ids"], values["decode"]["stop"]) == ([4, 9], ["\n", "é"])
    assert from_dict(Config, values) == config


def test_eos_may_be_the_padding():
    """As in many tokenizers; only the mask needs a token of its own."""
    assert ModelConfig(pad_token_id=1, eos_token_ids=(1,)).pad_token_id == 1


@pytest.mark.parametrize("remat", ["none", "minimal", "full", "attention", "q_proj, k_proj,v_proj", "down_proj"])
def test_policies_and_lists_of_activations(remat):
    assert ModelConfig(remat=remat).remat == remat


def test_absent_fields_and_sections_take_their_defaults():
    assert from_dict(Config, {}) == Config()
    assert from_dict(Config, {"train": {"seed": 3}}) == Config(train=TrainConfig(seed=3))


def test_a_whole_number_serves_as_a_float():
    config = from_dict(OptimizerConfig, {"learning_rate": 1})
    assert config.learning_rate == 1.0
    assert type(config.learning_rate) is float


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"train": {"stpes": 5}}, "Unknown config field 'train.stpes'. Did you mean 'steps'?"),
        ({"trian": {}}, "Unknown config field 'trian'. Did you mean 'train'?"),
        ({"train": 5}, "train is 5; it must be a section of settings."),
        ({"train": {"steps": 5.0}}, "train.steps is 5.0; it must be of type int."),
        ({"train": {"steps": True}}, "train.steps is True; it must be of type int."),
        ({"optimizer": {"learning_rate": "1e-3"}}, "optimizer.learning_rate is '1e-3'; it must be of type float."),
        ({"slots": {"sizes": 4}}, "slots.sizes is 4; it must be a list."),
        ({"slots": {"sizes": [4, "8"]}}, "slots.sizes is '8'; it must be of type int."),
        ({"data": {"train_files": [1]}}, "data.train_files is 1; it must be of type str."),
    ],
)
def test_values_of_the_wrong_kind_are_refused(values, sentence):
    with pytest.raises(ConfigError) as caught:
        from_dict(Config, values)
    assert sentence in str(caught.value)


def test_nearest_names_one_or_lists_all():
    assert nearest("stesp", ["steps", "seed"]) == " Did you mean 'steps'?"
    assert nearest("zzz", ["steps", "seed"]) == " Known: seed, steps."


def test_configs_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().train.steps = 5


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"train": {"objective": "lada"}}, "train.objective is 'lada', not one of hybrid, autoregressive, llada"),
        ({"slots": {"clean_order": "sorted"}}, "slots.clean_order is 'sorted', not one of shuffled, left_to_right"),
        (
            {"train": {"objective": "autoregressive"}, "slots": {"ar_weight": 0.0}},
            "slots.ar_weight is 0, but train.objective 'autoregressive' has no other loss; make it positive.",
        ),
        (
            {"train": {"objective": "dream"}, "slots": {"mdm_weight": 0.0}},
            "slots.mdm_weight is 0, but train.objective 'dream' has no other loss; make it positive.",
        ),
        (
            {
                "train": {"objective": "llada", "eval_every": 10},
                "checkpoint": {"keep_best": 1, "best_metric": "eval_ar_loss"},
            },
            "checkpoint.best_metric is 'eval_ar_loss', which train.objective 'llada' does not have; use "
            "'eval_nats_per_token'.",
        ),
        (
            {"train": {"objective": "llada"}, "slots": {"ar_weight": 0.5}},
            "slots.ar_weight is 0.5, but train.objective 'llada' has no such loss; leave it out.",
        ),
        (
            {"train": {"objective": "autoregressive"}, "slots": {"clean_order": "left_to_right"}},
            "slots.clean_order is 'left_to_right', but train.objective 'autoregressive' has no clean slots; leave it",
        ),
        (
            {"train": {"objective": "block_diffusion"}, "slots": {"sizes": [4, 24]}},
            "decode.gen_length is 64, which blocks of 24, the longest of slots.sizes, do not divide; change one, or",
        ),
    ],
)
def test_objectives_that_cannot_be_trained_so(sections, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        from_dict(Config, sections)


def test_a_metric_that_an_objective_has_chooses_checkpoints():
    for objective, metric in (("llada", "eval_mdm_bound"), ("autoregressive", "eval_ar_loss")):
        checkpoint = {"keep_best": 1, "best_metric": metric}
        from_dict(Config, {"train": {"objective": objective, "eval_every": 10}, "checkpoint": checkpoint})
