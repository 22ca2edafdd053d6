"""Evaluating at all points of a grid of decode settings: the grid, and quality against speed over it."""

import itertools
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from refusion_jax.config import ConfigError, DecodeConfig, nearest
from refusion_jax.evaluation import NAME
from refusion_jax.evaluation.results import main_score
from refusion_jax.files import write_json

_TYPES = (bool, int, float, str)
_LARGEST = 400  # points


def points(text: str) -> list[dict[str, Any]]:
    """All combinations of "name=value,value name=value", names being fields of `DecodeConfig`.

    Raises:
      ConfigError: for anything else, or more points than anybody would wait for.
    """
    kinds = {name: kind for name, kind in typing.get_type_hints(DecodeConfig).items() if kind in _TYPES}
    axes: dict[str, list[Any]] = {}
    for part in text.split():
        name, equals, values = part.partition("=")
        if not equals or not all(values.split(",")):
            raise ConfigError(f"--sweep has {part!r}; write NAME=VALUE,VALUE, with spaces between settings.")
        if name not in kinds:
            raise ConfigError(f"--sweep has the setting {name!r}, which is none of decoding.{nearest(name, kinds)}")
        if name in axes:
            raise ConfigError(f"--sweep has {name} twice; list its values once, separated by commas.")
        axes[name] = [_value(name, kinds[name], value) for value in dict.fromkeys(values.split(","))]
    if not axes:
        raise ConfigError("--sweep is empty; write NAME=VALUE,VALUE.")
    grid = [dict(zip(axes, combination, strict=True)) for combination in itertools.product(*axes.values())]
    if len(grid) > _LARGEST:
        raise ConfigError(f"--sweep has {len(grid)} points; give at most {_LARGEST}.")
    return grid


def _value(name: str, kind: type, text: str) -> Any:
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise ConfigError(f"--sweep has {name}={text!r}; it is true or false.")
        return text.lower() == "true"
    try:
        return kind(text)
    except ValueError:
        raise ConfigError(f"--sweep has {name}={text!r}; it must be of type {kind.__name__}.") from None


def report_sweep(grid: Sequence[Mapping[str, Any]], results: Sequence[Mapping[str, Any]], output: Path) -> None:
    """Prints score and speed of every point, and writes sweep.json and, with matplotlib, sweep.png into `output`.

    Args:
      grid: the points.
      results: what the evaluation of each returned.
    """
    rows = [row for point, result in zip(grid, results, strict=True) for row in _rows(point, result)]
    write_json(output / "sweep.json", rows)
    print(f"\n{'settings':<50} {'task':<24} {'metric':<30} {'score':>7} {'tokens/forward':>15} {'tokens/s':>9}")
    for row in rows:
        settings = " ".join(f"{name}={value}" for name, value in row["point"].items())
        print(
            f"{settings:<50} {row['task']:<24} {row['metric']:<30} {row['score']:>7.3f} "
            f"{row['tokens_per_forward']:>15.2f} {row['tokens_per_second']:>9,.0f}"
        )
    try:
        draw_sweep(rows, output / "sweep.png")
    except ImportError:
        print("No picture: matplotlib is not installed (pip install 'refusion_jax[plot]').")
        return
    print(f"{output / 'sweep.json'}, {output / 'sweep.png'}: {len(grid)} point{'s' if len(grid) > 1 else ''}.")


def _rows(point: Mapping[str, Any], result: Mapping[str, Any]) -> list[dict[str, Any]]:
    rows = []
    for task, speed in result["config"][NAME]["speed"].items():
        if "tokens_per_forward" in speed:
            metric, score = main_score(result["results"][task])
            figures = {name: speed[name] for name in ("tokens_per_forward", "tokens_per_second")}
            rows.append({"point": dict(point), "task": task, "metric": metric, "score": score, **figures})
    if not rows:
        raise ConfigError("--sweep needs tasks whose answers are generated; none of these is.")
    return rows


def draw_sweep(rows: Sequence[Mapping[str, Any]], output: Path) -> None:
    """Draws the score over tokens per forward and over tokens/s: a colour for each task, the best points joined."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, measure, label in zip(
        panels, ("tokens_per_forward", "tokens_per_second"), ("tokens per forward", "tokens/s"), strict=True
    ):
        for task in dict.fromkeys(row["task"] for row in rows):
            of_task = sorted((row for row in rows if row["task"] == task), key=lambda row: row[measure])
            (dots,) = axes.plot([r[measure] for r in of_task], [r["score"] for r in of_task], "o", label=task)
            best = [r for i, r in enumerate(of_task) if all(r["score"] > o["score"] for o in of_task[i + 1 :])]
            axes.plot([r[measure] for r in best], [r["score"] for r in best], color=dots.get_color())
            for row in best:
                text = " ".join(f"{value}" for value in row["point"].values())
                axes.annotate(text, (row[measure], row["score"]), fontsize=7, xytext=(4, 4), textcoords="offset points")
        axes.set(xlabel=label, ylim=(0, None))
        axes.margins(x=0.2, y=0.15)
        axes.grid(alpha=0.3)
    panels[0].set(ylabel=" / ".join(dict.fromkeys(row["metric"] for row in rows)))
    panels[0].legend()
    figure.suptitle("at the best points: " + " ".join(rows[0]["point"]), fontsize=9)
    figure.savefig(output, dpi=120)
