"""A run directory made of weights from elsewhere, which decodes, and begins other runs, like one that was trained."""

from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
from etils import epath

from refusion_jax.config import Config, ConfigError, DataConfig, ModelConfig, SlotsConfig, TrainConfig, to_dict
from refusion_jax.data import Tokenizer
from refusion_jax.files import write_json
from refusion_jax.huggingface.export import check_unquantised
from refusion_jax.training.checkpoint import About, about_item, writing
from refusion_jax.training.integrity import absolute, seal_all
from refusion_jax.training.run_directory import CHECKPOINTS_NAME, CONFIG_NAME, TOKENIZER_NAME


def write_run(
    directory: Path,
    config: ModelConfig,
    params: Any,
    tokenizer: Tokenizer | None,
    objective: str = "",
    block_lengths: tuple[int, ...] = (),
) -> None:
    """Fills an empty directory with a run whose checkpoint of step 0 has these weights.

    Args:
      directory: to fill.
      config: the model.
      params: its parameters.
      tokenizer: the model's, if it has one.
      objective: what the weights were trained for; "" for what runs are for by default.
      block_lengths: of "block_diffusion" the lengths of the blocks they were trained in.

    Raises:
      ConfigError: when no run can have such a model, or it is not known which blocks it was trained in.
      CheckpointError, OSError: when the parameters are quantised, or something cannot be written.
    """
    check_unquantised(params)
    data = DataConfig(max_length=min(DataConfig.max_length, config.context_length))
    if objective == "block_diffusion" and not block_lengths:
        raise ConfigError("It is not known in which blocks the weights were trained; give their lengths.")
    # No run is trained on from here, so nothing is decoded on the way.
    train = TrainConfig(objective=objective or TrainConfig.objective, eval_decode_examples=0)
    slots = SlotsConfig(sizes=block_lengths or SlotsConfig.sizes)
    run = Config(model=config, data=data, slots=slots, train=train)
    write_json(directory / CONFIG_NAME, to_dict(run))
    checkpoints = absolute(epath.Path(directory)) / CHECKPOINTS_NAME
    files = {} if tokenizer is None else dict(tokenizer.files)
    about = about_item(About(to_dict(run), data_fingerprint="", tokenizer=files), step=0)
    items = {"params": ocp.args.StandardSave(params), "about": ocp.args.JsonSave(about)}
    options = ocp.CheckpointManagerOptions(enable_async_checkpointing=False)
    with writing(checkpoints), ocp.CheckpointManager(checkpoints, options=options) as manager:
        manager.save(0, args=ocp.args.Composite(**items))
    seal_all(checkpoints)
    if tokenizer is not None:
        tokenizer.save(directory / TOKENIZER_NAME)
