# SPDX-License-Identifier: Apache-2.0
"""Splits a text into documents of bounded length: at headings, paragraphs, lines, sentences, words."""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from app.documents.document import Document

CountTokens = Callable[[Document], int]
_HEADING = re.compile(r"(#{1,6})[ \t]+(.+?)[ \t]*#*[ \t]*")
_FENCE = re.compile(r" {0,3}(```|~~~)")
_BLANK_LINES = re.compile(r"\n[ \t]*(?:\n[ \t]*)+")
_PAUSES = (re.compile(r"\n"), re.compile(r"(?<=[.!?…。])\s+"), re.compile(r"\s+"))
"""Places for a cut, the best first."""
_BETWEEN_PARAGRAPHS = 2
"""Tokens of the blank line between two paragraphs, at most, in all known tokenizers."""


class Piece(NamedTuple):
    """A part of the text as a document, and its number of prompt tokens."""

    document: Document
    num_tokens: int


def split_markdown(text: str, max_tokens: int, count: CountTokens) -> Iterator[Piece]:
    """Splits Markdown at headings. The title of a piece is the headings above it (``Guide › Setup``)."""
    for title, body in _sections(text):
        yield from split_text(body, max_tokens, count, title)


def split_text(text: str, max_tokens: int, count: CountTokens, title: str | None = None) -> Iterator[Piece]:
    """Splits a text into pieces of at most ``max_tokens``, of whole paragraphs where possible.

    A title of more than half of ``max_tokens`` is left out.
    """
    if title is not None and count(Document("", None, title)) > max_tokens // 2:
        title = None
    paragraphs = [paragraph.strip() for paragraph in _BLANK_LINES.split(text) if paragraph.strip()]
    for group in _groups(paragraphs, max_tokens, count, title):
        yield from _fitting("\n\n".join(group), max_tokens, count, title)


def _sections(text: str) -> Iterator[tuple[str | None, str]]:
    """Yields ``(title, body)`` from heading to heading; ``#`` in fenced code is not a heading."""
    above: list[tuple[int, str]] = []
    lines: list[str] = []
    fence = None
    for line in text.splitlines():
        if mark := _FENCE.match(line):
            fence = mark[1] if fence is None else None if mark[1] == fence else fence
        if fence is None and (heading := _HEADING.fullmatch(line)):
            yield _title(above), "\n".join(lines)
            lines, level = [], len(heading[1])
            above = [*(each for each in above if each[0] < level), (level, heading[2])]
        else:
            lines.append(line)
    yield _title(above), "\n".join(lines)


def _title(above: Sequence[tuple[int, str]]) -> str | None:
    return " › ".join(text for _, text in above) or None


def _groups(paragraphs: Sequence[str], max_tokens: int, count: CountTokens, title: str | None) -> Iterator[list[str]]:
    """Groups paragraphs that fit together, by the sum of their lengths."""
    group: list[str] = []
    room = 0
    for paragraph in paragraphs:
        tokens = count(Document(paragraph)) + _BETWEEN_PARAGRAPHS
        if group and tokens > room:
            yield group
            group = []
        if not group:
            room = max_tokens - (count(Document("", None, title)) if title else 0)
        group.append(paragraph)
        room -= tokens
    if group:
        yield group


def _fitting(text: str, max_tokens: int, count: CountTokens, title: str | None) -> Iterator[Piece]:
    """Yields ``text`` as one piece, or halves it until all pieces fit. One character always fits."""
    document = Document(text, None, title)
    tokens = count(document)
    if tokens <= max_tokens or len(text) == 1:
        yield Piece(document, tokens)
        return
    middle = _cut(text)
    for half in (text[:middle].strip(), text[middle:].strip()):
        if half:
            yield from _fitting(half, max_tokens, count, title)


def _cut(text: str) -> int:
    """The best cut in the middle half of ``text``, nearest to its middle."""
    middle, quarter = len(text) // 2, len(text) // 4
    for pause in _PAUSES:
        places = [match.end() for match in pause.finditer(text, middle - quarter, middle + quarter)]
        if places:
            return min(places, key=lambda place: abs(place - middle))
    return middle
