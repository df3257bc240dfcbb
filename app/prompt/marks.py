# SPDX-License-Identifier: Apache-2.0
"""Marks that carry segment boundaries through the model's chat template.

A mark is text with a random nonce per request, placed before each chunk, before the text behind a document that was
found in the prompt, and before the question. After rendering, the prompt is split at the marks, which never reach the
tokenizer. Text that merely looks like a mark stays text: the nonce
is drawn after the request has arrived, so that no client can know it.
"""

import re
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest

from app.documents.document import Document
from engine_ext.client.request import Ticket

_MARK = re.compile(r"\[tessera-([0-9a-f]{32})-(chunk|text|question)\]")


@dataclass(frozen=True, slots=True)
class MarkedPrompt:
    """A rendered prompt split at its marks; without chunks, ``system`` is everything before the question.

    ``between`` has the texts between the chunks, one fewer, if the documents were found in the prompt; else nothing.
    """

    ticket: Ticket
    system: str
    chunks: tuple[str, ...]
    question: str
    between: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The prompt without marks."""
        texts = zip_longest(self.chunks, self.between, fillvalue="")
        return self.system + "".join(chunk + between for chunk, between in texts) + self.question


class BrokenMarksError(ValueError):
    """The chat template repeated, dropped or reordered the marked text."""


class Marks:
    """Marks of the requests being rendered."""

    def __init__(self) -> None:
        self._tickets: dict[str, tuple[Ticket, list[str]]] = {}

    @contextmanager
    def issue(self, ticket: Ticket, documents: Sequence[Document]) -> Iterator[str]:
        """Yields the text for the place before the question: the marked chunks. Valid inside the ``with`` block."""
        with self._issued(ticket, ["chunk"] * len(documents) + ["question"]) as marks:
            texts = [*(document.render() for document in documents), ""]
            yield "".join(mark + text for mark, text in zip(marks, texts, strict=True))

    @contextmanager
    def issue_within(self, ticket: Ticket, num_documents: int) -> Iterator[list[str]]:
        """Yields the marks around documents in a prompt's own text: before each, and before the text behind it."""
        with self._issued(ticket, ["chunk", "text"] * (num_documents - 1) + ["chunk", "question"]) as marks:
            yield marks

    @contextmanager
    def _issued(self, ticket: Ticket, kinds: list[str]) -> Iterator[list[str]]:
        nonce = secrets.token_hex(16)
        self._tickets[nonce] = ticket, kinds
        try:
            yield [f"[tessera-{nonce}-{kind}]" for kind in kinds]
        finally:
            del self._tickets[nonce]

    def without(self, text: str) -> str:
        """``text`` without the marks of requests being rendered."""
        return _MARK.sub(lambda match: "" if match[1] in self._tickets else match[0], text)

    def ticket_of(self, text: str) -> Ticket | None:
        """The request whose marks are in ``text``."""
        return next((self._tickets[match[1]][0] for match in self._matches(text)), None)

    def are_in(self, text: str) -> bool:
        """Whether ``text`` contains a mark of a request being rendered."""
        return bool(self._tickets) and any(True for _ in self._matches(text))

    def split(self, text: str) -> MarkedPrompt:
        """Splits a rendered prompt; raises :class:`BrokenMarksError` unless all marks are in place."""
        matches = list(self._matches(text))
        if len({match[1] for match in matches}) != 1:
            raise BrokenMarksError("the chat template dropped the documents")
        ticket, issued = self._tickets[matches[0][1]]
        kinds = [match[2] for match in matches]
        if kinds != issued:
            raise BrokenMarksError(f"the chat template changed the order of segments to {kinds}")
        bounds = [*(match.end() for match in matches)]
        ends = [*(match.start() for match in matches[1:]), len(text)]
        pieces = [text[start:end] for start, end in zip(bounds, ends, strict=True)]
        chunks, between = (
            tuple(piece for piece, kind in zip(pieces, kinds, strict=True) if kind == wanted)
            for wanted in ("chunk", "text")
        )
        return MarkedPrompt(ticket, text[: matches[0].start()], chunks, pieces[-1], between)

    def _matches(self, text: str) -> Iterator[re.Match[str]]:
        return (match for match in _MARK.finditer(text) if match[1] in self._tickets)
