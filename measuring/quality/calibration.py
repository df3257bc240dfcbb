# SPDX-License-Identifier: Apache-2.0
"""`tessera calibrate`: measures a model's accuracy in each mode and writes its profile."""

import argparse
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from app.profile import DescribedModel, Kind, Measured, Profile, ProfileError, described
from engine_ext.start.weights import PROFILE_NAME
from machine.progress import progress, say
from measuring.kit.arguments import UsageError
from measuring.kit.client import SetupError
from measuring.quality.client import ServerInfo
from measuring.quality.command import Report, evaluate, model_of, report
from measuring.quality.results import Result, ResultsFolder
from measuring.quality.summary import Bin, Row, rows_by_chunks

LEAST_ANSWERS: Final = 30
"""With fewer answers of a kind nothing is reused for it."""
_AS_FAST: Final = 1.1
_ROUNDING: Final = 1e-9


def main(argv: Sequence[str]) -> int:
    """Runs `tessera calibrate`; returns its exit code, as `tessera eval` does."""
    return evaluate(argv, "calibrate", _begin)


def _begin(args: argparse.Namespace, info: ServerInfo) -> Report:
    """Finds out before the questions whether there can be a profile."""
    if info.cache_off:
        raise SetupError("nothing can be measured of chunks that are not reused")
    path: Path = args.profile or args.output / PROFILE_NAME
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not path.exists()
        path.open("a").close()
        if is_new:
            path.unlink()
    except OSError as error:
        raise UsageError(f"{error.filename}: {error.strerror}") from error
    flags, _ = _server_flags().parse_known_args(args.server_arguments)
    try:
        with progress("reading the model's files"):
            model = described(model_of(args), flags.revision, flags.download_dir, flags.chunk_adapter)
    except ProfileError as error:
        raise SetupError(f"no profile: {error}") from error
    return partial(_report, path=path, model=model)


def _server_flags() -> argparse.ArgumentParser:
    """Flags of the server that select the files of model and adapter."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--revision")
    parser.add_argument("--download-dir")
    parser.add_argument("--chunk-adapter", type=Path)
    return parser


def _report(args: argparse.Namespace, folder: ResultsFolder, path: Path, model: DescribedModel) -> int:
    if status := report(args, folder):
        return status
    settings = folder.settings
    results = _with_computed_chunks(folder.results.values())
    made = Profile(
        model=settings.model or settings.served_model,
        weights=model.weights,
        adapter=model.adapter,
        trained_for=model.trained_for,
        questions=settings.questions,
        questions_sha256=settings.questions_sha256,
        tolerance=args.tolerance / 100,
        tessera=settings.tessera,
        vllm=settings.vllm,
        kinds=kinds(rows_by_chunks(results, args.refusal), args.tolerance / 100),
    )
    path.write_text(made.model_dump_json(indent=1) + "\n", encoding="utf-8")
    _tell(made)
    say(" ".join(["tessera serve", made.model, "--profile", str(path), *args.server_arguments]))
    return 0


def _with_computed_chunks(results: Iterable[Result]) -> list[Result]:
    """Results with the server's numbers of chunks: it splits long documents into several."""
    listed = list(results)
    numbers = {result.question: result.chunks for result in listed}
    for result in listed:
        if result.cache is not None:
            numbers[result.question] = max(numbers[result.question], len(result.cache["chunks"]))
    return [result.model_copy(update={"chunks": numbers[result.question]}) for result in listed]


def kinds(by_chunks: Sequence[tuple[Bin, Sequence[Row]]], tolerance: float) -> tuple[Kind, ...]:
    """For each number of chunks the mode to use.

    It is the quickest whose accuracy is at most ``tolerance`` below full attention's; of those about as quick, the most
    accurate.
    """
    return tuple(_kind(at, rows, tolerance) for at, rows in by_chunks)


def _kind(at: Bin, rows: Sequence[Row], tolerance: float) -> Kind:
    measured = {row.mode: _measured(row) for row in rows}
    full = measured["full"]
    good = [each for each in measured.values() if _is_within(each, full, tolerance)]
    timed = [each for each in good if each.first_token_ms is not None]
    chosen = _quickest(timed) if timed else full
    return Kind(
        min_chunks=at.low,
        max_chunks=at.high,
        mode=chosen.mode,
        is_certain=len(timed) == len(good) and _is_certain(chosen, tolerance),
        holds=tuple(each.mode for each in good if each is not full),
        measured=tuple(measured.values()),
    )


def _is_within(each: Measured, full: Measured, tolerance: float) -> bool:
    """Whether there are enough answers, few fallbacks, and accuracy is within the tolerance."""
    if each.answers < max(LEAST_ANSWERS, 0.9 * full.answers):
        return False
    return each.mode == "full" or (each.difference is not None and each.difference.mean >= -tolerance - _ROUNDING)


def _is_certain(chosen: Measured, tolerance: float) -> bool:
    """Whether a loss beyond the tolerance can be excluded.

    A bootstrap interval of answers that are all alike has no width, however few they are: then it is the rule of three
    (Hanley and Lippman-Hand 1983, JAMA 249(13)).
    """
    if chosen.answers < LEAST_ANSWERS:
        return False
    if chosen.difference is None:
        return True
    low = min(chosen.difference.low, chosen.difference.mean - 3 / chosen.answers)
    return low >= -tolerance - _ROUNDING


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
        accuracy=row.accuracy,
        difference=row.difference,
        logprob_difference=row.logprob_difference,
        first_token_ms=None if seconds is None else 1e3 * seconds,
    )


def _tell(profile: Profile) -> None:
    if profile.trained_for:
        say(f"the model, or its adapter, says that it was trained for {', '.join(profile.trained_for)}")
    for kind in profile.kinds:
        doubt = "" if kind.is_certain else " (not certain: too few questions, or chunks that were never all cached)"
        say(f"up to {kind.max_chunks} chunks: {kind.mode}{doubt}")
