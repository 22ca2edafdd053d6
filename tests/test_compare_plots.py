"""Pictures of numbers made up here: what is drawn, and that it can be read."""

import itertools
import re

import pytest
from matplotlib.image import imread

from benchmarks import common, compare_plots
from benchmarks.compare_plots import Curve, Point

RUNS = [{0: 0.0, 100: 0.5, 200: 0.9}, {0: 0.1, 100: 0.7, 200: 0.8}, {0: 0.0, 100: 0.6}]
CURVES = [
    Curve.of_runs("refusion", "ReFusion", RUNS),
    Curve("llada", "LLaDA", [1, 2, 4], [0.9, 0.8, 0.5], marks=["0.95", "0.9", "0.5"]),
    Curve("refusion", "ReFusion, left to right", [1, 3], [0.4, 0.5]),
]


@pytest.fixture
def figures(monkeypatch):
    """The figures that were saved."""
    seen, save = [], compare_plots._save
    monkeypatch.setattr(compare_plots, "_save", lambda figure, output: (seen.append(figure), save(figure, output)))
    return seen


def point(system, speed, exact_match):
    speeds = common.spread([0.95 * speed, speed, 1.1 * speed])
    return Point(system, f"{system} at {speed}", common.spread([exact_match, exact_match + 0.01]), speeds)


def test_curves_of_runs_are_medians_where_all_were_measured():
    curve = CURVES[0]
    assert (curve.x, curve.y, curve.low, curve.high) == ([0, 100], [0.0, 0.6], [0.0, 0.5], [0.1, 0.7])


def test_names_stand_clear_of_points_and_of_one_another(figures, tmp_path):
    """Crowded ones too."""
    points = [point("llada", 12.0, 0.9), point("dream", 12.2, 0.9), point("fast_dllm", 12.4, 0.901)]
    points += [point("refusion", 400.0, 0.95), point("ablation", 410.0, 0.952), point("autoregressive", 50.0, 0.95)]
    compare_plots.draw_quality_against_speed(points, tmp_path / "speed.png", "v5e")
    axes = figures[0].axes[0]
    assert [text.get_text() for text in axes.texts] == [each.label for each in points]
    boxes = [text.get_window_extent() for text in axes.texts]
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))
    assert all(axes.bbox.x0 < box.x0 and box.x1 < axes.bbox.x1 for box in boxes)
    middles = axes.transData.transform([(p.tokens_per_second["median"], p.exact_match["median"]) for p in points])
    assert not any(box.contains(*middle) for box in boxes for middle in middles)


def draw(name, output):
    if name == "speed":
        compare_plots.draw_quality_against_speed([point("refusion", 400.0, 0.9)], output, "v5e")
    elif name == "settings":
        tried = [(100.0, 0.9), (200.0, 0.8), (150.0, 0.8), (90.0, 0.7), (400.0, 0.5)]
        compare_plots.draw_settings({"refusion": ("ReFusion", tried), "llada": ("LLaDA", [(5.0, 0.6)])}, output, "v5e")
    elif name == "parallelism":
        compare_plots.draw_quality_against_parallelism(CURVES[1:], output)
    elif name == "learning":
        compare_plots.draw_learning_curves(CURVES, output, "exact match (share)")
    else:
        by_distance = {1: (0.5, 0.1, 9), 3: (0.25, 0.05, 8)}
        compare_plots.draw_dependence({"LLaDA": ("llada", by_distance)}, output)


@pytest.mark.parametrize("name", ["speed", "settings", "parallelism", "learning", "dependence"])
def test_pictures_are_800_pixels_wide_with_units_on_their_axes(name, figures, tmp_path):
    draw(name, tmp_path / "picture.png")
    assert imread(tmp_path / "picture.png").shape[:2] == (500, 800)
    axes = figures[0].axes[0]
    assert all(re.search(r"\(.+\)$|steps$", label) for label in (axes.get_xlabel(), axes.get_ylabel()))


def test_settings_that_no_other_beats_are_joined(figures, tmp_path):
    draw("settings", tmp_path / "picture.png")
    best, all_of_them, other, _ = figures[0].axes[0].lines
    assert list(zip(*best.get_data(), strict=True)) == [(100.0, 0.9), (200.0, 0.8), (400.0, 0.5)]
    assert len(all_of_them.get_xdata()) == 5 and len(other.get_xdata()) == 1


def test_every_system_has_its_colour_and_marker(figures, tmp_path):
    draw("learning", tmp_path / "picture.png")
    first, other, second = figures[0].axes[0].lines
    assert first.get_color() == second.get_color() != other.get_color()
    assert first.get_marker() == second.get_marker() != other.get_marker()
    assert first.get_linestyle() != second.get_linestyle()
    names = [*compare_plots._STYLES, "ablation", "another"]
    assert len(set(compare_plots._styles(names))) == len(names)


def test_thresholds_stand_at_their_points_and_errors_around_theirs(figures, tmp_path):
    draw("parallelism", tmp_path / "picture.png")
    texts = figures[0].axes[0].texts
    assert [(text.get_text(), text.xy) for text in texts] == [("0.95", (1, 0.9)), ("0.9", (2, 0.8)), ("0.5", (4, 0.5))]
    draw("dependence", tmp_path / "picture.png")
    (band,) = figures[1].axes[0].collections
    corners = {(x, round(y, 6)) for x, y in band.get_paths()[0].vertices}
    assert corners == {(1, 0.4), (1, 0.6), (3, 0.2), (3, 0.3)}
