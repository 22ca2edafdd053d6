"""The flags that `decode` and `evaluate` share: where and how a checkpoint decodes."""

import dataclasses
import typing
from collections.abc import Callable
from typing import Any

import jax
from absl import flags

from refusion_jax import api
from refusion_jax.api import Model
from refusion_jax.config import DTYPES, ConfigError, DecodeConfig
from refusion_jax.decoding.rules import SLOT_SCORES
from refusion_jax.methods import CHOICES, METHOD_SETTINGS, SLOT_SETTINGS, Method, choose_method, methods_of
from refusion_jax.modeling.quantization import QUANTIZATIONS
from refusion_jax.prompt_files import SEED_LIMIT
from refusion_jax.sharding import decoding_mesh

_DEFINE: dict[Any, Callable[..., Any]] = {
    str: flags.DEFINE_string,
    int: flags.DEFINE_integer,
    float: flags.DEFINE_float,
    bool: flags.DEFINE_bool,
    tuple[int, ...]: flags.DEFINE_list,
    tuple[str, ...]: flags.DEFINE_multi_string,  # texts may hold commas
}


class _BatchSize(flags.ArgumentParser):
    syntactic_help = "a number of at least 1, or auto"

    def parse(self, argument: str | int) -> str | int:
        """A number of rows or "auto".

        Raises:
          ValueError: for anything else.
        """
        if argument == "auto":
            return "auto"
        if not str(argument).isdecimal() or int(argument) < 1:
            raise ValueError("it must be at least 1, or auto")
        return int(argument)


def define(flag_values: flags.FlagValues) -> None:
    """Defines the checkpoint and how it is loaded, the batch, every setting of `DecodeConfig` and of `Method`."""
    flags.DEFINE_string("checkpoint", None, "Run directory or Hugging Face directory.", flag_values=flag_values)
    _define_devices(flag_values)
    flags.DEFINE_integer(
        "seed", 0, "Seed of sampling.", lower_bound=0, upper_bound=SEED_LIMIT - 1, flag_values=flag_values
    )
    for field in dataclasses.fields(DecodeConfig):
        kind = typing.get_type_hints(DecodeConfig)[field.name]
        text = field.metadata.get("help", "decode setting") + ", separated by commas" * (kind == tuple[int, ...])
        _DEFINE[kind](field.name, None, text, flag_values=flag_values)
    flags.DEFINE_enum(
        "slot_score",
        "first_token",
        list(SLOT_SCORES),
        "What tells how sure a drafted slot is.",
        flag_values=flag_values,
    )
    for field in dataclasses.fields(Method):
        kind, flag = typing.get_type_hints(Method)[field.name], "method" if field.name == "name" else field.name
        choices = f" ({', '.join(CHOICES[field.name])})" if field.name in CHOICES else ""
        _DEFINE[kind](flag, None, field.metadata["help"] + choices, flag_values=flag_values)
    flags.DEFINE_string(
        "allow_objective",
        None,
        "The checkpoint's training objective, or unknown: decodes it by a method for another one.",
        flag_values=flag_values,
    )


def _define_devices(flag_values: flags.FlagValues) -> None:
    flags.DEFINE(
        _BatchSize(),
        "batch_size",
        32,
        "Responses decoded at once, or auto: as many as memory holds.",
        flag_values=flag_values,
    )
    flags.DEFINE_integer(
        "data_parallel",
        1,
        "Devices that responses are split over, each with the whole model: of this process, or of the topology that is "
        "compiled for; -1 for the rest.",
        lower_bound=-1,
        flag_values=flag_values,
    )
    flags.DEFINE_integer(
        "tensor_parallel",
        1,
        "Devices that the model is split over, by heads, feed-forward width and vocabulary (mesh.tensor); -1 for the "
        "rest.",
        lower_bound=-1,
        flag_values=flag_values,
    )
    flags.DEFINE_enum(
        "dtype",
        None,
        list(DTYPES),
        "Type of parameters and activations; by default the checkpoint's.",
        flag_values=flag_values,
    )
    flags.DEFINE_enum("quantize", None, list(QUANTIZATIONS), "Type to round the weights to.", flag_values=flag_values)
    flags.DEFINE_string(
        "kv_dtype", None, "Type of the KV buffer: int8, or '' for that of activations.", flag_values=flag_values
    )


def load(args: flags.FlagValues) -> Model:
    """The checkpoint, on the devices and in the types that the flags name.

    Raises:
      CheckpointError, ConfigError: as of `api.load`, or when there are not so many devices.
    """
    mesh = decoding_mesh(args.data_parallel, args.tensor_parallel, jax.local_devices())
    types = {"dtype": args.dtype, "quantize": args.quantize, "kv_dtype": args.kv_dtype}
    return api.load(args.checkpoint, mesh=mesh, **types)


def method(args: flags.FlagValues, model: Model) -> Method:
    """The method among the flags, by default that of the checkpoint's training objective.

    Raises:
      ConfigError: for flags that do not belong together, or a method that the checkpoint was not trained for.
    """
    given: dict[str, Any] = {name: args[name].value for name in METHOD_SETTINGS if args[name].value is not None}
    try:
        chosen = Method(methods_of(model.objective)[0] if args.method is None else args.method, **given)
    except ConfigError as error:
        raise ConfigError(str(error).replace("method.name", "--method").replace("method.", "--")) from None
    try:
        chosen = choose_method(model.objective, chosen, args.allow_objective, model.block_lengths)
    except ConfigError as error:
        text = str(error).replace("method is", "--method is").replace("method.", "--")
        raise ConfigError(text.replace("allow_objective", "--allow_objective")) from None
    for flag in (*SLOT_SETTINGS, "slot_score") if chosen.name != "refusion" else ():
        if args[flag].present:
            raise ConfigError(f"--{flag} is for slots, which the method {chosen.name!r} does not have; leave it out.")
    return chosen


def method_identity(args: flags.FlagValues, method: Method) -> dict[str, Any]:
    """None of ReFusion's own method, as in what was begun before there were others."""
    if method.name == "refusion":
        return dict.fromkeys(("method", *METHOD_SETTINGS, "allow_objective"))
    values = {name: getattr(method, name) for name in METHOD_SETTINGS} | {"ordering": method.scores}
    return {"method": method.name, **values, "allow_objective": args.allow_objective}


def settings(args: flags.FlagValues) -> dict[str, Any]:
    """The decode settings among the flags.

    Raises:
      ConfigError: for a list of numbers with something else in it.
    """
    found = {}
    for name, kind in typing.get_type_hints(DecodeConfig).items():
        value = args[name].value
        if value is None:
            continue
        if typing.get_origin(kind) is tuple:
            item = typing.get_args(kind)[0]
            try:
                value = tuple(item(text) for text in value if text or item is str)  # an empty list has one empty item
            except ValueError:
                raise ConfigError(
                    f"--{name} is {','.join(value)!r}; give whole numbers, separated by commas."
                ) from None
        found[name] = value
    return found
