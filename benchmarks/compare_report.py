"""The comparison's result: one record, the tables and the pictures."""

import dataclasses
import functools
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import common, compare_mechanisms, compare_plots
from benchmarks.compare_ablations import DECODERS, THRESHOLDS
from benchmarks.compare_decoding import CHIP, SETTINGS, Outcome, Setting, projected
from benchmarks.compare_projection import PROMPT_LENGTH, RESPONSE_LENGTH, Load, mean_forward
from benchmarks.compare_systems import RATES, TASKS, TRAINING
from refusion_jax.config import to_dict

LABELS = {
    "refusion": "ReFusion, self-correcting",
    "refusion_paper_decoding": "ReFusion, the paper's decoding",
    "autoregressive": "autoregressive",
    "llada": "LLaDA",
    "dream": "Dream",
    "fast_dllm": "Fast-dLLM",
    "block_diffusion": "block diffusion",
}
TRAINED = {name: LABELS[name] for name in TRAINING} | {"refusion": "ReFusion"}  # however it is decoded
# What the paper measured of 8B models, as multiples of another system's tokens per second.
CLAIMS = {"autoregressive": 2.33, "llada": 18.0, "dream": 18.0}
CHIPS = (CHIP, "v5e", "v5p", "H200")
FIGURES = ("exact match", "tokens per forward", f"tokens/s, 8B on {CHIP}")


@dataclasses.dataclass(frozen=True)
class Report:
    """What all cells of a comparison found.

    Attributes:
      comparison: a `compare.Comparison`.
      results: by cell place.
      chosen: the best setting of each system.
    """

    comparison: Any
    results: dict[str, Any]
    chosen: dict[str, Setting]

    @functools.cached_property
    def _tests(self) -> dict[tuple[str, int], Any]:
        """By system and seed."""
        return self.comparison.tests(self.chosen)

    @functools.cached_property
    def _timings(self) -> dict[str, Any]:
        return self.comparison.timings(self.chosen)

    @functools.cached_property
    def _other_tests(self) -> dict[tuple[str, str], Any]:
        """By decoder and weights."""
        return self.comparison.other_tests(self.chosen)

    def result(self) -> dict[str, Any]:
        """The record: `systems` has the mean over seeds, `..._spread` the least and the greatest; then all details."""
        return {
            "systems": {name: self._system(name) for name in SETTINGS},
            "claims": self._claims(),
            "chip": CHIP,
            "projection": {"model": "8B", "prompt": PROMPT_LENGTH, "response": RESPONSE_LENGTH, "batch": 1},
            "chosen": {name: dataclasses.asdict(setting) for name, setting in self.chosen.items()},
            "tried": {name: self._decoded(cell) for name, cell in self.comparison.searches.items()},
            "tests": {f"{name}_{seed}": self._decoded(cell)[0] for (name, seed), cell in self._tests.items()},
            "other_weights": {
                f"{name} with {models}": self._decoded(cell)[0] for (name, models), cell in self._other_tests.items()
            },
            "rates": {f"{name} at {rate:g}": self._nats(cell) for (name, rate), cell in self.comparison.rates.items()},
            "timings": {name: self._of(cell) for name, cell in self._timings.items()},
            "training": {cell.name: self._training(cell) for cell in self.comparison.trained.values()},
            "curves": {str(seed): self._decoded(cell) for seed, cell in self.comparison.curves.items()},
            "ablations": {name: self._decoded(cell) for name, cell in self.comparison.ablations.items()},
            "gsm8k": {name: self._training(cell) for name, cell in self.comparison.gsm8k_runs.items()},
            "studies": {name: self._of(cell) for name, cell in self.comparison.studies.items()},
            "preset": to_dict(self.comparison.preset),
            "commit": common.commit(),
            "machine": common.machine(),
            "versions": common.versions(),
        }

    def _of(self, cell: Any) -> Any:
        return self.results[cell.place]

    def _training(self, cell: Any) -> dict[str, Any]:
        """A run's summary, and what it measured of the held-out examples on the way."""
        found = self._of(cell)
        return found | {"curve": [record for record in found["curve"] if "eval_nats_per_token" in record]}

    def _nats(self, cell: Any) -> float:
        """What a training cell's run says of the held-out examples."""
        return self._of(cell)["summary"]["eval_nats_per_token"]

    def _decoded(self, cell: Any) -> list[dict[str, Any]]:
        """What a cell decoded: the fields of each setting and its outcome, and what is projected from it."""
        found = []
        for each in self._of(cell):
            setting, outcome = Setting(**each["setting"]), Outcome(**each["outcome"])
            loads, length = [Load(**load) for load in outcome.loads], setting.decode["gen_length"]
            projections = {
                "projected": projected(setting, outcome),
                "forward": dataclasses.asdict(mean_forward(loads, length)),
            }
            kept = {name: value for name, value in each["outcome"].items() if name != "loads"}
            found.append({"setting": each["setting"]} | kept | projections)
        return found

    def _outcomes(self, name: str) -> list[dict[str, Any]]:
        return [self._decoded(self._tests[name, seed])[0] for seed in self.comparison.seeds]

    def _system(self, name: str) -> dict[str, Any]:
        outcomes = self._outcomes(name)
        trained = self.chosen[name].trained
        nats = [self._nats(self.comparison.trained[trained, seed]) for seed in self.comparison.seeds]
        found: dict[str, Any] = {}
        for field, values in (
            ("exact_match", [each["exact_match"] for each in outcomes]),
            ("nats_per_token", nats),
            ("tokens_per_forward", [each["tokens_per_forward"] for each in outcomes]),
            ("projected_tokens_per_second", [each["projected"][CHIP] for each in outcomes]),
        ):
            found[field] = statistics.mean(values)
            found[f"{field}_spread"] = [min(values), max(values)]
        timing = self._of(self._timings[name])
        found |= {"tokens_per_second": timing["alone"], "tokens_per_second_batch": timing["together"]}
        for part in ("by_task", "projected", "forward"):
            found[part] = {key: statistics.mean(each[part][key] for each in outcomes) for key in outcomes[0][part]}
        return found

    def _claims(self) -> dict[str, Any]:
        """Of ReFusion by both of its decoders against the others: ratios of speed and differences of exact match."""
        systems = {name: self._outcomes(name) for name in SETTINGS}
        return {
            ours: {
                theirs: {
                    "speed_ratio": {
                        chip: common.spread([
                            a["projected"][chip] / b["projected"][chip]
                            for a, b in zip(systems[ours], found, strict=True)
                        ])
                        for chip in CHIPS
                    },
                    "exact_match_difference": common.spread([
                        a["exact_match"] - b["exact_match"] for a, b in zip(systems[ours], found, strict=True)
                    ]),
                    "claimed_ratio": CLAIMS.get(theirs),
                }
                for theirs, found in systems.items()
                if not theirs.startswith("refusion")
            }
            for ours in ("refusion", "refusion_paper_decoding")
        }  # fmt: skip

    # ---- tables ----

    def text(self) -> str:
        """The tables."""
        parts = [self._main_table(), self._task_table(), self._claim_table(), self._chosen_table()]
        if self._other_tests:
            parts += [self._other_weights_table()]
        if self.comparison.rates:
            parts += [self._rate_table()]
        if self.comparison.ablations:
            parts += [self._ablation_table()]
        if self.comparison.studies:
            parts += [compare_mechanisms.text(self._of(self.comparison.studies["mechanisms"]))]
        return "\n\n".join([*parts, self._tried_table()])

    def _main_table(self) -> str:
        header = [
            "system", "exact match", "nats per token", "tokens per forward", f"tokens/s, 8B on {CHIP}",
            *(f"on {chip}" for chip in CHIPS if chip != CHIP), "tokens/s here, one response", "in batches",
        ]  # fmt: skip
        rows = []
        for name in SETTINGS:
            system = self._system(name)
            cells = [
                _with_spread(system, field, form)
                for field, form in (
                    ("exact_match", ".3f"), ("nats_per_token", ".3f"), ("tokens_per_forward", ".2f"),
                    ("projected_tokens_per_second", ",.0f"),
                )
            ]  # fmt: skip
            here = [f"{system[field]:,.0f}" for field in ("tokens_per_second", "tokens_per_second_batch")]
            others = [f"{system['projected'][chip]:,.0f}" for chip in CHIPS if chip != CHIP]
            rows.append([LABELS[name], *cells, *others, *here])
        return common.table(header, rows)

    def _task_table(self) -> str:
        rows = [
            [LABELS[name], *(f"{self._system(name)['by_task'].get(task, 0):.2f}" for task in TASKS)]
            for name in SETTINGS
        ]
        return common.table(["exact match by task", *TASKS], rows)

    def _claim_table(self) -> str:
        rows = []
        for ours, others in self._claims().items():
            for theirs, found in others.items():
                claimed = found["claimed_ratio"]
                rows.append([
                    LABELS[ours], LABELS[theirs], *(common.of(found["speed_ratio"][chip], ".2f") for chip in CHIPS),
                    f"{claimed:g}" if claimed else "–", common.of(found["exact_match_difference"], "+.3f"),
                ])  # fmt: skip
        header = ["", "against", *(f"times its speed, {chip}" for chip in CHIPS), "the paper's", "exact match, more by"]
        return common.table(header, rows)

    def _chosen_table(self) -> str:
        rows = [[LABELS[name], setting.trained, setting.text] for name, setting in self.chosen.items()]
        return common.table(["system", "weights", "settings chosen"], rows)

    def _tried_table(self) -> str:
        rows = [
            [
                LABELS[name], found["setting"]["trained"], Setting(**found["setting"]).text, *_figures(found),
            ]
            for name, cell in self.comparison.searches.items()
            for found in self._decoded(cell)
        ]  # fmt: skip
        return common.table(["tried on validation prompts", "weights", "settings", *FIGURES], rows)

    def _other_weights_table(self) -> str:
        preset, cells = self.comparison.preset, self._other_tests
        usual = f"{preset.steps:,} steps"
        found = {(name, usual): self._decoded(self._tests[name, 0])[0] for name, _ in cells}
        for (name, models), cell in cells.items():
            other = f"{preset.long_steps:,} steps" if models.startswith("long_") else f"{usual}, from random weights"
            found[name, other] = self._decoded(cell)[0]
        rows = [
            [
                LABELS[name], weights, *_figures(each), *(f"{each['by_task'].get(task, 0):.2f}" for task in TASKS),
            ]
            for (name, weights), each in sorted(found.items(), key=lambda item: list(LABELS).index(item[0][0]))
        ]  # fmt: skip
        return common.table(["one seed", "trained for", *FIGURES, *TASKS], rows)

    def _rate_table(self) -> str:
        rates = self.comparison.rates
        rows = [[TRAINED[name], *(f"{self._nats(rates[name, rate]):.3f}" for rate in RATES)] for name in TRAINING]
        steps = f"{self.comparison.preset.rate_steps:,}"
        return common.table([f"nats per token after {steps} steps", *(f"rate {rate:g}" for rate in RATES)], rows)

    def _ablation_table(self) -> str:
        rows = []
        for name, cell in self.comparison.ablations.items():
            for found in self._decoded(cell):
                decode = found["setting"]["decode"]
                # Over slots in random order, so no bound for a model that saw clean ones from left to right.
                bounded = name != "left_to_right"
                rows.append([
                    name, decode["algorithm"], str(decode["slot_size"]), f"{found['exact_match']:.3f}",
                    f"{found['tokens_per_forward']:.2f}",
                    f"{self._nats(self.comparison.trained[name, 0]):.3f}" if bounded else "–",
                ])  # fmt: skip
        header = ["trained", "decoded", "slot size", "exact match", "tokens per forward", "nats per token"]
        return common.table(header, rows)

    # ---- pictures ----

    def draw(self, directory: Path) -> None:
        """Writes all pictures."""
        directory.mkdir(parents=True, exist_ok=True)
        systems = {name: self._outcomes(name) for name in SETTINGS}
        points = [
            compare_plots.Point(
                name, LABELS[name], common.spread([each["exact_match"] for each in found]),
                common.spread([each["projected"][CHIP] for each in found]),
            )
            for name, found in systems.items()
        ]  # fmt: skip
        compare_plots.draw_quality_against_speed(points, directory / "quality_speed.png", CHIP)
        tried = {name: self._decoded(cell) for name, cell in self.comparison.searches.items()}
        compare_plots.draw_settings(
            {
                name: (LABELS[name], [(each["projected"][CHIP], each["exact_match"]) for each in found])
                for name, found in tried.items()
            },
            directory / "settings.png",
            CHIP,
        )
        trained = self.comparison.trained
        learning = [
            _learning_curve(name, [self._training(trained[name, seed]) for seed in self.comparison.seeds])
            for name in TRAINING
        ]
        compare_plots.draw_learning_curves(learning, directory / "learning.png", "held-out bound (nats per token)")
        if self.comparison.gsm8k_runs:
            curves = [
                _learning_curve(name, [self._training(cell)]) for name, cell in self.comparison.gsm8k_runs.items()
            ]
            compare_plots.draw_learning_curves(curves, directory / "gsm8k.png", "held-out bound (nats per token)")
        if self.comparison.curves:
            for size in (8, 32):
                drawn = self._threshold_curves(size)
                compare_plots.draw_quality_against_parallelism(drawn, directory / f"thresholds_{size}.png")
        if self.comparison.studies:
            found = self._of(self.comparison.studies["dependence"])
            by_distance = {int(distance): tuple(values) for distance, values in found.items()}
            compare_plots.draw_dependence({"LLaDA": ("llada", by_distance)}, directory / "dependence.png")

    def _threshold_curves(self, size: int) -> list[compare_plots.Curve]:
        drawn = []
        for label, decoder in DECODERS.items():
            points = []
            for threshold in THRESHOLDS:
                wanted = {"redraft": False} | decoder | {"slot_size": size, "token_threshold": threshold}
                found = list(self._matching(wanted))
                points.append(
                    [statistics.mean(each[field] for each in found) for field in ("tokens_per_forward", "exact_match")]
                )
            system = "refusion_paper_decoding" if label == "paper" else "refusion"
            x, y = ([point[k] for point in points] for k in (0, 1))
            drawn.append(compare_plots.Curve(system, label, x, y, marks=[f"{each:g}" for each in THRESHOLDS]))
        return drawn

    def _matching(self, wanted: dict[str, Any]) -> Iterable[dict[str, Any]]:
        """What came of the curves' settings that have all these values."""
        for each in self._curve_points:
            decode = {"redraft": False} | each["setting"]["decode"]
            if all(decode[name] == value for name, value in wanted.items()):
                yield each

    @functools.cached_property
    def _curve_points(self) -> list[dict[str, Any]]:
        return [each for cell in self.comparison.curves.values() for each in self._decoded(cell)]


def _figures(found: dict[str, Any]) -> list[str]:
    """The cells below `FIGURES`, of one setting's outcome."""
    return [
        f"{found['exact_match']:.3f}", f"{found['tokens_per_forward']:.2f}", f"{found['projected'][CHIP]:,.0f}",
    ]  # fmt: skip


def _with_spread(system: dict[str, Any], field: str, form: str) -> str:
    least, greatest = system[f"{field}_spread"]
    return f"{system[field]:{form}} ({least:{form}} to {greatest:{form}})"


def _learning_curve(name: str, runs: Sequence[dict[str, Any]]) -> compare_plots.Curve:
    """The held-out bound over the steps of runs as `Report._training` tells them."""
    key = "eval_nats_per_token"
    curves = [{record["step"]: record[key] for record in run["curve"]} for run in runs]
    return compare_plots.Curve.of_runs(name, TRAINED[name], curves)
