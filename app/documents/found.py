# SPDX-License-Identifier: Apache-2.0
"""Documents found in a prompt's own text, which stays as it is: only the segments' boundaries are new."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from app.documents.document import MOST_DOCUMENTS, Document
from app.documents.patterns import Pattern, Span
from cache.report import FoundDocument

KNOWN: Final = "known passage"
Find = Callable[[str], list[Span]]
"""The places of documents in a text, in order; none overlap."""


def finder(patterns: Sequence[Pattern], known: Callable[[str], list[tuple[int, int]]]) -> Find:
    """Finds passages by ``patterns`` and those that ``known`` finds.

    Of passages that overlap, one within another's markers comes first, then the longest.
    """

    def find(text: str) -> list[Span]:
        marked = _apart(sorted((each for pattern in patterns for each in pattern.spans(text)), key=_length))
        exact = [Span(start, end, KNOWN) for start, end in known(text)]
        return _apart(sorted([*marked, *exact], key=_length, reverse=True))

    return find


def _length(span: Span) -> int:
    return span.end - span.start


def _apart(spans: Sequence[Span]) -> list[Span]:
    """The spans in order of place, without those that overlap an earlier one."""
    kept, taken = list[Span](), bytearray(max((span.end for span in spans), default=0))
    for span in spans:
        if taken.find(1, span.start, span.end) < 0:
            taken[span.start : span.end] = b"\1" * _length(span)
            kept.append(span)
    return sorted(kept)


@dataclass(frozen=True, slots=True)
class FoundIn:
    """A text of a request with the documents found in it; ``path`` is its field."""

    path: str
    text: str
    spans: Sequence[Span]

    @classmethod
    def of(cls, path: str, text: str, find: Find, most: int = MOST_DOCUMENTS) -> "FoundIn":
        """The first documents that ``find`` finds, without white space at the text's ends: templates may strip it."""
        first, end = len(text) - len(text.lstrip()), len(text.rstrip())
        bounded = (Span(max(first, each.start), min(end, each.end), each.by) for each in find(text))
        return cls(path, text, [each for each in bounded if each.start < each.end][:most])

    @property
    def documents(self) -> list[Document]:
        """The documents, as they stand there."""
        return [Document(self.text[span.start : span.end], is_verbatim=True) for span in self.spans]

    @property
    def reported(self) -> list[FoundDocument]:
        """The documents for the report."""
        return [FoundDocument(by=span.by, at=self.path, start=span.start, end=span.end) for span in self.spans]

    def marked(self, marks: Iterator[str]) -> str:
        """The text with the next of ``marks`` before each document, and before the text behind it."""
        parts, at = list[str](), 0
        for span in self.spans:
            parts += [self.text[at : span.start], next(marks), self.text[span.start : span.end], next(marks)]
            at = span.end
        return "".join([*parts, self.text[at:]])
