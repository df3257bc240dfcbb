# SPDX-License-Identifier: Apache-2.0
"""`tessera calibrate`: which way of reusing chunks a model bears, from how it answers questions in each."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from app.profile import Estimate, Kind, Measured, Profile, ProfileError, described
from app.progress import progress, say
from evaluation.command import evaluate, model_of, report
from evaluation.results import ResultsFolder
from evaluation.summary import Bin, Row, rows_by_chunks

PROFILE: Final = "profile.json"
LEAST_ANSWERS: Final = 30
"""With fewer answers of a kind nothing is reused for it."""
_AS_FAST: Final = 1.1
_ROUNDING: Final = 1e-9


def main(argv: Sequence[str]) -> int:
    """Runs `tessera calibrate`; returns its exit code, as `tessera eval` does."""
    return evaluate(argv, "calibrate", _report)


def _report(args: argparse.Namespace, folder: ResultsFolder) -> int:
    if status := report(args, folder):
        return status
    try:
        with progress("reading the model's files"):
            model = described(model_of(args))
    except ProfileError as error:
        say(f"no profile: {error}")
        return 2
    settings = folder.settings
    made = Profile(
        model=settings.model or settings.served_model,
        weights=model.weights,
        trained_for=model.trained_for,
        questions=settings.questions,
        questions_sha256=settings.questions_sha256,
        tolerance=args.tolerance / 100,
        tessera=settings.tessera,
        vllm=settings.vllm,
        kinds=kinds(rows_by_chunks(folder.results.values(), args.refusal), args.tolerance / 100),
    )
    path: Path = args.profile or folder.path / PROFILE
    path.write_text(made.model_dump_json(indent=1) + "\n", encoding="utf-8")
    _tell(made)
    say(f"tessera serve {made.model} --profile {path}")
    return 0


def kinds(by_chunks: Sequence[tuple[Bin, Sequence[Row]]], tolerance: float) -> tuple[Kind, ...]:
    """For each number of chunks the mode to use.

    It is the quickest whose accuracy is at most ``tolerance`` below full attention's; of those about as quick, the most
    accurate.
    """
    return tuple(_kind(at, rows, tolerance) for at, rows in by_chunks)


def _kind(at: Bin, rows: Sequence[Row], tolerance: float) -> Kind:
    measured = {row.mode: _measured(row) for row in rows}
    full = measured["full"]
    within = [each for each in measured.values() if _is_within(each, full, tolerance)]
    chosen = _quickest(within) if within else full
    is_certain = chosen.difference is None or chosen.difference.low >= -tolerance
    return Kind(
        min_chunks=at.low,
        max_chunks=at.high,
        mode=chosen.mode,
        is_certain=is_certain and chosen.answers >= LEAST_ANSWERS,
        measured=tuple(measured.values()),
    )


def _is_within(each: Measured, full: Measured, tolerance: float) -> bool:
    """Whether it is known well enough, and not worse than it may be. What often fell back says nothing."""
    if each.first_token_ms is None or each.answers < max(LEAST_ANSWERS, 0.9 * full.answers):
        return False
    return each.mode == "full" or (each.difference is not None and each.difference.mean >= -tolerance - _ROUNDING)


def _quickest(within: Sequence[Measured]) -> Measured:
    times = {each.mode: each.first_token_ms or 0.0 for each in within}
    least = min(times.values())
    as_quick = [each for each in within if times[each.mode] <= _AS_FAST * least]
    return max(as_quick, key=lambda each: each.accuracy.mean if each.accuracy else 0.0)


def _measured(row: Row) -> Measured:
    seconds = row.ttft_computed_s if row.mode == "full" else row.ttft_cached_s
    return Measured(
        mode=row.mode,
        answers=row.answers,
        accuracy=_estimate(row.accuracy),
        difference=_estimate(row.difference),
        first_token_ms=None if seconds is None else 1e3 * seconds,
    )


def _estimate(found: Any) -> Estimate | None:
    return None if found is None else Estimate(mean=found.mean, low=found.low, high=found.high)


def _tell(profile: Profile) -> None:
    if profile.trained_for:
        say(f"the model says that it was trained for {', '.join(profile.trained_for)}")
    for kind in profile.kinds:
        doubt = "" if kind.is_certain else " (too few questions to be certain)"
        say(f"up to {kind.max_chunks} chunks: {kind.mode}{doubt}")
