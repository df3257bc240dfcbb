# SPDX-License-Identifier: Apache-2.0
"""Shapes that make parsers slow take time in proportion to their size. Times are compared with one another alone."""

import json
from collections.abc import Callable
from contextlib import suppress

import pytest

from app.documents.readers import UnreadableFileError, read
from app.documents.splitting import split
from tests.app.documents.files import cell, docx, epub, message, paragraph, pptx, shape, xhtml, xlsx
from tests.app.pdfs import make_pdf
from tests.support.cpu_time import cpu_seconds
from tests.support.words import words

pytestmark = pytest.mark.matrix

LEAST_SECONDS = 0.02
"""Of the smallest size: below that, other things weigh more than the file."""
MOST_RATIO = 8.0
"""For four times the size. Quadratic would be 16."""

Shape = Callable[[int], str | bytes]

# Each is repeated, with an x behind; a tuple has what else stands before and behind it.
TEXTS = [
    *("x", "\n", "\t", "ab ", "桥长，三百米。", "👩‍👩‍👧", ".", "A. ", "data:a/b;c;", "\r"),
    *(" ", ("e", "\u0301", ""), ("data:a/b", ";c", "")),
]
MARKDOWN = [
    *("#", "# a\n", "# a\n## b\n### c\n", "a\n=\n", "> x\n", "- x\n", "```\n", "[", "*a ", "`", "<!--\n", "<div>\n\n"),
    *("[a]: b\n", "> ", "- ", ("# ", " ", "x"), ("~~~\n", "x\n", "")),
    *(("|a|b|\n|-|-|\n", "|c|d|\n", ""), ("---\na: b\n", "---x\n", "")),
]
HTML = [
    *("<div>", "<b>", "<b><i>x</b></i>", "<ul><li>", "<blockquote>", "<dl><dt>x<dd>y", "<table><tr><td>", "<p>x"),
    *("<table><caption>y<tr><td>", "<font size=1>", "<a href=x>", "<select><option>x", "<sup>", "1<sub>2</sub>"),
    *("<input value=x>", "<ruby>a<rt>b", "<br>", "<", "&", "</x>", "<script>", "<svg>", ("", "<!--", "-->x")),
    *(("<table>", "<tr><td>a<td>b", ""), ("<table><tr><td>x<tr>", "<td>a", ""), ("<b>", "<p><i>", "")),
    *(("<math>", "<msup><mi>x<mn>2</msup>", ""), ("<pre>", "`", ""), ("<table><tr><td>x<td>y<tr><td>z<td>", "|", "")),
]
UNEVEN: dict[str, tuple[str, Shape]] = {
    "Markdown: underlines": ("a.md", lambda n: "a\n" + "=" * n + "\n" * n),
    "HTML: closed div": ("a.html", lambda n: "<div>" * n + "x" + "</div>" * n),
    "HTML: one long row": ("a.html", lambda n: "<table>" + "<tr><td>x" * n + "<tr>" + "<td>a" * n),
    "HTML: row spans": ("a.html", lambda n: "<table>" + "<tr><td rowspan=65000>x<td>y" * (n // 40)),
    "HTML: column spans": ("a.html", lambda n: "<table>" + "<tr><td colspan=1000>x" * (n // 40)),
    "HTML: attributes": ("a.html", lambda n: "<a " + " ".join(f"b{i}=1" for i in range(n)) + ">x"),
    "HTML: self-closed": ("a.html", lambda n: xhtml("<p/>" * n + "x")),
    "HTML: CDATA": ("a.html", lambda n: xhtml("<![CDATA[" * n + "x")),
    "HTML: half self-closed": ("a.html", lambda n: xhtml("<p/" * n + "x")),
}


def repeated(part: str | tuple[str, str, str]) -> Shape:
    before, unit, behind = part if isinstance(part, tuple) else ("", part, "x")
    return lambda n: before + unit * n + behind


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


FILES: dict[str, tuple[str, Shape]] = {
    **{f"text: {part!a}": ("a.txt", repeated(part)) for part in TEXTS},
    **{f"Markdown: {part!a}": ("a.md", repeated(part)) for part in [*TEXTS, *MARKDOWN]},
    **{f"HTML: {part!a}": ("a.html", repeated(part)) for part in HTML},
    **UNEVEN,
    "CSV: rows": ("a.csv", lambda n: "a,b\n" * n),
    "CSV: columns": ("a.csv", lambda n: "a," * n),
    "CSV: one long row": ("a.csv", lambda n: "a\n" * n + "a," * n),
    "CSV: long header": ("a.csv", lambda n: "a," * n + ("\n" + "x" * 900) * (n // 50)),
    "CSV: quotes": ("a.csv", lambda n: '"' * n),
    "CSV: long lines": ("a.csv", lambda n: ("x" * 900 + ",y\n") * (n // 50)),
    "RTF: groups": ("a.rtf", lambda n: _rtf("{" * n + "x" + "}" * n)),
    "RTF: words": ("a.rtf", lambda n: _rtf("\\b a" * n)),
    "RTF: escapes": ("a.rtf", lambda n: _rtf("\\u8364?\\'e9" * n)),
    "RTF: raised": ("a.rtf", lambda n: _rtf("\\super\\a" * n)),
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

    def read_and_split() -> None:
        with suppress(UnreadableFileError, RecursionError):
            for _ in split(read(content, name), 256, words):
                pass

    return cpu_seconds(read_and_split, tries=1)


@pytest.mark.parametrize("case", FILES)
def test_time_grows_with_size(case):
    name, shape = FILES[case]
    size = _measurable(name, shape)
    ratios = []
    for _ in range(5):  # the machine may do something else meanwhile
        once, twice, four_times = (max(seconds(name, shape(size * i)), LEAST_SECONDS / 2) for i in (1, 2, 4))
        ratios.append((round(twice / once, 1), round(four_times / once, 1)))
        if four_times / once < MOST_RATIO:
            return
    pytest.fail(f"{size}: twice and four times as much take {ratios} times as long")


def _measurable(name: str, shape: Shape) -> int:
    """A size that takes long enough to be compared, or one that is large."""
    size = 2000
    while size < 32_000 and seconds(name, shape(size)) < LEAST_SECONDS:
        size *= 2
    return size
