# SPDX-License-Identifier: Apache-2.0
"""Which mode a profile has for which requests, from results made up for each."""

import pytest

from evaluation.calibration import LEAST_ANSWERS, kinds
from evaluation.summary import rows_by_chunks
from tests.evaluation.helpers import make_report, make_result

MODES = {"full": 1.0, "shared": 0.1, "offset": 0.105, "link-8": 0.2, "link-16": 0.3}
"""With times to first token."""


def profile(accuracies, chunks=2, count=100, tolerance=0.02, times=MODES, missing=()):
    """Of modes with these shares of right answers."""
    results = [
        make_result(
            mode,
            f"{chunks}-{i}",
            "Riga" if i < round(share * count) else "Paris",
            chunks=chunks,
            ttft_s=times[mode],
            cache=make_report("full") if (mode, i) in missing else make_report(mode),
        )
        for mode, share in accuracies.items()
        for i in range(count)
    ]
    return kinds(rows_by_chunks(results, "I don't know"), tolerance)


@pytest.mark.parametrize(
    ("accuracies", "mode"),
    [
        ({"full": 0.9, "shared": 0.9, "offset": 0.85, "link-8": 0.9}, "shared"),
        ({"full": 0.9, "shared": 0.88, "offset": 0.89, "link-8": 0.9}, "offset"),
        ({"full": 0.9, "shared": 0.87, "offset": 0.8, "link-8": 0.89, "link-16": 0.9}, "link-8"),
        ({"full": 0.9, "shared": 0.5, "offset": 0.6, "link-8": 0.7, "link-16": 0.87}, "full"),
        ({"full": 0.5, "shared": 0.6}, "shared"),
        ({"full": 0.9}, "full"),
    ],
)
def test_the_quickest_within_the_tolerance_and_of_those_as_quick_the_best(accuracies, mode):
    (kind,) = profile(accuracies)
    assert (kind.mode, kind.max_chunks) == (mode, 2)
    assert [each.mode for each in kind.measured] == list(accuracies)


def test_another_tolerance():
    accuracies = {"full": 0.9, "shared": 0.84}
    assert [profile(accuracies, tolerance=t)[0].mode for t in (0.0, 0.05, 0.06)] == ["full", "full", "shared"]


def test_reuse_that_saves_no_time():
    (kind,) = profile({"full": 0.9, "shared": 0.9}, times={"full": 0.1, "shared": 0.2})
    assert kind.mode == "full"


def test_certain_is_what_the_interval_says():
    (sure,) = profile({"full": 0.5, "shared": 0.5}, count=200)
    (doubtful,) = profile({"full": 0.5, "shared": 0.49}, count=100)
    assert (sure.is_certain, doubtful.mode, doubtful.is_certain) == (True, "shared", False)
    (shared,) = [each for each in doubtful.measured if each.mode == "shared"]
    assert shared.difference.low < -0.02 < shared.difference.mean


def test_too_few_answers_say_nothing():
    (few,) = profile({"full": 1.0, "shared": 1.0}, count=LEAST_ANSWERS - 1)
    assert (few.mode, few.is_certain) == ("full", False)
    (enough,) = profile({"full": 1.0, "shared": 1.0}, count=LEAST_ANSWERS)
    assert enough.mode == "shared"


def test_a_mode_that_often_fell_back_is_not_chosen():
    (kind,) = profile({"full": 0.9, "shared": 0.9}, missing={("shared", i) for i in range(20)})
    assert kind.mode == "full"


def test_kinds_go_by_the_number_of_chunks():
    results = [
        make_result(mode, f"{chunks}-{i}", text, chunks=chunks, ttft_s=MODES[mode], cache=make_report(mode))
        for chunks, of_shared in ((8, "Paris"), (2, "Riga"))
        for mode, text in (("full", "Riga"), ("shared", of_shared))
        for i in range(40)
    ]
    found = kinds(rows_by_chunks(results, "I don't know"), 0.02)
    assert [(kind.min_chunks, kind.max_chunks, kind.mode) for kind in found] == [(2, 2, "shared"), (8, 8, "full")]
