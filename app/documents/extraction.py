# SPDX-License-Identifier: Apache-2.0
"""Reads and splits files in processes with limits; a file at fault fails alone."""

import resource
from collections.abc import Iterator
from typing import Any, Final

from app.documents.document import Document
from app.documents.document_tokenizer import DocumentTokenizer
from app.documents.readers import READERS, UnreadableFileError, has_ocr, read, suffix_of
from app.documents.splitting import Piece, split
from engine_ext.client.processes import Answers, LimitedProcesses, WorkFailedError, answer_all

MAX_SECONDS = 60
MAX_MEMORY_BYTES = 2 << 30
_TOO_MUCH_MEMORY: Final = f"takes more than {MAX_MEMORY_BYTES >> 30} GiB of memory"
_MODULE = "app.documents.extraction"
_PROCESSES: Final = 2
_OCR: Final = 10
"""Times the limit of CPU time, where scans are read."""


class Extraction:
    """Splits files by a tokenizer."""

    def __init__(self, tokenizer: str) -> None:
        self._processes = LimitedProcesses(_MODULE, tokenizer.encode, _PROCESSES)
        self.close = self._processes.close

    async def split(self, file: bytes, name: str, max_tokens: int) -> list[Piece]:
        """The pieces of a file; raises :class:`UnreadableFileError`, and :class:`StoppedError`."""
        if suffix_of(name) not in READERS:
            raise UnreadableFileError(f"files of the type {suffix_of(name)!r} can't be read")
        max_seconds = MAX_SECONDS * (_OCR if suffix_of(name) == ".pdf" and has_ocr() else 1)
        try:
            *pieces, wrong = await self._processes.ask({"name": name, "max_tokens": max_tokens}, file, max_seconds)
        except WorkFailedError as error:
            late = f"takes longer than {max_seconds} s"
            why = late if error.is_late else f"breaks its reader, or {_TOO_MUCH_MEMORY}"
            raise UnreadableFileError(f"reading this file {why}") from error
        if wrong:
            raise UnreadableFileError(wrong)
        return [Piece(*each) for each in pieces]


def _prepare(tokenizer: bytes) -> Answers:
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    tokenize = DocumentTokenizer(tokenizer.decode()).encode

    def count(document: Document) -> int:
        return len(tokenize(document.render()))

    def answers(about: dict[str, Any], file: bytes) -> Iterator[Any]:
        """The pieces of a file, and what is wrong with it."""
        wrong = None
        try:
            yield from split(read(file, about["name"]), about["max_tokens"], count)
        except UnreadableFileError as error:
            wrong = str(error)
        except MemoryError:
            wrong = f"reading this file {_TOO_MUCH_MEMORY}"
        except BaseException as error:  # a broken file may cause any error in a parser, also panics
            wrong = f"this file can't be read: {type(error).__name__}: {error}"
        yield wrong

    return answers


if __name__ == "__main__":
    answer_all(_prepare)
