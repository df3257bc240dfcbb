# SPDX-License-Identifier: Apache-2.0
"""Reports a run's results as tables for the terminal, JSON, and a page of HTML."""

import io
import itertools
import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from measuring.speed.folder import Run
from measuring.speed.report.summary import Results, Row, Section, load
from measuring.speed.report.words import cells, columns, legend, sentence
from measuring.speed.samples import Claim
from measuring.speed.verdicts import CONFIDENCE, Verdict

SUMMARY, PAGE = "summary.json", "report.html"
# Wide enough for the widest line where there is no terminal that has a width.
_WIDTH = 170
_HTML: Final = """\
<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>tessera bench</title>
<style>{stylesheet} body {{ color: {foreground}; background: {background} }}</style>
</head><body><pre>{code}</pre></body></html>
"""


def table(console: Console, folder: Path, claims: Sequence[Claim]) -> None:
    """Prints figures and claims of each workload, after a note on partial runs."""
    if not console.is_terminal:
        console.width = _WIDTH
    _print_results(console, load(folder, claims))


def write(folder: Path, claims: Sequence[Claim]) -> None:
    """Writes :data:`SUMMARY` and :data:`PAGE` into the folder."""
    results = load(folder, claims)
    summary = json.dumps(_summary(results), indent=1, ensure_ascii=False)
    (folder / SUMMARY).write_text(summary + "\n", encoding="utf-8")
    (folder / PAGE).write_text(_page(results), encoding="utf-8")


def _page(results: Results) -> str:
    """A page of HTML that needs nothing beside itself."""
    console = Console(record=True, width=_WIDTH, file=io.StringIO())
    _print_results(console, results)
    for section in results.sections:
        sizes = ", ".join(f"{name.replace('_', ' ')}: {size}" for name, size in section.sizes.items())
        _print(console, f"{section.name}: {sizes or 'no sizes'}")
    for name, value in _setup(results.run).items():
        _print(console, f"{name}: {value}")
    return console.export_html(code_format=_HTML)


def _setup(run: Run) -> dict[str, str]:
    """The machine, the model and the programs of a run."""
    return {
        "machine": f"{run.cpu}, {run.cores} cores",
        "model": run.model,
        "flags of both servers": shlex.join(run.flags) or "none",
        "tessera": run.tessera,
        "vLLM": run.vllm or "unknown",
        "seed": str(run.seed),
        "started": f"{run.started_at:%Y-%m-%d %H:%M %Z}",
        "command": shlex.join(run.command),
    }


def _print_results(console: Console, results: Results) -> None:
    if results.partial:
        _print(console, results.partial)
    for section in results.sections:
        if section.rows:
            console.print(_table(section))
        else:
            _print(console, f"{section.heading}: nothing was measured")
        for claim, verdict in section.verdicts:
            _print(console, sentence(claim, verdict, section.axis))
        console.print()
    _print(console, legend(results.systems))


def _print(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _table(section: Section) -> Table:
    result = Table(title=section.heading, title_justify="left")
    for i, column in enumerate(columns(section)):
        result.add_column(column, justify="left" if i < 2 else "right", no_wrap=i < 2)
    for _, rows in itertools.groupby(section.rows, lambda row: row.point):
        for row in rows:
            result.add_row(*cells(section, row))
        result.add_section()
    return result


def _summary(results: Results) -> dict[str, Any]:
    """The run's description, and of each workload its figures (seconds, 1/s) and claims."""
    workloads = {
        section.name: {
            "rows": [_figures(row) for row in section.rows],
            "claims": [_outcome(claim, verdict) for claim, verdict in section.verdicts],
        }
        for section in results.sections
    }
    return {"run": results.run.model_dump(mode="json"), "confidence": CONFIDENCE, "workloads": workloads}


def _figures(row: Row) -> dict[str, Any]:
    return {"point": row.point, "system": row.system, **{value: asdict(found) for value, found in row.figures.items()}}


def _outcome(claim: Claim, verdict: Verdict | None) -> dict[str, Any]:
    """The claim's own fields and kind, and its verdict; ``null`` where it was not measured."""
    found = {name: getattr(verdict, name, None) for name in ("value", "low", "high", "n", "holds", "outcome")}
    return {"kind": type(claim).__name__.lower(), "claim": asdict(claim), **found}
