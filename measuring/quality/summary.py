# SPDX-License-Identifier: Apache-2.0
"""Figures of a run per mode, over all questions and by number of chunks."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from pydantic import BaseModel, ConfigDict

from app.modes import in_order
from app.profile import Estimate
from measuring.kit.statistics import interval
from measuring.quality.divergence import kl_divergence
from measuring.quality.metrics import Scores, score
from measuring.quality.results import Result

CONFIDENCE = 0.95
"""Of each estimate's bootstrap interval."""

# With more different numbers of chunks than this, they are put together by powers of two.
_MAX_BINS = 6


class Row(BaseModel):
    """One mode, on questions with one number of chunks, or of one kind.

    Shares are from 0 to 1; ``None``: nothing to take it from.
    Only answers that ran in the mode asked for count. ``fell_back`` counts the others by the server's reason, and
    ``refused`` the requests that it didn't answer, by its message.
    """

    model_config = ConfigDict(frozen=True)

    mode: str
    chunks: str
    """``all``, a number, or a range such as ``5–8``."""
    kind: str
    """Of the questions; ``all``: of every kind."""
    answers: int
    accuracy: Estimate | None
    difference: Estimate | None
    """Accuracy minus that of mode ``full`` on the same questions; ``None`` for ``full`` itself."""
    logprob: Estimate | None
    """Log probability of the right answer, in nats."""
    logprob_difference: Estimate | None
    """… minus that of mode ``full`` on the same questions."""
    divergence: Estimate | None
    """Kullback-Leibler divergence D(full ‖ mode) of the predictions of that answer's tokens, in nats a token."""
    exact_match: float | None
    f1: float | None
    right_refusals: float | None
    """Share of refusals where no chunk has the answer …"""
    false_refusals: float | None
    """… and where one has."""
    ttft_cached_s: float | None
    """Median time to first token of answers whose chunks were all cached …"""
    ttft_computed_s: float | None
    """… and of the others; all of mode ``full`` are."""
    reused_share: float | None
    """Prompt tokens that weren't computed for the request."""
    fell_back: dict[str, int]
    refused: dict[str, int]


_Scored = tuple[Result, Scores]


@dataclass(frozen=True, slots=True)
class Bin:
    """Numbers of chunks from ``low`` to ``high``."""

    low: int
    high: int

    @property
    def label(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}–{self.high}"


def summarize(results: Iterable[Result], refusal: str) -> list[Row]:
    """Rows for all questions first, then by number of chunks, then by kind; within these, by mode."""
    scored = _scored(results, refusal)
    rows = _rows(scored)
    for _, of_bin in _by_chunks(scored):
        rows += of_bin
    for kind in dict.fromkeys(result.kind for result, _ in scored if result.kind):
        rows += _rows([(result, scores) for result, scores in scored if result.kind == kind], kind=kind)
    return rows


def rows_by_chunks(results: Iterable[Result], refusal: str) -> list[tuple[Bin, list[Row]]]:
    """The rows of each number of chunks, few first; within these, by mode."""
    return _by_chunks(_scored(results, refusal))


def _scored(results: Iterable[Result], refusal: str) -> list[_Scored]:
    return [(result, score(result.text, result.answers, refusal)) for result in results]


def _by_chunks(scored: Sequence[_Scored]) -> list[tuple[Bin, list[Row]]]:
    return [
        (at, _rows([(result, scores) for result, scores in scored if at.low <= result.chunks <= at.high], at.label))
        for at in _bins({result.chunks for result, _ in scored})
    ]


def _bins(counts: set[int]) -> list[Bin]:
    """A bin per number, or, of many numbers, per power of two."""
    if len(counts) <= _MAX_BINS:
        return [Bin(count, count) for count in sorted(counts)]
    exponents = sorted({(count - 1).bit_length() for count in counts})
    return [Bin((1 << exponent) // 2 + 1, 1 << exponent) for exponent in exponents]


def _rows(scored: Sequence[_Scored], chunks: str = "all", kind: str = "all") -> list[Row]:
    modes = in_order(result.mode for result, _ in scored)
    full = {result.question: (result, scores) for result, scores in scored if result.mode == result.ran_as == "full"}
    return [
        _row(mode, chunks, kind, [(result, scores) for result, scores in scored if result.mode == mode], full)
        for mode in modes
    ]


def _row(mode: str, chunks: str, kind: str, asked: Sequence[_Scored], full: Mapping[str, _Scored]) -> Row:
    results = [result for result, _ in asked]
    ran = [(result, scores) for result, scores in asked if result.ran_as == mode]
    against = full if mode != "full" else {}
    pairs = [((result, scores), against[result.question]) for result, scores in ran if result.question in against]
    return Row(
        mode=mode,
        chunks=chunks,
        kind=kind,
        answers=len(ran),
        accuracy=_estimate([scores.accuracy for _, scores in ran]),
        difference=_difference((one.accuracy, other.accuracy) for (_, one), (_, other) in pairs),
        logprob=_estimate([result.logprob for result, _ in ran if result.logprob is not None]),
        logprob_difference=_difference((one.logprob, other.logprob) for (one, _), (other, _) in pairs),
        divergence=_estimate(
            [_divergence(of_full, one) for (one, _), (of_full, _) in pairs if one.top_logprobs and of_full.top_logprobs]
        ),
        exact_match=_mean(scores.exact_match for _, scores in ran),
        f1=_mean(scores.f1 for _, scores in ran),
        right_refusals=_mean(scores.is_refusal for result, scores in ran if not result.answers),
        false_refusals=_mean(scores.is_refusal for result, scores in ran if result.answers),
        ttft_cached_s=_median_ttft(result for result, _ in ran if _all_cached(result)),
        ttft_computed_s=_median_ttft(result for result, _ in ran if not _all_cached(result)),
        reused_share=_reused_share([result for result, _ in ran]),
        fell_back=_counts(result.cache["reason"] for result in results if result.cache and result.ran_as != mode),
        refused=_counts(result.error for result in results if result.error is not None),
    )


def _estimate(values: Sequence[float]) -> Estimate | None:
    if not values:
        return None
    low, high = interval(values, CONFIDENCE)
    return Estimate(mean=fmean(values), low=low, high=high)


def _difference(pairs: Iterable[tuple[float | None, float | None]]) -> Estimate | None:
    """Mean difference over pairs whose values are both known."""
    return _estimate([one - other for one, other in pairs if one is not None and other is not None])


def _divergence(full: Result, other: Result) -> float:
    """Mean over the tokens of the same answer."""
    return fmean(map(kl_divergence, full.top_logprobs, other.top_logprobs))


def _mean(values: Iterable[float]) -> float | None:
    listed = list(values)
    return fmean(listed) if listed else None


def _median_ttft(results: Iterable[Result]) -> float | None:
    times = [result.ttft_s for result in results if result.ttft_s is not None]
    return median(times) if times else None


def _all_cached(result: Result) -> bool:
    return result.cache is not None and all(chunk["status"] == "hit" for chunk in result.cache["chunks"])


def _reused_share(results: Sequence[Result]) -> float | None:
    tokens = [result.cache["tokens"] for result in results if result.cache is not None]
    return sum(t["reused"] for t in tokens) / sum(t["prompt"] for t in tokens) if tokens else None


def _counts(reasons: Iterable[str | None]) -> dict[str, int]:
    """The most frequent first."""
    return dict(Counter(reason or "the server gave no reason" for reason in reasons).most_common())
