# SPDX-License-Identifier: Apache-2.0
"""Shapes that make parsers slow take time in proportion to their size. Times are compared with one another alone."""

import gc
import json
import time
from collections.abc import Callable

import pytest

from app.documents.readers import UnreadableFileError, read
from app.documents.splitting import split
from tests.app.documents.files import cell, docx, epub, message, paragraph, pptx, shape, xhtml, xlsx
from tests.app.pdfs import make_pdf
from tests.support.words import words

pytestmark = pytest.mark.matrix

LEAST_SECONDS = 0.02
"""Of the smallest size: below that, other things weigh more than the file."""
MOST_RATIO = 8.0
"""For four times the size. Quadratic would be 16."""

TEXTS: dict[str, Callable[[int], str]] = {
    "a character": lambda n: "x" * n,
    "spaces": lambda n: " " * n + "x",
    "lines": lambda n: "\n" * n + "x",
    "tabs": lambda n: "\t" * n + "x",
    "words": lambda n: "ab " * n,
    "Chinese": lambda n: "桥长，三百米。" * n,
    "families": lambda n: "👩‍👩‍👧" * n,
    "accents": lambda n: "e" + "\u0301" * n,
    "stops": lambda n: "." * n,
    "sentences": lambda n: "A. " * n,
    "data URIs": lambda n: "data:a/b;c;" * n,
    "half data URIs": lambda n: "data:a/b" + ";c" * n,
    "carriage returns": lambda n: "\r" * n,
}
MARKDOWN: dict[str, Callable[[int], str]] = {
    "hashes": lambda n: "#" * n,
    "headings": lambda n: "# a\n" * n,
    "a heading of spaces": lambda n: "# " + " " * n + "x",
    "deep headings": lambda n: "# a\n## b\n### c\n" * n,
    "setext": lambda n: "a\n=\n" * n,
    "underlines": lambda n: "a\n" + "=" * n + "\n" * n,
    "quotes": lambda n: "> " * n + "x",
    "quoted lines": lambda n: "> x\n" * n,
    "list": lambda n: "- x\n" * n,
    "nested list": lambda n: "- " * n + "x",
    "fences": lambda n: "```\n" * n,
    "an open fence": lambda n: "~~~\n" + "x\n" * n,
    "brackets": lambda n: "[" * n,
    "emphasis": lambda n: "*a " * n,
    "code": lambda n: "`" * n,
    "comments": lambda n: "<!--\n" * n,
    "HTML blocks": lambda n: "<div>\n\n" * n,
    "references": lambda n: "[a]: b\n" * n,
    "table": lambda n: "|a|b|\n|-|-|\n" + "|c|d|\n" * n,
    "front matter": lambda n: "---\na: b\n" + "---x\n" * n,
}
HTML: dict[str, Callable[[int], str]] = {
    "div": lambda n: "<div>" * n + "x",
    "closed div": lambda n: "<div>" * n + "x" + "</div>" * n,
    "bold": lambda n: "<b>" * n + "x",
    "crossed": lambda n: "<b><i>x</b></i>" * n,
    "lists": lambda n: "<ul><li>" * n + "x",
    "quotes": lambda n: "<blockquote>" * n + "x",
    "definitions": lambda n: "<dl><dt>x<dd>y" * n,
    "tables": lambda n: "<table><tr><td>" * n + "x",
    "titled tables": lambda n: "<table><caption>y<tr><td>" * n + "x",
    "rows": lambda n: "<table>" + "<tr><td>a<td>b" * n,
    "one long row": lambda n: "<table>" + "<tr><td>x" * n + "<tr>" + "<td>a" * n,
    "columns": lambda n: "<table><tr><td>x<tr>" + "<td>a" * n,
    "row spans": lambda n: "<table>" + "<tr><td rowspan=65000>x<td>y" * (n // 40),
    "column spans": lambda n: "<table>" + "<tr><td colspan=1000>x" * (n // 40),
    "paragraphs": lambda n: "<p>x" * n,
    "formatting": lambda n: "<b>" + "<p><i>" * n,
    "fonts": lambda n: "<font size=1>" * n,
    "anchors": lambda n: "<a href=x>" * n,
    "options": lambda n: "<select><option>x" * n,
    "superscripts": lambda n: "<sup>" * n + "x",
    "subscripts": lambda n: "1<sub>2</sub>" * n,
    "inputs": lambda n: "<input value=x>" * n,
    "formulas": lambda n: "<math>" + "<msup><mi>x<mn>2</msup>" * n,
    "ruby": lambda n: "<ruby>a<rt>b" * n,
    "breaks": lambda n: "<br>" * n + "x",
    "brackets": lambda n: "<" * n,
    "ampersands": lambda n: "&" * n,
    "comments": lambda n: "<!--" * n + "-->x",
    "ends": lambda n: "</x>" * n + "x",
    "attributes": lambda n: "<a " + " ".join(f"b{i}=1" for i in range(n)) + ">x",
    "scripts": lambda n: "<script>" * n,
    "SVG": lambda n: "<svg>" * n + "x",
    "code": lambda n: "<pre>" + "`" * n,
    "bars": lambda n: "<table><tr><td>x<td>y<tr><td>z<td>" + "|" * n,
    "self-closed": lambda n: xhtml("<p/>" * n + "x"),
    "half self-closed": lambda n: xhtml("<p/" * n + "x"),
}


def _rtf(text: str) -> str:
    return "{\\rtf1 " + text + "}"


def _cells(n: int) -> str:
    rows = "".join(f'<row r="{i}"><c r="A{i}"><v>1</v></c><c r="B{i}"><v>2</v></c></row>' for i in range(1, n // 4))
    return f"<sheetData>{rows}</sheetData>"


def _rows(n: int) -> str:
    row = f"<w:tr>{cell(paragraph('a'))}{cell(paragraph('b'))}</w:tr>"
    return f"<w:tbl>{row * (n // 8)}</w:tbl>"


def _notebook(n: int) -> str:
    cell = {"cell_type": "code", "source": "`" * 9, "outputs": [{"output_type": "stream", "text": ["x\n"]}]}
    return json.dumps({"cells": [cell] * (n // 4)})


FILES: dict[str, tuple[str, Callable[[int], str | bytes]]] = {
    **{f"text: {name}": ("a.txt", shape) for name, shape in TEXTS.items()},
    **{f"Markdown: {name}": ("a.md", shape) for name, shape in {**TEXTS, **MARKDOWN}.items()},
    **{f"HTML: {name}": ("a.html", shape) for name, shape in HTML.items()},
    "CSV: rows": ("a.csv", lambda n: "a,b\n" * n),
    "CSV: columns": ("a.csv", lambda n: "a," * n),
    "CSV: one long row": ("a.csv", lambda n: "a\n" * n + "a," * n),
    "CSV: long header": ("a.csv", lambda n: "a," * n + ("\n" + "x" * 900) * (n // 50)),
    "CSV: quotes": ("a.csv", lambda n: '"' * n),
    "CSV: long lines": ("a.csv", lambda n: ("x" * 900 + ",y\n") * (n // 50)),
    "RTF: groups": ("a.rtf", lambda n: _rtf("{" * n + "x" + "}" * n)),
    "RTF: words": ("a.rtf", lambda n: _rtf("\\b a" * n)),
    "RTF: escapes": ("a.rtf", lambda n: _rtf("\\u8364?\\'e9" * n)),
    "RTF: rows": ("a.rtf", lambda n: _rtf("\\trowd a\\cell b\\cell\\row " * (n // 4))),
    "RTF: numbers": ("a.rtf", lambda n: _rtf("\\u" + "1" * 5 + " " + "9" * n)),
    "e-mail: lines": ("a.eml", lambda n: message("x", "a line\n" * n)),
    "e-mail: a header": ("a.eml", lambda n: ("Subject: " + "=?utf-8?q?a?= " * (n // 8) + "\n\nx").encode()),
    "e-mail: parts": ("a.eml", lambda n: message("x", "y", **{f"f{i}_txt": b"z" for i in range(n // 99)})),
    "e-mail: headers": ("a.eml", lambda n: "To: a@b.c\n" * n + "\nx"),
    "e-mail: nested": ("a.eml", lambda n: _nested_message(n // 200)),
    "notebook: cells": ("a.ipynb", _notebook),
    "document: paragraphs": ("a.docx", lambda n: docx(paragraph("x") * n)),
    "document: rows": ("a.docx", lambda n: docx(_rows(n))),
    "document: a run": ("a.docx", lambda n: docx(paragraph("x" * n))),
    "workbook: rows": ("a.xlsx", lambda n: xlsx(A=_cells(n))),
    "presentation: shapes": ("a.pptx", lambda n: pptx(shape("x") * (n // 4))),
    "presentation: slides": ("a.pptx", lambda n: pptx(*[shape("x")] * (n // 99))),
    "book: chapters": ("a.epub", lambda n: _book(n // 40)),
    "PDF: pages": ("a.pdf", lambda n: make_pdf(*[["text"]] * (n // 40))),
    "PDF: boxes": ("a.pdf", lambda n: make_pdf(["text"], boxes={f"b{i}": True for i in range(n // 8)})),
    "PDF: lines": ("a.pdf", lambda n: make_pdf(["text"] * n)),
}


def _nested_message(depth: int) -> str:
    return "".join(f"Content-Type: multipart/mixed; boundary=b{i}\n\n--b{i}\n" for i in range(depth)) + "\nx"


def _book(chapters: int) -> bytes:
    made = {f"{i}.xhtml": xhtml("<h1>A</h1>b") for i in range(chapters)}
    return epub(made, list(made))


def seconds(name: str, file: str | bytes) -> float:
    """CPU time to read and split a file."""
    content = file.encode() if isinstance(file, str) else file
    gc.collect()
    gc.disable()  # it runs once in a while, and then through all that other tests have left
    started = time.process_time()
    try:
        for _ in split(read(content, name), 256, words):
            pass
    except (UnreadableFileError, RecursionError):
        pass
    finally:
        gc.enable()
    return time.process_time() - started


@pytest.mark.parametrize("case", FILES)
def test_time_grows_with_size(case: str) -> None:
    name, shape = FILES[case]
    size = _measurable(name, shape)
    ratios = []
    for _ in range(5):  # the machine may do something else meanwhile
        once, twice, four_times = (max(seconds(name, shape(size * i)), LEAST_SECONDS / 2) for i in (1, 2, 4))
        ratios.append((round(twice / once, 1), round(four_times / once, 1)))
        if four_times / once < MOST_RATIO:
            return
    pytest.fail(f"{size}: twice and four times as much take {ratios} times as long")


def _measurable(name: str, shape: Callable[[int], str | bytes]) -> int:
    """A size that takes long enough to be compared, or one that is large."""
    size = 2000
    while size < 32_000 and seconds(name, shape(size)) < LEAST_SECONDS:
        size *= 2
    return size
