"""Decodes prompts with a trained model: one prompt to stdout, or a file of them to a file.

    python decode.py --checkpoint=runs/demo --prompt='S:7+1+7+5?'
    python decode.py --checkpoint=runs/demo --input=prompts.jsonl --output=out.jsonl

The input has one JSON object per line with a "prompt": text, or a list of token IDs. The output has the same objects
plus "response", in input order. A line that cannot be answered gets "error" and its "line" number instead, and the exit
status is 1. Settings that are not given are those of the run.
"""

import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeGuard

from absl import flags

from refusion_jax import command_line
from refusion_jax.api import Model, encode_prompt, generate, load
from refusion_jax.config import ConfigError, DecodeConfig
from refusion_jax.decoding.batching import check_request
from refusion_jax.host_memory import keep_freed_memory

FLAGS = flags.FlagValues()
flags.DEFINE_string("checkpoint", None, "Run directory or Hugging Face directory.", flag_values=FLAGS)
flags.DEFINE_string("prompt", None, "One prompt; its response goes to stdout.", flag_values=FLAGS)
flags.DEFINE_string("input", None, "JSON-lines file of prompts.", flag_values=FLAGS)
flags.DEFINE_string("output", None, "JSON-lines file to write.", flag_values=FLAGS)
flags.DEFINE_string("prompt_field", "prompt", "Field of the input that holds the prompt.", flag_values=FLAGS)
flags.DEFINE_integer("batch_size", 32, "Prompts decoded at once.", lower_bound=1, flag_values=FLAGS)
flags.DEFINE_integer("seed", 0, "Seed of sampling.", lower_bound=0, upper_bound=2**31 - 1, flag_values=FLAGS)

_DEFINE: dict[type, Callable[..., Any]] = {
    str: flags.DEFINE_string,
    int: flags.DEFINE_integer,
    float: flags.DEFINE_float,
    bool: flags.DEFINE_bool,
}
for _field in dataclasses.fields(DecodeConfig):
    _help = f"Decode setting; by default the run's, else {_field.default}."
    _DEFINE[type(_field.default)](_field.name, None, _help, flag_values=FLAGS)


def main(args: flags.FlagValues) -> None:
    """Decodes with the parsed flags."""
    if (args.prompt is None) == (args.input is None):
        raise ConfigError("Give either --prompt or --input.")
    if (args.input is None) != (args.output is None):
        raise ConfigError("--input and --output belong together: the file of prompts and the file to write.")
    keep_freed_memory()
    model = load(args.checkpoint)
    settings = {field.name: args[field.name].value for field in dataclasses.fields(DecodeConfig)}
    given = {name: value for name, value in settings.items() if value is not None}
    config = dataclasses.replace(model.decode, **given)
    if args.prompt is not None:
        decode_one(model, args.prompt, config, args.seed)
    elif not decode_file(model, args, config):
        sys.exit(1)


def decode_one(model: Model, prompt: str, config: DecodeConfig, seed: int) -> None:
    """Prints the response to one prompt, and how it was decoded on stderr."""
    check_request(encode_prompt(model, prompt), config, model.config)
    result = generate(model, [prompt], config, seed=seed)
    assert result.text is not None
    print(result.text[0])
    tokens, forwards = len(result.tokens[0]), result.forwards[0]
    print(f"[{tokens} tokens in {forwards} forwards, {tokens / forwards:.1f} per forward]", file=sys.stderr)


def decode_file(model: Model, args: flags.FlagValues, config: DecodeConfig) -> bool:
    """Answers a file of prompts; True when every line could be answered.

    Raises:
      ConfigError: when the input cannot be read or the output not be written.
    """
    try:
        lines = Path(args.input).read_bytes().split(b"\n")
    except OSError as error:
        raise ConfigError(f"--input {args.input} cannot be read: {error.strerror}.") from error
    _check_writable(Path(args.output))
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    read = [_read_line(model, line, number, args.prompt_field, config) for number, line in numbered]
    records = [record for record, _ in read]
    good = [record for record, is_good in read if is_good]
    start = time.perf_counter()
    result = generate(
        model,
        [record[args.prompt_field] for record in good],
        config,
        seed=args.seed,
        batch_size=args.batch_size,
        on_progress=lambda done: print(f"{done}/{len(good)} prompts", file=sys.stderr),
    )
    seconds = time.perf_counter() - start
    for record, response in zip(good, result.tokens if result.text is None else result.text, strict=True):
        record["response"] = response
    _write(Path(args.output), records)
    tokens, forwards = sum(map(len, result.tokens)), sum(result.forwards)
    print(
        f"{len(good)} prompts answered, {len(records) - len(good)} lines with errors; "
        f"{tokens} tokens in {seconds:.1f} s, {tokens / max(forwards, 1):.1f} per forward.",
        file=sys.stderr,
    )
    return len(good) == len(records)


def _read_line(
    model: Model, line: bytes, number: int, prompt_field: str, config: DecodeConfig
) -> tuple[dict[str, Any], bool]:
    """The object of a line and whether it can be answered; if not, it has "line" and "error"."""

    def bad(error: str, record: dict[str, Any]) -> tuple[dict[str, Any], bool]:
        return record | {"line": number, "error": error}, False

    try:
        record = json.loads(line.decode("utf-8-sig"))
        json.dumps(record, ensure_ascii=False).encode()  # escapes can spell half a surrogate pair
    except (ValueError, RecursionError) as error:
        return bad(f"Not JSON in UTF-8: {error}.", {})
    if not isinstance(record, dict):
        return bad(f"A JSON object was expected, not {type(record).__name__}.", {})
    # An output fed in again must not carry over what was said of it then.
    stale = {"response"} | ({"line", "error"} if {"line", "error"} <= record.keys() else set())
    record = {name: value for name, value in record.items() if name not in stale - {prompt_field}}
    prompt = record.get(prompt_field)
    if not _is_prompt(prompt):
        return bad(f"{prompt_field!r} must be text or token IDs; fields here: {', '.join(record) or 'none'}.", record)
    try:
        check_request(encode_prompt(model, prompt), config, model.config)
    except ConfigError as error:
        return bad(str(error), record)
    return record, True


def _is_prompt(value: Any) -> TypeGuard[str | list[int]]:
    return isinstance(value, str) or (isinstance(value, list) and all(type(token) is int for token in value))


def _check_writable(path: Path) -> None:
    """Refuses a path that cannot be written before any work is spent on it."""
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        reason = "it is a directory" if path.is_dir() else f"{path.parent} is not a directory one can write to"
        raise ConfigError(f"--output {path} cannot be written: {reason}.")


def _write(path: Path, records: list[dict[str, Any]]) -> None:
    temporary = path.with_name(path.name + ".tmp")
    text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise ConfigError(f"--output {path} cannot be written: {error}.") from error


if __name__ == "__main__":
    command_line.run(main, FLAGS, required=("checkpoint",))
