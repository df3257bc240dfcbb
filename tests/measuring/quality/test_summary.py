# SPDX-License-Identifier: Apache-2.0
"""Figures of a run, from results made up for each."""

import math

import pytest

from app.profile import Estimate
from measuring.quality.summary import Row, summarize
from tests.measuring.fake_server import make_report
from tests.measuring.quality.helpers import make_result

REFUSAL = "I don't know"


def rows(results, mode: str | None = None) -> dict[str, Row]:
    """By number of chunks; of one mode."""
    return {row.chunks: row for row in summarize(results, REFUSAL) if mode in (None, row.mode) and row.kind == "all"}


def overall(results, mode: str) -> Row:
    return rows(results, mode)["all"]


def test_scores_are_means_and_refusals_right_where_there_is_no_answer():
    texts = ["Riga", "In Riga.", "In Paris.", "I don't know"]
    row = overall([make_result("full", str(i), text) for i, text in enumerate(texts)], "full")
    assert (row.answers, row.accuracy.mean, row.exact_match) == (4, 0.5, 0.25)
    assert row.f1 == pytest.approx((1 + 2 / 3) / 4)
    assert 0 <= row.accuracy.low < 0.5 < row.accuracy.high <= 1
    assert row.difference is None
    results = [
        make_result("full", "1", "I don't know.", answers=()),
        make_result("full", "2", "Riga", answers=()),
        make_result("full", "3", "I don't know."),
        make_result("full", "4", "Riga"),
        make_result("full", "5", "Riga"),
    ]
    row = overall(results, "full")
    assert (row.right_refusals, row.false_refusals) == (0.5, pytest.approx(1 / 3))
    assert row.accuracy.mean == 0.6
    assert overall(results[:2], "full").false_refusals is overall(results[2:], "full").right_refusals is None


def test_times_are_apart_for_cached_and_computed_chunks():
    statuses = [("hit", "hit"), ("hit", "filled"), ("waited", "hit"), ("hit", "hit"), ("hit", "hit"), ("hit", "hit")]
    results = [
        make_result("shared", str(i), ttft_s=ttft_s, cache=make_report("shared", *given, reused=80))
        for i, (given, ttft_s) in enumerate(zip(statuses, (1.0, 5.0, 7.0, 2.0, 4.0, None), strict=True))
    ]
    row = overall(results, "shared")
    assert (row.ttft_cached_s, row.ttft_computed_s, row.reused_share) == (2.0, 6.0, 0.8)
    full = overall([make_result("full", ttft_s=3.0)], "full")  # computes its chunks
    assert (full.ttft_cached_s, full.ttft_computed_s, full.reused_share) == (None, 3.0, 0.0)


def test_answers_in_another_mode_and_refused_requests_are_counted_apart():
    full = make_report("full", reason="the chunk cache is off")
    results = [
        make_result("shared", "1", "Paris", ttft_s=9.0, cache=full),
        make_result("shared", "2", "Paris", ttft_s=9.0, cache=full),
        make_result("shared", "3", "Paris", ttft_s=9.0, cache=make_report("full")),
        make_result("shared", "4", "Paris", ttft_s=9.0, cache=make_report("offset")),
        make_result("shared", "5", "Riga", ttft_s=1.0),
        make_result("shared", "6", "", cache=None, error="too long"),
    ]
    row = overall(results, "shared")
    assert (row.answers, row.accuracy.mean, row.ttft_cached_s, row.ttft_computed_s) == (1, 1.0, 1.0, None)
    assert row.fell_back == {"the chunk cache is off": 2, "the server gave no reason": 2}
    assert row.refused == {"too long": 1}
    row = overall([make_result("shared", cache=make_report("full", reason="off")), make_result("full")], "shared")
    shown = (row.answers, row.accuracy, row.difference, row.f1, row.ttft_computed_s, row.reused_share, row.fell_back)
    assert shown == (0, None, None, None, None, None, {"off": 1})


def test_the_difference_is_over_questions_that_ran_in_both_modes():
    fell_back = make_report("full", reason="off")
    results = [
        *(make_result("full", "1", "Riga"), make_result("offset", "1", "Riga")),
        *(make_result("full", "2", "Riga"), make_result("offset", "2", "Paris")),
        *(make_result("full", "3", "Riga"), make_result("offset", "3", "Riga", cache=fell_back)),
        *(make_result("full", "4", "", cache=None, error="x"), make_result("offset", "4", "Riga")),
    ]
    row = overall(results, "offset")
    assert (row.answers, row.accuracy.mean) == (3, pytest.approx(2 / 3))
    assert row.difference == Estimate(mean=-0.5, low=-1.0, high=0.0)
    assert overall([make_result("shared"), make_result("offset")], "offset").difference is None


def test_rows_are_by_chunks_mode_and_kind():
    results = [make_result(mode, f"{n}", chunks=n) for n in (16, 2, 4) for mode in ("offset", "full")]
    assert [(row.chunks, row.mode) for row in summarize(results, REFUSAL)] == [
        (chunks, mode) for chunks in ("all", "2", "4", "16") for mode in ("full", "offset")
    ]
    results = [
        make_result(mode, f"{kind}-{n}", "Riga" if mode == "full" else "Paris", chunks=n, kind=kind)
        for kind in ("plain", "count")
        for n in (2, 4)
        for mode in ("full", "offset")
    ]
    by_kind = [row for row in summarize(results, REFUSAL) if row.kind != "all"]
    assert [(row.kind, row.chunks, row.mode, row.answers) for row in by_kind] == [
        (kind, "all", mode, 2) for kind in ("plain", "count") for mode in ("full", "offset")
    ]
    assert [row.difference and row.difference.mean for row in by_kind] == [None, -1, None, -1]


def test_the_divergence_is_over_the_tokens_of_answers_that_both_modes_predicted():
    alike, sure = {"a": math.log(0.5), "b": math.log(0.5)}, {"a": 0.0}
    results = [
        *(make_result("full", "1", top_logprobs=(sure, sure)), make_result("offset", "1", top_logprobs=(alike, sure))),
        *(make_result("full", "2"), make_result("offset", "2", top_logprobs=(alike,))),
        *(make_result("full", "3", top_logprobs=(sure,)), make_result("offset", "3")),
    ]
    assert overall(results, "offset").divergence.mean == pytest.approx(math.log(2) / 2)
    assert overall(results, "full").divergence is None


@pytest.mark.parametrize(
    ("counts", "labels"),
    [
        (range(1, 7), ["1", "2", "3", "4", "5", "6"]),
        (range(1, 8), ["1", "2", "3–4", "5–8"]),
        ([2, 3, 4, 9, 10, 16, 17, 100], ["2", "3–4", "9–16", "17–32", "65–128"]),
    ],
)
def test_many_numbers_of_chunks_are_put_together(counts, labels):
    found = rows([make_result("full", str(n), chunks=n) for n in counts])
    assert list(found) == ["all", *labels]
    assert sum(row.answers for row in found.values()) == 2 * len(counts)
