"""What the benchmarks share: figures with their spread, what a result says about where it comes from, yardsticks."""

import contextlib
import json
import os
import platform
import resource
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from refusion_jax.config import ConfigError, ModelConfig

HERE = Path(__file__).resolve().parent
MODELS = ("reference", "100m")
SHAPE_100M = ModelConfig(
    vocab_size=32_000, hidden_size=768, intermediate_size=2_048, num_hidden_layers=12, num_attention_heads=12,
    num_key_value_heads=4, head_dim=64, max_position_embeddings=1_024, tie_word_embeddings=True,
)  # fmt: skip
PACKAGES = ("jax", "jaxlib", "flax", "optax", "grain", "numpy")


def parse_models(names: Sequence[str]) -> list[str]:
    """Checks the names of models.

    Raises:
      ConfigError: for an unknown one.
    """
    unknown = [name for name in names if name not in MODELS]
    if unknown:
        raise ConfigError(f"--models has {unknown[0]!r}; the models are {', '.join(MODELS)}.")
    return list(names)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, least and greatest of the values."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def of(values: dict[str, float], form: str, scale: float = 1.0) -> str:
    """A spread as text: median (least to greatest)."""
    median, least, greatest = (format(scale * values[key], form) for key in ("median", "min", "max"))
    return f"{median} ({least} to {greatest})"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows))


def available_cores() -> int:
    """CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine() -> dict[str, Any]:
    """What it runs on, and how busy that was; a load well above 0 spoils the figures."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": available_cores(),
        "devices": sorted({device.device_kind for device in jax.devices()}),
        "load_average": list(os.getloadavg()),
    }


def warn_if_busy(on: dict[str, Any]) -> None:
    """Says so when other work keeps the machine busy."""
    load, cores = on["load_average"][0], on["cores"]
    if load > cores / 2:
        print(f"Warning: the load average is {load:.1f} on {cores} cores; with other work running, figures mislead.\n")


def commit() -> str:
    """The checkout's commit, with "-dirty" when files other than results differ from it; "unknown" without git."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", "-C", str(HERE), *arguments], capture_output=True, text=True, check=True).stdout

    try:
        changes = git("status", "--porcelain", "--", ":/", ":(exclude)results").strip()
        return git("rev-parse", "HEAD").strip() + ("-dirty" if changes else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that matter, as far as they are there."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def peak_rss_mib() -> float:
    """The most memory this process ever held, in MiB."""
    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


def result_path(given: str | None, name: str) -> Path:
    """Where a result goes: `given`, else `benchmarks/results/NAME_BACKEND.json`. Its directory is made."""
    path = Path(given or HERE / "results" / f"{name}_{jax.default_backend()}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


class Yardstick:
    """A script of this directory in a process of its own, under a Python with PyTorch, ready to measure."""

    def __init__(self, python: str, script: str, request: dict[str, Any]):
        """Starts it; `versions` tells of what.

        Args:
          python: interpreter to start.
          script: the script's file name.
          request: its first line of input.

        Raises:
          ConfigError: when there is no such interpreter, or it cannot import torch or transformers.
        """
        remedy = "install them there with `pip install torch transformers`, or name another with --yardstick_python."
        self._command = [python, str(HERE / script)]
        try:
            self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        except OSError as error:
            raise ConfigError(f"{python} does not start ({error.strerror}); name a Python with torch.") from None
        answer = self.ask(request | {"threads": available_cores()})
        if "error" in answer:
            self.close()
            raise ConfigError(
                f"--yardstick needs torch and transformers, but {python} lacks them ({answer['error']}): {remedy}"
            )
        self.versions: dict[str, str] = answer["versions"]

    def ask(self, value: Any) -> dict[str, Any]:
        """Returns its answer to a line of input.

        Raises:
          ConfigError: when it has ended instead.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        # One that has ended accepts nothing; it is noticed below, by its missing answer.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(value) + "\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise ConfigError(f"{shlex.join(self._command)} ended with exit status {self._process.wait()}, see above.")
        return json.loads(line)

    def close(self) -> None:
        """Ends the process."""
        self._process.communicate()
