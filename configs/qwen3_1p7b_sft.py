"""Qwen3-1.7B made into a ReFusion model on your own JSON lines, --config.data.train_files=mine.jsonl.

Parameters and AdamW's moments in float32 are 21 GB, which the devices share.
"""

from ml_collections import ConfigDict

from refusion_jax.command_line import config_dict
from refusion_jax.config import CheckpointConfig, Config, DataConfig, DecodeConfig, OptimizerConfig, TrainConfig
from refusion_jax.modeling.sizes import qwen3

TOPOLOGY = "v6e:2x4"  # what --compile_for shows it to fit


def get_config() -> ConfigDict:
    """Returns the settings of the run."""
    return config_dict(
        Config(
            # Objects with query and response, prompt and completion, or messages; the chat template writes prompts.
            data=DataConfig(
                source="json",
                train_files=("train.jsonl",),
                template="prompt",
                max_length=2_048,
                workers=2,
            ),
            model=qwen3("1.7B", dtype="bfloat16", remat="minimal"),
            # Packed rows: several examples of a few hundred tokens each.
            train=TrainConfig(
                init_from="Qwen/Qwen3-1.7B", steps=0, epochs=3, batch_size=32, log_every=10, eval_every=500
            ),
            optimizer=OptimizerConfig(learning_rate=2e-5, warmup_steps=100, weight_decay=0.0),
            checkpoint=CheckpointConfig(save_every=500, keep_best=1),
            # The published settings for worked problems; shorter answers want fewer blocks.
            decode=DecodeConfig(gen_length=512, slot_size=32, serial_num_blocks=4),
        )
    )
