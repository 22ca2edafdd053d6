"""Where a run's numbers go: `metrics.jsonl`, TensorBoard files and a progress bar."""

import json
from pathlib import Path
from typing import Any

import tqdm
from tensorboardX import SummaryWriter

from refusion_jax.files import replace_file

METRICS_NAME = "metrics.jsonl"


class MetricsWriter:
    """Writes one object per logged step to `metrics.jsonl`, the same numbers for TensorBoard, and shows progress.

    Args:
      workdir: the run directory.
      start_step: step the run continues from; records of later steps, of work that was lost, are removed.
      steps: total steps, the length of the progress bar.
    """

    def __init__(self, workdir: Path, start_step: int, steps: int):
        self._path = workdir / METRICS_NAME
        kept = [record for record in read_metrics(workdir) if record["step"] <= start_step]
        with replace_file(self._path) as file:
            file.write("".join(json.dumps(record) + "\n" for record in kept).encode())
        self._file = self._path.open("a")
        # Events of steps that are done again hide the lost ones.
        purge = {"purge_step": start_step + 1} if start_step else {}
        self._board = SummaryWriter(str(workdir / "tensorboard"), **purge)
        self._bar = tqdm.tqdm(total=steps, initial=start_step, unit="step", dynamic_ncols=True, mininterval=1.0)
        self.last = kept[-1] if kept else {}

    def write(self, record: dict[str, Any]) -> None:
        """Writes the record of one step, flushed at once."""
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        for name, value in record.items():
            if name != "step":
                self._board.add_scalar(name, value, record["step"])
        self._board.flush()
        self._bar.set_postfix_str(f"loss {record['loss']:.3f}, {record['tokens_per_second']:,.0f} tokens/s")
        self.last = record

    def advance(self) -> None:
        """Moves the progress bar one step."""
        self._bar.update()

    def say(self, line: str) -> None:
        """Prints a line without disturbing the progress bar."""
        self._bar.write(line)

    def close(self) -> None:
        """Closes files and progress bar."""
        self._file.close()
        self._board.close()
        self._bar.close()


def read_metrics(workdir: Path) -> list[dict[str, Any]]:
    """The records of a run so far; a last line cut short by a crash is left out."""
    path = workdir / METRICS_NAME
    records = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records
