"""Low-rank adapters for the published ReFusion-8B on your own JSON lines, --config.data.train_files=mine.jsonl.

The frozen parameters are kept in bfloat16, 16 GB, which the devices share; adapters and their moments are 0.1 GB. Rank,
scale and adapted projections are those of the authors' low-rank option.
"""

from ml_collections import ConfigDict

from refusion_jax.command_line import config_dict
from refusion_jax.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    DecodeConfig,
    LoraConfig,
    OptimizerConfig,
    TrainConfig,
)
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
                max_length=4096,
                workers=2,
            ),
            model=qwen3(
                "8B",
                vocab_size=151_671,
                dtype="bfloat16",
                param_dtype="bfloat16",
                remat="attention,q_proj,k_proj,v_proj,o_proj",
            ),
            train=TrainConfig(
                init_from="GSAI-ML/ReFusion", steps=0, epochs=3, batch_size=16, log_every=10, eval_every=500
            ),
            # Adapters begin at nothing and want larger steps than whole weights.
            optimizer=OptimizerConfig(learning_rate=2e-4, warmup_steps=50),
            lora=LoraConfig(rank=8, alpha=16.0, targets=("q_proj", "k_proj", "v_proj", "o_proj")),
            checkpoint=CheckpointConfig(save_every=500, keep_best=1),
            decode=DecodeConfig(gen_length=512, slot_size=32, serial_num_blocks=4),
        )
    )
