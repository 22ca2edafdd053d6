"""Trains a model: `python train.py --config=configs/demo.py --workdir=runs/demo`.

Any setting can be changed on the command line, for instance --config.train.steps=2000. Run again with the same
settings to continue an interrupted run; Ctrl-C and SIGTERM save before they end it.

On a TPU pod run the same command on every host. Elsewhere --num_processes, --process_id and --coordinator_address join
processes; all of them read the same data and --workdir.

--compile_for=v5p:4x4x4 trains nothing: it compiles the step for these TPUs, which need not be there, and prints memory,
arithmetic and traffic of a chip. The last line is JSON, and the exit status 1 when the step does not fit.
"""

import logging
import sys

from absl import flags

from refusion_jax import accelerators, command_line
from refusion_jax.compilation.commands import compile_training
from refusion_jax.config import ConfigError
from refusion_jax.host_memory import keep_freed_memory
from refusion_jax.processes import PROCESS_FLAGS, define_processes, failing_together, join_processes
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
command_line.define_compile_for(FLAGS)


def main(args: flags.FlagValues) -> None:
    """Trains with the parsed flags, or only compiles.

    Raises:
      ConfigError: without a work directory to train in, or with one where nothing is trained.
    """
    accelerators.set_flags()
    if args.compile_for is not None:
        command_line.refuse_beside_compile_for(args, ("workdir", *PROCESS_FLAGS))
        if status := compile_training(args.config, args.compile_for):
            sys.exit(status)
        return
    if args.workdir is None:
        raise ConfigError(f"--workdir is missing: {args['workdir'].help}")
    keep_freed_memory()
    # What fails in the background is said in one sentence when the run ends for it; tracebacks of threads bury that.
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    with failing_together(join_processes(args)):
        accelerators.keep_programs()
        train(args.config, args.workdir)


if __name__ == "__main__":
    command_line.run(main, FLAGS)
