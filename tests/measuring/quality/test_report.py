# SPDX-License-Identifier: Apache-2.0
"""Printed, written and drawn results."""

import io
import json

import numpy as np
import pytest
from matplotlib.image import imread
from rich.console import Console

from measuring.quality import report
from measuring.quality.report import plot, table, to_json
from measuring.quality.summary import summarize
from tests.measuring.fake_server import make_report
from tests.measuring.quality.helpers import make_result


@pytest.fixture
def rows():
    results = []
    for chunks in (2, 4, 8):
        for i in range(4):
            question = f"{chunks}-{i}"
            results += [
                make_result("full", question, chunks=chunks),
                make_result("shared", question, "In Paris." if i == 0 else "In Riga.", chunks=chunks, ttft_s=0.04),
                make_result("offset", question, chunks=chunks, cache=make_report("full", reason=f"[red] {question}")),
            ]
    results.append(make_result("shared", "long", "", chunks=8, cache=None, error="too long"))
    return summarize(results, "I don't know")


def printed(rows, **options) -> str:
    stream = io.StringIO()
    table(rows, Console(file=stream, **options))
    return stream.getvalue()


def test_tables_have_a_line_for_each_row_and_the_most_frequent_reasons(rows):
    text = printed(rows)
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if line.startswith("│")]
    accuracy, speed = lines[: len(rows)], lines[len(rows) :]
    assert accuracy[0] == ["all", "full", "12", "100.0 (100.0 to 100.0)", "–", "0.0", "66.7", "–", "0.0"]
    assert accuracy[1][:5] == ["all", "shared", "12", "75.0 (50.0 to 100.0)", "-25.0 (-50.0 to +0.0)"]
    assert accuracy[2] == ["all", "offset", "0", *["–"] * 6]
    assert speed[1] == ["all", "shared", "0.040", "–", "0.0", "0", "1"]
    assert speed[2] == ["all", "offset", "–", "–", "–", "12", "0"]
    assert [line[:2] for line in accuracy] == [[row.chunks, row.mode] for row in rows]
    lines = printed(rows).splitlines()
    assert "offset: ran in full attention instead, 1 ×: [red] 2-0" in lines
    assert "offset: ran in full attention instead: 9 more reasons in the summary" in lines
    assert "shared: refused by the server, 1 ×: too long" in lines
    assert "…" not in printed(rows, width=20)  # without a terminal nothing is cut off


def test_kinds_of_questions_have_a_table_of_their_own():
    results = [
        make_result(mode, kind, kind=kind, logprob=-1.0, top_logprobs=({"a": 0.0},))
        for kind in ("plain", "count")
        for mode in ("full", "offset")
    ]
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in printed(summarize(results, "?")).splitlines()]
    sure = "100.0 (100.0 to 100.0)"
    assert ["count", "full", "1", sure, "–", "–", "–"] in lines
    differences = ["+0.0 (+0.0 to +0.0)", "+0.00 (+0.00 to +0.00)", "0.000 (0.000 to 0.000)"]
    assert ["count", "offset", "1", sure, *differences] in lines


def test_the_summary_has_every_figure(rows, tmp_path):
    to_json(rows, "I don't know", tmp_path / "summary.json")
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["refusal"], summary["confidence"]) == ("I don't know", 0.95)
    assert [(row["chunks"], row["mode"]) for row in summary["rows"]] == [(row.chunks, row.mode) for row in rows]
    shared = summary["rows"][1]
    assert shared["accuracy"] == {"mean": 0.75, "low": 0.5, "high": 1.0}
    assert shared["ttft_cached_s"] == 0.04
    assert sum(summary["rows"][2]["fell_back"].values()) == 12


def test_the_plot_can_be_read_without_colours(rows, tmp_path):
    plot(rows, tmp_path / "accuracy.png")
    image = imread(tmp_path / "accuracy.png")[..., :3]
    assert image.shape[0] > 400
    assert image.shape[1] > 600
    grey = image.mean(axis=2)
    assert np.unique(grey.round(1)).size > 3
    plot([], tmp_path / "accuracy.png")  # of nothing it is drawn, too
    assert (tmp_path / "accuracy.png").stat().st_size > 1000


def test_without_matplotlib_the_figures_come_without_a_plot(rows, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(report, "find_spec", lambda _: None)
    plot(rows, tmp_path / "accuracy.png")
    assert not (tmp_path / "accuracy.png").exists()
    assert "no accuracy.png: matplotlib is not installed: pip install 'tessera-rag[measure]'" in capsys.readouterr().err
