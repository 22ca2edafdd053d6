"""Trains a model: `python train.py --config=configs/demo.py --workdir=runs/demo`.

Any setting can be changed on the command line, for instance --config.train.steps=2000. Run again with the same
settings to continue an interrupted run.
"""

from pathlib import Path

from absl import flags

from refusion_jax import command_line
from refusion_jax.host_memory import keep_freed_memory
from refusion_jax.training.loop import train

FLAGS = flags.FlagValues()
command_line.define_config(FLAGS)
flags.DEFINE_string("workdir", None, "Run directory, for checkpoints, metrics and tokenizer.", flag_values=FLAGS)


def main(args: flags.FlagValues) -> None:
    """Trains with the parsed flags."""
    keep_freed_memory()
    train(args.config, Path(args.workdir))


if __name__ == "__main__":
    command_line.run(main, FLAGS, required=("workdir",))
