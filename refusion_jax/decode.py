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
import threading
import time
import types
import typing
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeGuard

import jax
import numpy as np
import tqdm
from absl import flags
from orbax.checkpoint import multihost

from refusion_jax import answers, command_line
from refusion_jax.api import Model, StreamRequest, encode_prompt, generate_stream, load, prepare
from refusion_jax.config import ConfigError, DecodeConfig, from_dict, to_dict
from refusion_jax.decoding import Answer, Rules, Statistics
from refusion_jax.decoding.batching import count_suppressed
from refusion_jax.decoding.rules import SLOT_SCORES
from refusion_jax.files import fingerprint, read_lines
from refusion_jax.host_memory import keep_freed_memory
from refusion_jax.prompts import Prepared
from refusion_jax.training.checkpoint import CHECKPOINTS_NAME, CONFIG_NAME, TOKENIZER_NAME

MAX_LINE_BYTES = 1 << 20
PLAIN_PROGRESS_SECONDS = 10.0

_SEED_LIMIT = 2**31
_SHUTDOWN_SECONDS = 30
_BARRIER_MILLISECONDS = 30 * 24 * 3600 * 1000  # shares may take days and finish far apart


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
flags.DEFINE_integer("seed", 0, "Seed of sampling.", lower_bound=0, upper_bound=_SEED_LIMIT - 1, flag_values=FLAGS)
flags.DEFINE_enum(
    "slot_score", "first_token", list(SLOT_SCORES), "What tells how sure a drafted slot is.", flag_values=FLAGS
)
flags.DEFINE_integer("num_processes", None, "How many processes share the input.", lower_bound=1, flag_values=FLAGS)
flags.DEFINE_integer("process_id", None, "Which of them this is, from 0.", lower_bound=0, flag_values=FLAGS)
flags.DEFINE_string("coordinator_address", None, "HOST:PORT of process 0, for all of them.", flag_values=FLAGS)

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


class _Interrupted(KeyboardInterrupt):
    """SIGINT or SIGTERM came."""

    def __init__(self, number: int):
        super().__init__()
        self.number = number


class _Signals:
    """Makes SIGINT and SIGTERM raise `_Interrupted` in a `with` block: at once, or at the next `check` while `waiting`.

    While answers are decoded they wait: Python swallows what is raised while it collects garbage, which is then the
    likeliest time. A second signal never waits.
    """

    def __init__(self) -> None:
        self._came: int | None = None
        self._before: dict[int, Any] = {}
        self.waiting = False

    def __enter__(self) -> "_Signals":
        if threading.current_thread() is threading.main_thread():  # which alone may set handlers
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) != signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._raise)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _raise(self, number: int, frame: types.FrameType | None) -> None:
        is_second, self._came = self._came is not None, number
        if is_second or not self.waiting:
            self.check()

    def check(self) -> None:
        """Raises if a signal came.

        Raises:
          _Interrupted: then.
        """
        if self._came is not None:
            raise _Interrupted(self._came)


@dataclasses.dataclass(frozen=True)
class _Process:
    """Which of the processes that share the input this is. A line belongs to process `line % count`."""

    id: int = 0
    count: int = 1

    def has(self, line: int) -> bool:
        return line % self.count == self.id

    def of(self, states: bytearray | np.ndarray) -> Any:
        """The part, of what is known by line, that this process has."""
        return states[self.id :: self.count]


_ALONE = _Process()


def main(args: flags.FlagValues) -> None:
    """Decodes with the parsed flags."""
    _check_flags(args)
    process = _join_processes(args)
    keep_freed_memory()
    try:
        with _Signals() as signals:
            status = _decode(args, process, signals)
    except _Interrupted as interrupted:
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


def _join_processes(args: flags.FlagValues) -> _Process:
    """Connects to the other processes; for before anything else uses JAX."""
    names = ("num_processes", "process_id", "coordinator_address")
    given = [name for name in names if args[name].value is not None]
    if not given:
        return _ALONE
    if len(given) < len(names):
        missing = next(name for name in names if name not in given)
        raise ConfigError(f"--{given[0]} is given without --{missing}; processes that share the input need all three.")
    if args.process_id >= args.num_processes:
        raise ConfigError(
            f"--process_id is {args.process_id}; with --num_processes={args.num_processes} it must lie in "
            f"[0, {args.num_processes})."
        )
    host, _, port = args.coordinator_address.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(
            f"--coordinator_address is {args.coordinator_address!r}; give HOST:PORT, as in 10.0.0.1:1234."
        )
    jax.distributed.initialize(
        args.coordinator_address,
        args.num_processes,
        args.process_id,
        # One that is interrupted need not wait long for those that are not.
        shutdown_timeout_seconds=_SHUTDOWN_SECONDS,
    )
    return _Process(args.process_id, args.num_processes)


def _decode(args: flags.FlagValues, process: _Process, signals: _Signals) -> int:
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
                value = tuple(item(text) for text in value if text)  # an empty flag is no item
            except ValueError:
                raise ConfigError(
                    f"--{name} is {','.join(value)!r}; give whole numbers, separated by commas."
                ) from None
        settings[name] = value
    return settings


@dataclasses.dataclass
class _Bounds:
    """What a stream must be made for: the largest of its requests."""

    prompt_length: int = 1
    response_length: int = 1
    suppressed: int = 0
    sampling: bool = False
    infilling: bool = False

    def include(self, prepared: Prepared) -> None:
        config = prepared.config
        self.prompt_length = max(self.prompt_length, prepared.prompt_length)
        self.response_length = max(self.response_length, prepared.response_length)
        self.suppressed = max(self.suppressed, count_suppressed(config))
        self.sampling |= config.temperature > 0
        self.infilling |= config.algorithm == "paper"


def _stream(
    model: Model,
    args: flags.FlagValues,
    requests: Iterable[StreamRequest],
    count: int,
    bounds: _Bounds,
    statistics: Statistics,
) -> Iterator[Answer]:
    """Answers to `count` requests at most, of which each gets `--num_samples`."""
    rows = args.batch_size if args.batch_size == "auto" else min(args.batch_size, count * args.num_samples)
    return generate_stream(
        model,
        requests,
        batch_size=rows,
        num_samples=args.num_samples,
        prefix=args.prefix or None,
        rules=Rules(slot_score=SLOT_SCORES[args.slot_score]),
        statistics=statistics,
        **dataclasses.asdict(bounds),
    )


def decode_one(model: Model, args: flags.FlagValues, config: DecodeConfig) -> int:
    """Prints the responses to one prompt, and how they were decoded on stderr."""
    prepared, bounds, statistics = prepare(model, args.prompt, config, args.prefix or None), _Bounds(), Statistics()
    bounds.include(prepared)
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


def decode_file(
    model: Model, args: flags.FlagValues, config: DecodeConfig, process: _Process, signals: _Signals
) -> int:
    """Answers a file of prompts, or this process's share of it; returns the exit status.

    Raises:
      ConfigError: when the input cannot be read or used, or the output not be written or continued.
    """
    with _open_input(Path(args.input)) as source, contextlib.ExitStack() as stack:
        reader = _Reader(model, config, args.seed, args.prompt_field, args.prefix or None, signals)
        scan = _scan(source, reader, process)
        identity = _identity(args, config, scan)
        outputs = [
            _Output(
                stack.enter_context(answers.Answers(_own_path(path, process), identity, flag)), path, identity, flag
            )
            for flag, path in (("--output", args.output), ("--trace", args.trace))
            if path is not None
        ]
        job = _FileJob(reader, outputs, process, scan, args.num_samples)
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
            return 128 + (interrupt.number if isinstance(interrupt, _Interrupted) else signal.SIGINT)
        return 1 if job.failed else 0


def _open_input(path: Path) -> BinaryIO:
    try:
        if path.exists() and not path.is_file():
            raise ConfigError(f"--input {path} is not a regular file; it is read twice, so save it as one.")
        return path.open("rb")
    except OSError as error:
        raise ConfigError(f"--input {path} cannot be read: {error.strerror}.") from error


def _own_path(path: str, process: _Process) -> Path:
    return answers.part_path(Path(path), process.id) if process.id else Path(path)


def _identity(args: flags.FlagValues, config: DecodeConfig, scan: "_Scan") -> dict[str, Any]:
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


# ---- reading -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Line:
    """A line of input: its object with "error" where it cannot be answered, and the request where it can."""

    number: int
    record: dict[str, Any]
    request: StreamRequest | None = None


class _Refused(Exception):
    """A line that cannot be answered, and what is known of its object."""

    def __init__(self, error: str, record: Mapping[str, Any]):
        super().__init__(error)
        self.record = record


@dataclasses.dataclass(frozen=True)
class _Reader:
    """Turns lines into requests."""

    model: Model
    config: DecodeConfig
    seed: int
    prompt_field: str
    prefix: str | None
    signals: _Signals

    def lines(
        self, file: BinaryIO, digest: Any = None, wanted: Callable[[int], bool] = lambda _: True
    ) -> Iterator[_Line]:
        """The wanted lines that are not blank."""
        file.seek(0)
        for number, line in read_lines(file, MAX_LINE_BYTES, digest):
            self.signals.check()
            if (line is None or line.strip()) and wanted(number):
                yield self.line(number, line)

    def line(self, number: int, line: bytes | None) -> _Line:
        """Reads one line; None is one too long to be read."""
        try:
            record, request = self._read(number, line)
        except _Refused as refused:
            return _Line(number, {**refused.record, "line": number, "error": str(refused)})
        return _Line(number, record, request)

    def _read(self, number: int, line: bytes | None) -> tuple[dict[str, Any], StreamRequest]:
        if line is None:
            raise _Refused(f"The line has more than {MAX_LINE_BYTES} bytes; shorten it.", {})
        try:
            record = json.loads(line.decode("utf-8-sig"))
            json.dumps(record, ensure_ascii=False).encode()  # escapes can spell half a surrogate pair
        except (ValueError, RecursionError) as error:
            raise _Refused(f"Not JSON in UTF-8: {error}.", {}) from None
        if not isinstance(record, dict):
            raise _Refused(f"A JSON object was expected, not {type(record).__name__}.", {})
        record = self._without_stale(record)
        try:
            config, seed = self._config(record)
            prepared = prepare(self.model, self._prompt(record), config, self.prefix)
        except ConfigError as error:
            raise _Refused(str(error), record) from None
        # The first line's index is that of the first prompt of a list.
        return record, StreamRequest(number - 1, prepared, config, seed)

    def _without_stale(self, record: dict[str, Any]) -> dict[str, Any]:
        """An output fed in again must not carry over what was said of it then; other fields may share a name."""
        stale = {"response", "finish_reason"}
        for together in ({"line", "error"}, {"responses", "finish_reasons"}, {"segments", "holes"}):
            stale |= together if together <= record.keys() else set()
        return {name: value for name, value in record.items() if name not in stale - {self.prompt_field, "segments"}}

    def is_template(self, record: Mapping[str, Any]) -> bool:
        """Whether an object has segments rather than a prompt."""
        return "segments" in record and self.prompt_field != "segments"

    def _prompt(self, record: Mapping[str, Any]) -> Any:
        field = self.prompt_field
        if self.is_template(record):
            if field in record:
                raise ConfigError(f"There are both {field!r} and 'segments'; give one of them.")
            return {"segments": record["segments"]}
        if not _is_prompt(record.get(field)):
            there = ", ".join(record) or "none"
            raise ConfigError(f"{field!r} must be text or token IDs; fields here: {there}.")
        return record[field]

    def _config(self, record: Mapping[str, Any]) -> tuple[DecodeConfig, int]:
        if "decode" not in record or self.prompt_field == "decode":
            return self.config, self.seed
        settings = record["decode"]
        if not isinstance(settings, dict):
            raise ConfigError(f"'decode' must be an object of settings, not {type(settings).__name__}.")
        seed = settings.get("seed", self.seed)
        if type(seed) is not int or not 0 <= seed < _SEED_LIMIT:
            raise ConfigError(f"decode.seed is {seed!r}; it must be a whole number in [0, 2**31).")
        changed = {name: value for name, value in settings.items() if name != "seed"}
        return from_dict(DecodeConfig, to_dict(self.config) | changed, "decode"), seed


def _is_prompt(value: Any) -> TypeGuard[str | list[int]]:
    return isinstance(value, str) or (isinstance(value, list) and all(type(token) is int for token in value))


@dataclasses.dataclass(frozen=True)
class _Scan:
    """What a first reading of the input tells.

    Attributes:
      size, sha256: of the file.
      last: number of the last line that is not blank.
      share: how many that are not blank this process has.
      bounds: what the good ones ask for.
    """

    size: int
    sha256: str
    last: int
    share: int
    bounds: _Bounds


def _scan(file: BinaryIO, reader: _Reader, process: _Process) -> _Scan:
    digest, bounds, ids = hashlib.sha256(), _Bounds(), _Ids()
    last = share = 0
    for line in reader.lines(file, digest):
        last = line.number
        share += process.has(line.number)
        ids.add(line)
        if line.request is not None:
            assert isinstance(line.request.prompt, Prepared)
            bounds.include(line.request.prompt)
    ids.check(file)
    return _Scan(os.fstat(file.fileno()).st_size, digest.hexdigest(), last, share, bounds)


class _Ids:
    """Finds lines with the same "id", at sixteen bytes a line."""

    def __init__(self) -> None:
        self._hashes, self._lines = array("Q"), array("Q")

    def add(self, line: _Line) -> None:
        """Notes the ID of a line, if it has one."""
        if line.record.get("id") is not None:
            digest = hashlib.blake2b(_canonical(line.record["id"]), digest_size=8).digest()
            self._hashes.append(int.from_bytes(digest, "little"))
            self._lines.append(line.number)

    def check(self, file: BinaryIO) -> None:
        """Refuses IDs that come twice.

        Raises:
          ConfigError: naming the first that does, and both lines.
        """
        hashes, lines = np.asarray(self._hashes), np.asarray(self._lines)
        order = np.argsort(hashes, kind="stable")
        same = np.flatnonzero(hashes[order][1:] == hashes[order][:-1])
        pairs = sorted((int(lines[order[i + 1]]), int(lines[order[i]])) for i in same)
        for second, first in pairs:
            found = _ids_at(file, {first, second})
            if _canonical(found[first]) == _canonical(found[second]):  # not just the same hash
                raise ConfigError(
                    f"--input {file.name} has the id {found[first]!r} twice, on lines {first} and {second}; give every "
                    "line an id of its own, or none."
                )


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True).encode()


def _ids_at(file: BinaryIO, numbers: set[int]) -> dict[int, Any]:
    file.seek(0)
    lines = itertools.islice(read_lines(file, MAX_LINE_BYTES), max(numbers))
    return {n: json.loads(line.decode("utf-8-sig"))["id"] for n, line in lines if n in numbers and line is not None}


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
    """

    def __init__(self, reader: _Reader, outputs: list[_Output], process: _Process, scan: _Scan, num_samples: int):
        self._reader, self._outputs, self._process, self._scan = reader, outputs, process, scan
        self._num_samples = num_samples
        self._pending: dict[int, tuple[_Line, list[Answer]]] = {}
        states = [output.states(scan.last + 1) for output in outputs]
        # A trace has nothing of lines with errors.
        is_failed, is_answered = states[0] == answers.FAILED, np.all(np.stack(states) == answers.ANSWERED, axis=0)
        self._is_done = is_failed | is_answered
        self.done = int(np.count_nonzero(process.of(self._is_done)))
        self.failed = int(np.count_nonzero(process.of(is_failed)))

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
        _wait_for_all(self._process, "answered")
        if not self._process.id:
            for output in self._outputs:
                output.gather(ordered)
            index = self._outputs[0].own.index
            self.failed = index.failed
            if self._process.count > 1:
                print(f"All shares: {len(index) - self.failed} prompts answered, {self.failed} lines with errors.",
                      file=sys.stderr)  # fmt: skip
        _wait_for_all(self._process, "gathered")


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


def _wait_for_all(process: _Process, name: str) -> None:
    if process.count == 1:
        return
    # Not `sync_global_devices`: as a computation on devices it gives up on a process that is half a minute late.
    barrier, errors = multihost.get_barrier_sync_fn(), []

    def wait() -> None:
        try:
            barrier(key=f"refusion_jax.decode.{name}", timeout_ms=_BARRIER_MILLISECONDS)
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=wait, daemon=True)  # signals come between calls, of which this is one
    thread.start()
    while thread.is_alive():
        thread.join(0.5)
    if errors:
        raise ConfigError("Another process ended before its share was answered; run all of them again.") from errors[0]


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
