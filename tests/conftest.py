"""What several test files share: quick compilation, and one tiny trained run."""

import contextlib
import os
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before NumPy: two threads only spin on matrices this small
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"  # tests leave the user's files alone

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import refusion_jax as rf
from refusion_jax.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    DecodeConfig,
    ModelConfig,
    OptimizerConfig,
    TrainConfig,
)
from refusion_jax.data import train_tokenizer
from refusion_jax.decoding import batching
from refusion_jax.modeling import Transformer
from refusion_jax.training.loop import train


@contextlib.contextmanager
def _quick_compilation():
    """Spares the compiler, where programs that run for a moment spend their time.

    XLA leaves out its expensive passes, and decoding compiles one query width: responses of up to 16 tokens.
    """
    flag = "jax_disable_most_optimizations"
    before = jax.config.read(flag)
    jax.config.update(flag, True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batching, "MIN_RESPONSE_BUCKET", batching.MIN_WIDTH)
        try:
            yield
        finally:
            jax.config.update(flag, before)


@pytest.fixture(scope="module")
def quick_compilation():
    with _quick_compilation():
        yield


@pytest.fixture(scope="session")
def tiny_config() -> Config:
    """Twenty steps of a one-layer model: enough for a falling loss, not for right answers."""
    return Config(
        data=DataConfig(synthetic_examples=300, eval_examples=8, tokenizer_vocab_size=64, max_length=96),
        model=ModelConfig(
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            max_position_embeddings=160,
        ),
        train=TrainConfig(steps=20, batch_size=4, log_every=4, eval_every=0, eval_decode_examples=0),
        optimizer=OptimizerConfig(learning_rate=2e-2, warmup_steps=2),
        checkpoint=CheckpointConfig(save_every=10),
        decode=DecodeConfig(gen_length=16, slot_size=4, serial_num_blocks=2),
    )


@pytest.fixture(scope="session")
def tiny_run(tiny_config, tmp_path_factory) -> Path:
    """The run directory of `tiny_config`. Read it, or copy it, but leave it as it is."""
    workdir = tmp_path_factory.mktemp("runs") / "tiny"
    with _quick_compilation():
        train(tiny_config, workdir)
    return workdir


@pytest.fixture(scope="session")
def chat_model() -> rf.Model:
    """Random weights, and a tokenizer with the letters that conversations need; other characters are bytes."""
    tokenizer = train_tokenizer(["".join(map(chr, range(32, 127))) + "\n"], "char", 400)
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=256,
        initializer_range=0.6,
    )
    module, tokens = Transformer(config), jnp.zeros((1, 1), jnp.int32)
    params = nn.unbox(jax.jit(module.init)(jax.random.key(1), tokens, tokens))["params"]
    return rf.Model(config, module, params, tokenizer, DecodeConfig(gen_length=16, slot_size=4, slot_threshold=0.2))
