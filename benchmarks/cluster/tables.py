# SPDX-License-Identifier: Apache-2.0
"""Outcomes as tables for the terminal."""

from collections.abc import Callable, Iterable, Sequence

from rich.table import Table

from benchmarks.cluster.outcome import Outcome, Part
from benchmarks.cluster.parts import Row
from benchmarks.cluster.speed import DOCUMENTS, Speed

_COLUMNS: dict[str, Callable[[Outcome], str]] = {
    "hit, %": lambda it: f"{100 * it.hit_rate:.1f}",
    "of one, %": lambda it: f"{100 * it.hit_rate_of_one:.1f}",
    "balance": lambda it: f"{it.balance:.2f}",
    "now": lambda it: f"{it.balance_now:.2f}",
    "busy": lambda it: f"{it.busy:.2f}",
    "first token, s": lambda it: f"{it.ttft_mean_s:.2f}",
    "p95": lambda it: f"{it.ttft_p95_s:.2f}",
    "commands": lambda it: f"{it.commands:.1f}",
    "trips": lambda it: f"{it.round_trips:.2f}",
    "claims": lambda it: str(it.claims),
}
_TIMES: dict[str, Callable[[Part], str]] = {
    "hit, %": lambda part: f"{100 * part.hit_rate:.1f}",
    "first token, s": lambda part: f"{part.ttft_mean_s:.2f}",
    "p95": lambda part: f"{part.ttft_p95_s:.2f}",
}


def table_of(part: str, rows: Sequence[Row]) -> Table:
    """A row for each run; what is the same in all of them is left out."""
    about = {name: [str(value(row)) for row in rows] for name, value in _ABOUT.items()}
    shown = {name: values for name, values in about.items() if name == "policy" or len(set(values)) > 1}
    table = Table(title=part, title_justify="left")
    for name in (*shown, *_COLUMNS):
        table.add_column(name, justify="left" if name == "policy" else "right", no_wrap=name == "policy")
    for number, row in enumerate(rows):
        numbers = (column(row.outcome) for column in _COLUMNS.values())
        table.add_row(*(values[number] for values in shown.values()), *numbers)
    return table


def failure_table(rows: Iterable[Row]) -> Table:
    """Before, while and after some replicas were away."""
    table = Table("replicas", "policy", "", title="failures, by part of the time", title_justify="left")
    for name in (*_TIMES, "sent again", "interrupted"):
        table.add_column(name, justify="right")
    for row in rows:
        it = row.outcome
        for name, part in zip(("before", "while", "after"), it.parts, strict=False):
            numbers = [column(part) for column in _TIMES.values()]
            again = [str(it.sent_again), str(it.interrupted)] if name == "before" else []
            table.add_row(str(it.replicas), it.policy, name, *numbers, *again)
    return table


def speed_table(speeds: Iterable[Speed]) -> Table:
    """Milliseconds by candidates and holders."""
    table = Table(title=f"rank, {DOCUMENTS} documents", title_justify="left")
    for name in ("candidates", "holders of each document", "ms"):
        table.add_column(name, justify="right")
    for speed in speeds:
        table.add_row(str(speed.candidates), str(speed.held_by), f"{speed.rank_ms:.3f}")
    return table


_ABOUT: dict[str, Callable[[Row], object]] = {
    "replicas": lambda row: row.outcome.replicas,
    "documents": lambda row: row.outcome.documents,
    "routers": lambda row: row.routers,
    "LOAD_TOKENS": lambda row: row.load_tokens,
    "HOME_DISCOUNT": lambda row: row.home_discount,
    "hot": lambda row: row.outcome.hot_share,
    "policy": lambda row: row.outcome.policy,
}
