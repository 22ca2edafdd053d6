"""Grade School Math 8K (7,473 worked problems) from nothing, with a subword vocabulary learned on it.

Far too little data to learn arithmetic: what this run shows is the whole path from JSON lines and a trained tokenizer
to decoded text, on sentences people wrote. `train_files` are relative to where the command runs; set them with
--config.data.train_files=A.jsonl,B.jsonl.
"""

from ml_collections import ConfigDict

from refusion_jax.command_line import config_dict
from refusion_jax.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    DecodeConfig,
    ModelConfig,
    OptimizerConfig,
    SlotsConfig,
    TrainConfig,
)

TOPOLOGY = "v5e:2x2"  # what --compile_for shows it to fit


def get_config() -> ConfigDict:
    """Returns the settings of the GSM8K run."""
    return config_dict(
        Config(
            data=DataConfig(
                source="json",
                train_files=("../shared/data/gsm8k/train.jsonl",),
                prompt_field="question",
                response_field="answer",
                # A small vocabulary: each of its 1,000 pieces is seen often enough to be learned.
                tokenizer_type="bpe",
                tokenizer_vocab_size=1_000,
                # Keeps nearly every example whole; longer ones are dropped and counted.
                max_length=512,
            ),
            model=ModelConfig(
                num_hidden_layers=4,
                hidden_size=256,
                intermediate_size=768,
                num_attention_heads=8,
                num_key_value_heads=4,
                head_dim=32,
                max_position_embeddings=512,
            ),
            slots=SlotsConfig(sizes=(4, 8, 16, 32)),
            # 4 rows of 512 tokens hold 9 problems: 800 steps to an epoch.
            train=TrainConfig(steps=2_400, batch_size=4, log_every=20, eval_every=800, eval_decode_examples=8),
            optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=100, weight_decay=0.1),
            checkpoint=CheckpointConfig(save_every=400),
            decode=DecodeConfig(gen_length=192, slot_size=8, serial_num_blocks=3),
        )
    )
