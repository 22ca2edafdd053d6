"""The command line that `train`, `decode` and `evaluate` share: flags, presets, dotted overrides, one-line errors.

A command defines its flags on a `flags.FlagValues` of its own and hands them to `run`, together with a `main` that
receives them parsed:

    FLAGS = flags.FlagValues()
    command_line.define_config(FLAGS)
    flags.DEFINE_string("workdir", None, "Directory of the run.", flag_values=FLAGS)

    def main(args: flags.FlagValues) -> None:
        train(args.config, args.workdir)  # args.config is a frozen `Config`

    if __name__ == "__main__":
        command_line.run(main, FLAGS, required=("workdir",))

`--config` takes a file (`--config=configs/demo.py`) or the bare name of a preset (`--config=demo`), looked up in
./configs and then among those installed with the package. `--config.SECTION.FIELD=VALUE` overrides one field, before or
after `--config`:

    --config.train.steps=2000  --config.optimizer.learning_rate=1  --config.data.pack=false  --noconfig.data.pack
    --config.slots.sizes=4,8   --config.data.train_files=a.jsonl,b.jsonl   # a list is replaced whole
    --config.slots.sizes=8     --config.data.train_files=                  # one element, none
    --config.data.train_files=a.jsonl --config.data.train_files=b.jsonl    # repeating the flag lists its values
    --config.data.train_files="('a,b.jsonl',)"                             # Python syntax, where a value has a comma

Only the command-line modules import absl and ml_collections.
"""

import ast
import contextlib
import copy
import dataclasses
import difflib
import os
import re
import signal
import sys
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import ConfigDict, config_flags

from refusion_jax.config import Config, ConfigError, from_dict, nearest, to_dict
from refusion_jax.config_files import find_config_files, run_config_file

_OVERRIDE = re.compile(r"--?(no)?config\.([^=]*)(?:=(.*))?", re.DOTALL)


def config_dict(config: Config) -> ConfigDict:
    """Returns the editable form of `config`, for a preset's `get_config()`; a float field set to 1 holds 1.0."""
    return ConfigDict(dataclasses.asdict(from_dict(Config, to_dict(config))))


def freeze(config: ConfigDict) -> Config:
    """Builds and validates the dataclasses from their editable form.

    Raises:
      ConfigError: for an unknown field, a value of the wrong type, or one that does not validate.
    """
    return from_dict(Config, config.to_dict())


def define_config(flag_values: flags.FlagValues, optional: bool = False) -> None:
    """Defines `--config`; after `parse` its value is a `Config`, or "" where it is optional and not given."""
    flags.DEFINE_string(
        "config",
        "" if optional else None,
        "Preset, or Python file whose get_config() returns the settings; --config.SECTION.FIELD=VALUE overrides one.",
        flag_values=flag_values,
    )


def define_compile_for(flag_values: flags.FlagValues) -> None:
    """Defines `--compile_for`, the topology."""
    flags.DEFINE_string(
        "compile_for",
        None,
        "Only compile, for TPUs such as v5p:4x4x4, or 2*v5e:4x8 for two slices; none need be there.",
        flag_values=flag_values,
    )


def refuse_beside_compile_for(values: flags.FlagValues, names: Iterable[str]) -> None:
    """Refuses flags that compiling does not read.

    Args:
      values: parsed flags. names: of those that are not read.

    Raises:
      ConfigError: naming those that were given.
    """
    given = [f"--{name}" for name in names if values[name].present]
    if given:
        pronoun = "them" if len(given) > 1 else "it"
        raise ConfigError(f"--compile_for only compiles and does not read {', '.join(given)}; leave {pronoun} out.")


def parse(arguments: Sequence[str], flag_values: flags.FlagValues, required: Iterable[str] = ()) -> flags.FlagValues:
    """Returns a parsed copy of `flag_values`, in which `config`, if defined, is a `Config`.

    Args:
      arguments: what the user typed, without the program's name.
      flag_values: the command's flags; unchanged.
      required: names of the flags that must be given.

    Raises:
      ConfigError: for anything that cannot be understood or used, in one sentence.
    """
    values = copy.deepcopy(flag_values)
    values.set_gnu_getopt(True)
    try:
        unknown = values(["", *arguments], known_only=True)[1:]
    except (flags.Error, ValueError) as error:
        raise ConfigError(str(error)) from None
    overrides = _overrides(unknown, list(values))
    for name in required:
        if values[name].value is None:
            raise ConfigError(f"--{name} is missing: {values[name].help}")
    if "config" in values:
        optional = values["config"].default == ""
        if optional and not values.config and not overrides:
            return values
        if not values.config:
            raise ConfigError(f"--config is missing: give a preset ({', '.join(find_config_files())}) or a file.")
        values["config"].value = freeze(_override(_load(find_config(values.config)), overrides))
    return values


def run(
    main: Callable[[flags.FlagValues], None],
    flag_values: flags.FlagValues,
    required: Iterable[str] = (),
    arguments: Sequence[str] | None = None,
) -> None:
    """Parses `arguments` (by default the process's) and calls `main` with the parsed flags.

    Bad input ends the process as `ending_at_bad_input` says. A reader of stdout that is gone ends the process quietly.
    `--help` prints the documentation of `main`'s module, the flags and the fields.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    # Libraries read absl flags of their own; they get their defaults.
    flags.FLAGS.mark_as_parsed()
    if "--help" in arguments or "-h" in arguments:
        print(_usage(main, flag_values))
        return
    try:
        with ending_at_bad_input():
            main(parse(arguments, flag_values, required))
            if sys.stdout is not None:
                sys.stdout.flush()
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        # As SIGPIPE would; what is buffered must not be tried once more at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)


@contextlib.contextmanager
def ending_at_bad_input() -> Iterator[None]:
    """Ends the process with status 2 and one line on stderr when the block meets bad input.

    Bad input is a ValueError or OSError of a class that this package defines (`ConfigError`, `DataError`, ...), by
    which it is told from a programming error: that one keeps its traceback.
    """
    try:
        yield
    except (ValueError, OSError) as error:
        if type(error).__module__.partition(".")[0] != __name__.partition(".")[0]:
            raise
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)


def find_config(name: str) -> Path:
    """Returns the file that `--config=name` means: itself, or the preset of that name.

    Raises:
      ConfigError: when there is none, naming the nearest.
    """
    presets = find_config_files()
    if "/" not in name and not name.endswith(".py"):
        if name not in presets:
            raise ConfigError(f"Unknown preset {name!r}.{nearest(name, presets)}")
        return presets[name]
    path = Path(name)
    if not path.is_file():
        siblings = [str(path.parent / other.name) for other in sorted(path.parent.glob("*.py"))]
        raise ConfigError(f"No config file {name!r}.{nearest(str(path), [*siblings, *presets])}")
    return path


def _load(path: Path) -> ConfigDict:
    module = run_config_file(path)
    if not hasattr(module, "get_config"):
        raise ConfigError(f"{path} has no get_config(); define one that returns config_dict(Config(...)).")
    config = module.get_config()
    if not isinstance(config, ConfigDict):
        raise ConfigError(f"get_config() in {path} returns a {type(config).__name__}; return config_dict(Config(...)).")
    # A config file may have edited its ConfigDict: overrides rely on every field, each of its declared type.
    return config_dict(freeze(config))


def _leaves(cls: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, declared type) of every field that is not a section."""
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        kind = hints[field.name]
        if dataclasses.is_dataclass(kind):
            yield from _leaves(typing.cast(type, kind), f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", kind


def _overrides(arguments: Iterable[str], flag_names: Iterable[str]) -> dict[str, str | tuple]:
    """Reads the arguments that are no flags as overrides: dotted field -> text, or the items of a tuple field."""
    kinds = dict(_leaves(Config)) if "config" in flag_names else {}
    overrides: dict[str, str | tuple] = {}
    remaining = iter(arguments)
    for argument in remaining:
        match = _OVERRIDE.fullmatch(argument)
        if not match or not kinds:
            raise _unknown_argument(argument, flag_names)
        negated, name, text = match.groups()
        kind = kinds.get(name)
        if kind is None:
            raise _unknown_field(name, list(kinds))
        if negated and (kind is not bool or text is not None):
            raise ConfigError(f"{argument} is not understood; write --config.{name}=VALUE.")
        if kind is bool:
            text = "false" if negated else text if text is not None else "true"
        else:
            text = next(remaining, None) if text is None else text
        if text is None:
            raise ConfigError(f"--config.{name} needs a value.")
        if typing.get_origin(kind) is tuple:
            overrides[name] = (*overrides.get(name, ()), *_items(name, text, typing.get_args(kind)[0]))
        else:
            overrides[name] = text
    return overrides


def _items(name: str, text: str, kind: type) -> tuple:
    try:
        items = ast.literal_eval(text) if text.startswith(("(", "[")) else [item for item in text.split(",") if item]
        items = items if isinstance(items, tuple | list) else [items]  # "(4)" is no tuple
        return tuple(kind(str(item).strip()) for item in items)
    except (ValueError, SyntaxError):
        raise ConfigError(f"{name} is {text!r}; give values of type {kind.__name__}, separated by commas.") from None


def _override(config: ConfigDict, overrides: Mapping[str, str | tuple]) -> ConfigDict:
    for name, value in overrides.items():
        arguments = ["", f"--config.{name}={value}"]
        values = flags.FlagValues()
        try:
            config_flags.DEFINE_config_dict("config", config, flag_values=values, sys_argv=arguments)
            values(arguments)
        except flags.IllegalFlagValueError:
            kind = dict(_leaves(Config))[name].__name__
            raise ConfigError(f"{name} is {value!r}; it must be of type {kind}.") from None
        config = values.config
    return config


def _unknown_argument(argument: str, flag_names: Iterable[str]) -> ConfigError:
    if not argument.startswith("-"):
        return ConfigError(f"Unexpected argument {argument!r}; every setting is given as --name=value.")
    flag = argument.split("=", 1)[0]
    return ConfigError(f"Unknown flag {flag!r}.{nearest(flag, [f'--{name}' for name in (*flag_names, 'help')])}")


def _unknown_field(name: str, known: Sequence[str]) -> ConfigError:
    if not difflib.get_close_matches(name, known, n=1, cutoff=0.5):
        known = [field.name for field in dataclasses.fields(Config)]
    return ConfigError(f"Unknown config field {name!r}.{nearest(name, known)}")


def _usage(main: Callable[..., Any], flag_values: flags.FlagValues) -> str:
    lines = [(sys.modules[main.__module__].__doc__ or "").strip(), "", "Flags:"]
    lines += [f"  --{name}: {flag_values[name].help}" for name in flag_values]
    if "config" in flag_values and flag_values["config"].default is None:
        lines += [
            "",
            f"Presets: {', '.join(find_config_files())}",
            "",
            "Fields, with their defaults where no preset sets them:",
        ]
        for name, _ in _leaves(Config):
            section, _, field = name.partition(".")
            value = getattr(getattr(Config(), section), field)
            text = ",".join(map(str, value)) if isinstance(value, tuple) else value
            lines.append(f"  --config.{name}={text}")
    return "\n".join(lines)
