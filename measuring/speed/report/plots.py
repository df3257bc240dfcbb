# SPDX-License-Identifier: Apache-2.0
"""One figure per workload: medians as dots, with a line from each to its 95th percentile."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from measuring.speed.report.summary import Row, values_of
from measuring.speed.report.words import SYSTEMS, digits, heading, place, scaled
from measuring.speed.samples import System, Value

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# After Okabe and Ito, whose colours the colour-blind tell apart, but dark enough for text.
_COLOURS: Final[dict[System, str]] = {
    "stock": "#333333",
    "exact repeat": "#b0588a",
    "empty": "#c87800",
    "warm": "#0072b2",
    "in place": "#8a6d00",
    "quarter": "#007a5a",
    "tessera": "#0072b2",
}
_WIDTH_IN, _DPI = 9.0, 100
_ROW_IN, _MARGINS_IN = 0.3, 1.15
# Above this ratio of largest to smallest, small medians could not be told from zero on a linear scale.
_LINEAR_RATIO = 8


def draw(rows: Sequence[Row], title: str, axis: str, path: Path) -> None:
    """Draws one workload as PNG: a panel for each value, with a line for each row under a heading for each point."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # takes a second to import
    from matplotlib.figure import Figure

    labels, heights = _layout(rows, axis)
    figure = Figure(figsize=(_WIDTH_IN, _MARGINS_IN + _ROW_IN * len(labels)), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
    values = values_of(rows)
    panels = figure.subplots(1, len(values), sharey=True, squeeze=False, gridspec_kw={"wspace": 0.08})[0]
    for axes, value in zip(panels, values, strict=True):
        _panel(axes, value, rows, heights)
    panels[0].set_yticks(range(len(labels)), labels)
    panels[0].set_ylim(len(labels) - 0.4, -0.6)
    note = "medians, with lines to the 95th percentiles"
    figure.supxlabel(note, x=0.99, ha="right", fontsize=8, color="0.4")
    figure.savefig(path, dpi=_DPI)


def _layout(rows: Sequence[Row], axis: str) -> tuple[list[str], list[int]]:
    """The text of each line from the top, and the line of each row."""
    labels: list[str] = []
    heights = []
    for i, row in enumerate(rows):
        if i == 0 or rows[i - 1].point != row.point:
            labels.append(f"— {place(row.point, axis)} —")
        heights.append(len(labels))
        labels.append(SYSTEMS[row.system])
    return labels, heights


def _panel(axes: "Axes", value: Value, rows: Sequence[Row], heights: Sequence[int]) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="0.9")
    axes.set_axisbelow(True)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(heading(value))
    numbers = []
    for row, height in zip(rows, heights, strict=True):
        if found := row.figures.get(value):
            median, p95 = scaled(value, found.median), scaled(value, found.p95)
            _dot(axes, _COLOURS[row.system], height, median, p95)
            numbers += [median, p95]
    _scale(axes, numbers)


def _dot(axes: "Axes", colour: str, height: int, median: float, p95: float) -> None:
    axes.plot([median, p95], [height, height], color=colour, linewidth=2)
    axes.plot([median], [height], color=colour, marker="o", markersize=7)
    beside = {"xytext": (8, 0), "textcoords": "offset points", "va": "center", "color": colour}
    axes.annotate(digits(median), (max(median, p95), height), fontsize=9, **beside)  # type: ignore[arg-type]


def _scale(axes: "Axes", numbers: Sequence[float]) -> None:
    """From zero, or logarithmic; with room for the numbers beside the dots."""
    low, high = min(numbers), max(numbers)
    if low > 0 and high / low > _LINEAR_RATIO:
        axes.set_xscale("log")
        axes.set_xlim(low / (high / low) ** 0.08, high * (high / low) ** 0.5)
    else:
        axes.set_xlim(0, 1.5 * high or 1)
