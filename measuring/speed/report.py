# SPDX-License-Identifier: Apache-2.0
"""Reports a run's results as tables for people and JSON for programs."""

import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
from rich.console import Console
from rich.table import Table

from measuring.kit.statistics import interval
from measuring.kit.tables import new_table, widened
from measuring.speed.folder import Run, WorkloadRun, read_run
from measuring.speed.samples import Claim, Growth, Ratio, Sample, System, Value
from measuring.speed.verdicts import CONFIDENCE, Verdict, evaluate

SUMMARY = "summary.json"
SYSTEMS: Final[dict[System, str]] = {
    "stock": "stock vLLM",
    "prefix hit": "stock vLLM, a new question behind the same documents",
    "empty": "Tessera, chunks missing",
    "warm": "Tessera, chunks cached",
    "in place": "Tessera, chunks cached, in place",
    "attend": "Tessera, chunks cached, attended to in the pool",
    "quarter": "Tessera, pool for a quarter",
    "tessera": "Tessera",
}
"""In the order in which every table has them. Tables and claims have the short names."""
VALUES: Final[dict[Value, str]] = {
    "ttft_s": "time to first token",
    "tpot_s": "time per output token",
    "latency_s": "time to last token",
    "requests_per_s": "requests per second",
}


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Quantiles of ``n`` samples, in the value's own unit (seconds, or 1/s); ``low`` and ``high`` bound the median."""

    median: float
    low: float
    high: float
    p95: float
    n: int


@dataclass(frozen=True, slots=True)
class Row:
    """Figures of one system at one point of a workload, without unmeasured values."""

    point: str
    system: System
    figures: dict[Value, Quantiles]


@dataclass(frozen=True, slots=True)
class Section:
    """One workload. ``verdicts`` has each claim with its verdict; ``None``: it was not measured."""

    name: str
    about: WorkloadRun
    rows: list[Row]
    verdicts: list[tuple[Claim, Verdict | None]]

    @property
    def heading(self) -> str:
        return f"{self.name}: {self.about.title}"


def report(console: Console, folder: Path, claims: Sequence[Claim]) -> None:
    """Writes :data:`SUMMARY` into the folder of a run, and prints its figures and claims."""
    run, samples = read_run(folder)
    sections = _sections(run, samples, claims)
    summary = json.dumps(_summary(run, sections), indent=1, ensure_ascii=False)
    (folder / SUMMARY).write_text(summary + "\n", encoding="utf-8")
    _print_results(widened(console), run, sections)


def _sections(run: Run, samples: Sequence[Sample], claims: Sequence[Claim]) -> list[Section]:
    verdicts = [(claim, evaluate(claim, samples)) for claim in claims]
    return [
        Section(
            name,
            about,
            _rows([sample for sample in samples if sample.workload == name]),
            [(claim, verdict) for claim, verdict in verdicts if claim.workload == name],
        )
        for name, about in run.workloads.items()
    ]


def _rows(samples: Sequence[Sample]) -> list[Row]:
    """One workload's rows by point (numbers ascending, others as run), then by system."""
    groups: dict[tuple[str, System], list[Sample]] = {}
    for sample in samples:
        groups.setdefault((sample.point, sample.system), []).append(sample)
    points = list(dict.fromkeys(point for point, _ in groups))

    def order(key: tuple[str, System]) -> tuple[int, int, int]:
        point, system = key
        return int(point) if point.isdecimal() else 0, points.index(point), list(SYSTEMS).index(system)

    return [Row(*key, _figures(groups[key])) for key in sorted(groups, key=order)]


def _figures(samples: Sequence[Sample]) -> dict[Value, Quantiles]:
    taken = {value: [sample.values[value] for sample in samples if value in sample.values] for value in VALUES}
    return {value: _quantiles(found) for value, found in taken.items() if found}


def _quantiles(found: Sequence[float]) -> Quantiles:
    low, high = interval(found, CONFIDENCE, np.median)
    return Quantiles(median(found), low, high, float(np.percentile(found, 95)), len(found))


def _summary(run: Run, sections: Sequence[Section]) -> dict[str, Any]:
    """The run's description, and of each workload its figures (seconds, 1/s) and claims."""
    workloads = {
        section.name: {
            "rows": [{"point": row.point, "system": row.system, **asdict(row)["figures"]} for row in section.rows],
            "claims": [_outcome(claim, verdict) for claim, verdict in section.verdicts],
        }
        for section in sections
    }
    return {"run": run.model_dump(mode="json"), "confidence": CONFIDENCE, "workloads": workloads}


def _outcome(claim: Claim, verdict: Verdict | None) -> dict[str, Any]:
    """The claim's own fields and kind, and its verdict; ``null`` where it was not measured."""
    found = {name: getattr(verdict, name, None) for name in ("value", "low", "high", "n", "outcome")}
    return {"kind": type(claim).__name__.lower(), "claim": asdict(claim), **found}


def _print_results(console: Console, run: Run, sections: Sequence[Section]) -> None:
    """Prints figures and claims of each workload, after a note on partial runs."""
    if not run.complete:
        reason = run.stopped_by or "it did not end"
        _print(console, f"Partial run ({reason}): the figures are of what was measured.")
    for section in sections:
        if section.rows:
            console.print(_table(section))
        else:
            _print(console, f"{section.heading}: nothing was measured")
        for claim, verdict in section.verdicts:
            _print(console, _sentence(claim, verdict, section.about.axis))
        console.print()
    measured = {row.system for section in sections for row in section.rows}
    _print(console, "; ".join(f"{system}: {words}" for system, words in SYSTEMS.items() if system in measured))


def _print(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _table(section: Section) -> Table:
    values = [value for value in VALUES if any(value in row.figures for row in section.rows)]
    figures = [head for value in values for head in (_heading(value), f"{CONFIDENCE:.0%} interval", "p95")]
    result = new_table(section.heading, (section.about.axis, "system"), (*figures, "n"))
    for _, rows in itertools.groupby(section.rows, lambda row: row.point):
        for row in rows:
            texts = [text for value in values for text in _texts(value, row.figures.get(value))]
            result.add_row(row.point, row.system, *texts, _counts(row))
        result.add_section()
    return result


def _heading(value: Value) -> str:
    """Name of the value, with the unit of :func:`_texts`."""
    return VALUES[value] if value == "requests_per_s" else f"{VALUES[value]}, ms"


def _texts(value: Value, found: Quantiles | None) -> tuple[str, str, str]:
    """Median, interval and 95th percentile: times in milliseconds, throughput as it is."""
    if found is None:
        return "–", "–", "–"
    factor = 1 if value == "requests_per_s" else 1e3
    middle, low, high, p95 = (_digits(factor * each) for each in (found.median, found.low, found.high, found.p95))
    return middle, f"{low} to {high}", p95


def _counts(row: Row) -> str:
    """Number of samples, or its range."""
    counts = sorted({quantiles.n for quantiles in row.figures.values()})
    return " to ".join(map(str, dict.fromkeys((counts[0], counts[-1]))))


def _digits(number: float) -> str:
    """Three digits that count, and whole numbers from 100 on."""
    size = abs(number)
    return f"{number:#.3g}" if size < 1 else f"{number:.{2 if size < 10 else 1 if size < 100 else 0}f}"


def _sentence(claim: Claim, verdict: Verdict | None, axis: str) -> str:
    """The claim with its value, confidence interval and outcome."""
    measured = "not measured"
    if verdict:
        measured = f"{_ratio(verdict.value)} ({_ratio(verdict.low)} to {_ratio(verdict.high)})"
    parts = [measured]
    if claim.at_least is not None:
        parts.append(f"at least {claim.at_least:g}")
    if claim.at_most is not None:
        parts.append(f"at most {claim.at_most:g}")
    return f"{_subject(claim, axis)}: {', '.join(parts)}{_judgement(verdict)}"


def _subject(claim: Claim, axis: str) -> str:
    match claim:
        case Ratio():
            return f"{claim.over} / {claim.under}, {VALUES[claim.value]} at {_place(claim.point, axis)}"
        case Growth():
            return f"{claim.system}, {VALUES[claim.value]}, {_place(claim.last, axis)} over {claim.first}"


def _place(point: str, axis: str) -> str:
    """``4096 tokens of context``; a point that isn't a number speaks for itself."""
    return f"{point} {axis}" if point.isdecimal() else point


def _ratio(number: float) -> str:
    # Bounds may be as near to 1 as 1.03.
    return f"{number:.3f}" if number < 2 else _digits(number)


def _judgement(verdict: Verdict | None) -> str:
    if verdict is None or verdict.outcome is None:
        return ""
    after = f" after {verdict.n} rounds" if verdict.outcome == "undecided" else ""
    return f": {verdict.outcome}{after}"
