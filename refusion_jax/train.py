"""Trains a model: `python train.py --config=configs/demo.py --workdir=runs/demo`.

Any setting can be changed on the command line, for instance --config.train.steps=2000. Run again with the same
settings to continue an interrupted run; Ctrl-C and SIGTERM save before they end it.

On a TPU pod run the same command on every host. Elsewhere --num_processes, --process_id and --coordinator_address join
processes; all of them read the same data and --workdir.
"""

import logging

from absl import flags

from refusion_jax import command_line
from refusion_jax.host_memory import keep_freed_memory
from refusion_jax.processes import define_processes, failing_together, join_processes
from refusion_jax.training.loop import train

FLAGS = flags.FlagValues()
command_line.define_config(FLAGS)
define_processes(FLAGS)
flags.DEFINE_string(
    "workdir",
    None,
    "Run directory, for checkpoints, metrics and tokenizer; may be gs://BUCKET/NAME.",
    flag_values=FLAGS,
)


def main(args: flags.FlagValues) -> None:
    """Trains with the parsed flags."""
    keep_freed_memory()
    # What fails in the background is said in one sentence when the run ends for it; tracebacks of threads bury that.
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    with failing_together(join_processes(args)):
        train(args.config, args.workdir)


if __name__ == "__main__":
    command_line.run(main, FLAGS, required=("workdir",))
