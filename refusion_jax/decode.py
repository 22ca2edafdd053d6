"""Decodes prompts with a trained model: one prompt to stdout, or a file of them to a file.

    python decode.py --checkpoint=runs/demo --prompt='S:7+1+7+5?'
    python decode.py --checkpoint=runs/demo --input=prompts.jsonl --output=out.jsonl

The input has one JSON object per line with a "prompt": text, or a list of token IDs. Instead of it there may be
"segments", fixed texts and holes to fill: ["def add(a, b):", {"hole": 32}, "return result"]. "decode" may hold settings
for that line alone: {"seed": 3, "gen_length": 32}. Lines may have an "id" of their own.

The output has the same objects plus "response" and "finish_reason", of segments also "holes"; with --num_samples above
1 "responses" and "finish_reasons". A line that cannot be answered gets "error" and its "line" number instead, and the
exit status is 1. Answers are written as they finish and put into input order at the end. A run that was interrupted
goes on where it was when the same command is given again; OUTPUT.journal, beside the output, tells what is done.

With --num_processes, --process_id and --coordinator_address several processes share one input, each on the devices it
has; they need a common file system.

Settings that are not given are those of the run.
"""

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import os
import signal
import sys
import time
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import tqdm
from absl import flags

from refusion_jax import answers, command_line
from refusion_jax.api import Model, StreamRequest, encode_prompt, generate_stream, load, prepare
from refusion_jax.config import ConfigError, DecodeConfig, to_dict
from refusion_jax.decoding import Answer, Rules, Statistics
from refusion_jax.decoding.batching import Bounds
from refusion_jax.decoding.rules import SLOT_SCORES
from refusion_jax.files import fingerprint
from refusion_jax.host_memory import keep_freed_memory
from refusion_jax.processes import (
    Interrupted,
    Process,
    Signals,
    define_processes,
    join_processes,
    wait_for_all,
)
from refusion_jax.prompt_files import SEED_LIMIT, Line, Reader, Scan, open_input, scan_file
from refusion_jax.training.run_directory import CHECKPOINTS_NAME, CONFIG_NAME, TOKENIZER_NAME

PLAIN_PROGRESS_SECONDS = 10.0


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


FLAGS = flags.FlagValues()
flags.DEFINE_string("checkpoint", None, "Run directory or Hugging Face directory.", flag_values=FLAGS)
flags.DEFINE_string("prompt", None, "One prompt; its response goes to stdout.", flag_values=FLAGS)
flags.DEFINE_string("input", None, "JSON-lines file of prompts.", flag_values=FLAGS)
flags.DEFINE_string("output", None, "JSON-lines file to write, or to continue.", flag_values=FLAGS)
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
flags.DEFINE(
    _BatchSize(),
    "batch_size",
    32,
    "Responses decoded at once, or auto: as many as memory holds.",
    flag_values=FLAGS,
)
flags.DEFINE_integer("seed", 0, "Seed of sampling.", lower_bound=0, upper_bound=SEED_LIMIT - 1, flag_values=FLAGS)
flags.DEFINE_enum(
    "slot_score", "first_token", list(SLOT_SCORES), "What tells how sure a drafted slot is.", flag_values=FLAGS
)
define_processes(FLAGS)

_DEFINE: dict[Any, Callable[..., Any]] = {
    str: flags.DEFINE_string,
    int: flags.DEFINE_integer,
    float: flags.DEFINE_float,
    bool: flags.DEFINE_bool,
    tuple[int, ...]: flags.DEFINE_list,
    tuple[str, ...]: flags.DEFINE_multi_string,  # texts may hold commas
}
for _field in dataclasses.fields(DecodeConfig):
    _kind = typing.get_type_hints(DecodeConfig)[_field.name]
    _text = _field.metadata.get("help", "decode setting") + ", separated by commas" * (_kind == tuple[int, ...])
    _DEFINE[_kind](_field.name, None, _text, flag_values=FLAGS)


def main(args: flags.FlagValues) -> None:
    """Decodes with the parsed flags."""
    _check_flags(args)
    process = join_processes(args)
    keep_freed_memory()
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


def _check_flags(args: flags.FlagValues) -> None:
    if (args.prompt is None) == (args.input is None):
        raise ConfigError("Give either --prompt or --input.")
    if (args.input is None) != (args.output is None):
        raise ConfigError("--input and --output belong together: the file of prompts and the file to write.")
    for name in ("trace", "num_processes"):
        if args.prompt is not None and args[name].value is not None:
            raise ConfigError(f"--{name} needs a file of prompts; give --input and --output instead of --prompt.")
    files = {f"--{name}": Path(str(args[name].value)) for name in ("input", "output", "trace") if args[name].value}
    for (one, path), (other, other_path) in itertools.combinations(files.items(), 2):
        if path.resolve() == other_path.resolve():
            raise ConfigError(f"{one} and {other} are both {path}; choose another file for {other}.")
    for flag in ("--output", "--trace"):
        if flag in files:
            answers.check_free(files[flag], flag)


def _decode(args: flags.FlagValues, process: Process, signals: Signals) -> int:
    model = load(args.checkpoint)
    config = dataclasses.replace(model.decode, **_settings(args))
    if args.prefix:
        try:
            encode_prompt(model, args.prefix)
        except ConfigError as error:
            raise ConfigError(f"--prefix cannot be used: {error}") from error
    if args.prompt is not None:
        return decode_one(model, args, config)
    return decode_file(model, args, config, process, signals)


def _settings(args: flags.FlagValues) -> dict[str, Any]:
    """The decode settings among the flags.

    Raises:
      ConfigError: for a list of numbers with something else in it.
    """
    settings = {}
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
        settings[name] = value
    return settings


def _stream(
    model: Model,
    args: flags.FlagValues,
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
        **dataclasses.asdict(bounds),
    )


def decode_one(model: Model, args: flags.FlagValues, config: DecodeConfig) -> int:
    """Prints the responses to one prompt, and how they were decoded on stderr."""
    prepared, bounds, statistics = prepare(model, args.prompt, config, args.prefix or None), Bounds(), Statistics()
    bounds.include(prepared.layout, prepared.config)
    requests = [StreamRequest(0, prepared, config, args.seed)]
    for answer in sorted(_stream(model, args, requests, 1, bounds, statistics), key=lambda answer: answer.sample):
        print(answer.text)
    per_forward = statistics.tokens / max(statistics.forwards, 1)
    print(
        f"[{statistics.tokens} tokens in {statistics.forwards} forwards, {per_forward:.1f} per forward]",
        file=sys.stderr,
    )
    return 0


# ---- files ---------------------------------------------------------------------------------------------------------


def decode_file(model: Model, args: flags.FlagValues, config: DecodeConfig, process: Process, signals: Signals) -> int:
    """Answers a file of prompts, or this process's share of it; returns the exit status.

    Raises:
      ConfigError: when the input cannot be read or used, or the output not be written or continued.
    """
    with open_input(Path(args.input)) as source, contextlib.ExitStack() as stack:
        reader = Reader(model, config, args.seed, args.prompt_field, args.prefix or None, signals)
        scan = scan_file(source, reader, process)
        identity = _identity(args, config, scan)
        outputs = [
            _Output(
                stack.enter_context(answers.Answers(_own_path(path, process), identity, flag)), path, identity, flag
            )
            for flag, path in (("--output", args.output), ("--trace", args.trace))
            if path is not None
        ]
        job = _FileJob(reader, outputs, process, scan, args.num_samples)
        if job.untraced:
            print(f"{job.untraced} answers have no trace yet; decoding them again for it.", file=sys.stderr)
        try:
            if job.done == scan.share > 0:
                print(
                    f"All {scan.share} prompts are already answered, {job.failed} of them with errors.", file=sys.stderr
                )
            else:
                job.answer(source, functools.partial(_stream, model, args))
            job.finish(args.ordered)
        except KeyboardInterrupt as interrupt:
            print(
                f"Interrupted: {job.done} of {scan.share} prompts answered; run the same command again to continue.",
                file=sys.stderr,
            )
            return 128 + (interrupt.number if isinstance(interrupt, Interrupted) else signal.SIGINT)
        return 1 if job.failed else 0


def _own_path(path: str, process: Process) -> Path:
    return answers.part_path(Path(path), process.id) if process.id else Path(path)


def _identity(args: flags.FlagValues, config: DecodeConfig, scan: "Scan") -> dict[str, Any]:
    """All that answers depend on: not how many are decoded at once, nor by how many processes."""
    checkpoint = Path(args.checkpoint).resolve()
    return {
        "checkpoint": str(checkpoint),
        "checkpoint_content": fingerprint(_checkpoint_files(checkpoint), checkpoint),
        "input_bytes": scan.size,
        "input_sha256": scan.sha256,
        "prompt_field": args.prompt_field,
        "prefix": args.prefix or None,
        "num_samples": args.num_samples,
        "seed": args.seed,
        "slot_score": args.slot_score,
        **to_dict(config),
    }


def _checkpoint_files(directory: Path) -> list[Path]:
    """The files that `load` reads; a run's others change when it goes on."""
    checkpoints = directory / CHECKPOINTS_NAME
    if checkpoints.is_dir():
        steps = [int(path.name) for path in checkpoints.iterdir() if path.name.isdecimal()]
        folders = [checkpoints / str(max(steps)) / "params"] if steps else []
        found = [path for folder in [*folders, directory / TOKENIZER_NAME] for path in folder.rglob("*")]
        found.append(directory / CONFIG_NAME)
    else:
        patterns = ("config.json", "*.safetensors", "*.safetensors.index.json", "tokenizer.model")
        found = [path for pattern in patterns for path in directory.glob(pattern)]
    return [path for path in found if path.is_file()]


# ---- writing -------------------------------------------------------------------------------------------------------


class _Output:
    """One of the files that answers go to: what this process writes of it, and what others have."""

    def __init__(self, own: answers.Answers, path: str, identity: Mapping[str, Any], flag: str):
        self.own, self._path = own, Path(path)
        others = [other for other in (self._path, *answers.find_parts(self._path)) if other != own.path]
        self._others = [answers.read_answers(other, identity, flag).states for other in others]

    def states(self, size: int) -> np.ndarray:
        """What is known of lines below `size`, from all files."""
        known = np.zeros(size, np.uint8)
        for states in (self.own.index.states, *self._others):
            there = np.frombuffer(states[:size], np.uint8)
            known[: len(there)] = np.maximum(known[: len(there)], there)
        return known

    def write(self, line: int, objects: Iterable[Any], tokens: int, failed: bool = False) -> None:
        """Writes the answer to a line, if it is not there from a run that was cut off before its other file."""
        if self.own.index.state(line) == answers.UNANSWERED:
            text = "".join(json.dumps(each, ensure_ascii=False) + "\n" for each in objects)
            self.own.append(line, text.encode(), tokens, failed)

    def gather(self, ordered: bool) -> None:
        """Takes over what other processes wrote, and finishes the file."""
        parts = answers.find_parts(self._path)
        for part in parts:
            self.own.gather(part)
        if ordered:
            self.own.sort()
        self.own.complete()
        for part in parts:
            answers.remove_part(part)


class _FileJob:
    """The work on one file: what is done, and doing the rest.

    Args:
      outputs: the output and, if there is one, the trace.

    Attributes:
      done, failed: this process's lines that have an answer, and those of them whose answer is an error.
      untraced: lines whose answer is there, but not its trace; they are decoded again.
    """

    def __init__(self, reader: Reader, outputs: list[_Output], process: Process, scan: Scan, num_samples: int):
        self._reader, self._outputs, self._process, self._scan = reader, outputs, process, scan
        self._num_samples = num_samples
        self._pending: dict[int, tuple[Line, list[Answer]]] = {}
        states = [output.states(scan.last + 1) for output in outputs]
        # A trace has nothing of lines with errors.
        is_failed, is_answered = states[0] == answers.FAILED, np.all(np.stack(states) == answers.ANSWERED, axis=0)
        self._is_done = is_failed | is_answered
        self.done = int(np.count_nonzero(process.of(self._is_done)))
        self.failed = int(np.count_nonzero(process.of(is_failed)))
        self.untraced = int(np.count_nonzero(process.of((states[0] == answers.ANSWERED) & ~is_answered)))

    def answer(self, source: BinaryIO, stream: Callable[..., Iterator[Answer]]) -> None:
        """Answers the lines that have no answer yet.

        Args:
          source: the input.
          stream: `_stream` of its last four arguments.

        Raises:
          ConfigError: when the input is not what it was at first, or an answer cannot be written.
        """
        statistics, digest, start = Statistics(), hashlib.sha256(), time.perf_counter()
        count = self._scan.share - self.done
        self._progress = _Progress(self.done, self._scan.share, statistics)
        signals = self._reader.signals
        signals.waiting = True
        try:
            requests = self._requests(source, digest)
            first = next(requests, None)  # a stream of none would be built for nothing
            if first is not None:
                for answer in stream(itertools.chain([first], requests), count, self._scan.bounds, statistics):
                    self._take(answer)
                    signals.check()
        finally:
            signals.waiting = False
            self._progress.close()
        if digest.hexdigest() != self._scan.sha256:
            raise ConfigError(f"--input {source.name} changed while it was read; delete the output and start over.")
        self._report(statistics, time.perf_counter() - start)

    def _requests(self, source: BinaryIO, digest: Any) -> Iterator[StreamRequest]:
        """The prompts to answer; lines with errors are answered on the way."""

        def is_wanted(number: int) -> bool:
            return number <= self._scan.last and self._process.has(number) and not self._is_done[number]

        for line in self._reader.lines(source, digest, is_wanted):
            if line.request is None:
                self._outputs[0].write(line.number, [line.record], 0, failed=True)
                self.failed += 1
                self._count(0)
            else:
                self._pending[line.request.index] = line, []
                yield line.request

    def _take(self, answer: Answer) -> None:
        """Writes the answer to a line when it has all samples."""
        line, samples = self._pending[answer.index]
        samples.append(answer)
        if len(samples) < self._num_samples:
            return
        del self._pending[answer.index]
        samples.sort(key=lambda sample: sample.sample)
        tokens = sum(len(sample.tokens) for sample in samples)
        record = line.record | _response(samples, self._reader.is_template(line.record))
        contents = [[record], [_trace(line.number, sample) for sample in samples]]
        for output, objects in reversed(list(zip(self._outputs, contents, strict=False))):  # the output comes last
            output.write(line.number, objects, tokens)
        self._count(tokens)

    def _count(self, tokens: int) -> None:
        self.done += 1
        self._progress.add(tokens)

    def _report(self, statistics: Statistics, seconds: float) -> None:
        print(
            f"{self.done - self.failed} prompts answered, {self.failed} lines with errors. This run: "
            f"{statistics.tokens} response tokens in {seconds:.1f} s ({statistics.tokens / seconds:,.0f} tokens/s) and "
            f"{statistics.forwards} forwards ({statistics.tokens / max(statistics.forwards, 1):.1f} tokens per "
            f"forward); {statistics.compile_seconds:.1f} s of it compiling.",
            file=sys.stderr,
        )

    def finish(self, ordered: bool) -> None:
        """Waits for all processes; the first one then brings all answers together.

        Raises:
          ConfigError: when another process did not do its share, or the output cannot be written.
        """
        if self._process.id:
            for output in self._outputs:
                output.own.close()
        wait_for_all(self._process, "answered")
        if not self._process.id:
            for output in self._outputs:
                output.gather(ordered)
            index = self._outputs[0].own.index
            self.failed = index.failed
            if self._process.count > 1:
                print(f"All shares: {len(index) - self.failed} prompts answered, {self.failed} lines with errors.",
                      file=sys.stderr)  # fmt: skip
        wait_for_all(self._process, "gathered")


def _response(samples: list[Answer], is_template: bool) -> dict[str, Any]:
    """What an output object says of the answers to its prompt: texts, or token IDs without a tokenizer."""
    holes = [sample.holes if sample.hole_texts is None else sample.hole_texts for sample in samples]
    if samples[0].text is not None:
        responses: list[Any] = [sample.text for sample in samples]
    else:
        responses = [sample.holes if is_template else sample.tokens for sample in samples]
    reasons = [sample.finish_reason for sample in samples]
    filled = {"holes": holes} if is_template else {}
    if len(samples) == 1:
        return {
            "response": responses[0],
            **{name: value[0] for name, value in filled.items()},
            "finish_reason": reasons[0],
        }
    return {"responses": responses, **filled, "finish_reasons": reasons}


def _trace(line: int, answer: Answer) -> dict[str, Any]:
    return {
        "line": line,
        "sample": answer.sample,
        "tokens": answer.committed,
        "position_ids": answer.position_ids,
        "iteration": answer.order,
        "probability": [float(f"{probability:.7g}") for probability in answer.probabilities],  # no more is float32
    }


class _Progress:
    """A bar on a terminal; elsewhere a line now and then."""

    def __init__(self, done: int, total: int, statistics: Statistics):
        self._start = self._printed = time.perf_counter()
        self._first, self._done, self._total, self._tokens = done, done, total, 0
        self._statistics = statistics
        self._bar = None
        if sys.stderr.isatty():
            self._bar = tqdm.tqdm(total=total, initial=done, unit=" prompts", dynamic_ncols=True)

    def add(self, tokens: int) -> None:
        """Counts an answered prompt with so many response tokens."""
        self._done += 1
        self._tokens += tokens
        now = time.perf_counter()
        seconds = max(now - self._start - self._statistics.compile_seconds, 1e-9)  # compiling does not come again
        rate = f"{self._tokens / seconds:,.0f} tokens/s"
        if self._bar is not None:
            self._bar.set_postfix_str(rate, refresh=False)
            self._bar.update()
        elif now - self._printed >= PLAIN_PROGRESS_SECONDS:
            self._printed = now
            left = seconds / (self._done - self._first) * (self._total - self._done)
            text = f"{self._done}/{self._total} prompts, {rate}, {tqdm.tqdm.format_interval(left)} left"
            print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Ends the bar's line."""
        if self._bar is not None:
            self._bar.close()


if __name__ == "__main__":
    command_line.run(main, FLAGS, required=("checkpoint",))
