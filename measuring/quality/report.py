# SPDX-License-Identifier: Apache-2.0
"""The figures of a run for people (tables and a plot) and for programs (JSON)."""

import json
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rich.console import Console
from rich.table import Table

from app.modes import in_order
from app.profile import Estimate
from machine.progress import say
from measuring.kit.tables import new_table, widened
from measuring.quality.summary import CONFIDENCE, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NO_PLOTS: Final = "matplotlib is not installed: pip install 'tessera-rag[measure]'"

_NAMES = ("chunks", "mode")
_REASONS_SHOWN = 3
# Told apart without colours: by line and marker, and by lightness.
_STYLES = (
    {"color": "#000000", "linestyle": "-", "marker": "o"},
    {"color": "#0060c0", "linestyle": "--", "marker": "s"},
    {"color": "#e08000", "linestyle": ":", "marker": "^"},
    {"color": "#008060", "linestyle": "-.", "marker": "D"},
    {"color": "#a040a0", "linestyle": "--", "marker": "v"},
    {"color": "#804000", "linestyle": "-", "marker": "x"},
)


def table(rows: Sequence[Row], console: Console | None = None) -> None:
    """Prints accuracy, predictions, speed, and fallbacks; to standard output unless ``console`` is another."""
    console = widened(console or Console())
    of_all_kinds = [row for row in rows if row.kind == "all"]
    console.print(_accuracy_table(of_all_kinds))
    if any(row.logprob is not None for row in rows):
        console.print(_prediction_table(of_all_kinds))
    if by_kind := [row for row in rows if row.kind != "all"]:
        console.print(_kind_table(by_kind))
    console.print(_speed_table(of_all_kinds))
    for row in of_all_kinds:
        if row.chunks == "all":
            _print_reasons(console, f"{row.mode}: ran in full attention instead", row.fell_back)
            _print_reasons(console, f"{row.mode}: refused by the server", row.refused)


def to_json(rows: Sequence[Row], refusal: str, path: Path) -> None:
    """Writes the rows, with their fields' names."""
    summary = {"refusal": refusal, "confidence": CONFIDENCE, "rows": [row.model_dump() for row in rows]}
    path.write_text(json.dumps(summary, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def plot(rows: Sequence[Row], path: Path) -> None:
    """Draws accuracy by number of chunks as PNG: a line and intervals per mode."""
    if find_spec("matplotlib") is None:
        say(f"no {path.name}: {NO_PLOTS}")
        return
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # takes a second to import
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    labels = list(dict.fromkeys(row.chunks for row in rows if row.chunks != "all"))
    for mode, style in zip(in_order(row.mode for row in rows), cycle(_STYLES)):
        _draw(axes, style, [row for row in rows if row.mode == mode and row.chunks != "all"], labels)
    axes.set(xlabel="number of chunks", ylabel="accuracy (share of questions)", ylim=(-0.02, 1.02))
    axes.set_xticks(range(len(labels)), labels)
    axes.grid(axis="y", color="0.85")
    if axes.lines:
        axes.legend(title=f"mode, with {CONFIDENCE:.0%} interval", frameon=False)
    figure.savefig(path, dpi=150)


def _accuracy_table(rows: Sequence[Row]) -> Table:
    columns = ("answers", f"accuracy ({CONFIDENCE:.0%})", "minus full", "exact", "F1", "refused rightly", "wrongly")
    result = new_table(f"Accuracy, %, with {CONFIDENCE:.0%} intervals", _NAMES, columns)
    for row in rows:
        shares = (row.exact_match, row.f1, row.right_refusals, row.false_refusals)
        estimates = (_interval(row.accuracy), _interval(row.difference, signed=True))
        result.add_row(*_head(row), str(row.answers), *estimates, *map(_percent, shares))
    return result


def _prediction_table(rows: Sequence[Row]) -> Table:
    columns = ("log probability of it", "minus full", "divergence from full, per token")
    result = new_table(f"Predictions of the right answer, nats, with {CONFIDENCE:.0%} intervals", _NAMES, columns)
    for row in rows:
        result.add_row(*_head(row), *_predictions(row))
    return result


def _kind_table(rows: Sequence[Row]) -> Table:
    title = (
        f"Accuracy, %, and predictions of the right answer, nats, by kind of question, with {CONFIDENCE:.0%} intervals"
    )
    columns = ("answers", "accuracy", "minus full", "log probability minus full", "divergence from full")
    result = new_table(title, ("kind", "mode"), columns)
    for row in rows:
        accuracy = (_interval(row.accuracy), _interval(row.difference, signed=True))
        _, *predictions = _predictions(row)
        result.add_row(row.kind, row.mode, str(row.answers), *accuracy, *predictions)
    return result


def _predictions(row: Row) -> tuple[str, str, str]:
    return _nats(row.logprob), _nats(row.logprob_difference, signed=True), _formatted(row.divergence, 1, ".3f")


def _speed_table(rows: Sequence[Row]) -> Table:
    columns = ("all chunks cached", "chunks to compute", "tokens reused, %", "ran in another mode", "refused")
    result = new_table("Time to first token, s, medians", _NAMES, columns)
    for row in rows:
        times = (_seconds(row.ttft_cached_s), _seconds(row.ttft_computed_s))
        counts = (str(sum(row.fell_back.values())), str(sum(row.refused.values())))
        result.add_row(*_head(row), *times, _percent(row.reused_share), *counts)
    return result


def _head(row: Row) -> tuple[str, str]:
    return row.chunks, row.mode


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f}"


def _interval(estimate: Estimate | None, signed: bool = False) -> str:
    """Shares as percentages."""
    return _formatted(estimate, 100, "+.1f" if signed else ".1f")


def _nats(estimate: Estimate | None, signed: bool = False) -> str:
    return _formatted(estimate, 1, "+.2f" if signed else ".2f")


def _formatted(estimate: Estimate | None, factor: float, form: str) -> str:
    if estimate is None:
        return "–"
    mean, low, high = (f"{factor * value:{form}}" for value in (estimate.mean, estimate.low, estimate.high))
    return f"{mean} ({low} to {high})"


def _seconds(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds:.3f}"


def _print_reasons(console: Console, what: str, reasons: Mapping[str, int]) -> None:
    shown = list(reasons.items())[:_REASONS_SHOWN]
    for reason, count in shown:
        console.print(f"{what}, {count} ×: {reason}", markup=False, highlight=False)
    if rest := len(reasons) - len(shown):
        console.print(f"{what}: {rest} more reasons in the summary", markup=False, highlight=False)


def _draw(axes: "Axes", style: Mapping[str, str], rows: Sequence[Row], labels: Sequence[str]) -> None:
    points = [(labels.index(row.chunks), row.accuracy) for row in rows if row.accuracy is not None]
    if not points:
        return
    x = [position for position, _ in points]
    axes.plot(x, [estimate.mean for _, estimate in points], label=rows[0].mode, **style)  # type: ignore[arg-type]
    lows, highs = [estimate.low for _, estimate in points], [estimate.high for _, estimate in points]
    axes.fill_between(x, lows, highs, color=style["color"], alpha=0.12, linewidth=0)
