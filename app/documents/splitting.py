# SPDX-License-Identifier: Apache-2.0
"""Splits a text into passages of bounded length: at headings, paragraphs, lines, sentences, words."""

import itertools
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

import regex
from markdown_it import MarkdownIt

from app.documents.document import Document
from app.documents.readers import ShownText, Text

LEAST_TOKENS: Final = 16
"""That a caller may ask for as the most of a passage."""
CountTokens = Callable[[Document], int]
_FRONT_MATTER: Final = re.compile(
    r"---[ \t]*\n(?=(?:[ \t]*+(?:#.*)?\n)*+[\"'\w-][\"'\w -]*:)(?:.*\n)*?(?:---|\.\.\.)[ \t]*(?:\n|\Z)"
    r"|\+\+\+[ \t]*\n(?:.*\n)*?\+\+\+[ \t]*(?:\n|\Z)"
)
"""YAML, or TOML."""
_CLOSING: Final = r"[\p{SB=Close}--[\p{Ps}\p{Pi}]]*+"
"""Brackets and quotation marks behind a sentence."""
_CUTS: Final = (
    re.compile(r"\n[ \t]*\n"),
    regex.compile(rf"(?V1)[\p{{SB=STerm}}\p{{SB=ATerm}}]{_CLOSING}[ \t]*\n"),
    re.compile(r"\n(?=[ \t|>#*+~`{}\[\]<(-]|\d+[.)])"),
    regex.compile(rf"(?V1)[.!?…]{_CLOSING}(?=\s)|[[\p{{SB=STerm}}．；]--[!?]]{_CLOSING}"),
    re.compile(r"\n"),
    re.compile(r"\S(?=\s)"),
    regex.compile(r"\X"),
)
"""Places for a cut, the best first: behind a paragraph, a line that ends a sentence, a line before one with a mark of
its own (of lists, tables, code), a sentence, a line, a word, what people see as one character."""
_INLINE: Final = {has_html: MarkdownIt("commonmark", {"html": has_html}) for has_html in (False, True)}
_BLOCKS: Final = {has_html: MarkdownIt("commonmark", {"html": has_html}).disable("inline") for has_html in _INLINE}
_LONGEST_HEADING: Final = 1000
"""Characters; marks within are not parsed in linear time."""
_AHEAD: Final = 32
"""Characters behind a cut that may tell that it is none."""
_BLANK_LINES: Final = re.compile(r"(?:[^\S\n]*\n)*+")
_BLANKS: Final = re.compile(r"[^\S\n]*+")
_DENSITY: Final = 4.0
_DENSITIES: Final = (0.25, 32.0)
"""Characters per token: at first, and the least and most that are tried first."""
_GROWTHS: Final = 4


class Piece(NamedTuple):
    """The part ``start:end`` of a text, and its number of prompt tokens. ``page`` counts from 1, if there are pages."""

    title: str | None
    text: str
    num_tokens: int
    start: int
    end: int
    page: int | None


class _Heading(NamedTuple):
    level: int
    text: str
    start: int
    end: int


class _Section(NamedTuple):
    """The part ``start:end`` of a text below headings, the outermost first; the last of them starts at ``heading``."""

    headings: Sequence[str]
    heading: int
    start: int
    end: int


def split(file: Text, max_tokens: int, count: CountTokens) -> Iterator[Piece]:
    """Splits a text into pieces of at most ``max_tokens``, of whole paragraphs where possible.

    Markdown is split at its headings. The title of a piece is the headings above it (``Guide › Setup``), without the
    outer ones where it would take more than half of ``max_tokens``.
    """
    text = file.text
    whole = _Section((), 0, 0, len(text))
    for section in _sections(text, not isinstance(file, ShownText)) if file.is_markdown else (whole,):
        title = _title(section.headings, max_tokens, count)
        # A heading that is too long for a title stays in the text.
        start = section.heading if section.headings and title is None else section.start
        yield from _pieces(file, start, section.end, title, max_tokens, count)


def _sections(text: str, has_html: bool) -> Iterator[_Section]:
    """Parts from heading to heading. A heading with nothing below it is a part itself."""
    headings = [*_headings(text, has_html), _Heading(0, "", len(text), len(text))]
    yield _Section((), 0, 0, headings[0].start)
    above: list[_Heading] = []
    for heading, following in itertools.pairwise(headings):
        above = [*(each for each in above if each.level < heading.level), heading]
        titles = [each.text for each in above if each.text]
        if text[heading.end : following.start].strip():
            yield _Section(titles, heading.start, heading.end, following.start)
        elif following.level <= heading.level and heading.text:
            start = text.find(heading.text, heading.start, heading.end)
            bounds = (heading.start, heading.end) if start < 0 else (start, start + len(heading.text))
            yield _Section(titles[:-1], bounds[0], *bounds)


def _headings(text: str, has_html: bool) -> Iterator[_Heading]:
    """The headings of Markdown, without those in lists and quotes."""
    matter = _FRONT_MATTER.match(text)
    skipped = matter.end() if matter else 0
    body = text[skipped:]
    lines = [skipped, *(skipped + match.end() for match in re.finditer("\n", body)), len(text), len(text)]
    tokens = _BLOCKS[has_html].parse(body)
    for opening, content in itertools.pairwise(tokens):
        if opening.type == "heading_open" and opening.level == 0 and opening.map is not None:
            first, last = opening.map
            words = " ".join(_plain(content.content, has_html).split())
            yield _Heading(int(opening.tag[1]), words, lines[first], lines[last])


def _plain(heading: str, has_html: bool) -> str:
    """A heading without marks, links and HTML. One that is longer than any title stays as it is."""
    if len(heading) > _LONGEST_HEADING:
        return heading
    (inline,) = _INLINE[has_html].parseInline(heading)
    parts = (each for each in inline.children or () if each.type != "html_inline")
    return "".join(" " if each.type.endswith("break") else each.content for each in parts)


def _title(headings: Sequence[str], max_tokens: int, count: CountTokens) -> str | None:
    for first in range(len(headings)):
        title = " › ".join(headings[first:])
        if count(Document("", None, title)) <= max_tokens // 2:
            return title
    return None


def _pieces(
    file: Text, start: int, end: int, title: str | None, max_tokens: int, count: CountTokens
) -> Iterator[Piece]:
    """Pieces of the part ``start:end``, one after the other. Each looks no further ahead than a piece can reach."""
    density = _DENSITY
    while start < end:
        size, growths = int(max_tokens * density) or 1, 0
        while True:
            cut = _cut(file.text, start, start + size) if start + size < end else end
            piece = _piece(file, start, cut, title, count)
            density = min(max((cut - start) / max(piece.num_tokens, 1), _DENSITIES[0]), _DENSITIES[1])
            if piece.num_tokens > max_tokens and cut - start > 1:
                size, growths = max(1, (cut - start) * max_tokens // piece.num_tokens), _GROWTHS
            elif cut < end and max_tokens * density > 1.1 * size and growths < _GROWTHS:
                size, growths = int(max_tokens * density), growths + 1
            else:
                break
        if piece.text:
            yield piece
        start = cut


def _piece(file: Text, start: int, end: int, title: str | None, count: CountTokens) -> Piece:
    """The part without blanks around it, but with the indentation of its first line."""
    first = _end(_BLANK_LINES, file.text, start, end)
    is_inside_line = first == start > 0 and file.text[start - 1] != "\n"
    start = _end(_BLANKS, file.text, start, end) if is_inside_line else first
    text = file.text[start:end].rstrip()
    page = bisect_right(file.page_starts, start) if file.page_starts else None
    return Piece(title, text, count(Document(text, None, title)) if text else 0, start, start + len(text), page)


def _cut(text: str, start: int, end: int) -> int:
    """The last place for a cut of the best kind, in the last three quarters of ``start:end``."""
    earliest = start + (end - start) // 4
    for pattern in _CUTS:
        places = [match.end() for match in pattern.finditer(text, earliest, end + _AHEAD) if match.end() <= end]
        if places:
            return places[-1]
    return end


def _end(pattern: re.Pattern[str], text: str, start: int, end: int) -> int:
    match = pattern.match(text, start, end)
    return match.end() if match else start
