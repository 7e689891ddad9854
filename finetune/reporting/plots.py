"""Plots as SVG text for a page or a separate file, with light and dark colors.

matplotlib draws them. The same values give the same text. The SVG loads nothing, has no script, and its ids
are unique.
"""

from __future__ import annotations

import io
import math
import warnings
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from xml.etree import ElementTree

import numpy as np

from finetune.core.visible_text import visible, visible_lines
from finetune.reporting.matplotlib_settings import defaults

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

    Numbers = Sequence[float | None]

WIDTH, HEIGHT = 4.3, 2.9  # in inches of 72 units: about the width of a phone, so that text is readable there
# Limit of points per line. Longer lines show the minimum and maximum of each stretch.
MOST_POINTS = 800
LOG_FROM, LOG_TO = 30, 1e12  # range (maximum divided by minimum) in which an axis is logarithmic
# Larger values are skipped like NaN and Inf, because axes overflow long before fp64 does
GREATEST = 1e30
# Name -> (light, dark), used in the SVG's own style sheet
COLORS = {
    "ink": ("#22262b", "#e4e3df"),
    "soft": ("#646a72", "#9aa1a9"),
    "grid": ("#e3e0d9", "#2c3238"),
    "1": ("#1f8a64", "#45b78b"),
    "2": ("#3566c4", "#7ba3f0"),
    "3": ("#b9610c", "#f0a75c"),
    "4": ("#8348b8", "#c096ea"),
    "5": ("#bf3344", "#f08490"),
    "6": ("#0f8394", "#4fc4d4"),
    "7": ("#75731a", "#c9c660"),
    "8": ("#a8447f", "#e68fc2"),
}
# Placeholders while matplotlib draws
STAND_INS = {name: f"#0000{0xA0 + index:02x}" for index, name in enumerate(COLORS)}
SERIES = [STAND_INS[str(number)] for number in range(1, 9)]
MARKERS = "osD^vPX*"
SVG = "{http://www.w3.org/2000/svg}"
LINK = "{http://www.w3.org/1999/xlink}href"


class Curve(NamedTuple):
    label: str
    x: Numbers
    y: Numbers
    """`None`, NaN and Inf are gaps."""
    style: Literal["line", "faint", "points"] = "line"


class Point(NamedTuple):
    label: str
    x: float
    x_err: float | tuple[float, float] | None
    """Half the width of the error bar, or its two parts (below, above)."""
    y: float
    y_err: float | tuple[float, float] | None


class Bar(NamedTuple):
    """One row of `bars`."""

    label: str
    values: Numbers
    """One value for each series. `None` draws no bar."""
    errors: Sequence[float]


@defaults()
def curves(
    lines: Sequence[Curve],
    ylabel: str,
    xlabel: str = "step",
    *,
    alt: str = "",
    zero: bool = False,
    mark: tuple[float, str] | None = None,
) -> str:
    """Draw lines over a shared x axis.

    Args:
        alt: text for screen readers. If empty, "ylabel over xlabel".
        zero: start the y axis at zero. Otherwise it is logarithmic if the values span a factor of LOG_FROM or
            more.
        mark: an x value to mark, and its label.
    """
    figure, axes = _axes(xlabel, ylabel)
    drawn = [(curve, *_finite(curve.x, curve.y)) for curve in lines]
    drawn = [(curve, x, y) for curve, x, y in drawn if np.isfinite(y).any()]
    if zero and drawn:
        axes.set_ylim(0, 1.08 * max(float(np.nanmax(y)) for *_, y in drawn) or 1)
    elif _is_wide([y for _, _, y in drawn]):
        _log(axes.yaxis, axes.set_yscale)
    for index, (curve, x, y) in enumerate(drawn):
        alone = np.isfinite(y).sum() < 3  # a line through one point is not visible
        shown = {"marker": "o" if alone or curve.style == "points" else "", "markersize": 4}
        faint = curve.style == "faint"
        shown |= {"alpha": 0.45 if faint else 1, "linewidth": 0.9 if faint else 1.7}
        color = STAND_INS["soft"] if faint else SERIES[index % len(SERIES)]
        axes.plot(*_thinned(x, y), color=color, label=curve.label, **shown)
    if mark and drawn:
        axes.axvline(mark[0], color=STAND_INS["soft"], linewidth=1, linestyle=(0, (3, 3)), label=mark[1])
    _finish(axes, drawn, named=len(drawn) > 1 or bool(mark))
    return _svg(figure, alt or f"{ylabel} over {xlabel}")


@defaults()
def scatter(
    points: Sequence[Point | tuple[str, float, Any, float, Any]],
    xlabel: str,
    ylabel: str,
    *,
    front: Sequence[str] = (),
) -> str:
    """Draw named points with error bars, each with its own marker and color.

    The x axis can be logarithmic.

    Args:
        points: points with a NaN or Inf coordinate are skipped.
        front: labels of points to connect by a line, such as a Pareto front.
    """
    figure, axes = _axes(xlabel, ylabel)
    shown = [Point(*point) for point in points]
    shown = [point for point in shown if _drawable(point.x) and _drawable(point.y)]
    if _is_wide([np.array([point.x for point in shown])]):
        _log(axes.xaxis, axes.set_xscale)
    joined = sorted((point.x, point.y) for point in shown if point.label in front)
    if len(joined) > 1:
        axes.plot(*zip(*joined, strict=True), color=STAND_INS["soft"], linewidth=1, linestyle=(0, (3, 3)))
    for index, point in enumerate(shown):
        errors = {"xerr": _error(point.x_err), "yerr": _error(point.y_err)}
        marker = MARKERS[(index + index // len(SERIES)) % len(MARKERS)]
        look: dict[str, Any] = {"fmt": marker, "color": SERIES[index % len(SERIES)], "markersize": 7}
        axes.errorbar([point.x], [point.y], **errors, **look, elinewidth=1.2, capsize=3, label=point.label)
    axes.margins(0.12)
    _finish(axes, shown, named=True)
    return _svg(figure, f"{ylabel} against {xlabel}")


@defaults()
def dots(
    x: Sequence[float | str],
    y: Sequence[float],
    xlabel: str,
    ylabel: str,
    *,
    best: int | None = None,
    line: Curve | None = None,
) -> str:
    """Draw unnamed points over numbers or words. A numeric axis is logarithmic for wide ranges.

    Args:
        best: index of the point to highlight.
        line: a curve to add.
    """
    figure, axes = _axes(xlabel, ylabel)
    words = list(dict.fromkeys(x)) if any(isinstance(value, str) for value in x) else []
    places = [float(words.index(value)) if words else float(value) for value in x]
    shown = [i for i, pair in enumerate(zip(places, y, strict=True)) if all(map(_drawable, pair))]
    if _is_wide([np.array([y[i] for i in shown])]):
        _log(axes.yaxis, axes.set_yscale)
    if words:
        axes.set_xticks(range(len(words)), [_short(visible(word)) for word in words], parse_math=False)
        axes.set_xlim(-0.5, len(words) - 0.5)
    elif _is_wide([np.array([places[i] for i in shown])]):
        _log(axes.xaxis, axes.set_xscale)
    look: dict[str, Any] = {"linestyle": "", "marker": "o", "color": SERIES[1]}
    axes.plot([places[i] for i in shown], [y[i] for i in shown], markersize=4.5, alpha=0.75, **look)
    if line:
        axes.plot(*_finite(line.x, line.y), color=SERIES[0], linewidth=1.7, label=line.label)
    if best in shown:
        look |= {"marker": "*", "color": SERIES[2], "label": "best"}
        axes.plot([places[best]], [y[best]], markersize=12, **look)
    _finish(axes, shown, named=best in shown or bool(line))
    return _svg(figure, f"{ylabel} against {xlabel}")


def _short(word: str) -> str:
    return word if len(word) <= 14 else word[:12] + ".."


@defaults()
def bars(rows: Sequence[Bar], series: Sequence[str], xlabel: str) -> str:
    """Draw horizontal bars: one row for each label from the top, with one bar for each series."""
    figure, axes = _axes(xlabel, "")
    thick = 0.8 / len(series)
    for index, name in enumerate(series):
        known = [(place, row) for place, row in enumerate(rows) if row.values[index] is not None]
        places = [place + (index - (len(series) - 1) / 2) * thick for place, _ in known]
        look: dict[str, Any] = {"color": SERIES[index], "label": name, "ecolor": STAND_INS["soft"]}
        errors = [row.errors[index] for _, row in known]
        axes.barh(
            places,
            [row.values[index] or 0.0 for _, row in known],
            thick * 0.9,
            xerr=errors,
            capsize=2,
            **look,
        )
    axes.set_yticks(
        range(len(rows)), [visible(row.label) for row in rows], color=STAND_INS["ink"], parse_math=False
    )
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", color=STAND_INS["grid"], linewidth=0.8)
    figure.set_size_inches(1.6 * WIDTH, HEIGHT + 0.28 * max(0, len(rows) - 6))
    _finish(axes, rows, named=True, height=figure.get_figheight())
    figure.subplots_adjust(left=0.36)
    return _svg(figure, f"{xlabel}, by {', '.join(series)}")


def smoothed(values: Numbers) -> list[float]:
    """Return the moving mean: a thirtieth of all values to each side, fewer at the ends.

    NaN and Inf stay gaps.
    """
    _, y = _finite(range(len(values)), values)
    known, places = np.isfinite(y), np.arange(len(y))
    reach = np.minimum(np.minimum(places, places[::-1]), min(len(y) // 30, 50))
    sums = np.concatenate([[0.0], np.cumsum(np.where(known, y, 0))])
    counts = np.concatenate([[0], np.cumsum(known)])
    first, last = places - reach, places + reach + 1
    means = (sums[last] - sums[first]) / np.maximum(counts[last] - counts[first], 1)
    return np.where(known, means, np.nan).tolist()


def _axes(xlabel: str, ylabel: str) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure  # a second import, which ranks that draw nothing avoid
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    # Set the margins by hand, because a layout engine draws three times
    figure = Figure(figsize=(WIDTH, HEIGHT))
    axes = figure.add_subplot()
    figure.patch.set_visible(False)
    axes.patch.set_visible(False)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(STAND_INS["soft"])
    axes.set_xlabel(visible(xlabel), color=STAND_INS["soft"], parse_math=False)
    axes.set_title(visible(ylabel), loc="left", color=STAND_INS["ink"], fontsize=11, parse_math=False)
    axes.tick_params(colors=STAND_INS["soft"], length=0, labelsize=10)
    axes.tick_params(axis="x", length=3)
    axes.grid(axis="y", color=STAND_INS["grid"], linewidth=0.8)
    axes.set_axisbelow(True)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
        axis.set_major_formatter(FuncFormatter(_number))
    return figure, axes


def _finish(axes: Axes, drawn: Sequence[Any], *, named: bool, height: float = HEIGHT) -> None:
    """Set the margins and add the legend below the plot. Without data, show "no values"."""
    handles, labels = axes.get_legend_handles_labels() if named else ([], [])
    columns = max(1, min(3, 48 // (max(map(len, labels), default=0) + 5)))
    legend_rows = -(-len(labels) // columns)
    # A long legend makes the figure taller instead of shrinking the plot
    height = 72 * height + 14 * max(0, legend_rows - 2)
    below = 33 + 14 * legend_rows  # the axis and its name, then the legend
    figure: Any = axes.figure
    figure.set_figheight(height / 72)
    figure.subplots_adjust(left=0.145, right=0.985, top=1 - 23 / height, bottom=below / height)
    if not drawn:
        axes.text(0.5, 0.5, "no values", transform=axes.transAxes, ha="center", color=STAND_INS["soft"])
        axes.set_xticks([])
        axes.set_yticks([])
    elif labels:
        look: dict[str, Any] = {"frameon": False, "fontsize": 10, "labelcolor": STAND_INS["ink"]}
        look |= {"handlelength": 1.2, "columnspacing": 1.2, "borderpad": 0, "handletextpad": 0.5}
        look |= {"labelspacing": 0.25, "borderaxespad": 0.2}
        legend = figure.legend(handles, labels, loc="lower left", ncols=columns, **look)
        for text in legend.get_texts():
            text.set(text=visible(text.get_text()), parse_math=False)


def _finite(x: Numbers, y: Numbers) -> tuple[np.ndarray, np.ndarray]:
    """Return fp64 arrays with NaN for values that cannot be drawn. Points without an x value are removed."""
    places, values = (np.array([math.nan if v is None else v for v in each], dtype=float) for each in (x, y))
    places, values = (np.where(np.abs(each) < GREATEST, each, math.nan) for each in (places, values))
    return places[np.isfinite(places)], values[np.isfinite(places)]


def _drawable(value: float) -> bool:
    return abs(value) < GREATEST


def _thinned(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the minimum and maximum of each stretch, and keep each gap."""
    if len(y) <= MOST_POINTS:
        return x, y
    kept: set[int] = {0, len(y) - 1}
    for stretch in np.array_split(np.arange(len(y)), MOST_POINTS // 2):
        values = y[stretch]
        known = stretch[np.isfinite(values)]
        if len(known):
            kept |= {int(known[np.argmin(y[known])]), int(known[np.argmax(y[known])])}
        if len(known) < len(stretch):
            kept.add(int(stretch[~np.isfinite(values)][0]))
    order = sorted(kept)
    return x[order], y[order]


def _is_wide(values: list[np.ndarray]) -> bool:
    """Return whether all values are positive and span a range that needs a logarithmic axis."""
    known = np.concatenate([each[np.isfinite(each)] for each in values]) if values else np.array([])
    if not len(known) or known.min() * LOG_TO <= known.max():
        return False
    return bool(known.min() * LOG_FROM < known.max())


def _log(axis: Axis, set_scale: Callable[[str], object]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    set_scale("log")
    axis.set_major_locator(LogLocator(numticks=6))
    axis.set_major_formatter(FuncFormatter(_number))
    axis.set_minor_formatter(NullFormatter())
    axis.set_tick_params(which="minor", length=0)


def _number(value: float, _: object = None) -> str:
    """Format a number as a person would write it, such as 12,000, 0.25 or 4e-5."""
    text = f"{value:,.5g}" if 1e-4 <= abs(value) < 1e6 or value == 0 else f"{value:.3g}"
    return text.replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")


def _error(error: Any) -> Any:
    """Return an error bar for matplotlib: two values, or `None` if it is not known."""
    parts = [error, error] if not isinstance(error, tuple | list) else error
    known = all(part is not None and _drawable(part) for part in parts)
    return [[max(0.0, float(part))] for part in parts] if known else None


def _svg(figure: Figure, alt: str) -> str:
    """Return the figure as an <svg> element with its own colors."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    file = io.BytesIO()
    settings: Any = {"svg.fonttype": "none", "svg.hashsalt": "same numbers, same text"}
    settings |= {"font.family": ["sans-serif"], "font.sans-serif": ["DejaVu Sans"]}
    with rc_context(settings), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # the browser draws the text
        # The default metadata contains the time and a URL
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        FigureCanvasSVG(figure).print_svg(file, metadata=nothing)
    root = ElementTree.fromstring(file.getvalue())
    own = "p" + sha256(file.getvalue()).hexdigest()[:8]
    for element in root.iter():
        element.tag = element.tag.removeprefix(SVG)
        if LINK in element.attrib:
            element.set("href", element.attrib.pop(LINK))
    _keep_ids(root, own)
    for style in root.findall("defs/style"):
        style.text = _sheet(own)
    for name in ("width", "height", "version"):
        root.attrib.pop(name, None)
    root.attrib |= {"xmlns": SVG[1:-1], "class": f"plot {own}", "role": "img", "aria-label": alt}
    text = ElementTree.tostring(root, encoding="unicode")
    for name, stand_in in STAND_INS.items():
        text = text.replace(stand_in, f"var(--{name})" if not name.isdigit() else f"var(--series-{name})")
    return visible_lines(text.replace("'DejaVu Sans'", "system-ui, 'DejaVu Sans'"))


def _keep_ids(root: ElementTree.Element, own: str) -> None:
    """Keep only ids that are referenced, and add the plot's prefix to them."""
    given = [element for element in root.iter() if "id" in element.attrib]
    everything = " ".join(value for element in root.iter() for value in element.attrib.values())
    for element in given:
        name = element.attrib.pop("id")
        if f"#{name}" in everything:
            element.set("id", f"{own}-{name}")
    for element in root.iter():
        for key, value in element.attrib.items():
            if key == "href" or "url(#" in value:
                element.set(key, value.replace("#", f"#{own}-", 1))


def _sheet(own: str) -> str:
    """Return the plot's light and dark colors, and matplotlib's line style for this plot only."""

    def named(shade: int) -> str:
        pairs = ((f"series-{name}" if name.isdigit() else name, c[shade]) for name, c in COLORS.items())
        return "".join(f"--{name}:{color};" for name, color in pairs)

    dark = f"@media screen and (prefers-color-scheme: dark) {{ .{own} {{ {named(1)} }} }}"
    return f".{own} {{ {named(0)} }} .{own} * {{ stroke-linejoin: round; stroke-linecap: butt }} {dark}"
