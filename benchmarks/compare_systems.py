"""The systems of the comparison: how each is trained and in which ways it is decoded.

All have one backbone, one tokenizer and one set of first weights, a model that was trained to predict next tokens for a
while, as ReFusion begins with Qwen3 and Dream with Qwen2.5; and all see the same examples in the same batches. Rows
hold one example each, so that a batch has the same examples whatever a system makes of them.
"""

import dataclasses
from typing import Any

from refusion_jax.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    DecodeConfig,
    ModelConfig,
    OptimizerConfig,
    TrainConfig,
)

TASKS = "RSQA46"
# The longest response has 65 characters and EOS. Slots and blocks round it up to 96 and 80.
PADDED_RESPONSE = 72
LONGEST_EXAMPLE = 44 + PADDED_RESPONSE  # 44 characters has the prompt of a Sudoku of six rows
LONGEST_BLOCK = 16


@dataclasses.dataclass(frozen=True)
class Preset:
    """How much of everything.

    Attributes:
      layers, width: of the model.
      batch_size, base_steps, steps: examples per step, steps of the common first weights, and of each system.
      learning_rate: of both.
      seeds: how many times the systems are trained and decode the test prompts; all else is done once.
      ablations: whether there are ablations, curves over thresholds and studies.
      validation, test: held-out prompts that settings are chosen on, and that are counted.
      decode_rows: prompts decoded at once.
      long_steps: of the systems in `LONGER`, once, to see what a larger budget changes; 0 for none.
      rate_steps: of each system with each of `RATES`, once, to see whether one rate is fair to all; 0 for none.
      gsm8k_steps: of each system on GSM8K, from random weights; 0 for none.
    """

    layers: int = 2
    width: int = 96
    batch_size: int = 16
    base_steps: int = 1_000
    steps: int = 5_000
    learning_rate: float = 1e-2
    seeds: int = 3
    ablations: bool = True
    validation: int = 120
    test: int = 360
    decode_rows: int = 32
    long_steps: int = 10_000
    rate_steps: int = 1_000
    gsm8k_steps: int = 1_000


PRESETS = {
    "cpu": Preset(),
    "gpu": Preset(
        layers=6, width=256, batch_size=64, base_steps=1_000, steps=2_000, learning_rate=5e-3, seeds=1,
        ablations=False, decode_rows=120, long_steps=0, rate_steps=0, gsm8k_steps=0,
    ),
    # Whether everything works, in a quarter of an hour of compiling; its figures mean nothing.
    "tiny": Preset(
        layers=1, width=32, batch_size=4, base_steps=6, steps=6, validation=6, test=12, seeds=2, decode_rows=12,
        long_steps=8, rate_steps=2, gsm8k_steps=4,
    ),
}  # fmt: skip


def base_config(preset: Preset, seed: int) -> Config:
    """The run that makes the first weights of a seed: next tokens, on examples of another seed than the systems'."""
    # Enough for a tokenizer that knows all characters, however few steps there are.
    examples = max(preset.batch_size * max(preset.base_steps, preset.steps), 1_000)
    return Config(
        data=DataConfig(
            source="synthetic",
            synthetic_tasks=TASKS,
            synthetic_examples=examples,
            eval_examples=preset.validation + preset.test,
            tokenizer_type="char",
            tokenizer_vocab_size=64,
            max_length=LONGEST_EXAMPLE,
            pack=False,
        ),
        model=ModelConfig(
            num_hidden_layers=preset.layers,
            hidden_size=preset.width,
            intermediate_size=3 * preset.width,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=preset.width // 4,
            max_position_embeddings=256,
            scan_unroll=preset.layers,
        ),
        train=TrainConfig(
            objective="autoregressive",
            steps=preset.base_steps,
            batch_size=preset.batch_size,
            loss_chunk=0,
            seed=1_000 + seed,
            log_every=50,
            eval_every=0,
            eval_draws=2,
            eval_decode_examples=0,
        ),
        optimizer=OptimizerConfig(
            name="muon",
            learning_rate=preset.learning_rate,
            schedule="constant",
            warmup_steps=min(100, preset.base_steps),
        ),
        checkpoint=CheckpointConfig(save_every=500),
        decode=DecodeConfig(gen_length=96, slot_size=32),
    )


# What each system changes of its data, slots and training.
TRAINING: dict[str, dict[str, dict[str, Any]]] = {
    "refusion": {"train": {"objective": "hybrid"}},
    "autoregressive": {"train": {"objective": "autoregressive"}},
    "llada": {"train": {"objective": "llada"}, "data": {"pad_responses": PADDED_RESPONSE}},
    "dream": {"train": {"objective": "dream"}, "data": {"pad_responses": PADDED_RESPONSE}},
    "block_diffusion": {
        "train": {"objective": "block_diffusion"},
        "data": {"pad_responses": LONGEST_BLOCK},
        "slots": {"sizes": (4, 8, LONGEST_BLOCK)},
    },
}
ABLATIONS: dict[str, dict[str, dict[str, Any]]] = {
    **{f"slots_of_{size}": {"slots": {"sizes": (size,)}} for size in (4, 8, 16, 32)},
    "left_to_right": {"slots": {"clean_order": "left_to_right"}},
    "without_ar": {"slots": {"ar_weight": 0.0}},
}
LONGER = ("refusion", "autoregressive", "llada", "dream")
RATES = (3e-3, 1e-2, 3e-2)

GSM8K_LENGTH = 384


def gsm8k_config(preset: Preset, name: str, file: str) -> Config:
    """The run of a system on GSM8K, from random weights: for learning curves of text that people wrote.

    Args:
      preset: how much.
      name: of `TRAINING`.
      file: GSM8K's training problems.
    """
    config = base_config(preset, 0)
    sections: dict[str, dict[str, Any]] = {
        "data": {
            "source": "json", "train_files": (file,), "prompt_field": "question", "response_field": "answer",
            "tokenizer_type": "bpe", "tokenizer_vocab_size": 1_000, "max_length": GSM8K_LENGTH, "eval_examples": 160,
        },
        "model": {"max_position_embeddings": 512},
        "train": {
            "steps": preset.gsm8k_steps, "batch_size": preset.batch_size // 2, "seed": 0, "loss_chunk": 256,
            "eval_every": max(preset.gsm8k_steps // 8, 1),
        },
        "optimizer": {"schedule": "cosine", "learning_rate": preset.learning_rate / 2,
                      "warmup_steps": min(100, preset.gsm8k_steps)},
    }  # fmt: skip
    padded = {"data": {"pad_responses": LONGEST_BLOCK}}  # of all, so that the same examples fit a row
    return _with(config, sections, TRAINING[name], padded)


def _with(config: Config, *changes: dict[str, dict[str, Any]]) -> Config:
    """The configuration with fields of sections changed, the last change of a field counting."""
    merged: dict[str, dict[str, Any]] = {}
    for change in changes:
        for section, values in change.items():
            merged[section] = merged.get(section, {}) | values
    replaced = {each: dataclasses.replace(getattr(config, each), **values) for each, values in merged.items()}
    return dataclasses.replace(config, **replaced)


def system_config(preset: Preset, seed: int, name: str, base: str, steps: int) -> Config:
    """The run of a system, or of an ablation of ReFusion.

    Args:
      preset: how much.
      seed: which repetition.
      name: of `TRAINING` or `ABLATIONS`.
      base: the run directory of the first weights; "" for random ones.
      steps: how many.
    """
    config = base_config(preset, seed)
    warmup = min(100, steps)
    sections: dict[str, dict[str, Any]] = {
        "train": {"steps": steps, "seed": seed, "init_from": base, "eval_every": steps // 6},
        "optimizer": {"schedule": "cosine", "warmup_steps": warmup},
    }
    return _with(config, sections, TRAINING.get(name, TRAINING["refusion"]), ABLATIONS.get(name, {}))
