"""How each benchmark is decoded: the files of configs/eval, and the settings of one task."""

import dataclasses
import fnmatch
import functools
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from refusion_jax.config import ConfigError, DecodeConfig, require, require_types, setting
from refusion_jax.config_files import find_config_files, run_config_file


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    """How a benchmark is decoded: what `configs/eval/NAME.py` returns."""

    tasks: tuple[str, ...] = setting((), "names of the harness's tasks it is for; * stands for any characters")
    decode: DecodeConfig = dataclasses.field(default_factory=DecodeConfig)

    def __post_init__(self) -> None:
        require_types("eval", self)
        require(bool(self.tasks), "eval.tasks is empty; name the tasks that the settings are for.")


@functools.cache
def eval_configs() -> Mapping[str, EvalConfig]:
    """By name, the settings in ./configs/eval and those that came with the package.

    Raises:
      ConfigError: for a file that returns none.
    """
    return {name: _read(path) for name, path in find_config_files("eval").items()}


def _read(path: Path) -> EvalConfig:
    module = run_config_file(path)
    config = module.get_config() if hasattr(module, "get_config") else None
    if not isinstance(config, EvalConfig):
        raise ConfigError(f"{path} has no get_config() that returns an EvalConfig; see configs/eval of the package.")
    return config


def find_eval_config(task: str) -> tuple[str, EvalConfig] | None:
    """Name and content of the settings for a task: those with the longest pattern that it matches; None without any."""
    found = [
        (len(pattern), name, config)
        for name, config in eval_configs().items()
        for pattern in config.tasks
        if fnmatch.fnmatchcase(task, pattern)
    ]
    if not found:
        return None
    _, name, config = max(found, key=lambda each: each[:2])
    return name, config


def decode_config(
    task: str, default: DecodeConfig, overrides: Mapping[str, Any], asked: Mapping[str, Any], use_eval_configs: bool
) -> DecodeConfig:
    """How the prompts of a task are decoded.

    Args:
      task: the harness's name of it.
      default: for a task without settings in configs/eval.
      overrides: fields that the user set, which win over all others.
      asked: the harness's `generation_kwargs`: "until", the texts that end a response; "temperature", "top_p" and
        "top_k" with "do_sample"; "max_gen_toks" counts only where nothing else says how long responses are.
      use_eval_configs: whether to look into configs/eval.

    Raises:
      ConfigError: for settings that do not go together, naming the task.
    """
    found = find_eval_config(task) if use_eval_configs else None
    base = default if found is None else found[1].decode
    fields: dict[str, Any] = {"stop": tuple(dict.fromkeys(text for text in _texts(asked.get("until")) if text))}
    if asked.get("do_sample"):
        kinds = typing.get_type_hints(DecodeConfig)
        names = [name for name in ("temperature", "top_p", "top_k") if asked.get(name) is not None]
        fields |= {name: kinds[name](asked[name]) for name in names}
    else:
        fields["temperature"] = 0.0
    if found is None and asked.get("max_gen_toks") is not None:
        shape = {name: overrides.get(name, getattr(base, name)) for name in ("slot_size", "serial_num_blocks")}
        unit = shape["slot_size"] * shape["serial_num_blocks"]
        fields["gen_length"] = -(-int(asked["max_gen_toks"]) // unit) * unit
    stop = (*fields["stop"], *overrides.get("stop", ()))
    try:
        return dataclasses.replace(base, **{**fields, **overrides, "stop": stop})
    except ConfigError as error:
        raise ConfigError(f"Task {task}: {error}") from error


def _texts(until: Any) -> list[str]:
    return [until] if isinstance(until, str) else list(until or ())
