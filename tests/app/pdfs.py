# SPDX-License-Identifier: Apache-2.0
"""Small PDFs."""

import io
from collections.abc import Sequence

from pypdf import PdfWriter
from pypdf.generic import DecodedStreamObject, DictionaryObject, NameObject


def make_pdf(*pages: Sequence[str], password: str | None = None) -> bytes:
    """A PDF with these lines of ASCII text per page."""
    writer = PdfWriter()
    for lines in pages:
        page = writer.add_blank_page(600, 800)
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
    if password is not None:
        writer.encrypt(password, algorithm="RC4-128")
    file = io.BytesIO()
    writer.write(file)
    return file.getvalue()
