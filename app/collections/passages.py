# SPDX-License-Identifier: Apache-2.0
"""Passages of files, as collections keep them."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import PurePath
from typing import Any, Final, Self

from xxhash import xxh3_64_hexdigest

from app.documents.document import Document
from app.documents.files import pieces_of
from app.documents.splitting import CountTokens

_PROBE: Final = 60
"""Characters of a passage that find its page."""
_PAGE_BREAK: Final = "\f"


@dataclass(frozen=True, slots=True)
class Passage:
    """A piece of a file, in size a chunk. ``page`` counts from 1; ``None`` in files without pages."""

    id: str
    file: str
    number: int
    title: str | None
    text: str
    tokens: int
    page: int | None

    @property
    def document(self) -> Document:
        """The passage in a prompt."""
        return Document(self.text, self.id, self.title)

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file as a collection keeps it. ``digest`` is of its bytes, ``max_tokens`` the most of a passage."""

    file: str
    digest: str
    bytes: int
    max_tokens: int
    passages: tuple[Passage, ...]

    @classmethod
    def of_json(cls, fields: Mapping[str, Any]) -> Self:
        """The record whose :meth:`to_dict` is ``fields``. Raises ``TypeError`` or ``KeyError`` for other JSON."""
        passages = tuple(Passage(**passage) for passage in fields["passages"])
        return cls(**{**fields, "passages": passages})

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return asdict(self)

    def is_of(self, digest: str, max_tokens: int) -> bool:
        """Whether a file with these bytes, split so, would make this record."""
        return (self.digest, self.max_tokens) == (digest, max_tokens)


def split_into_passages(
    text: str, file: str, max_tokens: int, count: CountTokens, *, collection: str
) -> tuple[Passage, ...]:
    """The passages of a file's text, in its order. An id depends on collection, file, number and content."""
    pages = _Pages(text)
    passages = []
    for number, (document, num_tokens) in enumerate(
        pieces_of(text, PurePath(file).suffix.lower(), max_tokens, count), 1
    ):
        digest = xxh3_64_hexdigest(document.render().encode())[:8]
        id = f"{collection}/{file}#{number}-{digest}"
        page = pages.page_of(document.text)
        passages.append(Passage(id, file, number, document.title, document.text, num_tokens, page))
    return tuple(passages)


def dropped_ids(before: FileRecord | None, after: FileRecord | None) -> Sequence[str]:
    """Ids of passages that a file had and no longer has."""
    kept = {passage.id for passage in after.passages} if after else set()
    return [passage.id for passage in before.passages if passage.id not in kept] if before else []


class _Pages:
    """Finds the pages of consecutive passages by the form feeds in their text."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._has_pages = _PAGE_BREAK in text
        self._at = 0

    def page_of(self, passage: str) -> int | None:
        if not self._has_pages:
            return None
        found = self._text.find(passage.splitlines()[0][:_PROBE], self._at)
        self._at = max(self._at, found)
        return 1 + self._text.count(_PAGE_BREAK, 0, self._at)
