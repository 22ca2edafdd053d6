"""Decodes prompts with a trained model: one prompt to stdout, a file of them to a file, or lines as they come.

    python decode.py --checkpoint=runs/demo --prompt='S:7+1+7+5?'
    python decode.py --checkpoint=runs/demo --input=prompts.jsonl --output=out.jsonl
    python decode.py --checkpoint=chat_model --chat --prompt='How many legs have three cats?'
    python decode.py --checkpoint=chat_model --chat < conversations.jsonl

The input has one JSON object per line with a "prompt": text, or a list of token IDs. Instead of it there may be
"messages", a conversation to answer: [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
which the tokenizer's chat template turns into text and which "enable_thinking" may go with; or "segments", fixed texts
and holes to fill: ["def add(a, b):", {"hole": 32}, "return result"]. "decode" may hold settings for that line alone:
{"seed": 3, "gen_length": 32}. Lines may have an "id" of their own.

With --chat a prompt is a conversation too, of one user's message. With --chat alone lines of this form are read from
standard input and answered one by one, each as soon as it has come; their objects go to standard output.

The output has the same objects plus "response" and "finish_reason", of segments also "holes"; with --num_samples above
1 "responses" and "finish_reasons". A line that cannot be answered gets "error" and its "line" number instead, and the
exit status is 1. Answers are written as they finish and put into input order at the end. A run that was interrupted
goes on where it was when the same command is given again; OUTPUT.journal, beside the output, tells what is done.

With --num_processes, --process_id and --coordinator_address several processes share one input, each on the devices it
has; they need a common file system. Of these devices --data_parallel and --tensor_parallel say how many it uses.

Settings that are not given are those of the run.

--method decodes as another system does that ReFusion is compared with, by default the one that the checkpoint was
trained for: one token after the other, or by masked or block diffusion. Each takes some of the flags --block_length,
--steps, --ordering, --threshold, --factor, --cache, --guidance and --unconditional, and none that is about slots.

--compile_for=v6e:2x4 decodes nothing: it compiles for these TPUs, which need not be there, and prints memory,
arithmetic and traffic of a chip. Of --checkpoint it reads the configuration alone; instead there may be --config, a
preset. The last line is JSON, and the exit status 1 when it does not fit.
"""

import dataclasses
import functools
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from absl import flags

from refusion_jax import accelerators, answers, command_line, decode_flags
from refusion_jax.api import Model, StreamRequest, encode_prompt, generate_stream, own_settings, prepare
from refusion_jax.checkpoint_identity import checkpoint_identity
from refusion_jax.compilation.commands import compile_decoding
from refusion_jax.compilation.programs import DecodeShape, described_config
from refusion_jax.config import ConfigError, DecodeConfig, to_dict
from refusion_jax.decoding import Answer, Rules, Statistics
from refusion_jax.decoding.batching import Bounds
from refusion_jax.decoding.rules import SLOT_SCORES
from refusion_jax.file_job import answer_file, response_fields
from refusion_jax.files import read_lines, writing_out
from refusion_jax.host_memory import keep_freed_memory
from refusion_jax.methods import METHOD_SETTINGS, Method
from refusion_jax.processes import PROCESS_FLAGS, Interrupted, Process, Signals, define_processes, join_processes
from refusion_jax.prompt_files import MAX_LINE_BYTES, Chat, Reader
from refusion_jax.prompts import Prepared

# What prompts and answers need; compiling has neither.
_NOT_COMPILED = (
    "prompt", "input", "output", "chat", "system", "enable_thinking", "ordered", "trace", "prompt_field", "prefix",
    "num_samples", "seed", "method", "allow_objective", *METHOD_SETTINGS, *PROCESS_FLAGS,
)  # fmt: skip


FLAGS = flags.FlagValues()
decode_flags.define(FLAGS)
flags.DEFINE_string("prompt", None, "One prompt; its response goes to stdout.", flag_values=FLAGS)
flags.DEFINE_string("input", None, "JSON-lines file of prompts.", flag_values=FLAGS)
flags.DEFINE_string("output", None, "JSON-lines file to write, or to continue.", flag_values=FLAGS)
flags.DEFINE_bool(
    "chat", False, "Prompts are conversations; alone it answers lines of standard input.", flag_values=FLAGS
)
flags.DEFINE_string("system", None, "With --chat: system message for conversations that have none.", flag_values=FLAGS)
flags.DEFINE_bool(
    "enable_thinking", True, "For conversations: what the chat template is told, if it asks.", flag_values=FLAGS
)
flags.DEFINE_bool("ordered", True, "Put the output into input order at the end.", flag_values=FLAGS)
flags.DEFINE_string(
    "trace",
    None,
    "JSON-lines file to write: per response its tokens, their positions, and of each the forward that committed it and "
    "the probability it was accepted with.",
    flag_values=FLAGS,
)
flags.DEFINE_string("prompt_field", "prompt", "Field of the input that holds the prompt.", flag_values=FLAGS)
flags.DEFINE_string("prefix", None, "Text before every prompt; computed once.", flag_values=FLAGS)
flags.DEFINE_integer("num_samples", 1, "Responses per prompt.", lower_bound=1, flag_values=FLAGS)
define_processes(FLAGS)
command_line.define_compile_for(FLAGS)
command_line.define_config(FLAGS, optional=True)
flags.DEFINE_integer(
    "compile_prompt_length", 512, "With --compile_for: the longest prompt.", lower_bound=1, flag_values=FLAGS
)


def main(args: flags.FlagValues) -> None:
    """Decodes with the parsed flags, or only compiles.

    Raises:
      ConfigError: for flags that do not belong together.
    """
    accelerators.set_flags()
    if args.compile_for is not None:
        if status := _compile(args):
            sys.exit(status)
        return
    if args.checkpoint is None:
        raise ConfigError(f"--checkpoint is missing: {args['checkpoint'].help}")
    for name in ("config", "compile_prompt_length"):
        if args[name].present:
            raise ConfigError(f"--{name} needs --compile_for: only compiling can do without weights and prompts.")
    _check_flags(args)
    process = join_processes(args)
    keep_freed_memory()
    accelerators.keep_programs()
    try:
        with Signals() as signals:
            status = _decode(args, process, signals)
    except Interrupted as interrupted:
        print("Interrupted.", file=sys.stderr)
        status = 128 + interrupted.number
    if process.count > 1 and status >= 128:
        # At its regular exit JAX waits for the others, and aborts when they do not come.
        sys.stderr.flush()
        os._exit(status)
    if status:
        sys.exit(status)


def _compile(args: flags.FlagValues) -> int:
    """Compiles for `--compile_for`; returns the exit status."""
    command_line.refuse_beside_compile_for(args, _NOT_COMPILED)
    if (args.checkpoint is None) == (not args.config):
        raise ConfigError("--compile_for needs one of --checkpoint and --config, not both: the model to compile.")
    config = args.config or described_config(args.checkpoint)
    types = {"dtype": args.dtype, "param_dtype": args.dtype, "kv_dtype": args.kv_dtype}
    types = {name: value for name, value in types.items() if value is not None}
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, **types))
    decode = dataclasses.replace(config.decode, **decode_flags.settings(args))
    rules = Rules(slot_score=SLOT_SCORES[args.slot_score])
    shape = DecodeShape(args.batch_size, args.compile_prompt_length, decode, rules, args.quantize or "")
    return compile_decoding(config, shape, args.compile_for, args.data_parallel, args.tensor_parallel)


def _check_flags(args: flags.FlagValues) -> None:
    given = [name for name in ("prompt", "input") if args[name].value is not None]
    if len(given) == 2 or not (given or args.chat):
        raise ConfigError("Give either --prompt or --input.")
    if (args.input is None) != (args.output is None):
        raise ConfigError("--input and --output belong together: the file of prompts and the file to write.")
    for name in ("trace", "num_processes"):
        if args.input is None and args[name].value is not None:
            instead = " instead of --prompt" if given else ""
            raise ConfigError(f"--{name} needs a file of prompts; give --input and --output{instead}.")
    _check_chat_flags(args)
    files = {f"--{name}": Path(str(args[name].value)) for name in ("input", "output", "trace") if args[name].value}
    for (one, path), (other, other_path) in itertools.combinations(files.items(), 2):
        if path.resolve() == other_path.resolve():
            raise ConfigError(f"{one} and {other} are both {path}; choose another file for {other}.")
    for flag in ("--output", "--trace"):
        if flag in files:
            answers.check_free(files[flag], flag)


def _check_chat_flags(args: flags.FlagValues) -> None:
    if args.system is not None and not args.chat:
        raise ConfigError("--system needs --chat: only conversations have a system message.")
    if args.prompt is not None and args["enable_thinking"].present and not args.chat:
        raise ConfigError(
            "--enable_thinking and --noenable_thinking need --chat with --prompt: the chat template alone asks for it."
        )
    if args.chat and args.prefix:
        raise ConfigError(
            "--prefix cannot be used with --chat: it would stand before the conversation's beginning; give --system."
        )


def _decode(args: flags.FlagValues, process: Process, signals: Signals) -> int:
    model = decode_flags.load(args)
    method = decode_flags.method(args, model)
    config = dataclasses.replace(own_settings(model, method), **decode_flags.settings(args))
    if args.prefix:
        try:
            encode_prompt(model, args.prefix)
        except ConfigError as error:
            raise ConfigError(f"--prefix cannot be used: {error}") from error
    if args.chat and model.tokenizer is None:
        raise ConfigError(
            "--chat needs a tokenizer, which the model does not have; give lists of token IDs without it."
        )
    chat = Chat(args.chat, args.system, args.enable_thinking)
    if args.system is not None:
        try:
            chat.of_text("", True)
        except ConfigError as error:
            raise ConfigError(f"--system cannot be used: {error}") from error
    if args.prompt is not None:
        return decode_one(model, args, config, chat, method)
    reader = Reader(model, config, args.seed, args.prompt_field, args.prefix or None, chat, signals, method)
    stream = functools.partial(_stream, model, args, method)
    if args.input is None:
        if sys.stdin is None:
            raise ConfigError("Standard input is closed; give lines there, or --prompt or --input.")
        with writing_out():
            target = sys.stdout.buffer
        return decode_lines(reader, sys.stdin.buffer, target, stream)
    targets = {f"--{name}": Path(str(args[name].value)) for name in ("output", "trace") if args[name].present}
    identity = _identity(args, config, method)
    return answer_file(reader, Path(args.input), targets, identity, process, stream, args.num_samples, args.ordered)


def _stream(
    model: Model,
    args: flags.FlagValues,
    method: Method,
    requests: Iterable[StreamRequest],
    count: int,
    bounds: Bounds,
    statistics: Statistics,
) -> Iterator[Answer]:
    """Answers to `count` requests at most, of which each gets `--num_samples`."""
    return generate_stream(
        model,
        requests,
        batch_size=args.batch_size,
        most_requests=count,
        num_samples=args.num_samples,
        prefix=args.prefix or None,
        rules=Rules(slot_score=SLOT_SCORES[args.slot_score]),
        statistics=statistics,
        method=method,
        allow_objective=args.allow_objective,
        **dataclasses.asdict(bounds),
    )


def decode_one(model: Model, args: flags.FlagValues, config: DecodeConfig, chat: Chat, method: Method) -> int:
    """Prints the responses to one prompt, and how they were decoded on stderr."""
    prompt = chat.of_text(args.prompt, chat.enable_thinking) if chat.prompts else args.prompt
    prepared, statistics = prepare(model, prompt, config, args.prefix or None, method), Statistics()
    requests, bounds = [StreamRequest(0, prepared, config, args.seed)], Bounds.of([(prepared.layout, prepared.config)])
    for answer in sorted(
        _stream(model, args, method, requests, 1, bounds, statistics), key=lambda answer: answer.sample
    ):
        with writing_out():
            print(answer.text, flush=True)
    per_forward = statistics.tokens / max(statistics.forwards, 1)
    print(
        f"[{statistics.tokens} tokens in {statistics.forwards} forwards, {per_forward:.1f} per forward]",
        file=sys.stderr,
    )
    return 0


def decode_lines(reader: Reader, source: BinaryIO, target: BinaryIO, stream: Callable[..., Iterator[Answer]]) -> int:
    """Answers lines one by one, each before the next is read; returns the exit status.

    Args:
      reader: of the lines.
      source: where they come from.
      target: where the objects with the answers go, in UTF-8.
      stream: `_stream` of its last four arguments.
    """
    failed = False
    for number, text in read_lines(source, MAX_LINE_BYTES):
        if text is not None and not text.strip():
            continue
        line = reader.line(number, text)
        failed |= line.request is None
        record = line.record if line.request is None else _answer_line(reader, line.record, line.request, stream)
        with writing_out():
            target.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
            target.flush()
        reader.signals.check()
    return int(failed)


def _answer_line(
    reader: Reader, record: dict[str, Any], request: StreamRequest, stream: Callable[..., Iterator[Answer]]
) -> dict[str, Any]:
    assert isinstance(request.prompt, Prepared)
    # Lengths are rounded up to buckets, so lines of similar lengths share one program.
    bounds = Bounds.of([(request.prompt.layout, request.prompt.config)])
    reader.signals.waiting = True
    samples = sorted(stream([request], 1, bounds, Statistics()), key=lambda answer: answer.sample)
    reader.signals.waiting = False
    return record | response_fields(samples, reader.is_template(record))


def _identity(args: flags.FlagValues, config: DecodeConfig, method: Method) -> dict[str, Any]:
    """All that answers depend on besides the input: not how many are decoded at once, nor by how many processes."""
    return {
        **checkpoint_identity(args.checkpoint),
        "prompt_field": args.prompt_field,
        "prefix": args.prefix or None,
        "chat": args.chat,
        "system": args.system,
        "enable_thinking": args.enable_thinking,
        "num_samples": args.num_samples,
        "seed": args.seed,
        "slot_score": args.slot_score,
        "dtype": args.dtype,
        "quantize": args.quantize,
        "kv_dtype": args.kv_dtype,
        **decode_flags.method_identity(args, method),
        **to_dict(config),
    }


if __name__ == "__main__":
    command_line.run(main, FLAGS)
