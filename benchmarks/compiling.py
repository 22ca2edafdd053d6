"""What TPU compilers say of Qwen3-8B: memory, arithmetic and traffic of training and decoding, at full depth.

    .venv-tpu/bin/python benchmarks/compiling.py

Every case is a command that anyone can give, `--compile_for` of train.py or decode.py, and takes a few minutes on two
cores. What decoding moves in each layer is the difference of two depths, over the layers between them.
"""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from absl import flags

sys.path.append(str(Path(__file__).resolve().parents[1]))  # a script finds its own directory only

from benchmarks import common
from refusion_jax import ConfigError, command_line
from refusion_jax.files import write_json

ROOT = Path(__file__).resolve().parents[1]
TRAINING = {
    "training, 2 rows per chip": ("v5p:4x4x4", "--config=qwen3_8b_sft", "--config.train.batch_size=128"),
    "training, 8 rows per chip": (
        "v5p:4x4x4",
        "--config=qwen3_8b_sft",
        "--config.train.batch_size=512",
        "--config.model.remat=attention,q_proj,k_proj,v_proj,o_proj",
    ),
    "training, 1 row per chip": ("v6e:16x16", "--config=qwen3_8b_sft", "--config.train.batch_size=256"),
    "the published recipe": ("v5p:2x2x2", "--config=refusion_8b_sft"),
}
DECODING = {
    "decoding, bfloat16": ("v6e:2x4",),
    "decoding, int8 weights": ("v6e:2x4", "--quantize=int8"),
    "decoding, int8 weights and KV": ("v6e:2x4", "--quantize=int8", "--kv_dtype=int8"),
}
# Eight rows of 64 tokens behind 2,048 and 64 KV entries.
DECODE_FLAGS = (
    "--config=qwen3_8b_sft", "--dtype=bfloat16", "--tensor_parallel=8", "--batch_size=8",
    "--compile_prompt_length=2048", "--gen_length=64", "--serial_num_blocks=1",
)  # fmt: skip
DEPTH, LESS_DEEP = 36, 4

FLAGS = flags.FlagValues()
flags.DEFINE_multi_string(
    "cases", None, "Part of the names of the cases to compile, given once per part; default: all.", flag_values=FLAGS
)
flags.DEFINE_string("output", str(common.HERE / "results" / "compiling_tpu.json"), "File to write.", flag_values=FLAGS)


def compiled(script: str, topology: str, *arguments: str) -> dict[str, Any]:
    """The command, and the object that it printed last.

    Raises:
      ConfigError: with the command's own sentence, when it printed none.
    """
    command = [script, *arguments, f"--compile_for={topology}"]
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    if done.returncode not in (0, 1) or not lines:
        raise ConfigError(f"{' '.join(command)} failed: {done.stderr.strip().splitlines()[-1]}")
    return {"command": f"python {' '.join(command)}"} | json.loads(lines[-1])


def decoding(topology: str, *arguments: str) -> dict[str, Any]:
    """A decode forward, with what each layer moves in it."""
    deep = compiled("decode.py", topology, *DECODE_FLAGS, *arguments)
    flat = compiled("decode.py", topology, *DECODE_FLAGS, *arguments, f"--config.model.num_hidden_layers={LESS_DEEP}")
    forward, less = (each["programs"]["decode forward"] for each in (deep, flat))
    if not deep["fits"]:
        raise ConfigError(f"{deep['command']} does not fit, so that there is nothing to compare.")
    return {name: deep[name] for name in ("command", "fits", "hbm_limit_bytes")} | forward | {
        "bytes_per_layer": per_layer(forward["bytes_per_chip"], less["bytes_per_chip"]),
        "held_per_layer": per_layer(_held(forward), _held(less)),
    }  # fmt: skip


def per_layer(deep: float, flat: float) -> float:
    """What each layer adds to a figure of both depths."""
    return (deep - flat) / (DEPTH - LESS_DEEP)


def _held(forward: Mapping[str, Any]) -> float:
    return forward["memory"]["parameters"] + forward["memory"]["KV buffer"]


_FIGURES = (("flops_ratio", ".3f"), ("collectives_ratio", ".3f"), ("utilisation", ".1%"))


def _figure(value: float | None, form: str) -> str:
    """A figure, which a program that does not fit has none of."""
    return "–" if value is None else format(value, form)


def training_table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """A row for each case that trains."""
    header = ("case", "mesh", "memory of a chip, GB", "free", "FLOPs, times the model's", "collectives, times needed",
              "utilisation at most", "compiled in, s")  # fmt: skip
    rows = [
        (
            name,
            " x ".join(map(str, each["mesh"].values())),
            f"{each['hbm_bytes_per_chip'] / 1e9:.1f} of {each['hbm_limit_bytes'] / 1e9:.1f}",
            f"{1 - each['hbm_bytes_per_chip'] / each['hbm_limit_bytes']:.0%}",
            *(_figure(each[name], form) for name, form in _FIGURES),
            f"{each['compile_seconds']:.0f}",
        )
        for name, each in results.items()
    ]
    return common.table(header, rows)


def decoding_table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """A row for each case that decodes, compared with the weights and KV entries of the first."""
    first = next(iter(results.values()))
    header = ("case", "MB of a layer and chip", "times weights and KV in bfloat16", "MB of a forward", "compiled in, s")
    rows = [
        (
            name,
            f"{each['bytes_per_layer'] / 1e6:.1f}",
            f"{each['bytes_per_layer'] / first['held_per_layer']:.3f}",
            f"{each['bytes_per_chip'] / 1e6:,.0f}",
            f"{each['compile_seconds']:.0f}",
        )
        for name, each in results.items()
    ]
    return common.table(header, rows)


def chosen(cases: Mapping[str, Sequence[str]], parts: Sequence[str] | None) -> dict[str, Sequence[str]]:
    """The cases whose names hold one of the parts."""
    return {name: case for name, case in cases.items() if parts is None or any(part in name for part in parts)}


def main(args: flags.FlagValues) -> None:
    """Compiles the cases, prints tables and writes the result after each.

    Raises:
      ConfigError: when no case is meant, or a command fails.
    """
    cases = chosen(TRAINING, args.cases), chosen(DECODING, args.cases)
    if not any(cases):
        raise ConfigError(
            f"--cases is {','.join(args.cases)}, which names none of {', '.join([*TRAINING, *DECODING])}."
        )
    jax.config.update("jax_platforms", "cpu")  # libtpu would look for a TPU
    about = {"commit": common.commit(), "machine": common.machine(), "versions": common.versions()}
    results: dict[str, dict[str, Any]] = {}
    Path(args.output).parent.mkdir(parents=True, exist_ok=True)
    for name, case in (cases[0] | cases[1]).items():
        results[name] = decoding(*case) if name in DECODING else compiled("train.py", *case)
        print(f"{name}: {results[name]['command']}", flush=True)
        write_json(Path(args.output), about | {"cases": results})
    for group, table in zip(cases, (training_table, decoding_table), strict=True):
        if group:
            print("\n" + table({name: results[name] for name in group}))
    print(f"\nWritten to {args.output}.")


if __name__ == "__main__":
    command_line.run(main, FLAGS)
