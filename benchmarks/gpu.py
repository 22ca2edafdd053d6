"""Training and decoding on one GPU, next to what the card itself reaches: `sh benchmarks/gpu.sh`, or benchmarks/gpu.py.

Parts run one after another, each in a process and with a time of its own: one that fails, or takes too long, is told as
such, and the others go on; so is what a part had no time left for. The result is written after every part. The exit
status is 0 when all was measured, 1 when not, 2 for bad arguments.

    peaks       a bfloat16 matrix product, and a copy: what all else is measured against
    train_*     whole training steps of Qwen3's shapes, random weights, rows of 4,096 random tokens, AdamW
    decode_*    forwards of the decode loop of Qwen3-8B's shape, and of left-to-right decoding, with random weights

A decode forward cannot take less time than it takes to read the weights and the committed KV entries once, at the
measured bandwidth of a copy: that is the bound. A rule that accepts every draft makes each forward commit a slot of
eight tokens while it drafts the next one.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))  # a script finds its own directory only

from refusion_jax import accelerators
from refusion_jax.config import ConfigError
from refusion_jax.files import write_json

ROOT = Path(__file__).resolve().parents[1]
# Seconds for each part, compilation included. Together they are less than six minutes.
SECONDS = {
    "peaks": 25,
    "train_0.6b": 60,
    "train_1.7b": 70,
    "decode_bfloat16": 65,
    "decode_int8": 55,
    "decode_int8_kv": 55,
}
SMALL_SECONDS = 300  # for each part on a CPU, where most of the time goes into compiling
_FAULTS = {"failed": "failed", "timeout": "ran out of its time", "incomplete": "had no time left"}


def run_part(name: str, seconds: float, arguments: Sequence[str]) -> dict[str, Any]:
    """Measures a part in a process of its own.

    Returns:
      "status": ok, failed, timeout, or incomplete where it ended by itself without the time for all; "seconds"; the
      "records" of what it measured and the names of what is "left_out", also where it came to no end.
    """
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "part.json"
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        command = [sys.executable, "-m", "benchmarks.gpu_parts", name, str(path), *arguments]
        error = ""
        try:
            done = subprocess.run(
                command, env=environment, timeout=seconds, stdout=sys.stderr, stderr=subprocess.PIPE, text=True
            )
            status = "failed" if done.returncode else "ok"
            if done.returncode:
                error = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1][:300]
        except subprocess.TimeoutExpired:
            status = "timeout"
        found = json.loads(path.read_text()) if path.exists() else {}
    if status == "ok" and found.get("left_out"):
        status = "incomplete"
    taken = round(time.monotonic() - began, 1)
    return {"status": status, "seconds": taken} | ({"error": error} if error else {}) | found


def mark_fastest(records: Sequence[dict[str, Any]]) -> None:
    """Says of each trial of training whether it was the fastest of several."""
    rates = [record["tokens_per_second"] for record in records if "step_seconds" in record]
    for record in records:
        is_measured = "step_seconds" in record and len(rates) > 1
        record["fastest"] = is_measured and record["tokens_per_second"] == max(rates)


def rows_of(name: str, part: dict[str, Any]) -> list[list[str]]:
    """The lines of the table that a part gives: what, its figures, peak memory."""
    rows = [_ROWS[name.partition("_")[0]](name, record) for record in part.get("records", [])]
    if part["status"] != "ok":
        told = f"{_FAULTS[part['status']]} after {part['seconds']} s"
        told += f": {part['error']}" if "error" in part else ""
        told += f"; not measured: {'; '.join(part['left_out'])}" if part.get("left_out") else ""
        rows.append([name, told, ""])
    return rows


def _memory(record: dict[str, Any]) -> str:
    peak = record.get("peak_memory_bytes")
    return f"{peak / 1e9:.1f} GB" if peak else ""


def _share(value: float | None, of_what: str) -> str:
    return "" if value is None else f", {value:.1%} of {of_what}"


def _peaks_row(name: str, record: dict[str, Any]) -> list[str]:
    figures = f"{record['flops'] / 1e12:,.4g} TFLOP/s in bfloat16, copies at {record['bandwidth'] / 1e9:,.0f} GB/s"
    return ["peaks", figures, _memory(record)]


def _train_row(name: str, record: dict[str, Any]) -> list[str]:
    what = f"{name}, {record['what']}"
    if "step_seconds" not in record:
        return [what, record["skipped"], ""]
    figures = "fastest: " * record["fastest"]
    figures += f"{1e3 * record['step_seconds']['median']:,.1f} ms, {record['tokens_per_second']:,.0f} tokens/s"
    figures += _share(record["utilisation_of_measured"], "the measured peak")
    return [what, figures + _share(record["utilisation_of_data_sheet"], "the data sheet's"), _memory(record)]


def _decode_row(name: str, record: dict[str, Any]) -> list[str]:
    query = "1 token" if record["query_width"] == 1 else f"{record['query_width']} tokens"
    figures = f"{1e3 * record['forward_seconds']['median']:,.2f} ms/forward of {query}"
    if record["bound_seconds"] is not None:
        figures += f" (bound {1e3 * record['bound_seconds']:,.2f})"
    figures += f", {record['tokens_per_second']:,.0f} tokens/s at {record['tokens_per_forward']:.1f} tokens per forward"
    return [f"{name}, {record['what']}", f"{figures}, {record['committed']:,} committed", _memory(record)]


_ROWS = {"peaks": _peaks_row, "train": _train_row, "decode": _decode_row}


def check_output(path: Path) -> None:
    """Sees to it that a file can be written, in a directory that is made where it is missing.

    Raises:
      ConfigError: when it cannot.
    """
    try:
        if path.exists() and not path.is_file():
            raise ConfigError(f"{path} is there already and no file; give another --output.")
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=os.path.dirname(os.path.realpath(path))):
            pass
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror}); give another --output.") from None


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The arguments, `parts` a list that has each once; ends the process with status 2 for bad ones."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="JSON file; default: benchmarks/results/gpu_DEVICE.json")
    parser.add_argument("--parts", default=",".join(SECONDS), help=f"some of {','.join(SECONDS)}")
    small = f"toy shapes, for a CPU; each part has {SMALL_SECONDS} seconds instead of at most {max(SECONDS.values())}"
    parser.add_argument("--small", action="store_true", help=small)
    args = parser.parse_args(arguments)
    args.parts = list(dict.fromkeys(args.parts.split(",")))
    unknown = [name for name in args.parts if name not in SECONDS]
    if unknown:
        parser.error(f"--parts has {unknown[0]!r}; the parts are {', '.join(SECONDS)}.")
    return args


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures part by part, prints a table and writes the result; ends with status 1 where not all was measured.

    Raises:
      ConfigError: when the result cannot be written, before anything is measured.
    """
    args = parse(arguments)
    if args.output is not None:
        check_output(args.output)
    accelerators.set_flags()  # which the parts inherit
    about = run_part("about", SMALL_SECONDS if args.small else 60, [])
    if about["status"] != "ok":
        sys.exit(f"error: JAX does not start: {about.get('error', about['status'])}")
    device = about["device"]
    print(f"{device}; {', '.join(f'{name} {version}' for name, version in about['versions'].items())}", flush=True)
    slug = "".join(letter if letter.isalnum() else "_" for letter in device.lower())
    output = args.output or ROOT / "benchmarks" / "results" / f"gpu_{slug}.json"
    check_output(output)
    result = {key: about[key] for key in ("commit", "device", "versions", "flags")} | {"small": args.small, "parts": {}}
    print("\n| what | figures | peak memory |\n| --- | --- | --- |", flush=True)
    measure_parts(args.parts, args.small, output, result)
    print(f"\nWritten to {output}.")
    if any(part["status"] != "ok" for part in result["parts"].values()):
        sys.exit(1)


def measure_parts(names: Sequence[str], small: bool, output: Path, result: dict[str, Any]) -> None:
    """Adds each part to the result, prints its rows of the table and writes the result so far."""
    peaks: dict[str, Any] = {}
    for name in names:
        limit = SMALL_SECONDS if small else SECONDS[name]
        # A part that finds time left measures more, and so ends a little before it is ended.
        options = ["--small"] * small + [f"--peaks={json.dumps(peaks)}", f"--seconds={0.85 * limit}"]
        part = run_part(name, limit, options)
        result["parts"][name] = part
        if name.startswith("train"):
            mark_fastest(part.get("records", []))
        if name == "peaks" and part.get("records"):
            peaks = part["records"][0]
        for row in rows_of(name, part):
            print(f"| {' | '.join(row)} |", flush=True)
        write_json(output, result)


if __name__ == "__main__":
    try:
        main()
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        sys.exit(130)
