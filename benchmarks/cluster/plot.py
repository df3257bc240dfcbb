# SPDX-License-Identifier: Apache-2.0
"""Hit rate and balance over the number of replicas, a line for each policy."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.cluster.router import POLICIES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ONE = "one replica with all pools' memory"
OVERLOADED = 0.97
"""Replicas busier than this can't keep up: requests wait longer and longer."""

# As in benchmarks/plots.py, after Okabe and Ito; markers do without colours.
_STYLES = {
    ONE: ("#333333", ""),
    "rank": ("#0072b2", "D"),
    "rank alone": ("#6f9fc8", "d"),
    "hashing": ("#c87800", "^"),
    "least load": ("#007a5a", "v"),
    "round robin": ("#b0588a", "s"),
}
_SIZE_IN, _DPI = (9.0, 4.6), 100


Run = Mapping[str, Any]
"""A row of the part *scaling*, as in its JSON."""


def draw(runs: Sequence[Run], path: Path) -> None:
    """Draws PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # takes a second to import
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained", figsize=_SIZE_IN)
    FigureCanvasAgg(figure)
    figure.suptitle("A simulated cluster", x=0.01, ha="left", fontsize=13, fontweight="bold")
    hits, balance = figure.subplots(1, 2)
    for axes, label in ((hits, "tokens of documents found, %"), (balance, "load of the most loaded replica / mean")):
        _prepare(axes, sorted({run["replicas"] for run in runs}), label)
    for policy in POLICIES:
        mine = [run for run in runs if run["policy"] == policy]
        _line(hits, policy, mine, [100 * run["hit_rate"] for run in mine])
        _line(balance, policy, mine, [run["balance"] for run in mine])
    one = {run["replicas"]: 100 * run["hit_rate_of_one"] for run in runs}
    hits.plot(list(one), list(one.values()), color=_STYLES[ONE][0], linestyle="--", label=ONE)
    hits.set_ylim(0, 100)
    balance.set_ylim(bottom=1)
    figure.legend(*hits.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    note = "hollow: overloaded"
    figure.supxlabel(note, x=0.99, ha="right", fontsize=8, color="0.4")
    figure.savefig(path, dpi=_DPI)


def _prepare(axes: "Axes", replicas: Sequence[int], label: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(replicas, [str(number) for number in replicas])
    axes.set_xticks([], minor=True)
    axes.set_xlabel("replicas")
    axes.set_ylabel(label)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="0.9")
    axes.set_axisbelow(True)


def _line(axes: "Axes", policy: str, runs: Sequence[Run], values: Sequence[float]) -> None:
    colour, marker = _STYLES[policy]
    x = [run["replicas"] for run in runs]
    axes.plot(x, values, color=colour, marker=marker, linewidth=1.8, label=policy)
    late = [number for number, run in enumerate(runs) if run["busy"] > OVERLOADED]
    hollow = {"color": colour, "marker": marker, "markerfacecolor": "white", "linestyle": ""}
    axes.plot([x[i] for i in late], [values[i] for i in late], **hollow)  # type: ignore[arg-type]
