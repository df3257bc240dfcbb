# SPDX-License-Identifier: Apache-2.0
"""Small PDFs."""

import io
from collections.abc import Mapping, Sequence

from pypdf import PdfWriter
from pypdf.generic import (
    ArrayObject,
    DecodedStreamObject,
    DictionaryObject,
    NameObject,
    NumberObject,
    TextStringObject,
)


def make_pdf(
    *pages: Sequence[str],
    password: str | None = None,
    field: str | None = None,
    boxes: Mapping[str, bool] | None = None,
    rotate: int = 0,
) -> bytes:
    """A PDF with these lines of ASCII text per page, and on the last the value of a form's field, and its boxes."""
    writer = PdfWriter()
    for lines in pages:
        page = writer.add_blank_page(600, 800)
        page.rotate(rotate)
        font = DictionaryObject(
            {
                NameObject("/Type"): NameObject("/Font"),
                NameObject("/Subtype"): NameObject("/Type1"),
                NameObject("/BaseFont"): NameObject("/Helvetica"),
            }
        )
        fonts = DictionaryObject({NameObject("/F1"): font})
        page[NameObject("/Resources")] = DictionaryObject({NameObject("/Font"): fonts})
        stream = DecodedStreamObject()
        shown = " ".join(f"({line}) Tj 0 -14 Td" for line in lines)
        stream.set_data(f"BT /F1 12 Tf 50 750 Td {shown} ET".encode())
        page[NameObject("/Contents")] = writer._add_object(stream)
    widgets = (
        [{"/FT": NameObject("/Tx"), "/T": TextStringObject("name"), "/V": TextStringObject(field)}] if field else []
    )
    for name, is_checked in (boxes or {}).items():
        state = NameObject("/Yes" if is_checked else "/Off")
        widgets.append({"/FT": NameObject("/Btn"), "/T": TextStringObject(name), "/V": state, "/AS": state})
    if widgets:
        about = {"/Type": "/Annot", "/Subtype": "/Widget"}
        place = ArrayObject(map(NumberObject, (50, 700, 300, 720)))
        common = {**{NameObject(key): NameObject(value) for key, value in about.items()}, NameObject("/Rect"): place}
        placed = ArrayObject(
            writer._add_object(DictionaryObject({**common, **{NameObject(key): each[key] for key in each}}))
            for each in widgets
        )
        page[NameObject("/Annots")] = placed
        writer.root_object[NameObject("/AcroForm")] = DictionaryObject({NameObject("/Fields"): placed})
    if password is not None:
        writer.encrypt(password, "owner", algorithm="RC4-128")
    file = io.BytesIO()
    writer.write(file)
    return file.getvalue()
