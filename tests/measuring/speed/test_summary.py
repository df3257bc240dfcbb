# SPDX-License-Identifier: Apache-2.0
"""Rows and sections of a run."""

import pytest

from measuring.speed.report.summary import Quantiles, load, rows_of, values_of
from measuring.speed.samples import Sample
from tests.measuring.speed.report_helpers import CLAIMS, WORKLOADS, load_samples, make_folder


def sample(point, system, number=0, **values):
    return Sample(workload="any", point=point, system=system, round=number, values=values)


def test_numbers_are_in_order_and_other_points_as_they_were_run():
    assert [row.point for row in rows_of([sample(p, "stock", ttft_s=1) for p in ("16384", "1024", "9")])] == [
        "9",
        "1024",
        "16384",
    ]
    assert [row.point for row in rows_of([sample(p, "stock", ttft_s=1) for p in ("open", "closed")])] == [
        "open",
        "closed",
    ]


def test_systems_are_in_the_same_order_everywhere():
    rows = rows_of([sample("1", system, ttft_s=1) for system in ("tessera", "quarter", "warm", "prefix hit", "stock")])
    assert [row.system for row in rows] == ["stock", "prefix hit", "warm", "quarter", "tessera"]


def test_a_value_counts_only_samples_that_have_it():
    (row,) = rows_of([sample("1", "stock", i, ttft_s=i, **({"tpot_s": 0.5} if i else {})) for i in range(3)])
    assert row.figures == {
        "ttft_s": Quantiles(1, 0, 2, pytest.approx(1.9), 3),
        "tpot_s": Quantiles(0.5, 0.5, 0.5, 0.5, 2),
    }
    assert row.n == "2 to 3"


def test_values_are_those_that_any_row_has():
    assert values_of(rows_of(load_samples())) == ["ttft_s", "requests_per_s"]


def test_sections_have_their_own_rows_and_claims(tmp_path):
    results = load(make_folder(tmp_path), CLAIMS)
    assert [section.name for section in results.sections] == list(WORKLOADS)
    assert [len(section.rows) for section in results.sections] == [4, 7, 0]
    assert [[claim for claim, _ in section.verdicts] for section in results.sections] == [
        CLAIMS[:2],
        CLAIMS[2:3],
        CLAIMS[3:],
    ]
    assert results.systems == ["stock", "warm", "quarter"]


@pytest.mark.parametrize(
    ("complete", "stopped_by", "partial"), [(True, None, ""), (False, "Ctrl-C", "Ctrl-C"), (False, None, "did not end")]
)
def test_a_run_that_is_not_complete_is_partial(complete, stopped_by, partial, tmp_path):
    results = load(make_folder(tmp_path, complete=complete, stopped_by=stopped_by), CLAIMS)
    assert partial in results.partial
    assert bool(results.partial) is not complete


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(OSError, match=r"run\.json"):
        load(tmp_path, CLAIMS)
