"""ReFusion-8B as its authors trained it (arXiv 2512.13586): Qwen3-8B, 4,096 tokens, four passes over the data.

The authors' data are `query` and `response`; the chat template writes the prompt, and a response is its own tokens and
EOS. Rows are not packed, so that a batch has as many examples as theirs: four on each of eight devices. What does not
fit is dropped, as there. Parameters and AdamW's moments in float32 are 98 GB, which the devices share.
"""

from ml_collections import ConfigDict

from refusion_jax.command_line import config_dict
from refusion_jax.config import CheckpointConfig, Config, DataConfig, DecodeConfig, OptimizerConfig, TrainConfig
from refusion_jax.modeling.sizes import qwen3

TOPOLOGY = "v5p:2x2x2"  # what --compile_for shows it to fit


def get_config() -> ConfigDict:
    """Returns the settings of the run."""
    return config_dict(
        Config(
            data=DataConfig(
                source="json",
                train_files=("train.jsonl",),
                template="prompt",
                max_length=4096,
                pack=False,
                eval_examples=0,
                workers=2,
            ),
            # The authors' vocabulary ends with the two tokens they added; Qwen3's unused rows are left out.
            model=qwen3("8B", vocab_size=151_671, dtype="bfloat16", remat="minimal"),
            train=TrainConfig(init_from="Qwen/Qwen3-8B", steps=0, epochs=4, batch_size=32, log_every=10, eval_every=0),
            # A cosine to 0 without warm-up and weight decay.
            optimizer=OptimizerConfig(learning_rate=2e-5, warmup_steps=0, weight_decay=0.0, beta2=0.999),
            checkpoint=CheckpointConfig(save_every=1_000),
            # Their settings for GSM8K.
            decode=DecodeConfig(
                algorithm="paper",
                gen_length=512,
                slot_size=32,
                serial_num_blocks=4,
                slot_threshold=0.9,
                token_threshold=0.4,
            ),
        )
    )
