# SPDX-License-Identifier: Apache-2.0
"""The page needs nothing beside itself, says what was run, and can't be broken by a name."""

import base64
from html.parser import HTMLParser

import pytest

from measuring.speed.report.report import write
from tests.measuring.speed.report_helpers import CLAIMS, MODEL, make_folder

VOID = {"meta", "img"}


class Page(HTMLParser):
    """Elements with their attributes, and the text of each ``section``; fails on tags that don't match."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] != ["style"]:
            self.text += data

    def having(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = make_folder(tmp_path_factory.mktemp("page"))
    write(folder, CLAIMS)
    return folder


@pytest.fixture(scope="module")
def html(folder):
    return (folder / "report.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page(html):
    return Page(html)


def test_nothing_is_loaded_or_run(html, page):
    assert not any(word in html for word in ("http://", "https://", "url(", "@import", "//cdn"))
    assert {tag for tag, _ in page.elements}.isdisjoint({"script", "link", "iframe", "object"})
    assert all(str(image["src"]).startswith("data:image/png;base64,") for image in page.having("img"))


def test_each_measured_workloads_figure_is_in_its_section(folder, page):
    assert [section["id"] for section in page.having("section")] == ["context", "load", "chat", "setup"]
    images = [base64.b64decode(str(image["src"]).partition(",")[2]) for image in page.having("img")]
    assert images == [(folder / f"{name}.png").read_bytes() for name in ("context", "load")]
    assert all(image["alt"] for image in page.having("img"))


def test_names_are_text(page):
    assert {tag for tag, _ in page.elements}.isdisjoint({"b", "i", "fast"})
    assert MODEL in page.text
    assert f"tessera bench --model '{MODEL}'" in page.text
    assert "context: questions <i>over</i> chunks" in page.text


def test_it_says_with_what_it_was_measured(page):
    for words in ("A <fast> CPU, 2 cores", "--dtype float32", "0.1.0", "0.32.0", "2026-01-02 03:04 UTC"):
        assert words in page.text
    assert "chunk tokens: 256, share: [red]" in page.text


def test_verdicts_are_told_apart(page):
    assert [item.get("class") for item in page.having("li")] == ["holds", "fails", None, None]
    assert "1 of 2 claims with bounds hold; 1 not measured." in page.text


def test_every_cell_is_in_the_table(page):
    assert len(page.having("tr")) == 1 + 4 + 1 + 7
    assert len(page.having("td")) == 4 * 5 + 7 * 7


def test_only_a_partial_run_is_marked(html, tmp_path):
    folder = make_folder(tmp_path, complete=False, stopped_by="an answer <differed>")
    write(folder, CLAIMS)
    partial = Page((folder / "report.html").read_text(encoding="utf-8"))
    assert "Partial run (an answer <differed>)" in partial.text
    assert {"class": "partial"} in partial.having("p")
    assert "artial run" not in html
