"""Trains ReFusion and the systems it is compared with alike, and puts the paper's claims to the test.

    python benchmarks/compare.py                      # all cells, one after another; the same command goes on
    python benchmarks/compare.py --list               # what is finished, and how long it took
    python benchmarks/compare.py --only='decode/search_*'    # these cells and what they need, and no report
    python benchmarks/compare.py --preset=gpu         # one seed of a larger model, and nothing but the systems

Everything is made of cells in --workdir: a training run, a search of settings, a decode of the test prompts, which
settings are chosen for first. Several processes may work on them at once (`taskset -c 0 python benchmarks/compare.py &
taskset -c 1 python ...`). When all are finished, the tables are printed, and written to --output, with pictures in
--pictures.
"""

import dataclasses
import fnmatch
import functools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags

sys.path.append(str(Path(__file__).resolve().parents[1]))  # a script finds its own directory only

import refusion_jax as rf
from benchmarks import common, compare_report
from benchmarks.compare_ablations import ablation_settings, curve_settings
from benchmarks.compare_cells import Cell, Cells, define_flags
from benchmarks.compare_decoding import SETTINGS, Outcome, Setting, choose, encoded, outcome, timing
from benchmarks.compare_dependence import dependence_by_distance
from benchmarks.compare_mechanisms import mechanisms
from benchmarks.compare_systems import (
    ABLATIONS,
    LONGER,
    PRESETS,
    RATES,
    TRAINING,
    Preset,
    base_config,
    gsm8k_config,
    system_config,
)
from refusion_jax import command_line
from refusion_jax.config import Config, ConfigError, to_dict
from refusion_jax.data import Example
from refusion_jax.data.synthetic import held_out_examples
from refusion_jax.files import write_json
from refusion_jax.host_memory import keep_freed_memory
from refusion_jax.training.loop import SUMMARY_NAME, train
from refusion_jax.training.metrics import read_metrics

RUN_NAME = "run"
FROM_RANDOM = "llada_from_random"
ALONE = 24  # test prompts that are decoded one by one, for the time of a single response

FLAGS = flags.FlagValues()
flags.DEFINE_enum("preset", "cpu", list(PRESETS), "How much of everything.", flag_values=FLAGS)
flags.DEFINE_string("output", None, "Result to write; by default in benchmarks/results.", flag_values=FLAGS)
flags.DEFINE_string("pictures", None, "Directory for pictures; none by default.", flag_values=FLAGS)
flags.DEFINE_string(
    "gsm8k", "../shared/data/gsm8k/train.jsonl", "GSM8K's training problems; empty leaves them out.", flag_values=FLAGS
)
flags.DEFINE_string("only", None, "Pattern of the cells to compute, such as train/llada_*.", flag_values=FLAGS)
define_flags(FLAGS)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """All cells of a preset.

    Attributes:
      preset: how much of everything.
      workdir: where they are.
      gsm8k: file of GSM8K's training problems; "" for none.
    """

    preset: Preset
    workdir: Path
    gsm8k: str

    @functools.cached_property
    def seeds(self) -> range:
        """Numbers of the repetitions."""
        return range(self.preset.seeds)

    @functools.cached_property
    def examples(self) -> tuple[list[Example], list[Example]]:
        """Held-out examples to choose settings on, and those that count; the same for all seeds."""
        config, count = base_config(self.preset, 0), self.preset.validation + self.preset.test
        drawn = held_out_examples(0, count, config.data.synthetic_tasks)
        return drawn[: self.preset.validation], drawn[self.preset.validation :]

    # ---- in which order ----

    @property
    def first(self) -> list[Cell]:
        """What settings are chosen by."""
        return [*self.bases, *self.trained.values(), *self.searches.values()]

    @property
    def later(self) -> list[Cell]:
        """What else does not depend on the settings chosen."""
        groups = (self.rates, self.curves, self.ablations, self.studies, self.gsm8k_runs)
        return [cell for group in groups for cell in group.values()]

    def last(self, chosen: dict[str, Setting]) -> list[Cell]:
        """What does."""
        groups = (self.tests(chosen), self.other_tests(chosen), self.timings(chosen))
        return [cell for group in groups for cell in group.values()]

    # ---- training ----

    def run_directory(self, name: str) -> Path:
        """Where a trained model is."""
        return self.workdir / "train" / name / RUN_NAME

    @functools.cached_property
    def bases(self) -> list[Cell]:
        """The first weights of each seed."""
        return [_training(f"base_{seed}", base_config(self.preset, seed)) for seed in self.seeds]

    @functools.cached_property
    def trained(self) -> dict[tuple[str, int], Cell]:
        """By system or ablation and seed; "long_" before one trained for longer; and LLaDA from random weights."""
        steps = self.preset.steps
        cells = {(name, seed): self._system(name, name, seed, steps) for seed in self.seeds for name in TRAINING}
        if self.preset.ablations:
            cells |= {(name, 0): self._system(name, name, 0, steps) for name in ABLATIONS}
            # As the published one began; the others had a model of next tokens to begin with.
            random = system_config(self.preset, 0, "llada", "", steps)
            cells[FROM_RANDOM, 0] = _training(f"{FROM_RANDOM}_0", random)
        if self.preset.long_steps:
            cells |= {
                (f"long_{name}", 0): self._system(f"long_{name}", name, 0, self.preset.long_steps) for name in LONGER
            }
        return cells

    def _system(self, called: str, name: str, seed: int, steps: int, learning_rate: float | None = None) -> Cell:
        """A training of a system or an ablation from the seed's first weights."""
        base = self.bases[seed]
        preset = dataclasses.replace(self.preset, learning_rate=learning_rate or self.preset.learning_rate)
        config = system_config(preset, seed, name, str(self.run_directory(base.name)), steps)
        return _training(f"{called}_{seed}", config, after=(base,))

    @functools.cached_property
    def rates(self) -> dict[tuple[str, float], Cell]:
        """By system and learning rate, of a short training."""
        steps = self.preset.rate_steps
        return {
            (name, rate): self._system(f"rate_{rate:g}_{name}", name, 0, steps, rate)
            for name in TRAINING
            for rate in RATES
            if steps
        }

    @functools.cached_property
    def gsm8k_runs(self) -> dict[str, Cell]:
        """By system, trained on GSM8K."""
        if not self.gsm8k or not self.preset.gsm8k_steps:
            return {}
        return {name: _training(f"gsm8k_{name}", gsm8k_config(self.preset, name, self.gsm8k)) for name in TRAINING}

    # ---- decoding ----

    def decoded(
        self, name: str, settings: Sequence[Setting], seed: int, *, test: bool, models: str | None = None
    ) -> Cell:
        """Decodes prompts with every setting; `models` says whose weights, by default each setting's own system."""
        weights = [(models or setting.trained, seed) for setting in settings]
        after = tuple(dict.fromkeys(self.trained[each] for each in weights))

        def compute(_: Path) -> list[dict[str, Any]]:
            examples, loaded = self.examples[test], _Loader(self)
            found = []
            for setting, each in zip(settings, weights, strict=True):
                model = loaded(each)
                result = outcome(model, examples, setting, self.preset.decode_rows)
                print(f"{name}: {setting.text}: {result.exact_match:.3f}, {result.tokens_per_forward:.2f}", flush=True)
                found.append({"setting": dataclasses.asdict(setting), "outcome": dataclasses.asdict(result)})
            return found

        described = [dataclasses.asdict(setting) for setting in settings]
        about = {"settings": described, "prompts": [self.preset.validation, self.preset.test], "test": test}
        about |= {"rows": self.preset.decode_rows, "models": models}
        return Cell("decode", name, about, compute, after)

    @functools.cached_property
    def searches(self) -> dict[str, Cell]:
        """By system: all its settings on the validation prompts, with the first seed's weights."""
        return {name: self.decoded(f"search_{name}", settings, 0, test=False) for name, settings in SETTINGS.items()}

    def tests(self, chosen: dict[str, Setting]) -> dict[tuple[str, int], Cell]:
        """By system and seed: its chosen setting on the test prompts."""
        return {
            (name, seed): self.decoded(f"test_{name}_{seed}", [setting], seed, test=True)
            for name, setting in chosen.items()
            for seed in self.seeds
        }

    def other_tests(self, chosen: dict[str, Setting]) -> dict[tuple[str, str], Cell]:
        """By decoder and weights: its chosen setting with weights of a longer training, or from another beginning."""
        wanted = [(name, f"long_{setting.trained}") for name, setting in chosen.items() if name != "fast_dllm"]
        wanted.append(("llada", FROM_RANDOM))
        return {
            (name, models): self.decoded(f"test_{name}_{models}", [chosen[name]], 0, test=True, models=models)
            for name, models in wanted
            if (models, 0) in self.trained
        }

    def timings(self, chosen: dict[str, Setting]) -> dict[str, Cell]:
        """By system: how fast its chosen setting is here, which only a machine without other work tells."""
        return {name: self._timed(name, setting) for name, setting in chosen.items()}

    def _timed(self, name: str, setting: Setting) -> Cell:
        def compute(_: Path) -> dict[str, Any]:
            machine = common.machine()
            common.warn_if_busy(machine)
            model, examples = rf.load(self.run_directory(f"{setting.trained}_0")), self.examples[1]
            alone = timing(model, examples[:ALONE], setting, 1)
            together = timing(model, examples, setting, self.preset.decode_rows)
            return {"alone": alone, "together": together, "machine": machine, "versions": common.versions()}

        settings = {"setting": dataclasses.asdict(setting), "rows": self.preset.decode_rows, "alone": ALONE}
        return Cell("timing", name, settings, compute, (self.trained[setting.trained, 0],))

    @functools.cached_property
    def curves(self) -> dict[int, Cell]:
        """By seed: ReFusion's decoders over thresholds on the test prompts."""
        return {
            seed: self.decoded(f"curves_{seed}", curve_settings(), seed, test=True)
            for seed in (self.seeds if self.preset.ablations else ())
        }

    @functools.cached_property
    def ablations(self) -> dict[str, Cell]:
        """By what is different in training, "refusion" for nothing: decoded in several ways."""
        names = ["refusion", *ABLATIONS] if self.preset.ablations else []
        return {
            name: self.decoded(f"ablation_{name}", ablation_settings(name), 0, test=True, models=name) for name in names
        }

    # ---- studies ----

    @functools.cached_property
    def studies(self) -> dict[str, Cell]:
        """Of what tokens depend on, and of where two decoders differ."""
        if not self.preset.ablations:
            return {}
        prompts = {"prompts": [self.preset.validation, self.preset.test]}
        return {
            "dependence": Cell("dependence", "llada_0", prompts, self._dependence, (self.trained["llada", 0],)),
            "mechanisms": Cell("mechanisms", "refusion_0", prompts, self._mechanisms, (self.trained["refusion", 0],)),
        }

    def _dependence(self, _: Path) -> dict[str, Any]:
        model = rf.load(self.run_directory("llada_0"))
        rows = [encoded(model, example) for example in self.examples[1]]
        length = max(len(prompt) + len(response) for prompt, response in rows)
        tokens = [[*prompt, *response, *[0] * (length - len(prompt) - len(response))] for prompt, response in rows]
        prompts, lengths = ([len(row[0]) for row in rows], [len(row[0]) + len(row[1]) for row in rows])
        found = dependence_by_distance(
            model.module, model.params, np.array(tokens), np.array(prompts), np.array(lengths)
        )
        return {str(distance): values for distance, values in found.items()}

    def _mechanisms(self, _: Path) -> Any:
        model = rf.load(self.run_directory("refusion_0"))
        return mechanisms(model, [encoded(model, example) for example in self.examples[1]])


class _Loader:
    """Loads each trained model once."""

    def __init__(self, comparison: Comparison):
        self._comparison = comparison
        self._models: dict[tuple[str, int], rf.Model] = {}

    def __call__(self, trained: tuple[str, int]) -> rf.Model:
        if trained not in self._models:
            name, seed = trained
            self._models[trained] = rf.load(self._comparison.run_directory(f"{name}_{seed}"))
        return self._models[trained]


def _training(name: str, config: Config, after: tuple[Cell, ...] = ()) -> Cell:
    def compute(directory: Path) -> dict[str, Any]:
        train(config, directory / RUN_NAME)
        if not (directory / RUN_NAME / SUMMARY_NAME).exists():  # only a run that came to its end has one
            raise ConfigError(f"The training of {name} was stopped; the same command continues.")
        summary = json.loads((directory / RUN_NAME / SUMMARY_NAME).read_text())
        wanted = ("step", "loss", "eval_nats_per_token", "seconds")
        curve = [{key: record[key] for key in wanted if key in record} for record in read_metrics(directory / RUN_NAME)]
        return {"summary": summary, "curve": curve}

    settings = to_dict(config)
    if settings["train"]["init_from"]:
        settings["train"]["init_from"] = after[0].place  # wherever the work directory is
    return Cell("train", name, settings, compute, after)


def _chosen(searched: dict[str, Sequence[dict[str, Any]]]) -> dict[str, Setting]:
    """By system, the best of what its search has tried."""
    return {
        name: choose([(Setting(**each["setting"]), Outcome(**each["outcome"])) for each in tried])
        for name, tried in searched.items()
    }


def _run_some(cells: Cells, known: Sequence[Cell], pattern: str) -> None:
    wanted = {cell.place: cell for cell in known if fnmatch.fnmatchcase(cell.place, pattern)}
    if not wanted:
        raise ConfigError(f"--only {pattern} is no cell's place; --list tells them.")
    queue = list(wanted.values())
    while queue:  # what a cell comes after is needed, too
        for each in queue.pop().after:
            if each.place not in wanted:
                wanted[each.place] = each
                queue.append(each)
    cells.run([cell for cell in known if cell.place in wanted])
    print(cells.table([cell for cell in known if cell.place in wanted]))


def main(args: flags.FlagValues) -> None:
    """Computes what is missing, prints the table and writes the result."""
    if PRESETS[args.preset].gsm8k_steps and not Path(args.gsm8k or ".").exists():
        raise ConfigError(f"--gsm8k {args.gsm8k} is no file; give that of GSM8K's training problems, or '' for none.")
    keep_freed_memory()
    # Resolved, since it is part of the configuration that a run goes on with.
    comparison = Comparison(PRESETS[args.preset], Path(args.workdir).resolve(), args.gsm8k)
    cells = Cells(comparison.workdir, allow_dirty=args.allow_dirty, recompute=args.recompute)
    if args.list or args.only is not None:
        searched = {name: cells.result(cell) or [] for name, cell in comparison.searches.items()}
        known = [*comparison.first, *comparison.later]
        if all(searched.values()):  # else it is not known yet what is tested
            known += comparison.last(_chosen(searched))
        if args.list:
            print(cells.table(known))
        else:
            _run_some(cells, known, args.only)
        return
    found = cells.run(comparison.first)
    chosen = _chosen({name: found[cell.place] for name, cell in comparison.searches.items()})
    known = [*comparison.first, *comparison.later, *comparison.last(chosen)]
    results = cells.run(known)
    report = compare_report.Report(comparison, results, chosen)
    output = common.result_path(args.output, f"compare_{args.preset}")
    write_json(output, report.result() | {"cell_commits": cells.commits, "cell_seconds": cells.seconds(known)})
    print(report.text())
    if args.pictures:
        report.draw(Path(args.pictures))
    print(f"\nWritten to {output}.")


if __name__ == "__main__":
    command_line.run(main, FLAGS)
