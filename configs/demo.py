"""Four little text tasks, learned from nothing in minutes on a CPU.

The smallest model that shows what the method is for: answers are drafted a slot at a time and in any order, so that a
response takes far fewer forwards than it has tokens. Examples are generated, nothing is downloaded.
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
    """Returns the demo's settings."""
    return config_dict(
        Config(
            # One token per character: the vocabulary is a few dozen, so nearly all parameters are in the layers. Every
            # example is new: 5,500 batches hold about 180,000.
            data=DataConfig(
                source="synthetic",
                synthetic_examples=182_000,
                tokenizer_type="char",
                tokenizer_vocab_size=64,
                max_length=96,
            ),
            # Unrolled layers train faster on a CPU than scanned ones.
            model=ModelConfig(
                num_hidden_layers=3,
                hidden_size=128,
                intermediate_size=384,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=32,
                max_position_embeddings=256,
                scan_unroll=3,
            ),
            slots=SlotsConfig(sizes=(4, 8, 16, 32)),
            # 16 rows of 96 tokens hold 33 examples. Logits of so few tokens are small, so all may exist at once.
            train=TrainConfig(steps=5_500, batch_size=16, loss_chunk=0, log_every=50, eval_every=2_750),
            optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=200),
            checkpoint=CheckpointConfig(save_every=1_000),
            # The longest answers have 65 characters and an EOS: three slots. Long slots lean on the next-token choices
            # inside them, which are right more often than first tokens far away.
            decode=DecodeConfig(gen_length=96, slot_size=32, slot_threshold=0.9, token_threshold=0.9),
        )
    )
