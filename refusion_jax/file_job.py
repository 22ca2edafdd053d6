"""Answering a file of prompts: what is done already, doing the rest, and the files that answers go to."""

import contextlib
import hashlib
import itertools
import json
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from refusion_jax import answers
from refusion_jax.api import StreamRequest
from refusion_jax.config import ConfigError
from refusion_jax.decoding import Answer, Statistics
from refusion_jax.processes import Interrupted, Process, wait_for_all
from refusion_jax.progress import Progress
from refusion_jax.prompt_files import Line, Reader, Scan, open_input, scan_file


def answer_file(
    reader: Reader,
    source: Path,
    targets: Mapping[str, Path],
    identity: Mapping[str, Any],
    process: Process,
    stream: Callable[..., Iterator[Answer]],
    num_samples: int,
    ordered: bool,
) -> int:
    """Answers a file of prompts, or this process's share of it; returns the exit status.

    Args:
      reader: of the input.
      source: the input.
      targets: by their flag, the output and, if there is one, the trace.
      identity: JSON object of all that answers depend on besides the input.
      process: which of the processes that share the input this is.
      stream: answers requests, of which it is given an iterator, their greatest number, `Bounds` and `Statistics`.
      num_samples: answers per request.
      ordered: whether the output is put into input order.

    Raises:
      ConfigError: when the input cannot be read or used, or the output not be written or continued.
    """
    with open_input(source) as file, contextlib.ExitStack() as stack:
        scan = scan_file(file, reader, process)
        identity = {**identity, "input_bytes": scan.size, "input_sha256": scan.sha256}
        outputs = [
            _Output(
                stack.enter_context(answers.Answers(_own_path(path, process), identity, flag)), path, identity, flag
            )
            for flag, path in targets.items()
        ]
        job = _FileJob(reader, outputs, process, scan, num_samples)
        if job.untraced:
            print(f"{job.untraced} answers have no trace yet; decoding them again for it.", file=sys.stderr)
        try:
            if job.done == scan.share > 0:
                print(
                    f"All {scan.share} prompts are already answered, {job.failed} of them with errors.", file=sys.stderr
                )
            else:
                job.answer(file, stream)
            job.finish(ordered)
        except KeyboardInterrupt as interrupt:
            print(
                f"Interrupted: {job.done} of {scan.share} prompts answered; run the same command again to continue.",
                file=sys.stderr,
            )
            return 128 + (interrupt.number if isinstance(interrupt, Interrupted) else signal.SIGINT)
        return 1 if job.failed else 0


def _own_path(path: Path, process: Process) -> Path:
    return answers.part_path(path, process.id) if process.id else path


class _Output:
    """One of the files that answers go to: what this process writes of it, and what others have."""

    def __init__(self, own: answers.Answers, path: Path, identity: Mapping[str, Any], flag: str):
        self.own, self._path = own, path
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
          stream: see `answer_file`.

        Raises:
          ConfigError: when the input is not what it was at first, or an answer cannot be written.
        """
        statistics, digest, start = Statistics(), hashlib.sha256(), time.perf_counter()
        count = self._scan.share - self.done
        self._progress = Progress(self.done, self._scan.share, statistics)
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
        record = line.record | response_fields(samples, self._reader.is_template(line.record))
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


def response_fields(samples: list[Answer], is_template: bool) -> dict[str, Any]:
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
