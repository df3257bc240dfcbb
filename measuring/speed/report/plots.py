# SPDX-License-Identifier: Apache-2.0
"""One figure per workload: medians as dots, with a line from each to its 95th percentile."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from measuring.speed.report.summary import Quantiles, Row, values_of
from measuring.speed.report.words import SYSTEMS, digits, heading, place, scaled
from measuring.speed.samples import System, Value

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

# After Okabe and Ito, whose colours the colour-blind tell apart, but dark enough for text; markers do without colours.
_COLOURS: dict[System, str] = {
    "stock": "#333333",
    "exact repeat": "#b0588a",
    "empty": "#c87800",
    "warm": "#0072b2",
    "in place": "#8a6d00",
    "quarter": "#007a5a",
    "tessera": "#0072b2",
}
_MARKERS: dict[System, str] = {
    "stock": "o",
    "exact repeat": "s",
    "empty": "^",
    "warm": "D",
    "in place": "h",
    "quarter": "v",
    "tessera": "D",
}

_WIDTH_IN, _DPI = 9.0, 100
_LINES_HEIGHT_IN = 5.0
_ROW_IN, _MARGINS_IN = 0.3, 1.15
# Above this ratio of largest to smallest, small medians could not be told from zero on a linear scale.
_LINEAR_RATIO = 8
_SHORT_AXIS_RATIO = 200
# Labels are this share of the axis apart, at least.
_LABEL_GAP = 0.055


def draw(rows: Sequence[Row], title: str, axis: str, path: Path) -> None:
    """Draws one workload's rows as PNG: lines over the points if these are numbers, or else a line of dots per row."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # takes a second to import
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
    if _is_scale(rows):
        _lines(figure, rows, axis)
    else:
        _dots(figure, rows, axis)
    note = "medians, with lines to the 95th percentiles"
    figure.supxlabel(note, x=0.99, ha="right", fontsize=8, color="0.4")
    figure.savefig(path, dpi=_DPI)


def _is_scale(rows: Sequence[Row]) -> bool:
    points = {row.point for row in rows}
    return len(points) > 1 and all(row.point.isdecimal() and "ttft_s" in row.figures for row in rows)


def _lines(figure: "Figure", rows: Sequence[Row], axis: str) -> None:
    figure.set_size_inches(_WIDTH_IN, _LINES_HEIGHT_IN)
    axes = figure.add_subplot(xscale="log", yscale="log")
    points = sorted({int(row.point) for row in rows})
    axes.set_xlabel(axis)
    axes.set_ylabel(heading("ttft_s"))
    axes.set_xticks(points, [str(point) for point in points])
    axes.set_xticks([], minor=True)
    axes.set_ylim(*_limits(rows))
    _log_ticks(axes.yaxis)
    _bare(axes)
    ends = {system: _line(axes, system, [row for row in rows if row.system == system]) for system in _systems(rows)}
    _label_ends(axes, ends)


def _limits(rows: Sequence[Row]) -> tuple[float, float]:
    numbers = [scaled("ttft_s", number) for row in rows for number in _both(row.figures["ttft_s"])]
    return min(numbers) / 1.4, max(numbers) * 1.4


def _systems(rows: Sequence[Row]) -> list[System]:
    return [system for system in SYSTEMS if any(row.system == system for row in rows)]


def _line(axes: "Axes", system: System, rows: Sequence[Row]) -> float:
    """Draws a system's line; returns where it ends, in milliseconds."""
    medians = [scaled("ttft_s", row.figures["ttft_s"].median) for row in rows]
    above = [scaled("ttft_s", row.figures["ttft_s"].p95) - middle for row, middle in zip(rows, medians, strict=True)]
    below = [0.0] * len(rows)
    x = [int(row.point) for row in rows]
    axes.errorbar(x, medians, (below, above), color=_COLOURS[system], marker=_MARKERS[system], capsize=3, linewidth=1.8)
    return medians[-1]


def _label_ends(axes: "Axes", ends: dict[System, float]) -> None:
    """Names the lines at their right ends, in their order, and moved apart where they would overlap."""
    low, high = axes.get_ylim()
    lowest = 0.0
    for system, end in sorted(ends.items(), key=lambda item: item[1]):
        height = max(math.log(end / low, high / low), lowest)
        lowest = height + _LABEL_GAP
        text = f"{SYSTEMS[system]}, {digits(end)} ms"
        axes.text(1.02, height, text, color=_COLOURS[system], transform=axes.transAxes, va="center", fontsize=10)


def _dots(figure: "Figure", rows: Sequence[Row], axis: str) -> None:
    """A panel for each value, with a line for each row, under a heading for each point."""
    labels, heights = _layout(rows, axis)
    figure.set_size_inches(_WIDTH_IN, _MARGINS_IN + _ROW_IN * len(labels))
    values = values_of(rows)
    panels = figure.subplots(1, len(values), sharey=True, squeeze=False, gridspec_kw={"wspace": 0.08})[0]
    for axes, value in zip(panels, values, strict=True):
        _panel(axes, value, rows, heights)
    _label_rows(figure.axes[0], rows, labels)


def _layout(rows: Sequence[Row], axis: str) -> tuple[list[str], list[int]]:
    """The text of each line from the top, and for each row which line it is on."""
    labels: list[str] = []
    heights = []
    for i, row in enumerate(rows):
        if i == 0 or rows[i - 1].point != row.point:
            labels.append(place(row.point, axis))
        heights.append(len(labels))
        labels.append(SYSTEMS[row.system])
    return labels, heights


def _label_rows(axes: "Axes", rows: Sequence[Row], labels: Sequence[str]) -> None:
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.4, -0.6)
    colours = {SYSTEMS[row.system]: _COLOURS[row.system] for row in rows}
    for text in axes.get_yticklabels():
        text.set_color(colours.get(text.get_text(), "black"))
        text.set_fontweight("normal" if text.get_text() in colours else "bold")


def _panel(axes: "Axes", value: Value, rows: Sequence[Row], heights: Sequence[int]) -> None:
    _bare(axes)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(heading(value))
    drawn = [(row, height) for row, height in zip(rows, heights, strict=True) if value in row.figures]
    _scale(axes, value, [row.figures[value] for row, _ in drawn])
    for row, height in drawn:
        _dot(axes, row.system, height, *(scaled(value, number) for number in _both(row.figures[value])))


def _both(quantiles: Quantiles) -> tuple[float, float]:
    return quantiles.median, quantiles.p95


def _scale(axes: "Axes", value: Value, drawn: Sequence[Quantiles]) -> None:
    """From zero, or logarithmic; with room for the numbers beside the dots."""
    numbers = [scaled(value, number) for quantiles in drawn for number in _both(quantiles)]
    if min(numbers) > 0 and max(numbers) / min(numbers) > _LINEAR_RATIO:
        axes.set_xscale("log")
        span = max(numbers) / min(numbers)
        axes.set_xlim(min(numbers) / span**0.08, max(numbers) * span**0.5)
        _log_ticks(axes.xaxis)
    else:
        axes.set_xlim(0, 1.5 * max(numbers) or 1)


def _log_ticks(axis: "Axis") -> None:
    """At powers of ten, in plain numbers; on a short axis also in the middle between them."""
    from matplotlib.ticker import LogLocator, NullFormatter

    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1, 3) if high / low < _SHORT_AXIS_RATIO else (1,)))
    axis.set_major_formatter(lambda number, _: f"{number:g}")
    axis.set_minor_formatter(NullFormatter())


def _dot(axes: "Axes", system: System, height: int, median: float, p95: float) -> None:
    colour = _COLOURS[system]
    axes.plot([median, p95], [height, height], color=colour, linewidth=2)
    axes.plot([median], [height], color=colour, marker=_MARKERS[system], markersize=7)
    beside = {"xytext": (8, 0), "textcoords": "offset points", "va": "center", "color": colour}
    axes.annotate(digits(median), (max(median, p95), height), fontsize=9, **beside)  # type: ignore[arg-type]


def _bare(axes: "Axes") -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="0.9")
    axes.set_axisbelow(True)
