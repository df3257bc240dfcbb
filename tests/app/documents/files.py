# SPDX-License-Identifier: Apache-2.0
"""Small files of types that are made of others."""

import io
import zipfile
from collections.abc import Mapping, Sequence
from email.message import EmailMessage

_XML = '<?xml version="1.0" encoding="UTF-8" standalone="yes"?>'
_TYPES = "http://schemas.openxmlformats.org/package/2006/content-types"
_RELATIONS = "http://schemas.openxmlformats.org/package/2006/relationships"
_OFFICE = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
_PARTS = "application/vnd.openxmlformats-officedocument"


def archive(parts: Mapping[str, str]) -> bytes:
    """A ZIP file."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as written:
        for name, part in parts.items():
            written.writestr(name, part)
    return file.getvalue()


def office(main: str, parts: Mapping[str, tuple[str, str]], relations: Mapping[str, Mapping[str, str]]) -> bytes:
    """An Office file of parts, ``(content type, XML)``; ``relations`` are the targets and their kinds of each part."""
    types = "".join(f'<Override PartName="/{n}" ContentType="{_PARTS}.{t}+xml"/>' for n, (t, _) in parts.items())
    defaults = '<Default Extension="rels" ContentType="application/vnd.openxmlformats-package.relationships+xml"/>'
    made = {
        "[Content_Types].xml": f'{_XML}<Types xmlns="{_TYPES}">{defaults}{types}</Types>',
        "_rels/.rels": _relations({main: "officeDocument"}),
    }
    for name, targets in relations.items():
        folder, _, file = name.rpartition("/")
        made[f"{folder}/_rels/{file}.rels"] = _relations(targets)
    return archive({**made, **{name: _XML + xml for name, (_, xml) in parts.items()}})


def _relations(targets: Mapping[str, str]) -> str:
    all_of_them = "".join(
        f'<Relationship Id="rId{i}" Type="{_OFFICE}/{kind}" Target="{target}"/>'
        for i, (target, kind) in enumerate(targets.items(), 1)
    )
    return f'{_XML}<Relationships xmlns="{_RELATIONS}">{all_of_them}</Relationships>'


def docx(body: str, footnotes: str = "") -> bytes:
    """A document: the XML in its body, and that of its footnotes."""
    space = 'xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main"'
    styles = "".join(
        f'<w:style w:type="paragraph" w:styleId="Heading{i}"><w:name w:val="heading {i}"/></w:style>'
        for i in range(1, 7)
    )
    main, document = "word/document.xml", f"<w:document {space}><w:body>{body}</w:body></w:document>"
    parts = {
        main: ("wordprocessingml.document.main", document),
        "word/styles.xml": ("wordprocessingml.styles", f"<w:styles {space}>{styles}</w:styles>"),
        "word/footnotes.xml": ("wordprocessingml.footnotes", f"<w:footnotes {space}>{footnotes}</w:footnotes>"),
    }
    return office(main, parts, {main: {"styles.xml": "styles", "footnotes.xml": "footnotes"}})


def paragraph(text: str, style: str = "") -> str:
    """A paragraph of a document."""
    chosen = f'<w:pPr><w:pStyle w:val="{style}"/></w:pPr>' if style else ""
    return f'<w:p>{chosen}<w:r><w:t xml:space="preserve">{text}</w:t></w:r></w:p>'


def cell(*paragraphs: str, properties: str = "") -> str:
    """A cell of a document's table."""
    return f"<w:tc><w:tcPr>{properties}</w:tcPr>{''.join(paragraphs)}</w:tc>"


def xlsx(**sheets: str) -> bytes:
    """A workbook: the rows of each sheet, and what follows them, as XML."""
    space = f'xmlns="http://schemas.openxmlformats.org/spreadsheetml/2006/main" xmlns:r="{_OFFICE}"'
    listed = "".join(f'<sheet name="{name}" sheetId="{i}" r:id="rId{i}"/>' for i, name in enumerate(sheets, 1))
    parts = {"xl/workbook.xml": ("spreadsheetml.sheet.main", f"<workbook {space}><sheets>{listed}</sheets></workbook>")}
    for i, rows in enumerate(sheets.values(), 1):
        parts[f"xl/sheet{i}.xml"] = ("spreadsheetml.worksheet", f"<worksheet {space}>{rows}</worksheet>")
    targets = {f"sheet{i}.xml": "worksheet" for i in range(1, len(sheets) + 1)}
    return office("xl/workbook.xml", parts, {"xl/workbook.xml": targets})


def pptx(*slides: str) -> bytes:
    """A presentation: the shapes of each slide as XML."""
    space = (
        f'xmlns:p="http://schemas.openxmlformats.org/presentationml/2006/main" xmlns:r="{_OFFICE}" '
        'xmlns:a="http://schemas.openxmlformats.org/drawingml/2006/main"'
    )
    listed = "".join(f'<p:sldId id="{255 + i}" r:id="rId{i}"/>' for i in range(1, len(slides) + 1))
    main = f"<p:presentation {space}><p:sldIdLst>{listed}</p:sldIdLst></p:presentation>"
    parts = {"ppt/presentation.xml": ("presentationml.presentation.main", main)}
    for i, shapes in enumerate(slides, 1):
        tree = f"<p:cSld><p:spTree><p:nvGrpSpPr/><p:grpSpPr/>{shapes}</p:spTree></p:cSld>"
        parts[f"ppt/slides/slide{i}.xml"] = ("presentationml.slide", f"<p:sld {space}>{tree}</p:sld>")
    targets = {f"slides/slide{i}.xml": "slide" for i in range(1, len(slides) + 1)}
    return office("ppt/presentation.xml", parts, {"ppt/presentation.xml": targets})


def shape(text: str, type: str = "body") -> str:
    """A shape of a slide."""
    about = f'<p:nvSpPr><p:cNvPr id="2" name="{type}"/><p:cNvSpPr/><p:nvPr><p:ph type="{type}"/></p:nvPr></p:nvSpPr>'
    return f"<p:sp>{about}<p:spPr/><p:txBody><a:bodyPr/><a:p><a:r><a:t>{text}</a:t></a:r></a:p></p:txBody></p:sp>"


def epub(chapters: Mapping[str, str], spine: Sequence[str]) -> bytes:
    """A book: its chapters by the names that the book gives them, and their order."""
    names = list(chapters)
    items = "".join(f'<item id="i{i}" href="{name.replace(" ", "%20")}"/>' for i, name in enumerate(names))
    order = "".join(f'<itemref idref="i{names.index(name)}"/>' for name in spine)
    root = '<rootfiles><rootfile full-path="OPS/book.opf"/></rootfiles>'
    return archive(
        {
            "META-INF/container.xml": f'<container xmlns="urn:x">{root}</container>',
            "OPS/book.opf": f'<package xmlns="urn:y"><manifest>{items}</manifest><spine>{order}</spine></package>',
            **{f"OPS/{name}": chapter for name, chapter in chapters.items()},
        }
    )


def xhtml(body: str) -> str:
    """A chapter."""
    space = "http://www.w3.org/1999/xhtml"
    return f'<?xml version="1.0"?><html xmlns="{space}"><head><title/></head><body>{body}</body></html>'


def message(subject: str, plain: str = "", html: str = "", **attachments: bytes) -> bytes:
    """An e-mail; the names of attachments have ``_`` for the dot."""
    made = EmailMessage()
    made["Subject"], made["From"], made["To"] = subject, "ada@example.org", "bob@example.org"
    if plain:
        made.set_content(plain)
    if html:
        (made.add_alternative if plain else made.set_content)(html, subtype="html")
    for name, content in attachments.items():
        made.add_attachment(
            content, maintype="application", subtype="octet-stream", filename=".".join(name.rsplit("_", 1))
        )
    return made.as_bytes()
