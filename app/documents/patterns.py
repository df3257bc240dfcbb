# SPDX-License-Identifier: Apache-2.0
"""The forms in which known apps write passages into a prompt: one row a form.

A row has the text before and the text behind a passage. What varies from request to request (a number, a file's name, a
score) belongs to that text, not to the passage, so that the passage is the same chunk in all of them. ``{number}``
stands for digits (the same number before and behind), ``{text}`` for up to 512 characters of one line, ``{end}`` for
the end of the message.

Matching takes time in proportion to the prompt, whatever the rows are: no row can go back over what it has read.
"""

import re
import tomllib
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from pathlib import Path
from typing import Annotated, Final, NamedTuple, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cache.report import FindsDocuments

_PLACEHOLDER: Final = re.compile(r"(\{number\}|\{text\}|\{end\})")
_END: Final = "{end}"
_BLANK_LINES: Final = re.compile(r"(?:[^\S\n]*+\n)*+")
SHORTEST_PIECE: Final = 32
"""Characters of a passage that no marker of its own surrounds; a shorter one is not worth a chunk."""


class PatternError(ValueError):
    """A file of patterns can't be used; the message says why."""


class Span(NamedTuple):
    """Characters ``[start, end)`` of a text, and what found them."""

    start: int
    end: int
    by: str


@dataclass(frozen=True)
class Pattern:
    """A passage stands behind ``start`` and before the first of ``ends``; if it has a ``split``, several between them.

    Raises :class:`PatternError` for markers that can't be searched for.
    """

    app: str
    start: str
    ends: Sequence[str]
    split: str | None = None

    def __post_init__(self) -> None:
        for marker in (self.start, *(end for end in self.ends if end != _END)):
            _compiled(marker)

    @cached_property
    def _anchor(self) -> str:
        """The longest part of ``start`` that is always the same: texts without it are done with at once."""
        return max(_PLACEHOLDER.split(self.start)[::2], key=len)

    @cached_property
    def _start(self) -> re.Pattern[str]:
        return _compiled(self.start)

    @cached_property
    def _ends(self) -> list[re.Pattern[str]]:
        return [_compiled(end) for end in self.ends if end != _END]

    def spans(self, text: str) -> Iterator[Span]:
        """The passages in ``text``, in order."""
        if self._anchor not in text:
            return
        ends = sorted((each.start(), _number(each)) for pattern in self._ends for each in pattern.finditer(text))
        # Never a list of all at once: to make one of a long text keeps all other threads waiting.
        for start, following in pairwise(chain(self._start.finditer(text), [None])):
            if start is not None and (end := self._end_of(start, ends, text, following)) is not None:
                yield from self._pieces(text, start.end(), end)

    def _end_of(
        self, start: re.Match[str], ends: list[tuple[int, str | None]], text: str, following: re.Match[str] | None
    ) -> int | None:
        """Where the passage behind ``start`` ends; ``None`` if it doesn't before the next one begins."""
        number, limit = _number(start), len(text) if following is None else following.start()
        for place in range(bisect_left(ends, start.end(), key=lambda end: end[0]), len(ends)):
            at, other = ends[place]
            if at > limit:
                return None
            if number is None or other is None or number == other:
                return at
        return limit if following is None and _END in self.ends else None

    def _pieces(self, text: str, start: int, end: int) -> Iterator[Span]:
        if self.split is None:
            yield from self._trimmed(text, start, end, 1)
            return
        while start < end:
            cut = text.find(self.split, start, end)
            yield from self._trimmed(text, start, cut if cut >= 0 else end, SHORTEST_PIECE)
            start = cut + len(self.split) if cut >= 0 else end

    def _trimmed(self, text: str, start: int, end: int, shortest: int) -> Iterator[Span]:
        """The passage without white space around it; the indentation of its first line is its own."""
        end = start + len(text[start:end].rstrip())
        blank = _BLANK_LINES.match(text, start, end)
        start = blank.end() if blank is not None else start
        if end - start >= shortest:
            yield Span(start, end, self.app)


def _number(match: re.Match[str]) -> str | None:
    return match[1] if match.re.groups else None


def _compiled(marker: str) -> re.Pattern[str]:
    """A marker as a regular expression that never backtracks: each placeholder ends where the next text can begin."""
    parts = _PLACEHOLDER.split(marker)
    literals, placeholders = parts[::2], parts[1::2]
    if not max(literals, key=len).strip():
        raise PatternError(f"the marker {marker!r} has no text of its own")
    expression = re.escape(literals[0])
    for number, (placeholder, literal) in enumerate(zip(placeholders, literals[1:], strict=True)):
        if placeholder == "{number}":
            is_second = "{number}" in placeholders[:number]
            expression += r"\d{1,9}+" if is_second else r"(\d{1,9}+)"
        elif placeholder == _END or not literal:
            raise PatternError(f"in the marker {marker!r}, {placeholder} must be followed by text")
        else:
            expression += rf"[^\n{re.escape(literal[0])}]{{0,512}}+"
        expression += re.escape(literal)
    return re.compile(expression)


_KNOWLEDGE_END: Final = "\n{text}The above is the knowledge base"
PATTERNS: Final = (
    Pattern("Open WebUI", '<source id="{text}>', ("</source>",)),
    Pattern("AnythingLLM", "[CONTEXT {number}]:\n", ("\n[END CONTEXT {number}]",)),
    Pattern("AnythingLLM", "[CONTEXT {number}]\n", ("\n[END CONTEXT {number}]",)),
    Pattern("RAGFlow", "└── Content:\n", ("\n------\n", _KNOWLEDGE_END, "\n\nID: {number}\n")),
    Pattern("LibreChat", "<contextItem>\n{text}<![CDATA[", ("]]>",)),
    Pattern("LibreChat", "</filename>\n{text}<context>\n", ("\n{text}</context>",)),
    Pattern("LibreChat", "\nRelevance: {text}\nContent: ", ("\n---\n", _END)),
    Pattern("LobeChat", "<chunk fileId={text}>", ("</chunk>",)),
    Pattern("Dify", "XML tags.\n\n<context>\n", ("\n</context>",), "\n"),
    Pattern("LangChain", "<context>\n", ("\n</context>",), "\n\n"),
    Pattern("LangChain", "make up an answer.\n\n", ("\n\nQuestion:",), "\n\n"),
    Pattern("LangChain", "make up an answer.\n----------------\n", (_END,), "\n\n"),
    Pattern("LangChain", "\nContext: ", ("\nAnswer:",), "\n\n"),
    Pattern(
        "LlamaIndex", "ontext information is below.\n---------------------\n", ("\n---------------------",), "\n\n"
    ),
    Pattern("LlamaIndex", "assist the user.\n--------------------\n", ("\n--------------------",), "\n\n"),
    Pattern("LlamaIndex", "Source {number}:\n", ("\nSource {text}:\n", "\nQuery: ", "\n------")),
    Pattern("document tags", "<document_content>", ("</document_content>",)),
)
"""The rows of the apps that docs/integrations/prompts.md names."""


class _Row(BaseModel):
    model_config = ConfigDict(extra="forbid")

    app: Annotated[str, Field(min_length=1)]
    start: str
    end: str | Annotated[list[str], Field(min_length=1)]
    split: Annotated[str, Field(min_length=1)] | None = None

    @property
    def pattern(self) -> Pattern:
        ends = [self.end] if isinstance(self.end, str) else self.end
        return Pattern(self.app, self.start, tuple(ends), self.split)


class PatternFile(BaseModel):
    """A file of further rows: TOML, each in a table ``[[pattern]]``."""

    model_config = ConfigDict(extra="forbid")

    pattern: list[_Row]

    @classmethod
    def read(cls, path: Path) -> Self:
        """Reads a file; raises :class:`PatternError`."""
        try:
            return cls.model_validate(tomllib.loads(path.read_text("utf-8")))
        except OSError as error:
            raise PatternError(f"--documents is auto, off or a file of forms; {path}: {error.strerror}") from error
        except ValidationError as error:
            fault = error.errors()[0]
            raise PatternError(f"{path}: {'.'.join(map(str, fault['loc']))}: {fault['msg']}") from error
        except ValueError as error:
            raise PatternError(f"{path} is not TOML: {error}") from error


def patterns_of(documents: str) -> tuple[Pattern, ...]:
    """The forms of ``--documents``: the rows of a file, if it is one, before those that are known here.

    Raises :class:`PatternError`.
    """
    if documents in get_args(FindsDocuments):
        return PATTERNS
    return (*(row.pattern for row in PatternFile.read(Path(documents)).pattern), *PATTERNS)


def finds_by(documents: str) -> FindsDocuments:
    """Whether documents are looked for by ``--documents``."""
    return "off" if documents == "off" else "auto"
