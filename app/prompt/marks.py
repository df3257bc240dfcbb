# SPDX-License-Identifier: Apache-2.0
"""Marks that carry segment boundaries through the model's chat template.

A mark is text with a random nonce per request, placed before each chunk and before the question. After rendering, the
prompt is split at the marks, which never reach the tokenizer. Text that merely looks like a mark stays text: the nonce
is drawn after the request has arrived, so that no client can know it.
"""

import re
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from app.documents.document import Document
from engine_ext.client.request import Ticket

_MARK = re.compile(r"\[tessera-([0-9a-f]{32})-(chunk|question)\]")


@dataclass(frozen=True, slots=True)
class MarkedPrompt:
    """A rendered prompt split at its marks; without chunks, ``system`` is everything before the question."""

    ticket: Ticket
    system: str
    chunks: tuple[str, ...]
    question: str

    @property
    def text(self) -> str:
        """The prompt without marks."""
        return self.system + "".join(self.chunks) + self.question


class BrokenMarksError(ValueError):
    """The chat template repeated, dropped or reordered the marked text."""


class Marks:
    """Marks of the requests being rendered."""

    def __init__(self) -> None:
        self._tickets: dict[str, tuple[Ticket, int]] = {}

    @contextmanager
    def issue(self, ticket: Ticket, documents: Sequence[Document]) -> Iterator[str]:
        """Yields the text for the place before the question: the marked chunks. Valid inside the ``with`` block."""
        nonce = secrets.token_hex(16)
        self._tickets[nonce] = ticket, len(documents)
        try:
            chunks = (f"[tessera-{nonce}-chunk]{document.render()}" for document in documents)
            yield "".join(chunks) + f"[tessera-{nonce}-question]"
        finally:
            del self._tickets[nonce]

    def are_in(self, text: str) -> bool:
        """Whether ``text`` contains a mark of a request being rendered."""
        return bool(self._tickets) and any(True for _ in self._matches(text))

    def split(self, text: str) -> MarkedPrompt:
        """Splits a rendered prompt; raises :class:`BrokenMarksError` unless all marks are in place."""
        matches = list(self._matches(text))
        if len({match[1] for match in matches}) != 1:
            raise BrokenMarksError("the chat template dropped the documents")
        ticket, num_chunks = self._tickets[matches[0][1]]
        kinds = [match[2] for match in matches]
        if kinds != ["chunk"] * num_chunks + ["question"]:
            raise BrokenMarksError(f"the chat template changed the order of segments to {kinds}")
        bounds = [*(match.end() for match in matches)]
        ends = [*(match.start() for match in matches[1:]), len(text)]
        pieces = [text[start:end] for start, end in zip(bounds, ends, strict=True)]
        return MarkedPrompt(ticket, text[: matches[0].start()], tuple(pieces[:-1]), pieces[-1])

    def _matches(self, text: str) -> Iterator[re.Match[str]]:
        return (match for match in _MARK.finditer(text) if match[1] in self._tickets)
