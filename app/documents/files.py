# SPDX-License-Identifier: Apache-2.0
"""Files that documents are made from: their text, and its pieces."""

from collections.abc import Iterator
from typing import Final

from app.documents.extraction import READERS, ExtractionError, extracted
from app.documents.splitting import CountTokens, Piece, split_markdown, split_text

SUFFIXES: Final = (".txt", ".md", ".markdown", *READERS)
"""Types of files that can be read, in lower case."""
_WITH_HEADINGS: Final = (".md", ".markdown", ".html", ".htm")


class UnreadableFileError(ValueError):
    """A file has no text that can be read; the message says why."""


async def text_of(file: bytes, suffix: str) -> str:
    """The text of a file; raises :class:`UnreadableFileError`."""
    try:
        return await extracted(file, suffix) if suffix in READERS else file.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UnreadableFileError(f"the file is not UTF-8 text: {error.reason}") from error
    except ExtractionError as error:
        raise UnreadableFileError(str(error)) from error


def pieces_of(text: str, suffix: str, max_tokens: int, count: CountTokens) -> Iterator[Piece]:
    """The pieces of a file's text, as its type is split."""
    split = split_markdown if suffix in _WITH_HEADINGS else split_text
    return split(text, max_tokens, count)
