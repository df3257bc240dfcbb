# SPDX-License-Identifier: Apache-2.0
"""Reads files of all types as text: Markdown, where the type has headings and tables.

Runs in the processes of ``extraction.py``: a file may make any parser fail, hang or take all memory.
"""

import codecs
import csv
import ctypes
import email
import email.policy
import importlib.util
import io
import itertools
import json
import posixpath
import re
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from email.headerregistry import HeaderRegistry
from functools import cache
from pathlib import PurePath
from typing import Any, Final, Literal, NamedTuple
from urllib.parse import unquote
from xml.etree import ElementTree

EDITION: Final = 3
"""Of what the readers and the splitter make of a file. Greater: files are read again, whose passages may differ."""
MAX_PAGES = 2000
MAX_CHARACTERS = 16 << 20
MAX_ATTACHMENTS = 100
_TABLE_CHARACTERS: Final = 800
"""Longer tables are written as several, each with the header, since a passage rarely holds all of one."""
_FIRST_LINES: Final = 50
"""Of a table, which tell what separates its cells."""
_OCR_SCALE: Final = 2.0
"""Pixels per point of a page: 144 DPI."""
_IN_LAYOUT: Final = "table, h1, h2, h3, h4, h5, h6"
"""A table with one of these inside only lays out the page."""
_MOST_EMPTY: Final = 20
"""Places per cell of a table, which the cells don't span."""
_MAX_SPAN: Final = 100
"""Rows or columns that a cell may span."""
_HEADER_CHARACTERS: Final = 2000
"""Of an e-mail's header; the rest of a longer one is left out."""
_DATA_URI: Final = re.compile(
    r"(?<!\w)data:(?:application|audio|font|image|model|text|video)/[\w.+-]++"
    r"(?:;(?!base64,)[\w.+=-]++)*+(?:;base64)?+,[^\s\"'()<>]*+"
)
_INTACT: Final = 4
"""Letters beyond ASCII for each damaged one, in text that is UTF-8 nevertheless."""
_JAPANESE: Final = b"\x1b$"
"""Begins Japanese in ISO-2022-JP, whose bytes are ASCII."""
_BYTES_PER_STOP: Final = 100
_HEAD_BYTES: Final = 4096
"""Of a page, where its encoding is declared."""
_INVISIBLE: Final = re.compile(r"[\x00-\x08\x0e-\x1f\x7f\xad\ufeff\ufffe\uffff]")
"""Control characters and soft hyphens."""
_HYPHEN: Final = re.compile("[\x02\ufffe]\\s*(\\S?)")
"""How PDFium writes a hyphen at the end of a line."""
_SELF_CLOSED: Final = re.compile(
    r"<(?!(?:br|hr|img|input|link|meta|col|wbr)\b)([a-zA-Z][\w:.-]*+)((?:[^<>/]|/(?!>))*+)/>"
)
_BOM: Final = re.compile("\ufeff|&#(?:65279|x0*+feff);", re.IGNORECASE)
"""Invisible, but written as a number at the beginning of a block."""
_CDATA: Final = re.compile(r"<!\[CDATA\[((?:[^\]]|\](?!\]>))*+)(?:\]\]>|\Z)")
"""Text that HTML, unlike XHTML, takes for a comment."""
_UNSEEN: Final = (
    "script, style, noscript, iframe, rp, annotation, annotation-xml, :is([hidden], [style*='display:none' i], "
    "[style*='display: none' i]):not(html, body, [role], [hidden=until-found i])"
)
"""What browsers don't show. With a role, it is a panel that a click opens."""
_SHOWN_AS: Final = {
    **dict.fromkeys(("center", "dialog", "fieldset", "form", "hgroup", "legend", "search"), "div"),
    **dict.fromkeys(("listing", "xmp"), "pre"),
    "dir": "ul",
}
"""Elements by those that browsers show alike."""
_APART: Final = "button, textarea, select, optgroup, progress, meter, svg text, svg title, mtd"
"""Elements that are apart from the words beside them on the page."""
_MARKS: Final = {"sup": "^", "sub": "_"}
"""Text for what only its place on the page tells."""
_FORMULAS: Final = {
    "msqrt": ("√",),
    "msup": ("", "^"),
    "mfrac": ("", "/"),
    **dict.fromkeys(("msub", "munder"), ("", "_")),
    **dict.fromkeys(("msubsup", "munderover"), ("", "_", "^")),
}
"""The same, before each part of a formula."""
_UNSEEN_INPUTS: Final = ("hidden", "password", "image", "file", "color", "range")
_HEADERS: Final = HeaderRegistry()
_MAIL: Final = email.policy.default.clone(header_factory=lambda name, value: _HEADERS(name, value[:_HEADER_CHARACTERS]))
"""The standard library's parser of headers is quadratic."""
_CUT_OFF: Final = "rows not shown — worksheet truncated"
"""What office-oxide says below the first 10,000 rows of a sheet."""
_TERMINAL: Final = re.compile(
    r"\x1b\[[0-?]*+[ -/]*+[@-~]|\x1b\][^\x07\x1b\n]*+(?:\x07|\x1b\\)?|\x1b[ -/]*+[0-~]|[^\n\x08]\x08"
)
"""Colours, other commands and titles; a character that the next one is printed over."""
_RAISED: Final = re.compile(r"\\super(?:\\[a-z]++-?+\d*+){0,8}+ (?=\w)")
"""Before an exponent in rich text."""
_ROW: Final = re.compile(r"[^\n|]*\|[^\n]*\|")


class UnreadableFileError(ValueError):
    """A file without text that can be read; the message says why."""


class Text(NamedTuple):
    """A file's text. ``page_starts`` are places in it, of files with pages."""

    text: str
    is_markdown: bool = False
    page_starts: Sequence[int] = ()


class ShownText(Text):
    """Markdown that is made of what people see: a tag in it is a word."""


def suffix_of(name: str) -> str:
    """The suffix that tells a file's type."""
    return PurePath(name).suffix.lower()


def has_ocr() -> bool:
    """Whether scans are read: the extra ``ocr`` is installed."""
    return importlib.util.find_spec("rapidocr") is not None


def read(file: bytes, name: str) -> Text:
    """The text of a file with one of the suffixes in ``READERS``; raises :class:`UnreadableFileError`.

    Pages of PDF files without text are read by OCR, where :func:`has_ocr`.
    """
    reader = READERS[suffix_of(name)]
    made = reader(file)
    made = Text(made) if isinstance(made, str) else made
    if not made.text.strip():
        raise UnreadableFileError("there is no text in the file")
    _check_length(len(made.text))
    return made


def read_text(file: bytes) -> str:
    """Text in UTF-8 or UTF-16, else in the encoding that fits its bytes best."""
    text = _clean(_decoded(file))
    _check_length(len(text))  # before anything is made of it, which takes more memory
    return text


def read_markdown(file: bytes) -> Text:
    """Markdown as it is."""
    return Text(read_text(file), is_markdown=True)


def read_csv(file: bytes, separators: str = "\t;,|") -> Text:
    """A table, separated as most of its first lines are."""
    text = read_text(file)
    csv.field_size_limit(MAX_CHARACTERS)
    if declared := re.match(r"sep=(.)\n", text):  # Excel's own
        text, separator = text[declared.end() :], declared[1]
    else:
        first = [*itertools.islice(io.StringIO(text), _FIRST_LINES)]
        separator = max(
            separators, key=lambda each: _most_alike(csv.reader(first, delimiter=each, skipinitialspace=True))
        )
    return Text(_table(csv.reader(io.StringIO(text), delimiter=separator, skipinitialspace=True)))


def _most_alike(rows: Iterable[Sequence[str]]) -> int:
    """The most rows with the same number of cells, of those with several."""
    return max(Counter(len(row) for row in rows if len(row) > 1).values(), default=0)


def read_html(file: bytes | str) -> Text:
    """A page as browsers read it, without links and pictures."""
    import turbohtml

    if isinstance(file, bytes):
        head = turbohtml.parse(file[:_HEAD_BYTES], detect_encoding=True, positions=False)
        is_sure = head.encoding_confidence == "certain" and head.encoding != "UTF-8"  # which may be declared wrongly
        with suppress(UnreadableFileError, LookupError):
            file = file.decode(f"whatwg-{head.encoding}") if is_sure else _decoded(file)
    if isinstance(file, str) and "http://www.w3.org/1999/xhtml" in file[:_HEAD_BYTES]:
        file = _SELF_CLOSED.sub(r"<\1\2></\1>", _CDATA.sub(lambda data: turbohtml.escape(data[1]), file))
    file = _BOM.sub("", file) if isinstance(file, str) else file
    page = turbohtml.parse(file, detect_encoding=True, positions=False)
    for unread in page.select(_UNSEEN):
        unread.decompose()
    for element in page.select(", ".join(_SHOWN_AS)):
        element.tag = _SHOWN_AS[element.tag]
    for element in page.select(", ".join(_MARKS)):
        before = element.previous_sibling
        # Only behind a number a subscript changes what is read: 101₂, but H₂O.
        if element.tag == "sup" or (isinstance(before, turbohtml.Text) and before.text[-1:].isdigit()):
            element.insert(0, turbohtml.Text(_MARKS[element.tag]))
    for element in page.select(", ".join(_FORMULAS)):
        parts = [element] if element.tag == "msqrt" else _elements(element)
        for part, mark in zip(parts, _FORMULAS[element.tag], strict=False):
            is_one = len([*_elements(part)]) < 2
            _put_around(part, mark if is_one else f"{mark}(", "" if is_one else ")")
    for element in page.select("input"):
        element.replace_with(turbohtml.Text(_shown(element.attrs)))
    for element in page.select("img"):
        element.replace_with(turbohtml.Text(str(element.attrs.get("alt") or "")))
    for element in page.select(_APART):
        _put_around(element, f" {element.attrs.get('label') or ''} ", " ")
    for element in page.select(":is(h1, h2, h3, h4, h5, h6) br"):
        element.replace_with(turbohtml.Text(" "))
    for element in page.select("rt"):
        _put_around(element, "(", ")")
    for table in page.select("table"):
        _prepare_table(table)
    title = page.select_one("head > title")
    return ShownText(_clean(page.to_markdown(_style()) or (title.text if title else "")), is_markdown=True)


def read_pdf(file: bytes) -> Text:
    """The text of all pages, with the values of form fields."""
    import pypdfium2

    try:
        document = pypdfium2.PdfDocument(file)
    except pypdfium2.PdfiumError as error:
        if "password" in str(error):
            raise UnreadableFileError("this PDF is encrypted: remove its password first") from error
        raise UnreadableFileError(f"this is not a PDF that can be read: {error}") from error
    if len(document) > MAX_PAGES:
        raise UnreadableFileError(f"this PDF has {len(document)} pages; at most {MAX_PAGES} are read")
    has_form = document.get_formtype() != 0
    if has_form:
        document.init_forms()
    made = _paged(_page_text(document, number, has_form=has_form) for number in range(len(document)))
    if not made.text.strip():
        words = "" if has_ocr() else "; scans are read with the extra ocr: pip install 'tessera-rag[ocr]'"
        raise UnreadableFileError(f"there is no text in this PDF{words}")
    return made


def read_office(file: bytes, type: Literal["docx", "pptx", "xlsx"]) -> Text:
    """A document, the slides of a presentation, or the sheets of a workbook."""
    import office_oxide
    from markdown_it import MarkdownIt

    try:
        document = office_oxide.Document.from_bytes(file, type)
        html = document.to_html()
    except office_oxide.OfficeOxideError as error:
        raise UnreadableFileError(f"this is not a {type} file that can be read: {error}") from error
    if type == "docx":
        return read_html(html)
    if type == "xlsx" and _CUT_OFF in html:  # only its Markdown has all rows
        html = MarkdownIt().enable("table").disable(["emphasis", "entity"]).render(document.to_markdown())
    parts = (read_html(part).text for part in html.split("<hr />"))
    if type == "xlsx":
        return ShownText(_joined(parts), is_markdown=True)
    # Slides without text are no parts of the HTML, but they count.
    slides = [next(parts, "") if each["elements"] else "" for each in json.loads(document.to_ir_json())["sections"]]
    made = _paged((*slides, *parts))
    return ShownText(made.text, is_markdown=True, page_starts=made.page_starts)


def read_epub(file: bytes) -> Text:
    """A book's chapters in the order of its spine."""
    book = _archive(file)
    container = ElementTree.fromstring(book.read("META-INF/container.xml"))
    root = next(each.attrib["full-path"] for each in container.iterfind(".//{*}rootfile"))
    package = ElementTree.fromstring(book.read(root))
    hrefs = {each.get("id"): each.get("href", "") for each in package.iterfind(".//{*}manifest/{*}item")}
    spine = (hrefs.get(each.get("idref"), "") for each in package.iterfind(".//{*}spine/{*}itemref"))
    names = [posixpath.normpath(posixpath.join(posixpath.dirname(root), unquote(href))) for href in spine]
    inside = set(book.namelist())
    chapters = (read_html(book.read(name)).text for name in names if name in inside)
    return ShownText(_joined(chapters), is_markdown=True)


def read_email(file: bytes) -> Text:
    """A message and its attachments."""
    return ShownText(_message(email.message_from_bytes(file, policy=_MAIL)), is_markdown=True)


def read_notebook(file: bytes) -> Text:
    """A notebook's cells: text, code, and what the code printed."""
    try:
        notebook = json.loads(file)
        about = notebook.get("metadata") or {}
        kernel, language_info = about.get("kernelspec") or {}, about.get("language_info") or {}
        language = kernel.get("language") or language_info.get("name") or ""
        cells = [part for cell in notebook["cells"] for part in _cell(cell, language)]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnreadableFileError(f"this is not a notebook that can be read: {error!r}") from error
    return Text(_joined(map(_clean, cells)), is_markdown=True)


def read_rtf(file: bytes) -> Text:
    """Rich text, with its tables and footnotes."""
    from striprtf.striprtf import rtf_to_text

    if not file.lstrip().startswith(b"{\\rtf"):
        raise UnreadableFileError("this is not an RTF file")
    marked = file.decode("latin-1").replace("\\footnote", "\\par")  # else footnotes are left out
    marked = _RAISED.sub(rf"\g<0>{_MARKS['sup']}", marked)
    lines = _clean(rtf_to_text(marked, errors="replace")).split("\n")
    parts = itertools.groupby(lines, lambda line: _ROW.fullmatch(line) is not None or line.endswith("|"))
    return Text(
        "\n".join(
            f"\n{_table(line.removesuffix('|').split('|') for line in group)}\n" if is_table else "\n".join(group)
            for is_table, group in parts
        )
    )


_SOURCE: Final = (
    ".adoc .bash .bat .c .cc .cfg .clj .cmake .conf .cpp .cs .css .cxx .dart .diff .erl .ex .exs .f90 .fish .go "
    ".gradle .groovy .h .hpp .hs .ini .java .jl .js .json .jsonl .jsx .kt .kts .less .lisp .lua .m .mjs .ml .mm "
    ".nim .org .patch .php .pl .pm .properties .proto .ps1 .py .pyi .r .rb .rs .rst .sass .scala .scss .sh .sql "
    ".swift .tex .tf .toml .ts .tsx .vb .vue .xml .yaml .yml .zig .zsh"
)
READERS: Final[dict[str, Callable[[bytes], Text | str]]] = {
    **dict.fromkeys((".txt", ".text", ".log"), read_text),
    **dict.fromkeys((".md", ".markdown"), read_markdown),
    **dict.fromkeys((".html", ".htm", ".xhtml"), read_html),
    ".csv": read_csv,
    ".tsv": lambda file: read_csv(file, "\t"),
    ".pdf": read_pdf,
    ".docx": lambda file: read_office(file, "docx"),
    ".pptx": lambda file: read_office(file, "pptx"),
    ".xlsx": lambda file: read_office(file, "xlsx"),
    ".epub": read_epub,
    ".eml": read_email,
    ".ipynb": read_notebook,
    ".rtf": read_rtf,
    **dict.fromkeys(_SOURCE.split(), read_text),
}
"""By the suffix of a file's name, in lower case."""


def _decoded(file: bytes, declared: str | None = None) -> str:
    """Text in the declared encoding or UTF-8, also if a little of it is damaged; else in the one that fits best."""
    from turbohtml.detect import detect

    try:
        # Text that is declared as Latin-1 is Windows's, for browsers and mail programs too.
        is_latin = declared and codecs.lookup(declared).name == "iso8859-1"
        undeclared = "iso2022_jp_ext" if _JAPANESE in file else "utf-8-sig"
        text = file.decode("cp1252" if is_latin else declared or undeclared)
    except (ValueError, LookupError):
        text = file.decode("utf-8-sig", errors="replace")
        damaged = text.count("\ufffd")
        if len(text) - len(text.encode("ascii", "ignore")) < _INTACT * damaged:
            guessed = detect(file.replace(b"<meta", b"<")).codec  # which would believe what a page declares
            text = file.decode(guessed or "latin-1", errors="replace")
    return _of_wide_characters(file) if "\0" in text else text


def _of_wide_characters(file: bytes) -> str:
    """UTF-32 or UTF-16, told without a BOM by its blanks and stops."""
    best, most = "", len(file) // _BYTES_PER_STOP
    for encoding in ("utf-32", "utf-16-le", "utf-16-be"):
        with suppress(UnicodeDecodeError):
            text = file.decode(encoding)
            if (stops := sum(map(text.count, " \n,.，。、"))) > most:
                best, most = text, stops
    if not best or "\0" in best:
        raise UnreadableFileError("the file is not text")
    return best


def _clean(text: str) -> str:
    """Text with LF alone, without control characters, halves of surrogate pairs and data URIs."""
    text = text.replace("\r\n", "\n").replace("\r", "\n").replace("\f", "\n").replace("\v", " ")
    text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # joins pairs
    return _DATA_URI.sub("", _INVISIBLE.sub("", _TERMINAL.sub("", text)))


def _check_length(length: int) -> None:
    if length > MAX_CHARACTERS:
        raise UnreadableFileError(f"there are more than {MAX_CHARACTERS >> 20} million characters in this file")


def _joined(parts: Iterable[str]) -> str:
    return "\n\n".join(part.strip("\n") for part in parts if part.strip())


def _paged(pages: Iterable[str]) -> Text:
    """Pages with a blank line between them."""
    parts, starts, length = [], [], 0
    for page in pages:
        starts.append(length)
        parts.append(page.strip("\n") + "\n\n")
        length += len(parts[-1])
        _check_length(length)
    return Text("".join(parts), page_starts=starts)


def _table(rows: Iterable[Sequence[str]]) -> str:
    """Rows as a Markdown table, without empty rows and columns. Rows shorter than others stay so: most may be."""
    cells = [[" ".join(cell.replace("|", "\\|").split()) for cell in row] for row in rows]
    cells = [row for row in cells if any(row)]
    if not cells:
        return ""
    used = {column for row in cells for column, cell in enumerate(row) if cell}
    cells[0].extend([""] * (max(used) + 1 - len(cells[0])))
    kept = ((cell for column, cell in enumerate(row) if column in used) for row in cells)
    first, *lines = (f"| {' | '.join(row)} |\n" for row in kept)
    header = f"{first}|{' --- |' * len(used)}\n"
    tables, room = [header], _TABLE_CHARACTERS
    for line in lines:
        if room < len(line) and room < _TABLE_CHARACTERS and len(header) < _TABLE_CHARACTERS:
            tables.append(f"\n{header}")
            room = _TABLE_CHARACTERS
        tables.append(line)
        room -= len(line)
    return "".join(tables).rstrip("\n")


def _prepare_table(table: Any) -> None:
    """Opens a table that only lays out the page; bounds the cells of another, and separates what is in them."""
    import turbohtml

    if (caption := next((each for each in _elements(table) if each.tag == "caption"), None)) is not None:
        caption.tag = "p"
        table.insert_before(caption.extract())
    rows = [cells for part in _elements(table) for row in _elements(part) if (cells := [*_elements(row)])]
    cells = [cell for row in rows for cell in row]
    is_sparse = len(rows) * max(map(len, rows), default=0) > _MOST_EMPTY * len(cells)
    if len(rows) == 1 or len(cells) == len(rows) or is_sparse or table.select_one(_IN_LAYOUT) is not None:
        for element in (table, *cells):
            element.tag = "div"
        return
    for cell in cells:
        for span in ("rowspan", "colspan"):
            given = cell.attrs.get(span)
            if given is not None and given.isdecimal() and int(given) > _MAX_SPAN:
                cell.attrs[span] = str(_MAX_SPAN)
        for inner in cell.select("br, p, div, li, dt, dd, pre"):
            inner.insert_before(turbohtml.Text(" "))


def _shown(field: Mapping[str, Any]) -> str:
    """The text that a form's field shows."""
    kind = str(field.get("type", "text")).lower()
    if kind in ("checkbox", "radio"):
        return " [x] " if "checked" in field else " [ ] "
    return "" if kind in _UNSEEN_INPUTS else f" {field.get('value') or ''} "


def _put_around(element: Any, before: str, behind: str) -> None:
    import turbohtml

    element.insert(0, turbohtml.Text(before))
    element.append(turbohtml.Text(behind))


def _elements(parent: Any) -> Iterator[Any]:
    import turbohtml

    return (each for each in parent.children if isinstance(each, turbohtml.Element))


def _style() -> Any:
    from turbohtml import Markdown

    return Markdown(
        links=Markdown.Links(ignore=True),
        escaping=Markdown.Escaping(mode="none", asterisks=False, underscores=False),
        converters={
            **dict.fromkeys(("b", "strong", "i", "em"), lambda _, text: text),  # else some are written as HTML
            **dict.fromkeys(("s", "del", "strike"), lambda _, text: f"~~{text}~~"),
            "br": lambda *_: "\n",
            "option": lambda _, text: f"{text}\n",
            "table": lambda table, _: _table(table.rows()),
        },
    )


def _page_text(document: Any, number: int, *, has_form: bool) -> str:
    page = document[number]
    boxes = ""
    if has_form:
        boxes = "".join(f"\n{box}" for box in _boxes(document.formenv, page))
        page.flatten()  # draws the fields' values into the page
        page = document[number]
    text = page.get_textpage().get_text_range() + boxes
    if not text.strip() and has_ocr():
        return "\n".join(_ocr()(page.render(scale=_OCR_SCALE).to_numpy()).txts or ())
    return _clean(_HYPHEN.sub(lambda match: match[1] if match[1].islower() else f"-{match[1]}", text))


def _boxes(form: Any, page: Any) -> Iterator[str]:
    """A form's boxes by their names: on the page, a tick is behind all other text."""
    from pypdfium2 import raw

    for number in range(raw.FPDFPage_GetAnnotCount(page)):
        field = raw.FPDFPage_GetAnnot(page, number)
        kind = raw.FPDFAnnot_GetFormFieldType(form, field)
        if kind in (raw.FPDF_FORMFIELD_CHECKBOX, raw.FPDF_FORMFIELD_RADIOBUTTON):
            names = (raw.FPDFAnnot_GetFormFieldAlternateName, raw.FPDFAnnot_GetFormFieldName)
            name = next(filter(None, (_field_text(get, form, field) for get in names)), "")
            if kind == raw.FPDF_FORMFIELD_RADIOBUTTON:  # a group has one name
                name = f"{name}: {_field_text(raw.FPDFAnnot_GetFormFieldExportValue, form, field)}"
            yield f"[{'x' if raw.FPDFAnnot_IsChecked(form, field) else ' '}] {name}"
        raw.FPDFPage_CloseAnnot(field)


def _field_text(get: Callable[..., int], form: Any, field: Any) -> str:
    text = ctypes.create_string_buffer(get(form, field, None, 0))
    get(form, field, ctypes.cast(text, ctypes.POINTER(ctypes.c_ushort)), len(text))
    return text.raw.decode("utf-16-le", "replace").rstrip("\0")


@cache
def _ocr() -> Any:
    from rapidocr import RapidOCR

    return RapidOCR(params={"Global.log_level": "error"})


def _archive(file: bytes) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(io.BytesIO(file))
    except zipfile.BadZipFile as error:
        raise UnreadableFileError(f"this is not a file that can be read: {error}") from error


def _message(message: Any) -> str:
    subject = f"# {message['subject']}" if message["subject"] else ""
    about = "\n".join(f"{name}: {message[name]}" for name in ("From", "To", "Cc", "Date") if message[name])
    return _joined(map(_clean, (subject, about, *_contents(message))))


def _contents(part: Any) -> Iterator[str]:
    """The texts of a message's part, as mail programs show them."""
    kind, name = part.get_content_type(), part.get_filename()
    if kind == "message/rfc822":
        yield _message(part.get_content())
    elif part.is_multipart():
        parts = list(itertools.islice(part.iter_parts(), MAX_ATTACHMENTS))
        if kind == "multipart/alternative":  # the first that has text, plain text before others
            parts.sort(key=lambda each: each.get_content_type() != "text/plain")
            yield from next(filter(None, ([*_contents(each)] for each in parts)), ())
        else:
            for each in parts:
                yield from _contents(each)
    elif name and (part.is_attachment() or part.get_content_maintype() != "image"):  # no pictures in the text
        yield _attachment(part.get_payload(decode=True), name)
    elif part.get_content_maintype() in ("text", "multipart"):  # one of no parts is what it has
        text = _decoded(part.get_payload(decode=True), part.get_content_charset())
        text = read_html(text).text if kind == "text/html" else text
        if text.strip():
            yield text


def _attachment(content: bytes, name: str) -> str:
    try:
        return f"# {name}\n\n{read(content, name).text}"
    except BaseException:  # of any type, or broken, which may cause any error in a parser, also panics
        return f"Attachment: {name}"


def _cell(cell: Any, language: str) -> Iterator[str]:
    source = "".join(cell.get("source") or "")
    if cell.get("cell_type") != "code":
        yield source
        return
    yield _fenced(source, language)
    for output in cell.get("outputs") or ():
        given = (output.get("data") or {}).items()
        data = {kind: "".join(text or "") for kind, text in given if kind.startswith("text/")}
        printed = output.get("text") or "\n".join(output.get("traceback") or ())
        plain = "".join(printed) or data.get("text/plain", "")
        html = data.get("text/html", "")
        if "text/markdown" in data:
            yield data["text/markdown"]
        elif "<table" in html or (html and plain.startswith("<")):  # the text only names the object
            yield read_html(html).text
        elif plain:
            yield _fenced(plain, "")


def _fenced(code: str, language: str) -> str:
    longest = max(map(len, re.findall("`+", code)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{code.strip(chr(10))}\n{fence}" if code.strip() else ""
