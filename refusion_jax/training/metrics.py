"""Where a run's numbers go: `metrics.jsonl`, TensorBoard files and a progress bar, all of process 0 alone."""

import contextlib
import json
import math
from collections.abc import Iterator
from typing import Any

from etils import epath

from refusion_jax.files import is_remote, replace_file
from refusion_jax.training.run_directory import WorkdirError

METRICS_NAME = "metrics.jsonl"


class MetricsWriter:
    """Writes one object per logged step to `metrics.jsonl`, the same numbers for TensorBoard, and shows progress.

    Args:
      workdir: the run directory.
      start_step: step the run continues from; records of later steps, of work that was lost, are removed.
      steps: total steps, the length of the progress bar.
      active: whether this process is the one that writes; others only remember the last record.

    Raises:
      WorkdirError: here and in `write`, when the directory cannot be written to.
    """

    def __init__(self, workdir: epath.Path, start_step: int, steps: int, active: bool = True):
        self._path, self._active = workdir / METRICS_NAME, active
        self._records = [record for record in read_metrics(workdir) if record["step"] <= start_step]
        self.last = self._records[-1] if self._records else {}
        # Only here: what computes has no need of them.
        import tqdm
        from tensorboardX import SummaryWriter

        self._file: Any = None
        self._bar = tqdm.tqdm(
            total=steps, initial=start_step, unit="step", dynamic_ncols=True, mininterval=1.0, disable=not active
        )
        if not active:
            return
        # Events of steps that are done again hide the lost ones.
        purge = {"purge_step": start_step + 1} if start_step else {}
        with self._writing():
            self._rewrite()
            self._board = SummaryWriter(str(workdir / "tensorboard"), **purge)
            if not is_remote(workdir):
                self._file = self._path.open("a")

    def _rewrite(self) -> None:
        with replace_file(self._path) as file:
            file.write("".join(_line(record) for record in self._records).encode())

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise WorkdirError(f"{self._path.parent} cannot be written to: {error.strerror or error}.") from error

    def write(self, record: dict[str, Any]) -> None:
        """Writes the record of one step, flushed at once."""
        self.last = record
        if not self._active:
            return
        with self._writing():
            if self._file is None:  # nothing can be appended to what is in object storage
                self._records.append(record)
                self._rewrite()
            else:
                self._file.write(_line(record))
                self._file.flush()
            for name, value in record.items():
                if name != "step":
                    self._board.add_scalar(name, value, record["step"])
            self._board.flush()
        self._bar.set_postfix_str(f"loss {record['loss']:.3f}, {record['tokens_per_second']:,.0f} tokens/s")

    def advance(self) -> None:
        """Moves the progress bar one step."""
        self._bar.update()

    def say(self, line: str) -> None:
        """Prints a line without disturbing the progress bar."""
        self._bar.write(line)

    def close(self) -> None:
        """Closes files and progress bar."""
        self._bar.close()
        if self._active:
            # What could not be written was said when it happened.
            with contextlib.suppress(OSError):
                self._board.close()
            with contextlib.suppress(OSError):
                if self._file is not None:
                    self._file.close()


def _line(record: dict[str, Any]) -> str:
    return json.dumps(finite(record)) + "\n"


def finite(record: dict[str, Any]) -> dict[str, Any]:
    """The record with None for what is no number, which JSON cannot express."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in record.items()
    }


def read_metrics(workdir: epath.Path) -> list[dict[str, Any]]:
    """The records of a run so far, NaN for what was no number; a last line cut short by a crash is left out."""
    path = workdir / METRICS_NAME
    records = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            records.append({name: math.nan if value is None else value for name, value in json.loads(line).items()})
        except json.JSONDecodeError:
            break
    return records
