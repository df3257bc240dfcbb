# SPDX-License-Identifier: Apache-2.0
"""Numbers, units and claims as people read them."""

from collections.abc import Sequence

from measuring.speed.report.summary import Quantiles, Row, Section, values_of
from measuring.speed.samples import Claim, Growth, Ratio, System, Value
from measuring.speed.verdicts import CONFIDENCE, Verdict

SYSTEMS: dict[System, str] = {
    "stock": "stock vLLM",
    "prefix hit": "stock vLLM, a new question behind the same documents",
    "empty": "Tessera, chunks missing",
    "warm": "Tessera, chunks cached",
    "in place": "Tessera, chunks cached, in place",
    "attend": "Tessera, chunks cached, attended to in the pool",
    "quarter": "Tessera, pool for a quarter",
    "tessera": "Tessera",
}
"""In the order in which every table and plot has them. Tables and claims have the short names."""

VALUES: dict[Value, str] = {
    "ttft_s": "time to first token",
    "tpot_s": "time per output token",
    "latency_s": "time to last token",
    "requests_per_s": "requests per second",
}


def scaled(value: Value, number: float) -> float:
    """Times in milliseconds, throughput as it is."""
    return number if value == "requests_per_s" else 1e3 * number


def heading(value: Value) -> str:
    """Name of the value, with the unit of :func:`scaled` numbers."""
    return VALUES[value] if value == "requests_per_s" else f"{VALUES[value]}, ms"


def legend(systems: Sequence[System]) -> str:
    """Meaning of the short names."""
    return "; ".join(f"{system}: {SYSTEMS[system]}" for system in systems)


def digits(number: float) -> str:
    """Three digits that count, and whole numbers from 100 on."""
    size = abs(number)
    return f"{number:#.3g}" if size < 1 else f"{number:.{2 if size < 10 else 1 if size < 100 else 0}f}"


def place(point: str, axis: str) -> str:
    """``4096 tokens of context``; a point that isn't a number speaks for itself."""
    return f"{point} {axis}" if point.isdecimal() else point


def columns(section: Section) -> list[str]:
    """The heads of the workload's table."""
    values = values_of(section.rows)
    interval = f"{CONFIDENCE:.0%} interval"
    return [section.axis, "system", *(head for value in values for head in (heading(value), interval, "p95")), "n"]


def cells(section: Section, row: Row) -> list[str]:
    """The row's texts, one for each of :func:`columns`."""
    numbers = [text for value in values_of(section.rows) for text in _texts(value, row.figures.get(value))]
    return [row.point, row.system, *numbers, row.n]


def _texts(value: Value, found: Quantiles | None) -> tuple[str, str, str]:
    if found is None:
        return "–", "–", "–"
    median, low, high, p95 = (
        digits(scaled(value, number)) for number in (found.median, found.low, found.high, found.p95)
    )
    return median, f"{low} to {high}", p95


def sentence(claim: Claim, verdict: Verdict | None, axis: str) -> str:
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
            return f"{claim.over} / {claim.under}, {VALUES[claim.value]} at {place(claim.point, axis)}"
        case Growth():
            return f"{claim.system}, {VALUES[claim.value]}, {place(claim.last, axis)} over {claim.first}"


def _ratio(number: float) -> str:
    # Bounds may be as near to 1 as 1.03.
    return f"{number:.3f}" if number < 2 else digits(number)


def _judgement(verdict: Verdict | None) -> str:
    if verdict is None or verdict.outcome is None:
        return ""
    after = f" after {verdict.n} rounds" if verdict.outcome == "undecided" else ""
    return f": {verdict.outcome}{after}"
