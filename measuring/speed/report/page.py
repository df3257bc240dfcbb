# SPDX-License-Identifier: Apache-2.0
"""The report as one page of HTML that needs nothing beside itself."""

import base64
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from measuring.speed.folder import Run
from measuring.speed.report.summary import Results, Section
from measuring.speed.report.words import cells, columns, legend, sentence

_TEMPLATE = "page.html.jinja"


def page(results: Results, plots: Mapping[str, Path]) -> str:
    """The page, with the PNG of each workload in it; ``plots`` are by the workload's name."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(_TEMPLATE).render(
        partial=results.partial,
        tally=_tally(results),
        legend=legend(results.systems),
        sections=[_section(section, plots.get(section.name)) for section in results.sections],
        setup=_setup(results.run),
        command=shlex.join(results.run.command),
    )


def _tally(results: Results) -> str:
    verdicts = [verdict for section in results.sections for _, verdict in section.verdicts]
    outcomes = [verdict.outcome for verdict in verdicts if verdict and verdict.outcome]
    missing = f"; {verdicts.count(None)} not measured" if None in verdicts else ""
    undecided = f"; {outcomes.count('undecided')} undecided" if "undecided" in outcomes else ""
    return f"{outcomes.count('holds')} of {len(outcomes)} claims with bounds hold{undecided}{missing}."


def _section(section: Section, plot: Path | None) -> dict[str, Any]:
    return {
        "name": section.name,
        "heading": section.heading,
        "plot": base64.b64encode(plot.read_bytes()).decode() if plot else "",
        "claims": [
            (sentence(claim, verdict, section.axis), verdict and verdict.outcome) for claim, verdict in section.verdicts
        ],
        "columns": columns(section),
        "lines": [cells(section, row) for row in section.rows],
        "sizes": ", ".join(f"{name.replace('_', ' ')}: {size}" for name, size in section.sizes.items()),
    }


def _setup(run: Run) -> dict[str, str]:
    """What the figures were taken with."""
    return {
        "machine": f"{run.cpu}, {run.cores} cores",
        "model": run.model,
        "flags of both servers": shlex.join(run.flags) or "none",
        "tessera": run.tessera,
        "vLLM": run.vllm or "unknown",
        "seed": str(run.seed),
        "started": f"{run.started_at:%Y-%m-%d %H:%M %Z}",
    }
