"""Useful tokens per second of the whole training step, fed by the real data pipeline.

    python benchmarks/train.py
    python benchmarks/train.py --yardstick --yardstick_python=PYTHON_WITH_TORCH

Trains two models on the demo's data (any setting can be changed, as for train.py): the demo's own, of the recorded
checkpoint's shape, and one of Qwen3's shape with 100 M parameters. Prints a table for each; --output gets the same
figures as JSON. A useful token is one that is not padding.

"FLOPs" compares what the compiler counts in a step with what its matrix products need on paper. The compiler counts the
body of a loop once, so it is asked about a step without loops: layers unrolled, all logits at once.

With --yardstick, our turns on the demo's model alternate with those of `benchmarks/yardstick.py`: PyTorch's eager
forward and backward of the same model, float32, on padded batches of 32 of the same examples. A machine's speed drifts,
so only turns of one round are compared; the ratio is ours to theirs.
"""

import contextlib
import dataclasses
import resource
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from jax.sharding import Mesh

sys.path.append(str(Path(__file__).resolve().parents[1]))  # a script finds its own directory only

from benchmarks import common
from benchmarks.common import of, spread
from refusion_jax import command_line
from refusion_jax.config import Config, ModelConfig, to_dict
from refusion_jax.data import Dataset, iterate, load_dataset, make_batches
from refusion_jax.files import write_json
from refusion_jax.host_memory import keep_freed_memory
from refusion_jax.modeling import Transformer
from refusion_jax.sharding import batch_sharding, make_mesh
from refusion_jax.slots import batch_from_arrays
from refusion_jax.training.flops import flops_per_token
from refusion_jax.training.loop import resolve
from refusion_jax.training.optimizer import make_optimizer
from refusion_jax.training.state import TrainState, init_state
from refusion_jax.training.step import Metrics, make_run_step

FLAGS = flags.FlagValues()
command_line.define_config(FLAGS)
FLAGS.set_default("config", "demo")
flags.DEFINE_list("models", ",".join(common.MODELS), "Models to train.", flag_values=FLAGS)
flags.DEFINE_integer("rounds", 5, "Rounds to measure.", lower_bound=1, flag_values=FLAGS)
flags.DEFINE_float("seconds", 6.0, "Length of a turn; a round has one for each side.", 0.01, flag_values=FLAGS)
flags.DEFINE_boolean("yardstick", False, "Compare with PyTorch.", flag_values=FLAGS)
flags.DEFINE_string("yardstick_python", sys.executable, "Python with torch and transformers.", flag_values=FLAGS)
flags.DEFINE_string("output", None, "Default: benchmarks/results/train_BACKEND.json.", flag_values=FLAGS)

VOCAB_SIZE = 64
# Rows for the 100 M model: a step of it takes seconds.
ROWS_100M, LENGTH_100M = 4, 256
MATMULS = ((1536, 128, 384), (1024, 1024, 1024))  # the demo's widest dense product, and a large one
WARM_UP_SECONDS = 2.0
YARDSTICK_EXAMPLES, YARDSTICK_BATCHES = 32, 64


@dataclasses.dataclass(frozen=True)
class Turn:
    """What one side did in its turn: seconds passed and, of these, waited for data; useful tokens; each step's
    seconds; memory pages that the system had to provide anew.
    """

    seconds: float
    tokens: int
    step_seconds: list[float]
    waited: float = 0.0
    page_faults: int = 0

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


@dataclasses.dataclass(frozen=True)
class Round:
    """One turn of each side, and the FLOP/s of every matrix product in `MATMULS` just before them."""

    matmul_rates: list[float]
    ours: Turn
    theirs: Turn | None = None

    @property
    def ratio(self) -> float | None:
        """Our tokens per second to theirs."""
        return self.ours.tokens_per_second / self.theirs.tokens_per_second if self.theirs else None


def make_step(config: Config, mesh: Mesh) -> tuple[TrainState, Any]:
    """The first state of a run and its compiled step."""
    module, optimizer = Transformer(config.model), make_optimizer(config.optimizer, config.train.steps)
    state, shardings = init_state(module, optimizer, config.train.seed, mesh, config.lora)
    return state, make_run_step(config, module, optimizer, mesh, shardings)


def compiled_flops(config: Config, dataset: Dataset) -> float:
    """FLOPs of a step as the compiler counts them, over those of `flops_per_token` for every place of the batch."""
    whole = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, scan_unroll=config.model.num_hidden_layers),
        train=dataclasses.replace(config.train, loss_chunk=0),
    )
    mesh, rows = make_mesh(config.mesh), config.train.batch_size
    state, step = make_step(whole, mesh)
    arrays = make_batches(config.data, dataset.train, seed=config.train.seed, batch_size=rows)[0]
    with jax.set_mesh(mesh):
        counted = step.lower(state, batch_from_arrays(arrays), jnp.int32(0)).compile().cost_analysis()["flops"]
    return counted / (flops_per_token(config.model, config.data.max_length) * rows * config.data.max_length)


class Trainer:
    """Trains as `refusion_jax.training.loop` does, without its records and checkpoints."""

    def __init__(self, config: Config, dataset: Dataset):
        self._mesh = make_mesh(config.mesh)
        self._state, self._train_step = make_step(config, self._mesh)
        self.num_parameters = sum(leaf.size for leaf in jax.tree.leaves(self._state.params))
        self._seed = jnp.int32(config.train.seed)
        batches = make_batches(config.data, dataset.train, seed=config.train.seed, batch_size=config.train.batch_size)
        data = config.data
        self._reader = iterate(batches, 0, read_threads=data.read_threads, prefetch=data.prefetch, workers=data.workers)
        began = time.perf_counter()
        self.measure(0)
        self.compile_seconds = time.perf_counter() - began
        self.measure(WARM_UP_SECONDS)

    def _step(self) -> tuple[Metrics, int, float]:
        """Starts a step; returns its metrics to come, its useful tokens and the seconds waited for its batch."""
        asked = time.perf_counter()
        arrays = next(self._reader)
        waited = time.perf_counter() - asked
        batch = jax.device_put(batch_from_arrays(arrays), batch_sharding(self._mesh))
        self._state, metrics = self._train_step(self._state, batch, self._seed)
        return metrics, int(np.count_nonzero(arrays["segment_ids"])), waited

    def measure(self, seconds: float) -> Turn:
        """Trains until `seconds` have passed, at least one step."""
        step_seconds: list[float] = []
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        began = now = time.perf_counter()

        def wait_for(metrics: Metrics) -> None:
            nonlocal now
            jax.block_until_ready(metrics)
            before, now = now, time.perf_counter()
            step_seconds.append(now - before)

        with jax.set_mesh(self._mesh):
            steps = [self._step()]
            while now - began < seconds:
                # A step is waited for after the next one has started: the device never waits for the host.
                steps.append(self._step())
                wait_for(steps[-2][0])
            wait_for(steps[-1][0])
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
        tokens, waited = sum(step[1] for step in steps), sum(step[2] for step in steps)
        return Turn(now - began, tokens, step_seconds, waited, faults)

    def close(self) -> None:
        """Ends the pipeline's threads."""
        self._reader.close()


def yardstick_model(model: ModelConfig) -> dict[str, Any]:
    """Returns the fields of a Hugging Face Qwen3 configuration that give the model's shape."""
    names = (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings",
        "pad_token_id",
    )  # fmt: skip
    return {name: getattr(model, name) for name in names}


def matmul_rate(shape: tuple[int, int, int], dtype: str, seconds: float = 0.25) -> float:
    """Median FLOP/s of XLA's (m, k) by (k, n) product, over bursts long enough to hide the dispatch."""
    m, k, n = shape
    left, right = jnp.ones((m, k), dtype), jnp.ones((k, n), dtype)
    jnp.matmul(left, right).block_until_ready()
    burst = 8
    rates: list[float] = []
    deadline = time.perf_counter() + seconds
    while not rates or time.perf_counter() < deadline:
        began = time.perf_counter()
        jax.block_until_ready([jnp.matmul(left, right) for _ in range(burst)])
        rates.append(burst * 2 * m * k * n / (time.perf_counter() - began))
    return statistics.median(rates)


def summarise(rounds: Sequence[Round], flops: int) -> dict[str, Any]:
    """Returns the figures of all rounds; rates and ratios are taken within rounds, step times over all steps.

    Args:
      rounds: what was measured.
      flops: FLOPs per useful token.
    """
    turns = [r.ours for r in rounds]
    summary: dict[str, Any] = {
        "tokens_per_second": spread([turn.tokens_per_second for turn in turns]),
        "step_ms": spread([1e3 * seconds for turn in turns for seconds in turn.step_seconds]),
        "tokens_per_step": sum(turn.tokens for turn in turns) / sum(len(turn.step_seconds) for turn in turns),
        "page_faults_per_step": sum(turn.page_faults for turn in turns) / sum(len(turn.step_seconds) for turn in turns),
        "data_wait_share": sum(turn.waited for turn in turns) / sum(turn.seconds for turn in turns),
        "flops_per_token": flops,
        "matmul": [
            {
                "shape": list(shape),
                "gflops_per_second": spread([r.matmul_rates[i] / 1e9 for r in rounds]),
                "share_reached": spread([flops * r.ours.tokens_per_second / r.matmul_rates[i] for r in rounds]),
            }
            for i, shape in enumerate(MATMULS)
        ],
    }
    theirs = [r.theirs for r in rounds if r.theirs]
    if theirs:
        summary["yardstick"] = {
            "tokens_per_second": spread([turn.tokens_per_second for turn in theirs]),
            "step_ms": spread([1e3 * seconds for turn in theirs for seconds in turn.step_seconds]),
            "tokens_per_step": sum(turn.tokens for turn in theirs) / sum(len(turn.step_seconds) for turn in theirs),
        }
        summary["ratio"] = spread([r.ratio for r in rounds if r.ratio is not None])
    return summary


def round_record(measured: Round) -> dict[str, Any]:
    """The figures of one round, for the result file."""
    record: dict[str, Any] = {
        "tokens_per_second": measured.ours.tokens_per_second,
        "matmul_gflops_per_second": [rate / 1e9 for rate in measured.matmul_rates],
    }
    if measured.theirs:
        record |= {"yardstick_tokens_per_second": measured.theirs.tokens_per_second, "ratio": measured.ratio}
    return record


HEADER = (
    "| round | tokens/s | step, ms | matmul, GFLOP/s | yardstick, tokens/s | yardstick step, ms | ratio |\n"
    "| --- | --- | --- | --- | --- | --- | --- |"
)


def round_row(number: int, measured: Round) -> str:
    """The table row of one round; matmul rates are in the order of `MATMULS`."""

    def step(turn: Turn) -> str:
        return f"{1e3 * statistics.median(turn.step_seconds):.1f}"

    theirs = measured.theirs
    matmuls = " / ".join(f"{rate / 1e9:.0f}" for rate in measured.matmul_rates)
    cells = [str(number), f"{measured.ours.tokens_per_second:,.0f}", step(measured.ours), matmuls]
    cells += [f"{theirs.tokens_per_second:,.0f}", step(theirs), f"{measured.ratio:.2f}"] if theirs else ["–"] * 3
    return f"| {' | '.join(cells)} |"


def summary_table(summary: dict[str, Any], compile_seconds: float, compiled_flops: float, peak_rss_mib: float) -> str:
    """The table of all rounds together, each figure as median (least to greatest)."""
    rows = [
        ("useful tokens per second", of(summary["tokens_per_second"], ",.0f")),
        ("step, ms", of(summary["step_ms"], ".1f")),
        ("useful tokens per step", f"{summary['tokens_per_step']:,.0f}"),
        ("page faults per step", f"{summary['page_faults_per_step']:,.1f}"),
        ("waiting for data", f"{summary['data_wait_share']:.1%}"),
        ("compiling, with the first step, s", f"{compile_seconds:.1f}"),
        ("peak resident memory, MiB", f"{peak_rss_mib:,.0f}"),
        ("MFLOPs per useful token", f"{summary['flops_per_token'] / 1e6:.2f}"),
        ("FLOPs of a step, compiled to analytic", f"{compiled_flops:.3f}"),
    ]
    for matmul in summary["matmul"]:
        m, k, n = matmul["shape"]
        rows.append((f"matmul {m}x{k} by {k}x{n}, GFLOP/s", of(matmul["gflops_per_second"], ".0f")))
        rows.append(("– share of it reached, %", of(matmul["share_reached"], ".0f", 100)))
    if "ratio" in summary:
        theirs = summary["yardstick"]
        rows += [
            ("yardstick: useful tokens per second", of(theirs["tokens_per_second"], ",.0f")),
            ("yardstick: step, ms", of(theirs["step_ms"], ".1f")),
            ("yardstick: useful tokens per step", f"{theirs['tokens_per_step']:,.0f}"),
            ("ratio, ours to the yardstick's", of(summary["ratio"], ".2f")),
        ]
    return common.table(["figure", "median (min to max)"], rows)


def measure_rounds(
    args: flags.FlagValues, dtype: str, trainer: Trainer, yardstick: common.Yardstick | None
) -> list[Round]:
    """Measures round after round, printing each."""
    print(HEADER, flush=True)
    rounds = []
    for number in range(1, args.rounds + 1):
        rates = [matmul_rate(shape, dtype) for shape in MATMULS]
        ours = trainer.measure(args.seconds)
        theirs = Turn(**yardstick.ask(args.seconds)) if yardstick else None
        rounds.append(Round(rates, ours, theirs))
        print(round_row(number, rounds[-1]), flush=True)
    return rounds


def configs(config: Config, names: Sequence[str]) -> dict[str, Config]:
    """What to train, by name: the given configuration, and its 100 M version."""
    reference = dataclasses.replace(config.model, vocab_size=config.model.vocab_size or VOCAB_SIZE)
    length = dataclasses.replace(config.data, max_length=LENGTH_100M)
    rows = dataclasses.replace(config.train, batch_size=ROWS_100M)
    known = {
        "reference": dataclasses.replace(config, model=reference),
        "100m": dataclasses.replace(config, model=common.SHAPE_100M, data=length, train=rows),
    }
    return {name: known[name] for name in names}


def measure_model(args: flags.FlagValues, name: str, config: Config) -> dict[str, Any]:
    """Measures and prints all about one model."""
    dataset = load_dataset(config.data, seed=config.train.seed)
    config = resolve(config, dataset.tokenizer)
    versions: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        yardstick = None
        if args.yardstick and name == "reference":
            lengths = np.resize(dataset.train.lengths, (YARDSTICK_BATCHES, YARDSTICK_EXAMPLES))
            request = {"model": yardstick_model(config.model), "lengths": lengths.tolist()}
            yardstick = common.Yardstick(args.yardstick_python, "yardstick.py", request)
            stack.enter_context(contextlib.closing(yardstick))
            versions = yardstick.versions
        trainer = stack.enter_context(contextlib.closing(Trainer(config, dataset)))
        print(f"\n{name}: {trainer.num_parameters:,} parameters\n")
        rounds = measure_rounds(args, config.model.dtype, trainer, yardstick)

    summary = summarise(rounds, flops_per_token(config.model, config.data.max_length))
    cost = {"compile_seconds": trainer.compile_seconds, "compiled_flops": compiled_flops(config, dataset)}
    cost["peak_rss_mib"] = common.peak_rss_mib()
    print(f"\n{summary_table(summary, **cost)}", flush=True)
    settings = {"rounds": args.rounds, "seconds": args.seconds, "batch_size": config.train.batch_size}
    settings |= {section: to_dict(getattr(config, section)) for section in ("model", "data", "slots")}
    about = {"settings": settings, "yardstick_versions": versions, "num_parameters": trainer.num_parameters}
    return about | cost | summary | {"rounds": [round_record(measured) for measured in rounds]}


def main(args: flags.FlagValues) -> None:
    """Measures, prints and writes the result."""
    keep_freed_memory()
    names = common.parse_models(args.models)
    output = common.result_path(args.output, "train")
    result: dict[str, Any] = {"commit": common.commit(), "machine": common.machine(), "versions": common.versions()}
    common.warn_if_busy(result["machine"])
    result["models"] = {name: measure_model(args, name, config) for name, config in configs(args.config, names).items()}
    write_json(output, result)
    print(f"\nWritten to {output}.")


if __name__ == "__main__":
    command_line.run(main, FLAGS)
