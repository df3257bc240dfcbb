# SPDX-License-Identifier: Apache-2.0
"""The page needs nothing beside itself, describes its run, and survives any name."""

import html as entities
import re

import pytest

from measuring.speed.report.report import write
from tests.measuring.speed.report_helpers import CLAIMS, MODEL, make_folder


def page(folder) -> str:
    write(folder, CLAIMS)
    return (folder / "report.html").read_text(encoding="utf-8")


def text(html: str) -> str:
    return entities.unescape(re.sub(r"<[^>]*>", "", html[html.index("<body") :]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("page"))


@pytest.fixture(scope="module")
def html(folder):
    return page(folder)


def test_nothing_is_loaded_or_run(html):
    assert not any(word in html for word in ("http://", "https://", "url(", "@import", "<script", "<link", "<iframe"))


def test_names_are_text(html):
    assert MODEL in text(html)
    assert f"tessera bench --model '{MODEL}'" in text(html)
    assert "context: questions <i>over</i> chunks" in text(html)


def test_it_has_figures_claims_and_what_they_were_measured_with(html):
    for words in ("14336", "50.0 (50.0 to 50.0), at least 40: holds", "not measured, at most 1.03"):
        assert words in text(html)
    for words in ("A <fast> CPU, 2 cores", "--dtype float32", "0.1.0", "0.32.0", "2026-01-02 03:04 UTC"):
        assert words in text(html)
    assert "chunk tokens: 256, share: [red]" in text(html)


def test_only_a_partial_run_is_marked(html, tmp_path):
    partial = page(make_folder(tmp_path, complete=False, stopped_by="an answer <differed>"))
    assert "Partial run (an answer <differed>)" in text(partial)
    assert "artial run" not in html
