# SPDX-License-Identifier: Apache-2.0
"""Small PDFs."""

import io
from collections.abc import Mapping, Sequence
from typing import Any

from pypdf import PdfWriter
from pypdf.generic import DecodedStreamObject, NameObject, read_object

_FONTS = "<< /Font << /F1 << /Type /Font /Subtype /Type1 /BaseFont /Helvetica >> >> >>"


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
        stream = DecodedStreamObject()
        stream.set_data(f"BT /F1 12 Tf 50 750 Td {' '.join(f'({line}) Tj 0 -14 Td' for line in lines)} ET".encode())
        page[NameObject("/Resources")] = _parsed(_FONTS)
        page[NameObject("/Contents")] = writer._add_object(stream)
    widgets = [f"/FT /Tx /T (name) /V ({field})"] if field else []
    for name, is_checked in (boxes or {}).items():
        state = "/Yes" if is_checked else "/Off"
        widgets.append(f"/FT /Btn /T ({name}) /V {state} /AS {state}")
    if widgets:
        form = "/Type /Annot /Subtype /Widget /Rect [50 700 300 720]"
        placed = [writer._add_object(_parsed(f"<< {form} {widget} >>")).idnum for widget in widgets]
        listed = f"[{' '.join(f'{number} 0 R' for number in placed)}]"
        page[NameObject("/Annots")] = _parsed(listed, writer)
        writer.root_object[NameObject("/AcroForm")] = _parsed(f"<< /Fields {listed} >>", writer)
    if password is not None:
        writer.encrypt(password, "owner", algorithm="RC4-128")
    file = io.BytesIO()
    writer.write(file)
    return file.getvalue()


def _parsed(text: str, writer: Any = None) -> Any:
    return read_object(io.BytesIO(text.encode()), writer)
