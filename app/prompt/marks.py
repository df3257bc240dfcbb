# SPDX-License-Identifier: Apache-2.0
"""Marks that carry segment boundaries through the model's chat template.

A mark is text with a random nonce of its request, put before each chunk and before the question; after rendering,
the prompt is split at the marks, which never reach the tokenizer. Text that only looks like a mark stays text: a
client can't know a nonce that is drawn after its request has arrived.
"""

import re
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from app.documents.document import Document, in_order
from engine_ext.wire.request import RequestContext

_MARK = re.compile(r"\[tessera-([0-9a-f]{32})-(chunk|question)\]")


@dataclass(frozen=True, slots=True)
class MarkedPrompt:
    """A rendered prompt split at its marks. Without chunks ``system`` is everything before the question.

    ``documents`` says of each chunk which of the request's documents it is.
    """

    ticket: RequestContext
    system: str
    chunks: tuple[str, ...]
    question: str
    documents: tuple[int, ...]

    @property
    def text(self) -> str:
        """The prompt without marks."""
        return self.system + "".join(self.chunks) + self.question


class BrokenMarksError(ValueError):
    """The chat template repeated, dropped or reordered the marked text."""


class Marks:
    """Marks of the requests now being rendered."""

    def __init__(self) -> None:
        self._tickets: dict[str, tuple[RequestContext, tuple[int, ...]]] = {}

    @contextmanager
    def issue(self, ticket: RequestContext, documents: Sequence[Document]) -> Iterator[str]:
        """Text to put directly before the question: the chunks, marked, in the order that the ticket wants.

        Valid inside the ``with`` block.
        """
        nonce, order = secrets.token_hex(16), in_order(documents, ticket.options.order)
        self._tickets[nonce] = ticket, tuple(order)
        try:
            chunks = (f"[tessera-{nonce}-chunk]{documents[i].render()}" for i in order)
            yield "".join(chunks) + f"[tessera-{nonce}-question]"
        finally:
            del self._tickets[nonce]

    def are_in(self, text: str) -> bool:
        """Whether ``text`` has a mark of a request now being rendered."""
        return bool(self._tickets) and any(True for _ in self._matches(text))

    def split(self, text: str) -> MarkedPrompt:
        """Splits a rendered prompt; raises :class:`BrokenMarksError` unless the marks are as issued."""
        matches = list(self._matches(text))
        if len({match[1] for match in matches}) != 1:
            raise BrokenMarksError("the chat template dropped the documents")
        ticket, order = self._tickets[matches[0][1]]
        kinds = [match[2] for match in matches]
        if kinds != ["chunk"] * len(order) + ["question"]:
            raise BrokenMarksError(f"the chat template changed the order of segments to {kinds}")
        bounds = [*(match.end() for match in matches)]
        ends = [*(match.start() for match in matches[1:]), len(text)]
        pieces = [text[start:end] for start, end in zip(bounds, ends, strict=True)]
        return MarkedPrompt(ticket, text[: matches[0].start()], tuple(pieces[:-1]), pieces[-1], order)

    def _matches(self, text: str) -> Iterator[re.Match[str]]:
        return (match for match in _MARK.finditer(text) if match[1] in self._tickets)
