# SPDX-License-Identifier: Apache-2.0
"""Printed and written results of a run."""

import io
import json

import numpy as np
import pytest
from rich.console import Console

from measuring.speed.report.report import table, write
from tests.measuring.speed.report_helpers import CLAIMS, context_samples, make_folder


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = make_folder(tmp_path_factory.mktemp("complete"))
    write(folder, CLAIMS)
    return folder


def printed(folder, **options) -> str:
    stream = io.StringIO()
    table(Console(file=stream, **options), folder, CLAIMS)
    return stream.getvalue()


def lines_of(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if line.startswith("│")]


def test_tables_have_a_line_for_each_point_and_system(tmp_path):
    assert lines_of(printed(make_folder(tmp_path))) == [
        ["1024", "stock", "3584", "1024 to 6144", "5888", "6"],
        ["1024", "warm", "71.7", "20.5 to 123", "118", "6"],
        ["4096", "stock", "14336", "4096 to 24576", "23552", "6"],
        ["4096", "warm", "287", "81.9 to 492", "471", "6"],
        ["concurrency 8", "stock", *3 * ["–"], "0.500", "0.500 to 0.500", "0.500", "6"],
        ["concurrency 8", "warm", *3 * ["–"], "4.00", "4.00 to 4.00", "4.00", "6"],
        ["concurrency 8", "quarter", *3 * ["–"], "2.00", "2.00 to 2.00", "2.00", "6"],
        ["concurrency 1", "stock", *3 * ["–"], "0.500", "0.500 to 0.500", "0.500", "6"],
        ["concurrency 1", "warm", *3 * ["–"], "4.00", "4.00 to 4.00", "4.00", "6"],
        ["concurrency 1", "quarter", *3 * ["–"], "2.00", "2.00 to 2.00", "2.00", "6"],
        ["open loop", "warm", "250", "250 to 250", "250", *3 * ["–"], "1"],
    ]


def test_claims_are_printed_in_words_under_their_tables(tmp_path):
    lines = [line.rstrip() for line in printed(make_folder(tmp_path)).splitlines()]
    ratio = lines.index(
        "stock / warm, time to first token at 4096 tokens of context: 50.0 (50.0 to 50.0), at least 40: holds"
    )
    growth = lines[ratio + 1]
    assert lines[0] == "context: questions <i>over</i> chunks"
    assert growth.startswith("warm, time to first token, 4096 tokens of context over 1024: 4.00 (")
    assert growth.endswith("), at most 1.5: does not hold")
    assert ratio < lines.index("load: many users")
    assert lines[lines.index("chat: no documents: nothing was measured") + 1].endswith(": not measured, at most 1.03")


def test_nothing_is_cut_off_without_a_terminal(tmp_path):
    assert "…" not in printed(make_folder(tmp_path), width=20)


def test_a_claim_is_one_line_however_narrow_the_terminal_is(tmp_path):
    text = printed(make_folder(tmp_path), width=40, force_terminal=True)
    assert "context: 50.0 (50.0 to 50.0), at least 40: holds\n" in text


@pytest.mark.parametrize(
    ("stopped_by", "words"),
    [("Ctrl-C [red]", "Partial run (Ctrl-C [red]): "), (None, "Partial run (it did not end): ")],
)
def test_the_first_line_says_that_a_run_is_partial(stopped_by, words, tmp_path):
    assert printed(make_folder(tmp_path, complete=False, stopped_by=stopped_by)).startswith(words)


def test_the_summary_has_numpys_figures(written):
    summary = json.loads((written / "summary.json").read_text())
    row = summary["workloads"]["context"]["rows"][1]
    taken = [s.values["ttft_s"] for s in context_samples() if (s.point, s.system) == ("1024", "warm")]
    quantiles = {"median": pytest.approx(np.median(taken)), "p95": pytest.approx(np.percentile(taken, 95))}
    expected = {**quantiles, "low": min(taken), "high": max(taken), "n": 6}
    assert row == {"point": "1024", "system": "warm", "ttft_s": expected}
    assert summary["workloads"]["chat"]["rows"] == []
    assert (summary["run"]["complete"], summary["confidence"]) == (True, 0.99)


def test_the_summary_has_each_claim_and_what_came_of_it(written):
    workloads = json.loads((written / "summary.json").read_text())["workloads"]
    ratio, growth = workloads["context"]["claims"]
    (rate,), (missing,) = workloads["load"]["claims"], workloads["chat"]["claims"]
    assert [claim["kind"] for claim in (ratio, growth, rate, missing)] == ["ratio", "growth", "ratio", "ratio"]
    assert (ratio["claim"]["at_least"], ratio["value"], ratio["n"]) == (40, pytest.approx(50), 6)
    assert ratio["low"] <= ratio["value"] <= ratio["high"]
    assert [claim["holds"] for claim in (ratio, growth, rate, missing)] == [True, False, None, None]
    assert missing["value"] is None


def test_without_a_single_sample_there_is_a_report_still(tmp_path):
    folder = make_folder(tmp_path, complete=False, stopped_by="stock did not start")
    (folder / "samples.jsonl").write_text("")
    write(folder, CLAIMS)
    assert "stock did not start" in (folder / "report.html").read_text()
    assert "load: many users: nothing was measured" in printed(folder)
