"""Turns a run into a Hugging Face directory, and the other way round.

    python -m refusion_jax.huggingface export RUN DIR [--dtype=bfloat16] [--max-shard-size=5GB]
    python -m refusion_jax.huggingface import DIR RUN [--dtype=bfloat16] [--objective=autoregressive]

`export` writes what `transformers` loads: of the newest checkpoint of a run, with adapters merged in, or of anything
else that `load` takes. `import` makes a run directory of a Hugging Face directory or a model of the Hub ("org/name"),
which decodes and which train.init_from may name; --objective says what its weights were trained for where its
config.json does not, as that of a plain Qwen3, and --block_lengths in which blocks, of block_diffusion. Tensors keep
their type unless --dtype says otherwise. The second directory appears when it is complete; one that holds something is
refused.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from refusion_jax import api, command_line
from refusion_jax.config import OBJECTIVES, ConfigError
from refusion_jax.huggingface.directories import check_new, new_directory, on_disk
from refusion_jax.huggingface.export import export_checkpoint, parse_size
from refusion_jax.processes import Interrupted, Signals
from refusion_jax.training.imported import write_run

_POSITIONAL = ("command", "source", "target")
_USAGE = {"export": "export RUN DIR", "import": "import DIR RUN"}

FLAGS = flags.FlagValues()
flags.DEFINE_string("command", None, "export or import; the first argument.", flag_values=FLAGS)
flags.DEFINE_string("source", None, "What is read; the second argument.", flag_values=FLAGS)
flags.DEFINE_string("target", None, "Directory that is written; the third argument.", flag_values=FLAGS)
flags.DEFINE_string("dtype", None, "float32, bfloat16 or float16; by default as stored.", flag_values=FLAGS)
flags.DEFINE_enum(
    "objective",
    None,
    list(OBJECTIVES),
    "With import: what the weights were trained for; by default what config.json says, or else hybrid.",
    flag_values=FLAGS,
)
flags.DEFINE_list(
    "block_lengths", [], "With import, of block_diffusion: lengths of the blocks it was trained in.", flag_values=FLAGS
)
flags.DEFINE_string("max-shard-size", "5GB", "Most bytes of tensors in a file of an export.", flag_values=FLAGS)


def main(args: flags.FlagValues) -> None:
    """Does what the arguments say."""
    try:
        with Signals():
            _convert(args)
    except Interrupted as interrupted:
        print("Interrupted.", file=sys.stderr, flush=True)
        # Not `sys.exit`: threads of a write under way would fail loudly.
        os._exit(128 + interrupted.number)


def _convert(args: flags.FlagValues) -> None:
    if args.command not in _USAGE or args.source is None or args.target is None:
        given = " ".join(text for text in (args.command, args.source, args.target) if text is not None)
        raise ConfigError(f"The arguments are {given!r}; say {' or '.join(_USAGE.values())}.")
    size = parse_size(str(args["max-shard-size"].value))
    target, source = on_disk(args.target), Path(args.source)
    check_new(target)  # before minutes of reading
    if source.exists() and source.resolve() in target.resolve().parents:
        raise ConfigError(f"{target} lies inside {source}, which is read; name a directory elsewhere.")
    model = api.load(args.source, dtype=args.dtype)
    if args.command == "export":
        for flag in ("objective", "block_lengths"):
            if args[flag].present:
                raise ConfigError(f"--{flag} belongs to import; an export says what the run was trained for.")
        export_checkpoint(
            model.params,
            model.config,
            target,
            model.tokenizer,
            max_shard_size=size,
            objective=model.objective,
            block_lengths=model.block_lengths,
        )
    else:
        with new_directory(target) as temporary:
            write_run(temporary, model.config, model.params, model.tokenizer, *_trained_for(args, model))
    print(f"Written to {target}.")


def _trained_for(args: flags.FlagValues, model: api.Model) -> tuple[str, tuple[int, ...]]:
    """The training objective and block lengths that an imported model's run has."""
    objective = args.objective or model.objective
    if model.objective not in ("", objective):
        raise ConfigError(
            f"--objective is {objective!r}, but {args.source} says that it was trained for {model.objective!r}; leave "
            "the flag out."
        )
    text = ",".join(args.block_lengths)
    if not all(length.isdecimal() and int(length) for length in args.block_lengths):
        raise ConfigError(f"--block_lengths is {text}; give whole numbers of at least 1, separated by commas.")
    given = tuple(map(int, args.block_lengths))
    lengths = model.block_lengths or given
    if given and objective != "block_diffusion":
        raise ConfigError(
            f"--block_lengths is {text}, which belongs to the objective block_diffusion, not to "
            f"{objective or 'hybrid'!r}; leave it out."
        )
    if given not in ((), lengths):
        raise ConfigError(
            f"--block_lengths is {text}, but {args.source} says that it was trained in blocks of "
            f"{', '.join(map(str, lengths))}; leave the flag out."
        )
    if objective == "block_diffusion" and not lengths:
        raise ConfigError(
            "--block_lengths is missing: block diffusion decodes in blocks of the lengths it was trained with."
        )
    return objective, lengths


def named(arguments: Sequence[str]) -> list[str]:
    """The arguments with the leading ones that are no flags as the flags they stand for."""
    count = next((i for i, argument in enumerate(arguments) if argument.startswith("-")), len(arguments))
    leading = [f"--{name}={value}" for name, value in zip(_POSITIONAL, arguments[:count], strict=False)]
    return leading + list(arguments[len(leading) :])


if __name__ == "__main__":
    command_line.run(main, FLAGS, arguments=named(sys.argv[1:]))
