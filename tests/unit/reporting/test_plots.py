"""Plots: the same numbers give the same text, which needs nothing but itself; and no numbers break them."""

import math
import re
import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from finetune.core.visible_text import visible
from finetune.reporting import plots
from finetune.reporting.plots import Curve, Point

STEPS = list(range(1, 41))
FALLING = [3 * math.exp(-step / 9) + 0.01 for step in STEPS]
NUMBERS = st.lists(st.one_of(st.none(), st.floats()), max_size=30)


def loss_plot() -> str:
    lines = [Curve("each step", STEPS, FALLING, "faint"), Curve("held out", [20, 40], [0.5, 0.4], "points")]
    return plots.curves(lines, "loss", mark=(20, "best"))


def texts(svg: str) -> str:
    found = ElementTree.fromstring(svg).findall(".//{*}text")
    return " ".join("".join(element.itertext()) for element in found)


def test_the_same_numbers_give_the_same_text() -> None:
    assert loss_plot() == loss_plot()


def test_a_plot_needs_nothing_but_itself() -> None:
    svg = loss_plot()
    assert svg.startswith("<svg ") and 'role="img"' in svg and 'aria-label="loss over step"' in svg
    assert re.findall(r"https?://[^\s\"<]*", svg) == ["http://www.w3.org/2000/svg"]
    assert "script" not in svg and "metadata" not in svg and "url(http" not in svg
    assert set(re.findall(r'href="(.)', svg)) == {"#"}
    ids = re.findall(r'\bid="([^"]+)"', svg)
    used = re.findall(r"#(p[0-9a-f]{8}-\w+)", svg)
    assert ids and len(ids) == len(set(ids)) and set(used) == set(ids)


def test_two_plots_on_a_page_share_no_id() -> None:
    other = plots.curves([Curve("rate", STEPS, FALLING)], "learning rate")
    ids = [set(re.findall(r'\bid="([^"]+)"', svg)) for svg in (loss_plot(), other)]
    assert all(ids) and not ids[0] & ids[1]


def test_colors_follow_the_reader_s_screen() -> None:
    svg = loss_plot()
    assert "prefers-color-scheme: dark" in svg and "var(--ink)" in svg and "var(--series-2)" in svg
    body = svg.partition("</style>")[2]
    assert set(re.findall(r"#[0-9a-f]{6}\b", body)) <= {"#000000"}, "each color is one of the sheet's"


def test_what_is_drawn_can_be_read() -> None:
    said = texts(loss_plot())
    assert all(word in said for word in ("loss", "step", "each step", "held out", "best"))


def test_names_are_text_whatever_they_hold() -> None:
    name = "</svg><script>$x^2$ & _a"
    for svg in (
        plots.curves([Curve(name, STEPS, FALLING), Curve("b", STEPS, FALLING)], name),
        plots.scatter([Point(name, 1, None, 2, None), Point("_b", 1, None, 2, None)], "x", name),
    ):
        assert "<script" not in svg and texts(svg).count(name) == 2


@pytest.mark.parametrize("name", [r"$|\w$", "a\x1b\ud800", "漢", "a\nb"])
def test_labels_of_ticks_are_text_whatever_they_hold(name: str) -> None:
    for svg in (
        plots.dots([name, "b"], [1.0, 2.0], "x", "y"),
        plots.bars([plots.Bar(name, [1.0], [0.1]), plots.Bar("b", [1.0], [0.1])], ("share",), "x"),
        plots.curves([Curve(name, STEPS, FALLING), Curve("b", STEPS, FALLING)], "loss"),
    ):
        assert visible(name) in texts(svg)


def test_a_wide_span_gets_a_log_axis_and_zero_does_not() -> None:
    wide = [Curve("loss", STEPS, [10 ** (-n / 10) for n in range(40)])]
    assert "0.001 " in texts(plots.curves(wide, "loss"))
    assert "0.001 " not in texts(plots.curves(wide, "loss", zero=True))


def test_a_long_run_stays_small_and_keeps_its_peaks() -> None:
    steps = list(range(200_000))
    values = [float(step % 7) for step in steps]
    values[123_456] = 1e4
    svg = plots.curves([Curve("loss", steps, values, "faint")], "loss")
    assert len(svg) < 60_000 and "10,000" in texts(svg)


@pytest.mark.parametrize(
    "values", [[], [2.0], [1.0, 1.0, 1.0], [math.nan] * 3, [1.0, math.inf, 2.0], [0.0, 0.0], [None, 3.0]]
)
def test_degenerate_lines(values: list) -> None:
    svg = plots.curves([Curve("loss", range(len(values)), values)], "loss")
    some = any(value is not None and math.isfinite(value) for value in values)
    assert ("no values" in texts(svg)) != some
    ElementTree.fromstring(svg)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(NUMBERS, st.booleans())
def test_any_numbers_can_be_drawn(values: list, zero: bool) -> None:
    svg = plots.curves([Curve("a", range(len(values)), values)], "a", zero=zero, mark=(1, "best"))
    ElementTree.fromstring(svg)
    mean = plots.smoothed(values)
    assert len(mean) == len(values)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.tuples(st.text("ab_", max_size=3), *[st.floats()] * 4), max_size=9))
def test_any_points_can_be_drawn(points: list) -> None:
    ElementTree.fromstring(plots.scatter(points, "seconds", "quality", front=[p[0] for p in points]))


def test_points_with_errors_and_a_front() -> None:
    points = [("lora", 80, 5, 0.96, (0.02, 0.01)), ("ia3", 60, None, 0.77, 0.03), ("bad", math.nan, 1, 1, 1)]
    svg = plots.scatter(points, "training, seconds", "exact match", front=["lora", "ia3"])
    said = texts(svg)
    assert "lora" in said and "ia3" in said and "bad" not in said and "training, seconds" in said
    assert svg == plots.scatter(points, "training, seconds", "exact match", front=["lora", "ia3"])


def test_a_long_legend_makes_the_plot_longer() -> None:
    def height(count: int) -> float:
        svg = plots.scatter(
            [(f"a run with a long name {n}", n, None, n, None) for n in range(count)], "x", "y"
        )
        return float(ElementTree.fromstring(svg).attrib["viewBox"].split()[-1])

    assert height(2) == height(1) and height(40) == pytest.approx(height(2) + 38 * 14)


def test_a_mean_is_of_neighbours_and_leaves_gaps() -> None:
    values = [float(n) for n in range(90)]
    assert plots.smoothed(values) == pytest.approx(values), "a straight line stays one, to its ends"
    noisy = [(-1.0) ** n for n in range(90)]
    assert max(map(abs, plots.smoothed(noisy)[5:-5])) < 0.2
    assert math.isnan(plots.smoothed([1.0, math.nan, 3.0])[1])
