"""Turns a run into a Hugging Face directory, and the other way round.

    python -m refusion_jax.huggingface export RUN DIR [--dtype=bfloat16] [--max-shard-size=5GB]
    python -m refusion_jax.huggingface import DIR RUN [--dtype=bfloat16]

`export` writes what `transformers` loads: of the newest checkpoint of a run, with adapters merged in, or of anything
else that `load` takes. `import` makes a run directory of a Hugging Face directory or a model of the Hub ("org/name"),
which decodes and which train.init_from may name. Tensors keep their type unless --dtype says otherwise. The second
directory appears when it is complete; one that holds something is refused.
"""

import sys
from collections.abc import Sequence

from absl import flags

from refusion_jax import api, command_line
from refusion_jax.config import ConfigError
from refusion_jax.huggingface.directories import check_new, new_directory, on_disk
from refusion_jax.huggingface.export import export_checkpoint, parse_size
from refusion_jax.training.imported import write_run

_POSITIONAL = ("command", "source", "target")

FLAGS = flags.FlagValues()
flags.DEFINE_string("command", None, "export or import; the first argument.", flag_values=FLAGS)
flags.DEFINE_string("source", None, "What is read; the second argument.", flag_values=FLAGS)
flags.DEFINE_string("target", None, "Directory that is written; the third argument.", flag_values=FLAGS)
flags.DEFINE_string("dtype", None, "float32, bfloat16 or float16; by default as stored.", flag_values=FLAGS)
flags.DEFINE_string("max-shard-size", "5GB", "Most bytes of tensors in a file of an export.", flag_values=FLAGS)


def main(args: flags.FlagValues) -> None:
    """Does what `args.command` says."""
    if args.command not in ("export", "import"):
        raise ConfigError(f"The command is {args.command!r}; say export RUN DIR or import DIR RUN.")
    size = parse_size(str(args["max-shard-size"].value))
    target = on_disk(args.target)
    check_new(target)  # before minutes of reading
    model = api.load(args.source, dtype=args.dtype)
    if args.command == "export":
        export_checkpoint(model.params, model.config, target, model.tokenizer, max_shard_size=size)
    else:
        with new_directory(target) as temporary:
            write_run(temporary, model.config, model.params, model.tokenizer)
    print(f"Written to {target}.")


def named(arguments: Sequence[str]) -> list[str]:
    """The arguments with the leading ones that are no flags as the flags they stand for."""
    count = next((i for i, argument in enumerate(arguments) if argument.startswith("-")), len(arguments))
    leading = [f"--{name}={value}" for name, value in zip(_POSITIONAL, arguments[:count], strict=False)]
    return leading + list(arguments[len(leading) :])


if __name__ == "__main__":
    command_line.run(main, FLAGS, required=_POSITIONAL, arguments=named(sys.argv[1:]))
