"""Pictures of a comparison of systems: 800 pixels wide, a colour and a marker of its own for each system.

They take plain numbers and write PNG files. Needs matplotlib (`pip install refusion_jax[plot]`).
"""

import dataclasses
import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import common
from refusion_jax.files import replace_file

# Of Okabe and Ito's palette, which people with any colour vision tell apart: those dark enough for lines on white.
_STYLES = {
    "refusion": ("#D55E00", "o"),
    "autoregressive": ("#000000", "s"),
    "llada": ("#0072B2", "^"),
    "dream": ("#56B4E9", "v"),
    "fast_dllm": ("#009E73", "D"),
    "block_diffusion": ("#CC79A7", "P"),
}
_OTHERS = (("#E69F00", "X"), ("#666666", "*"), ("#7F3C8D", "<"), ("#8C510A", ">"))
_FONTS = {"font.size": 11, "axes.titlesize": 11, "legend.fontsize": 10}


@dataclasses.dataclass(frozen=True)
class Point:
    """How well and how fast one system is, by `common.spread` over seeds."""

    system: str
    label: str
    exact_match: Mapping[str, float]
    tokens_per_second: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class Curve:
    """A line of one system.

    Attributes:
      system: what colour and marker it has; several curves may be of one.
      label: its name in the legend.
      x, y: the points in order.
      low, high: the ends of the spread at each point; empty for none.
      marks: a text for each point; empty for none.
    """

    system: str
    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    marks: Sequence[str] = ()

    @classmethod
    def of_runs(cls, system: str, label: str, runs: Sequence[Mapping[float, float]]) -> "Curve":
        """The median over runs, each `{x: y}`, at all `x` that every run has, and the least and greatest."""
        shared = sorted(set.intersection(*map(set, runs)))
        spreads = [common.spread([run[x] for run in runs]) for x in shared]
        median, low, high = ([spread[key] for spread in spreads] for key in ("median", "min", "max"))
        return cls(system, label, shared, median, low, high)


def draw_quality_against_speed(points: Sequence[Point], output: Path, chip: str) -> None:
    """A point per system, its name beside it: exact match against the tokens/s projected for an 8B model on a chip."""
    figure, axes = _figure()
    for point, (colour, marker) in zip(points, _styles(point.system for point in points), strict=True):
        across, up = point.tokens_per_second, point.exact_match
        axes.errorbar(
            across["median"], up["median"], xerr=_errors(across), yerr=_errors(up), fmt=marker, color=colour,
            markersize=8, elinewidth=1, capsize=3,
        )  # fmt: skip
    axes.set_xscale("log")
    axes.margins(x=0.2, y=0.15)
    axes.set(xlabel=f"projected speed of an 8B model on one {chip} (tokens/s)", ylabel="exact match (share)")
    _plain_numbers(axes.xaxis)
    _name(figure, axes, points)
    _save(figure, output)


def draw_settings(tried: Mapping[str, tuple[str, Sequence[tuple[float, float]]]], output: Path, chip: str) -> None:
    """A point per setting, those that no other one of the system beats in both respects joined by a line.

    Args:
      tried: by system its name in the legend, and tokens/s projected for an 8B model and exact match of each setting.
      output: PNG file to write.
      chip: the projection's.
    """
    figure, axes = _figure()
    for (colour, marker), (label, points) in zip(_styles(tried), tried.values(), strict=True):
        best = sorted(point for point in points if not any(_beats(other, point) for other in points))
        axes.plot(*zip(*best, strict=True), color=colour, linewidth=1.5, marker=marker, markersize=7, label=label)
        axes.plot(*zip(*points, strict=True), color=colour, linestyle="", marker=marker, markersize=4, alpha=0.5)
    axes.set_xscale("log")
    axes.set(xlabel=f"projected speed of an 8B model on one {chip} (tokens/s)", ylabel="exact match (share)")
    _plain_numbers(axes.xaxis)
    _legend(figure)
    _save(figure, output)


def _beats(one: tuple[float, float], other: tuple[float, float]) -> bool:
    return one != other and one[0] >= other[0] and one[1] >= other[1]


def draw_quality_against_parallelism(curves: Sequence[Curve], output: Path) -> None:
    """Exact match against tokens per forward, a curve over thresholds per system; `marks` are the thresholds."""
    figure, axes = _figure()
    _draw(axes, curves)
    axes.set_xscale("log")
    axes.margins(x=0.1, y=0.12)
    axes.set(xlabel="tokens per forward (tokens)", ylabel="exact match (share)")
    _plain_numbers(axes.xaxis)
    _legend(figure)
    _save(figure, output)


def draw_learning_curves(curves: Sequence[Curve], output: Path, ylabel: str, xlabel: str = "training steps") -> None:
    """What was measured during training, a curve per system; `ylabel` says what, and its unit."""
    figure, axes = _figure()
    _draw(axes, curves)
    axes.set(xlabel=xlabel, ylabel=ylabel, xlim=(0, None))
    _legend(figure)
    _save(figure, output)


def draw_dependence(systems: Mapping[str, tuple[str, Mapping[int, tuple[float, float, int]]]], output: Path) -> None:
    """The dependence of two masked tokens against their distance.

    Args:
      systems: by name of the curve, its system and what `dependence_by_distance` returns.
      output: PNG file to write.
    """
    figure, axes = _figure()
    curves = []
    for label, (system, by_distance) in systems.items():
        x = sorted(by_distance)
        means, errors = ([by_distance[distance][k] for distance in x] for k in (0, 1))
        low, high = ([m + sign * e for m, e in zip(means, errors, strict=True)] for sign in (-1, 1))
        curves.append(Curve(system, label, x, means, low, high))
    _draw(axes, curves)
    axes.set_ylim(bottom=0)
    axes.set(xlabel="distance of the two masked tokens (tokens)", ylabel="dependence, mean ± standard error (nats)")
    _legend(figure)
    _save(figure, output)


def _figure() -> tuple[Any, Any]:
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_FONTS):
        figure = Figure(figsize=(8, 5), dpi=100, layout="constrained")
        axes = figure.subplots()
    axes.grid(alpha=0.3)
    return figure, axes


def _styles(systems: Iterable[str]) -> list[tuple[str, str]]:
    """Colour and marker of each; those of unknown systems in order of appearance."""
    known, others = dict(_STYLES), itertools.cycle(_OTHERS)
    systems = list(systems)
    known |= {system: next(others) for system in dict.fromkeys(systems) if system not in known}
    return [known[system] for system in systems]


def _draw(axes: Any, curves: Sequence[Curve]) -> None:
    """Draws curves; the second and later ones of a system are dashed."""
    seen: dict[str, int] = {}
    for curve, (colour, marker) in zip(curves, _styles(curve.system for curve in curves), strict=True):
        dashes = ("-", "--", ":", "-.")[seen.setdefault(curve.system, 0) % 4]
        seen[curve.system] += 1
        markers = {"marker": marker, "markersize": 5, "markevery": max(len(curve.x) // 12, 1)}
        axes.plot(curve.x, curve.y, color=colour, linestyle=dashes, linewidth=1.5, label=curve.label, **markers)
        if len(curve.low):
            axes.fill_between(curve.x, curve.low, curve.high, color=colour, alpha=0.15, linewidth=0)
        for x, y, mark in zip(curve.x, curve.y, curve.marks, strict=False):
            axes.annotate(mark, (x, y), (3, 5), textcoords="offset points", fontsize=8, color=colour)


def _errors(spread: Mapping[str, float]) -> list[list[float]]:
    return [[spread["median"] - spread["min"]], [spread["max"] - spread["median"]]]


def _name(figure: Any, axes: Any, points: Sequence[Point]) -> None:
    """Writes the names where they cover neither a point nor one another."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.transforms import Bbox

    canvas = FigureCanvasAgg(figure)
    canvas.draw()  # settles where everything is
    figure.set_layout_engine("none")
    crosses = []  # (left, middle, right), (bottom, middle, top) of each point and its spread, in pixels
    for point in points:
        ends = [(point.tokens_per_second[key], point.exact_match[key]) for key in ("min", "median", "max")]
        crosses.append(axes.transData.transform(ends).T)
    taken = []
    for (left, x, right), (bottom, y, top) in crosses:
        taken += [Bbox([[left - 6, y - 6], [right + 6, y + 6]]), Bbox([[x - 6, bottom - 6], [x + 6, top + 6]])]
    for point, ((left, x, right), (bottom, y, top)) in zip(points, crosses, strict=True):
        text = axes.annotate(point.label, (x, y), (0, 0), xycoords="figure pixels", textcoords="figure pixels")
        text.set(fontsize=10, color="#222222", va="center")
        for place in _places(left, x, right, bottom, y, top):
            text.set(**place)
            box = text.get_window_extent(canvas.get_renderer())
            if axes.bbox.containsx(box.x0) and axes.bbox.containsx(box.x1) and not box.count_overlaps(taken):
                break
        taken.append(box)


def _places(left: float, x: float, right: float, bottom: float, y: float, top: float) -> Iterator[dict[str, Any]]:
    """Where a name may stand: beside its point and the spread if there is room, else above, below and further away."""
    for step in range(4):
        for up in (0, 14 * step, -14 * step) if step else (0,):
            yield {"position": (right + 10, y + up), "ha": "left"}
            yield {"position": (left - 10, y + up), "ha": "right"}
        yield {"position": (x, top + 14 * (step + 1)), "ha": "center"}
        yield {"position": (x, bottom - 14 * (step + 1)), "ha": "center"}


def _plain_numbers(axis: Any) -> None:
    """Numbers of a logarithmic axis as 20 or 0.5, not as powers of ten."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_minor_formatter(NullFormatter())


def _legend(figure: Any) -> None:
    figure.legend(loc="outside upper center", ncols=3, fontsize=10)


def _save(figure: Any, output: os.PathLike[str]) -> None:
    with replace_file(output) as file:
        figure.savefig(file, format="png")
