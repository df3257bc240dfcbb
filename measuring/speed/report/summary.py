# SPDX-License-Identifier: Apache-2.0
"""Figures of a run: medians, 95th percentiles and verdicts."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np

from measuring.kit.statistics import interval, median, p95, resampled
from measuring.speed.folder import Run, read_run
from measuring.speed.samples import Claim, Sample, System, Value
from measuring.speed.verdicts import CONFIDENCE, Verdict, evaluate

_SYSTEMS: tuple[System, ...] = get_args(System)
_VALUES: tuple[Value, ...] = get_args(Value)


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

    @property
    def n(self) -> str:
        """Number of samples, or its range."""
        counts = [quantiles.n for quantiles in self.figures.values()]
        low, high = min(counts, default=0), max(counts, default=0)
        return str(low) if low == high else f"{low} to {high}"


@dataclass(frozen=True, slots=True)
class Section:
    """One workload. ``verdicts`` has each claim with its verdict; ``None``: it was not measured."""

    name: str
    title: str
    axis: str
    sizes: dict[str, Any]
    rows: list[Row]
    verdicts: list[tuple[Claim, Verdict | None]]

    @property
    def heading(self) -> str:
        """For its table, plot and part of the page."""
        return f"{self.name}: {self.title}"


@dataclass(frozen=True, slots=True)
class Results:
    """All that a run found, by workload."""

    run: Run
    sections: list[Section]

    @property
    def partial(self) -> str:
        """Note that the run is partial, with the reason; empty if it is complete."""
        if self.run.complete:
            return ""
        return f"Partial run ({self.run.stopped_by or 'it did not end'}): the figures are of what was measured."

    @property
    def systems(self) -> list[System]:
        """Measured systems, in the order of :data:`System`."""
        return [system for system in _SYSTEMS if any(row.system == system for s in self.sections for row in s.rows)]


def load(folder: Path, claims: Sequence[Claim]) -> Results:
    """Reads the folder of a run; raises ``OSError`` or ``ValueError`` if it isn't one."""
    run, samples = read_run(folder)
    verdicts = [(claim, evaluate(claim, samples)) for claim in claims]
    sections = []
    for name, about in run.workloads.items():
        rows = rows_of([sample for sample in samples if sample.workload == name])
        mine = [(claim, verdict) for claim, verdict in verdicts if claim.workload == name]
        sections.append(Section(name, about.title, about.axis, about.sizes, rows, mine))
    return Results(run, sections)


def rows_of(samples: Sequence[Sample]) -> list[Row]:
    """One workload's rows by point (numbers ascending, others as run), then by system."""
    groups: dict[tuple[str, System], list[Sample]] = {}
    for sample in samples:
        groups.setdefault((sample.point, sample.system), []).append(sample)
    points = list(dict.fromkeys(point for point, _ in groups))

    def order(key: tuple[str, System]) -> tuple[int, int, int]:
        point, system = key
        return int(point) if point.isdecimal() else 0, points.index(point), _SYSTEMS.index(system)

    return [Row(*key, _figures(groups[key])) for key in sorted(groups, key=order)]


def values_of(rows: Sequence[Row]) -> list[Value]:
    """The values that any of the rows has, in the order of :data:`Value`."""
    return [value for value in _VALUES if any(value in row.figures for row in rows)]


def _figures(samples: Sequence[Sample]) -> dict[Value, Quantiles]:
    taken = {value: [sample.values[value] for sample in samples if value in sample.values] for value in _VALUES}
    return {value: _quantiles(found) for value, found in taken.items() if found}


def _quantiles(found: Sequence[float]) -> Quantiles:
    low, high = interval(resampled(found, np.median), CONFIDENCE)
    return Quantiles(median(found), low, high, p95(found), len(found))
