# SPDX-License-Identifier: Apache-2.0
"""Files that documents are made from: their text, and its pieces."""

from collections.abc import Iterator
from typing import Final

from app.documents.pdf_text import PdfError, pdf_text
from app.documents.splitting import CountTokens, Piece, split_markdown, split_text

SUFFIXES: Final = (".txt", ".md", ".markdown", ".pdf")
"""Types of files that can be read, in lower case."""


class UnreadableFileError(ValueError):
    """A file has no text that can be read; the message says why."""


async def text_of(file: bytes, suffix: str) -> str:
    """The text of a file; raises :class:`UnreadableFileError`."""
    try:
        return await pdf_text(file) if suffix == ".pdf" else file.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UnreadableFileError(f"the file is not UTF-8 text: {error.reason}") from error
    except PdfError as error:
        raise UnreadableFileError(str(error)) from error


def pieces_of(text: str, suffix: str, max_tokens: int, count: CountTokens) -> Iterator[Piece]:
    """The pieces of a file's text, as its type is split."""
    split = split_markdown if suffix in (".md", ".markdown") else split_text
    return split(text, max_tokens, count)
