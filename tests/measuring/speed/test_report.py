# SPDX-License-Identifier: Apache-2.0
"""Printed and written results of a run."""

import io
import json
from typing import get_args

import numpy as np
import pytest
from rich.console import Console

from measuring.speed.folder import RunFolder, WorkloadRun
from measuring.speed.report import SYSTEMS, VALUES, report
from measuring.speed.samples import Growth, Ratio, Sample, System, Value
from tests.measuring.helpers import make_run

ROUNDS = 6
WORKLOADS = {
    "context": WorkloadRun(title="questions over chunks", axis="tokens of context", sizes={}),
    "load": WorkloadRun(title="many users", axis="arrivals", sizes={}),
    "chat": WorkloadRun(title="no documents", axis="prompt tokens", sizes={}),
}
CLAIMS = [
    Ratio("context", "4096", "ttft_s", "stock", "warm", at_least=40),
    Growth("context", "1024", "4096", "ttft_s", "warm", at_most=1.5),
    Ratio("load", "concurrency 8", "requests_per_s", "warm", "stock"),
    Ratio("load", "concurrency 1", "requests_per_s", "quarter", "warm", at_least=0, at_most=1),
    Ratio("load", "open loop", "ttft_s", "warm", "warm", at_most=1.03),
    Ratio("chat", "128", "ttft_s", "tessera", "stock", at_most=1.03),
]


def context_samples() -> list[Sample]:
    """Stock takes 1 ms per token, cached chunks 20 µs; later rounds take longer."""
    return [
        Sample(workload="context", point=str(tokens), system=system, round=number, values={"ttft_s": seconds})
        for number in range(ROUNDS)
        for tokens in (16384, 4096, 1024)
        for system, seconds in (("warm", tokens / 50_000 * (1 + number)), ("stock", tokens / 1000 * (1 + number)))
    ]


def load_samples() -> list[Sample]:
    """Throughput in a closed loop; in an open one, only times to first token."""
    closed = [
        Sample(workload="load", point=point, system=system, round=number, values={"requests_per_s": rate})
        for number in range(ROUNDS)
        for point in ("concurrency 8", "concurrency 1")
        for system, rate in (("quarter", 2.0), ("warm", 4.0), ("stock", 0.5))
    ]
    opened = [
        Sample(workload="load", point="open loop", system="warm", round=number, values=values)
        for number, values in enumerate(({"ttft_s": 0.25}, {"ttft_s": 0.25, "requests_per_s": 0.0123}))
    ]
    return closed + opened


@pytest.fixture
def make(tmp_path):
    """Makes the folder of a run of which ``chat`` has no samples."""

    def make(samples, complete=True, stopped_by=None):
        with RunFolder(tmp_path, make_run(workloads=WORKLOADS)) as folder:
            for sample in samples:
                folder.record(sample)
            folder.mark(complete=complete, stopped_by=stopped_by)
        return tmp_path

    return make


@pytest.fixture
def folder(make):
    return make(context_samples() + load_samples())


def printed(folder, **options) -> str:
    stream = io.StringIO()
    report(Console(file=stream, **options), folder, CLAIMS)
    return stream.getvalue()


def test_every_system_and_value_has_words():
    assert list(SYSTEMS) == list(get_args(System))
    assert list(VALUES) == list(get_args(Value))


def test_tables_have_a_line_for_each_point_and_system(folder):
    """Numbers in order, other points as they were run; systems in the same order everywhere."""
    text = printed(folder)
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if line.startswith("│")]
    assert lines == [
        ["1024", "stock", "3584", "1024 to 6144", "5888", "6"],
        ["1024", "warm", "71.7", "20.5 to 123", "118", "6"],
        ["4096", "stock", "14336", "4096 to 24576", "23552", "6"],
        ["4096", "warm", "287", "81.9 to 492", "471", "6"],
        ["16384", "stock", "57344", "16384 to 98304", "94208", "6"],
        ["16384", "warm", "1147", "328 to 1966", "1884", "6"],
        ["concurrency 8", "stock", *3 * ["–"], "0.500", "0.500 to 0.500", "0.500", "6"],
        ["concurrency 8", "warm", *3 * ["–"], "4.00", "4.00 to 4.00", "4.00", "6"],
        ["concurrency 8", "quarter", *3 * ["–"], "2.00", "2.00 to 2.00", "2.00", "6"],
        ["concurrency 1", "stock", *3 * ["–"], "0.500", "0.500 to 0.500", "0.500", "6"],
        ["concurrency 1", "warm", *3 * ["–"], "4.00", "4.00 to 4.00", "4.00", "6"],
        ["concurrency 1", "quarter", *3 * ["–"], "2.00", "2.00 to 2.00", "2.00", "6"],
        ["open loop", "warm", "250", "250 to 250", "250", "0.0123", "0.0123 to 0.0123", "0.0123", "1 to 2"],
    ]
    assert text.splitlines()[-1].startswith("stock: stock vLLM; warm: Tessera, chunks cached; quarter: ")
    for words in ("time to first token, ms", "requests per second"):
        assert words in text


def test_claims_are_printed_in_words_under_their_tables(folder):
    expected = [
        "context: questions over chunks",
        "stock / warm, time to first token at 4096 tokens of context: 50.0 (50.0 to 50.0), at least 40: holds",
        "warm, time to first token, 4096 tokens of context over 1024: 4.00 (4.00 to 4.00), at most 1.5: does not hold",
        "load: many users",
        "warm / stock, requests per second at concurrency 8: 8.00 (8.00 to 8.00)",
        "quarter / warm, requests per second at concurrency 1: 0.500 (0.500 to 0.500), at least 0, at most 1: holds",
        "warm / warm, time to first token at open loop: 1.000 (1.000 to 1.000), at most 1.03: undecided after 2 rounds",
        "chat: no documents: nothing was measured",
        "tessera / stock, time to first token at 128 prompt tokens: not measured, at most 1.03",
    ]
    lines = [line.rstrip() for line in printed(folder).splitlines()]
    assert [line for line in lines if line in expected] == expected


def test_nothing_is_cut_off_and_a_claim_is_one_line_however_narrow_it_is(folder):
    assert "…" not in printed(folder, width=20)
    assert "context: 50.0 (50.0 to 50.0), at least 40: holds\n" in printed(folder, width=40, force_terminal=True)


@pytest.mark.parametrize(
    ("stopped_by", "words"),
    [
        ("an answer differed [red]", "Partial run (an answer differed [red]): "),
        (None, "Partial run (it did not end): "),
    ],
)
def test_the_first_line_says_that_a_run_is_partial(stopped_by, words, make):
    folder = make(context_samples(), complete=False, stopped_by=stopped_by)
    assert printed(folder).startswith(words)


def test_the_summary_has_numpys_figures_and_each_claim_with_what_came_of_it(folder):
    printed(folder)
    summary = json.loads((folder / "summary.json").read_text())
    taken = [s.values["ttft_s"] for s in context_samples() if (s.point, s.system) == ("1024", "warm")]
    quantiles = {"median": pytest.approx(np.median(taken)), "p95": pytest.approx(np.percentile(taken, 95))}
    expected = {**quantiles, "low": min(taken), "high": max(taken), "n": 6}
    assert summary["workloads"]["context"]["rows"][1] == {"point": "1024", "system": "warm", "ttft_s": expected}
    assert summary["workloads"]["chat"]["rows"] == []
    assert (summary["run"]["complete"], summary["confidence"]) == (True, 0.99)
    claims = [claim for workload in summary["workloads"].values() for claim in workload["claims"]]
    assert [claim["kind"] for claim in claims] == ["ratio", "growth", *["ratio"] * 4]
    assert [claim["outcome"] for claim in claims] == ["holds", "does not hold", None, "holds", "undecided", None]
    ratio, *_, missing = claims
    assert (ratio["claim"]["at_least"], ratio["value"], ratio["n"]) == (40, pytest.approx(50), 6)
    assert ratio["low"] <= ratio["value"] <= ratio["high"]
    assert missing["value"] is None


def test_without_a_single_sample_there_is_a_report_still(make):
    assert "load: many users: nothing was measured" in printed(make([], complete=False))
