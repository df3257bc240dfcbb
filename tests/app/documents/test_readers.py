# SPDX-License-Identifier: Apache-2.0
"""Files of all types are read as people read them."""

import io
import itertools
import json

import pytest

from app.documents import readers
from app.documents.readers import UnreadableFileError, read
from tests.app.documents.files import archive, cell, docx, epub, message, paragraph, pptx, shape, xhtml, xlsx
from tests.app.pdfs import make_pdf


def text(file: bytes | str, name: str) -> str:
    return read(file.encode() if isinstance(file, str) else file, name).text.strip()


def html(page: str | bytes) -> str:
    return text(page, "a.html")


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        ("<html><head><title>Hours</title><body><h1>Hours</h1><p>Open at nine.", "# Hours\n\nOpen at nine."),
        ("<ul><li>one<li>two<ul><li>a<li>b</ul><li>three</ul>", "- one\n- two\n  - a\n  - b\n- three"),
        ("<p>one<p>two<div>three</div>four<section>five</section>", "one\n\ntwo\n\nthree\n\nfour\n\nfive"),
        ("<dl><dt>A<dd>apple<dt>B<dd>bee</dl>", "A\n\napple\n\nB\n\nbee"),
        ("<p>320<sup>1</sup> meters, 10<sup>6</sup>", "320^1 meters, 10^6"),
        ("<p>H<sub>2</sub>O, 101<sub>2</sub>", "H2O, 101_2"),
        ("<p>Set PUMP_MAX_PRESSURE to *5* in [a] #1", "Set PUMP_MAX_PRESSURE to *5* in [a] #1"),
        ("<p>AT&T &copy 2020 &amp &lt b &#x80; &#128512;", "AT&T © 2020 & < b € 😀"),
        ("<p>a<!-- x > y -- > z</p> --><p>b", "a\n\nb"),
        ("<p>a<script>if (a<b) x('<p>')</script>b<style>p{}</style><template>t</template>", "ab"),
        ("<p>a<noscript>no</noscript><iframe src=x>foo</iframe>b<a href=http://x>link</a>", "ablink"),
        ("<p><img alt=graph src=data:image/png;base64,QQ==>", "graph"),
        ("<pre><code class=language-sh>ls\n\n  -l\n</code></pre>", "```sh\nls\n\n  -l\n```"),
        ("<pre>```\nx\n```</pre>", "````\n```\nx\n```\n````"),
        ("<blockquote><p>q<pre># no\n  y</pre></blockquote>", "> q\n>\n> ```\n> # no\n>   y\n> ```"),
        ("<ruby>漢<rp>(</rp><rt>kan</rt><rp>)</rp></ruby>", "漢(kan)"),
        ("<p>a<br>b<br><br>c", "a\nb\n\nc"),
        ("<h1>One<br>two</h1><p>three", "# One two\n\nthree"),
        ("<math><msup><mi>x</mi><mn>2</mn></msup><mfrac><mn>1</mn><mn>3</mn></mfrac></math>", "x^21/3"),
        ("<math><msqrt><mn>2</mn></msqrt><msub><mi>x</mi><mn>1</mn></msub></math>", "√2x_1"),
        (
            "<math><msubsup><mi>x</mi><mn>1</mn><mn>2</mn></msubsup><msqrt><mi>a</mi><mi>b</mi></msqrt></math>",
            "x_1^2√(ab)",
        ),
        (
            "<math><mfrac><mrow><mi>a</mi><mo>+</mo><mn>1</mn></mrow><mn>2</mn></mfrac></math>",
            "(a+1)/2",
        ),
        ("<math><mtable><mtr><mtd>1<mtd>2</mtable></math>", "1 2"),
        ("<p><b>Note:</b> a<i>b</i> <em>(c)</em> <strong>Grüße:</strong>", "Note: ab (c) Grüße:"),
        ("<p>Price <del>100</del> <s>é:</s> <ins>80</ins>", "Price ~~100~~ ~~é:~~ 80"),
        ("<p>Name <input value=Ada><input type=hidden value=x>!", "Name Ada !"),
        (
            "<p>Name<input value=Ada>Note<textarea>typed</textarea><button>Go</button><button>Stop",
            "Name Ada Note typed Go Stop",
        ),
        ("a<form>b<fieldset><legend>c</legend>d</fieldset></form><center>e</center>f", "a\n\nb\n\nc\n\nd\n\ne\n\nf"),
        ("<xmp><b>\n  x</b></xmp><dir><li>y</dir>", "```\n<b>\n  x</b>\n```\n\n- y"),
        ("<svg><title>Plan</title><text>Door</text><text>Lid<tspan>s</tspan></text></svg>", "Plan Door Lids"),
        ("<p>a<span hidden>b</span><span style='display: none'>c</span>d<p hidden=until-found>e", "ad\n\ne"),
        ("<body style=display:none><div role=tabpanel hidden>On macOS</div>", "On macOS"),  # a click opens it
        ("<p><input type=CHECKBOX checked>a <input type=radio>b", "[x] a [ ] b"),
        ("<p>re&shy;set", "reset"),
        ("<head><title>Emergency: 4711</title></head><body></body>", "Emergency: 4711"),
        ("<p>a\x0cb\x00c", "a bc"),
        ("\ufeff<p>\ufeffa<p>&#xFEFF;b", "a\n\nb"),
        ("<select><option>red<option>blue</select>", "red\nblue"),
        ("<select><optgroup label=Warm><option>red<option>pink</select>", "Warm red\npink"),
        (xhtml("<p>hi<br/>you<script src='x'/></p><p>there</p>"), "hi\nyou\n\nthere"),
        (xhtml("<p>hi</p><p/>you").encode("utf-16"), "hi\n\nyou"),
        (xhtml("<p>if <![CDATA[a < b[0]] && c]]></p><p>x</p>"), "if a < b[0]] && c\n\nx"),
    ],
)
def test_html_is_what_browsers_show(page, expected):
    assert html(page) == expected


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ("<tr><td>a<td>b<tr><td>c<td>d", "| a | b |\n| --- | --- |\n| c | d |"),
        (
            "<tr><th>x|y<th>z<tr><td><pre>a\n  b</pre><td><p>c</p><p>d</p>",
            "| x\\|y | z |\n| --- | --- |\n| a b | c d |",
        ),
        ("<tr><td>a<br>b<td><ul><li>c<li>10<sup>6</sup></ul><tr><td>e", "| a b | c 10^6 |\n| --- | --- |\n| e |  |"),
        (
            "<tr><th colspan=2>Size<th><tr><td rowspan=2>Pump<td>1<td>x<tr><td>2<td>y",
            "| Size | Size |  |\n| --- | --- | --- |\n| Pump | 1 | x |\n| Pump | 2 | y |",
        ),
        ("<tr><td>a<td><td>b<tr><td><td><td><tr><td>c<td><td>d", "| a | b |\n| --- | --- |\n| c | d |"),
        ("<caption>Sizes</caption><tr><td>a<td>b<tr><td>c<td>d", "Sizes\n\n| a | b |\n| --- | --- |\n| c | d |"),
        ("<tr><td>a<script>x</script><td>b<style>y</style><tr><td>c<td>d", "| a | b |\n| --- | --- |\n| c | d |"),
        ("<colgroup><col><col></colgroup><tr><td>a<td>b<tr><td>c<td>d", "| a | b |\n| --- | --- |\n| c | d |"),
        ("<tr><tr><tr><td>a<td>b<tr><td><img alt=yes src=x><td>d", "| a | b |\n| --- | --- |\n| yes | d |"),
        # Of tables that lay out the page, the parts are read.
        ("<tr><td><h1>T</h1><p>x<td><table><tr><td>1<td>2<tr><td>3<td>4</table>", None),
        ("<tr><td><pre>1\n2</pre><td><pre>def f():\n    pass</pre>", "```\n1\n2\n```\n\n```\ndef f():\n    pass\n```"),
        ("<tr><td>one<tr><td>two", "one\n\ntwo"),
    ],
)
def test_tables_stay_tables(table, expected):
    assert html(f"<table>{table}</table>") == (expected or "# T\n\nx\n\n| 1 | 2 |\n| --- | --- |\n| 3 | 4 |")


def test_each_part_of_a_long_table_has_the_header():
    rows = [f"{number},{number * 'x'}" for number in range(60)]
    parts = text("Number,Name\n" + "\n".join(rows), "a.csv").split("\n\n")
    assert len(parts) > 2
    assert all(part.startswith("| Number | Name |\n| --- | --- |\n| ") for part in parts)
    assert max(map(len, parts)) < 1000
    kept = [line for part in parts for line in part.split("\n")[2:]]
    assert kept == [f"| {row.replace(',', ' | ')} |" for row in rows]


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ('Name;Price\n"Pump;";12,5\n"a\nb";3', "| Name | Price |\n| --- | --- |\n| Pump; | 12,5 |\n| a b | 3 |"),
        ('a,b\n1,"x ""q"" | y"', '| a | b |\n| --- | --- |\n| 1 | x "q" \\| y |'),
        ("a\tb\n1\t2", "| a | b |\n| --- | --- |\n| 1 | 2 |"),
        ("Prices\n\nName;Price\nPump, big;3", "| Prices |  |\n| --- | --- |\n| Name | Price |\n| Pump, big | 3 |"),
        ("Name, first;Price\nA;3", "| Name, first | Price |\n| --- | --- |\n| A | 3 |"),
        ("a;b\n1,5;2,5\n2,5;3,5", "| a | b |\n| --- | --- |\n| 1,5 | 2,5 |\n| 2,5 | 3,5 |"),
        ('a, b\n1, "x, y"', "| a | b |\n| --- | --- |\n| 1 | x, y |"),
        ("sep=|\na|b\n1|2", "| a | b |\n| --- | --- |\n| 1 | 2 |"),
        ("a,b\r\n1\r\n1,2,3\r\n", "| a | b |  |\n| --- | --- | --- |\n| 1 |\n| 1 | 2 | 3 |"),
    ],
)  # fmt: skip
def test_csv_is_a_table(file, expected):
    assert text(file, "a.CSV") == expected
    assert text("a\tb,c\n1\t2", "a.tsv") == "| a | b,c |\n| --- | --- |\n| 1 | 2 |"  # the name says so


GERMAN, CHINESE = "Grüße aus Köln, schöne Straße", "桥长三百二十米，建于一九八七年"
JAPANESE = "橋の長さは三百二十メートルです"


@pytest.mark.parametrize(
    ("words", "encodings"),
    [
        (GERMAN, ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "latin-1"]),  # some without BOM
        ("\ufeff" + GERMAN, ["utf-16-be"]),
        (f"{CHINESE}，有三座桥。", ["utf-16-le"]),
        (CHINESE, ["gb18030"]),
        (JAPANESE, ["shift_jis", "euc_jp", "iso-2022-jp"]),
        ("다리의 길이는 삼백이십 미터입니다", ["euc_kr"]),
        ("สะพานยาวสามร้อยยี่สิบเมตร", ["cp874"]),
        ("“Brand™” – €5", ["cp1252"]),
        ("Открыто с девяти часов", ["cp1251", "koi8_r"]),
    ],
)
def test_encodings(words, encodings):
    for encoding, name in itertools.product(encodings, ("a.txt", "a.html")):
        assert text(words.encode(encoding), name) == words.removeprefix("\ufeff"), (encoding, name)


def test_declarations_come_before_guesses():
    assert html("<meta charset=iso-8859-1><p>“Brand™”".encode("cp1252")) == "“Brand™”"
    assert html("<meta charset=shift_jis><p>日本".encode("shift_jis")) == "日本"
    declared = xhtml(f"<p>{GERMAN}</p>").replace('"1.0"', '"1.0" encoding="iso-8859-1"')
    assert html(declared.encode("latin-1")) == GERMAN
    assert html(f"<meta charset=utf-8><p>{GERMAN}".encode("latin-1")) == GERMAN  # a declaration that is wrong
    assert html("<p>Some English text.<p>Brand™ 👨‍👩‍👧".encode()) == "Some English text.\n\nBrand™ 👨‍👩‍👧"
    damaged = f"{GERMAN} ".encode() * 9 + b"\xff" + JAPANESE.encode()  # one character, not the others
    for name in ("a.txt", "a.html"):
        assert text(damaged, name) == f"{GERMAN} " * 9 + "\ufffd" + JAPANESE


def test_line_ends_marks_and_data_uris_are_cleaned_and_source_code_keeps_its_lines():
    printed = "\x1b]0;title\x07\x1b[?25l\x1b[2K\x1b[1;31mred\x1b[0m\x1b(B \x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\"
    assert text(printed, "a.log") == "red link"
    assert text("N\bNA\bAM\bME\bE _\bls", "a.txt") == "NAME ls"  # as manual pages print bold and underlined words
    assert text("a\r\n  b\rc\n\n    d\x0ce\ufefff\x07\x0bg", "a.txt") == "a\n  b\nc\n\n    d\nef g"
    picture = f"Blue.\n\n![photo](data:image/png;base64,{'QUJD' * 9999}==)\n\n[p]: data:image/svg+xml;utf8,%3Csvg%3E\n"
    assert text(picture, "a.md") == "Blue.\n\n![photo]()\n\n[p]:"
    for kept in ("The data:2020/2021,2022 shows", "metadata:text/plain,x"):
        assert text(kept, "a.txt") == kept
    code = "def f():\n    if x:\n\n        return 'data'\n"
    assert read(code.encode(), "dir/a.PY") == (code, False, ())


def test_pdf_pages_forms_and_hyphens():
    made = read(make_pdf(["Head", "Page one."], [], ["Head", "Page three."]), "a.pdf")
    assert made.text.split() == ["Head", "Page", "one.", "Head", "Page", "three."]
    assert [made.text[start : start + 4] for start in made.page_starts] == ["Head", "\n\nHe", "Head"]
    assert text(make_pdf(["The clean-", "ing of the x-", "Ray"]), "a.pdf") == "The cleaning of the x-Ray"
    assert text(make_pdf(["Your policy number:"], field="Number 7342"), "a.pdf").split("\n")[-1] == "Number 7342"
    boxes = make_pdf(["Smoker:", "Driver:"], field="7342", boxes={"smoker": True, "driver": False})
    assert text(boxes, "a.pdf").split("\n")[-3:] == ["7342", "[x] smoker", "[ ] driver"]
    assert text(make_pdf(["Locked."], password=""), "a.pdf") == "Locked."
    assert text(make_pdf(["Turned."], rotate=90), "a.pdf") == "Turned."


def test_documents_with_lists_tables_footnotes_and_changes():
    wide = cell(paragraph("c"), properties='<w:gridSpan w:val="2"/>')
    table = f"<w:tbl><w:tr>{cell(paragraph('a'))}{cell(paragraph('b|'))}</w:tr><w:tr>{wide}</w:tr></w:tbl>"
    power = (
        "<w:p><w:r><w:t>10</w:t></w:r><w:r><w:rPr><w:vertAlign w:val='superscript'/></w:rPr><w:t>6</w:t></w:r></w:p>"
    )
    changed = "<w:p><w:ins><w:r><w:t>new</w:t></w:r></w:ins><w:del><w:r><w:delText>old</w:delText></w:r></w:del></w:p>"
    note = '<w:footnote w:id="2">' + paragraph("The note says 4711.") + "</w:footnote>"
    body = paragraph("Pump", "Heading1") + paragraph("SET_MAX_VALUE.") + table + power + changed
    assert text(docx(body, note), "a.docx") == (
        "# Pump\n\nSET_MAX_VALUE.\n\n| a | b\\| |\n| --- | --- |\n| c | c |\n\n10^6\n\nnew\n\nThe note says 4711."
    )


def test_workbooks_with_formulas_and_merged_cells():
    def row(number: int, *cells: str) -> str:
        return f'<row r="{number}">{"".join(cells)}</row>'

    def words(place: str, value: str) -> str:
        return f'<c r="{place}" t="inlineStr"><is><t>{value}</t></is></c>'

    rows = [
        row(1, words("A1", "Item"), words("C1", "Price")),
        row(2, words("A2", "Pump"), '<c r="C2"><f>6*2</f><v>12.5</v></c>'),
        row(3, '<c r="C3"><v>3</v></c>'),
    ]
    merged = '<mergeCells><mergeCell ref="A2:A3"/></mergeCells>'
    sheets = {"Prices": f"<sheetData>{''.join(rows)}</sheetData>{merged}", "Two": f"<sheetData>{rows[0]}</sheetData>"}
    first, second = text(xlsx(**sheets), "a.xlsx").split("## Two\n\n")
    assert first == "## Prices\n\n| Item | Price |\n| --- | --- |\n| Pump | 12.5 |\n| Pump | 3 |\n\n"
    assert second.split() == ["Item", "Price"]


def test_all_rows_of_a_long_sheet_are_read():
    rows = "".join(f'<row r="{i}"><c r="A{i}"><v>{i}</v></c><c r="B{i}"><v>7</v></c></row>' for i in range(1, 10_002))
    name = '<row r="10002"><c r="A10002" t="inlineStr"><is><t>_a|b*</t></is></c></row>'
    made = text(xlsx(A=f"<sheetData>{rows}{name}</sheetData>"), "a.xlsx")
    assert made.startswith("## A\n\n| 1 | 7 |\n")
    assert made.endswith("| 10001 | 7 |\n| _a\\|b* |  |")


def test_slides_are_pages():
    made = read(pptx(shape("Pump", "title") + shape("It is blue."), shape("Valve", "title")), "a.pptx")
    assert made.text.strip() == "## Pump\n\nIt is blue.\n\n## Valve"
    assert [made.text[start:].split("\n")[0] for start in made.page_starts] == ["## Pump", "## Valve"]
    made = read(pptx("", shape("one"), "", shape("two")), "a.pptx")
    assert [made.text[start:].strip().split("\n")[0] for start in made.page_starts] == ["one", "one", "two", "two"]


def test_books_are_read_in_the_order_of_their_spine():
    chapters = {"b c.xhtml": xhtml("<h1>Two</h1><p>b</p>"), "a.xhtml": xhtml("<h1>One</h1>"), "nav.xhtml": xhtml("no")}
    assert text(epub(chapters, ["a.xhtml", "b c.xhtml"]), "a.epub") == "# One\n\n# Two\n\nb"


def test_messages_with_alternatives_and_attachments():
    made = text(message("Grüße", "It is 320.", "<p>It is <b>320</b>.", n_txt=b"Attached.", x_zip=b"PK"), "a.eml")
    head = "# Grüße\n\nFrom: ada@example.org\nTo: bob@example.org"
    assert made == f"{head}\n\nIt is 320.\n\n# n.txt\n\nAttached.\n\nAttachment: x.zip"
    assert text(message("Grüße", html="<p>10<sup>6</sup>"), "a.eml") == f"{head}\n\n10^6"
    for charset in ("unknown", "undefined", "\0"):
        given = f"Subject: x\nContent-Type: text/plain; charset={charset}\n\nGrüße, Köln"
        assert text(given.encode("latin-1"), "a.eml") == "# x\n\nGrüße, Köln"
    assert text(b"Content-Type: text/plain; charset=iso-8859-1\n\n\x93Brand\x94 \x80 5", "a.eml") == "“Brand” € 5"
    assert text("Content-Type: multipart/mixed\n\nIt is 320.", "a.eml") == "It is 320."


def test_a_broken_attachment_leaves_the_message():
    broken = {"a_docx": b"PK", "b_epub": archive({"META-INF/container.xml": "<"}), "c_ipynb": b"[" * 100_000}
    made = text(message("s", "It is 320.", **broken), "a.eml").split("\n\n")
    assert made[2:] == ["It is 320.", "Attachment: a.docx", "Attachment: b.epub", "Attachment: c.ipynb"]


def mixed(*parts: str, kind: str = "mixed") -> str:
    within = "".join(f"--{kind}\n{part}\n" for part in parts)
    return f"Content-Type: multipart/{kind}; boundary={kind}\n\n{within}--{kind}--\n"


def test_all_parts_of_messages_that_mail_programs_show():
    page = "Content-Type: text/html\n\n<p>Hi 42<img src=cid:1>"
    picture = 'Content-Type: image/png; name="p.png"\nContent-Disposition: inline\n\nABC'
    note = 'Content-Type: text/plain; name="n.txt"\nContent-Disposition: inline; filename="n.txt"\n\nA note.'
    plain = "Content-Type: text/plain\n\n"
    made = mixed(mixed(page, picture, kind="related"), note, f"{plain}After it.")
    assert text(f"Subject: s\n{made}", "a.eml") == "# s\n\nHi 42\n\n# n.txt\n\nA note.\n\nAfter it."
    assert text(mixed(page, f"{plain}Plain.", kind="alternative"), "a.eml") == "Plain."
    assert text(mixed(f"{plain} ", page, kind="alternative"), "a.eml") == "Hi 42"
    inner = "Content-Type: message/rfc822\n\nSubject: Inner\n\nBelow."
    assert text(mixed(f"{plain}See", inner), "a.eml") == "See\n\n# Inner\n\nBelow."


def test_notebooks_with_outputs():
    table = "<table><tr><td>a<td>b<tr><td>1<td>2"
    outputs = [
        {"output_type": "stream", "text": ["out 42\n"]},
        {"output_type": "execute_result", "data": {"text/plain": ["<df>"], "text/html": [table]}},
        {"output_type": "display_data", "data": {"image/png": "iVBO", "application/json": {"a": 1}}},
        {"output_type": "display_data", "data": {"text/plain": ["<Markdown>"], "text/markdown": ["It is ", "**7**."]}},
        {"output_type": "display_data", "data": {"text/plain": ["<HTML>"], "text/html": ["<b>It is 8.</b>"]}},
        {"output_type": "error", "traceback": ["\x1b[0;31mValueError\x1b[0m: no", "line 2"]},
    ]
    cells = [
        {"cell_type": "markdown", "source": ["# Title\n", "Half \ud83d and \ud83d\ude00."]},
        {"cell_type": "code", "source": "def f():\n    return '```'\n", "outputs": outputs},
    ]  # fmt: skip
    notebook = {"metadata": {"kernelspec": {"language": "python"}}, "cells": cells}
    assert text(json.dumps(notebook), "a.ipynb") == (
        "# Title\nHalf \ufffd and 😀.\n\n````python\ndef f():\n    return '```'\n````\n\n```\nout 42\n```\n\n"
        "| a | b |\n| --- | --- |\n| 1 | 2 |\n\nIt is **7**.\n\nIt is 8.\n\n```\nValueError: no\nline 2\n```"
    )


def test_notebooks_that_lack_fields():
    output = {"output_type": "display_data", "data": None, "text": None, "traceback": None}
    cells = [{"cell_type": "markdown", "source": None}, {"cell_type": "code"}, {"source": ["It is ", "320."]}]
    code = [{"cell_type": "code", "source": "x", "outputs": outputs} for outputs in (None, [output])]
    for about in (None, {"kernelspec": None, "language_info": {"name": None}}):
        made = text(json.dumps({"metadata": about, "cells": [*cells, *code]}), "a.ipynb")
        assert made == "It is 320.\n\n```\nx\n```\n\n```\nx\n```"


def test_rich_text_with_tables_and_footnotes():
    rows = "".join(rf"\trowd\cellx1\cellx2 {a}\cell {b}\cell\row " for a, b in ("ab", "cd"))
    made = rf"{{\rtf1\ansi\ansicpg1252 Caf\'e9 \u8364? \u-10179?\u-8704?{{\footnote note 5}}\par {rows}\pard end}}"
    assert text(r"{\rtf1 10{\super\fs20 6} litres{\super\chftn }}", "a.rtf") == "10^6 litres"
    assert text(made, "a.rtf") == "Café € 😀\nnote 5\n\n| a | b |\n| --- | --- |\n| c | d |\n\nend"


@pytest.mark.parametrize(
    ("file", "name", "message"),
    [
        *((file, "a.md", "no text in the file") for file in (b"", b" \n")),
        (b"\x00\x01\xfe", "a.txt", "the file is not text"),
        *((file, "a.pdf", "this is not a PDF that can be read") for file in (b"not a PDF", b"%PDF-1.7\n1 0 obj")),
        (make_pdf([]), "a.pdf", "no text in this PDF; scans are read with the extra ocr"),
        (make_pdf(["a"], password="secret"), "a.pdf", "this PDF is encrypted"),
        *((file, "a.docx", "this is not a docx file that can") for file in (b"PK\x03\x04", docx(paragraph("x"))[:400])),
        (b"PK", "a.epub", "this is not a file that can be read"),
        *((file, "a.ipynb", "this is not a notebook that can be read") for file in (b"{", b'{"cells": [1]}')),
        (b"text", "a.rtf", "this is not an RTF file"),
        (b"<script>x</script>", "a.html", "no text in the file"),
    ],
    # Files of some libraries differ each time, and tests must have the same names in all of pytest's processes.
    ids=itertools.count(),
)
def test_what_has_no_text_says_why(file, name, message):
    with pytest.raises(UnreadableFileError, match=message):
        read(file, name)


def test_limits(monkeypatch):
    monkeypatch.setattr(readers, "MAX_PAGES", 2)
    with pytest.raises(UnreadableFileError, match="this PDF has 3 pages; at most 2 are read"):
        read(make_pdf(["a"], ["b"], ["c"]), "a.pdf")
    monkeypatch.setattr(readers, "MAX_CHARACTERS", 1 << 20)
    for name, file in {"a.pdf": make_pdf(["a" * 1000] * 700, ["b" * 1000] * 700), "a.txt": b"a" * (1 << 21)}.items():
        with pytest.raises(UnreadableFileError, match="more than 1 million characters"):
            read(file, name)


def test_scans_are_read_by_ocr_where_it_is_installed(monkeypatch):
    pytest.importorskip("rapidocr", reason="needs the extra ocr")
    from PIL import Image, ImageDraw, ImageFont

    page = Image.new("RGB", (1240, 1754), "white")
    ImageDraw.Draw(page).text((100, 100), "The code is 7342.", fill="black", font=ImageFont.load_default(40))
    scan = io.BytesIO()
    page.save(scan, "PDF")
    assert read(scan.getvalue(), "a.pdf").text.strip() == "The code is 7342."
    monkeypatch.setattr(readers, "has_ocr", lambda: False)
    with pytest.raises(UnreadableFileError, match="extra ocr"):
        read(scan.getvalue(), "a.pdf")
