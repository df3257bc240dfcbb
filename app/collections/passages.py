# SPDX-License-Identifier: Apache-2.0
"""Passages of files, as collections keep them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

from xxhash import xxh3_64_hexdigest

from app.documents.document import Document
from app.documents.readers import EDITION
from app.documents.splitting import Piece

LONGEST_NAME: Final = 512
"""Characters of a file's name."""


@dataclass(frozen=True, slots=True)
class Passage:
    """A piece of a file, in size a chunk.

    ``page`` counts from 1; ``None`` in files without pages. ``start`` and ``end`` are characters of the file's text.
    """

    id: str
    file: str
    number: int
    title: str | None
    text: str
    tokens: int
    start: int
    end: int
    page: int | None
    context: int = 0
    """How many passages before it in its file it is computed behind."""

    @property
    def document(self) -> Document:
        """The passage in a prompt, without its context."""
        return Document(self.text, self.id, self.title)


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file as a collection keeps it.

    ``digest`` is of its bytes, ``max_tokens`` the most of a passage, ``edition`` that of the readers.
    """

    file: str
    digest: str
    bytes: int
    max_tokens: int
    passages: tuple[Passage, ...]
    edition: int = EDITION

    @classmethod
    def of_json(cls, fields: Mapping[str, Any]) -> Self:
        """The record whose ``asdict`` is ``fields``. Raises ``TypeError`` or ``KeyError`` for other JSON."""
        passages = tuple(Passage(**passage) for passage in fields["passages"])
        return cls(**{**fields, "passages": passages})

    def context_of(self, passage: Passage) -> str:
        """The text that a passage of the file is computed behind."""
        end = passage.number - 1
        return "".join(each.document.render() for each in self.passages[end - passage.context : end])

    def is_of(self, digest: str, max_tokens: int) -> bool:
        """Whether a file with these bytes, read and split now, would make this record."""
        return (self.digest, self.max_tokens, self.edition) == (digest, max_tokens, EDITION)


def passages_of(pieces: Iterable[Piece], file: str, collection: str, context_tokens: int = 0) -> tuple[Passage, ...]:
    """The passages of a file, in its order. An id depends on collection, file, number, content and context."""
    pieces = list(pieces)
    contexts = _contexts([piece.num_tokens for piece in pieces], context_tokens)
    return tuple(
        Passage(
            piece_id(f"{collection}/{file}", number, piece, pieces[number - 1 - context : number - 1]),
            file,
            number,
            *piece,
            context,
        )
        for number, (piece, context) in enumerate(zip(pieces, contexts, strict=True), 1)
    )


def _contexts(tokens: Sequence[int], most: int) -> list[int]:
    """How many passages before it each passage is computed behind, ``most`` tokens together.

    A context that is full starts anew with its last half, so that most passages continue the context of the one before
    them, which the engine then has in its prefix cache.
    """
    contexts, first, total = [], 0, 0
    for number, length in enumerate(tokens):
        if total > most:
            while total > most // 2:
                total -= tokens[first]
                first += 1
        contexts.append(number - first)
        total += length
    return contexts


def piece_id(file: str, number: int, piece: Piece, context: Sequence[Piece] = ()) -> str:
    """An id that differs where the file, the number in it, the content or the context does."""
    text = "".join(Document(each.text, None, each.title).render() for each in (piece, *context))
    return f"{file}#{number}-{xxh3_64_hexdigest(text.encode())[:8]}"


def dropped_ids(before: FileRecord | None, after: FileRecord | None) -> Sequence[str]:
    """Ids of passages that a file had and no longer has."""
    kept = {passage.id for passage in after.passages} if after else set()
    return [passage.id for passage in before.passages if passage.id not in kept] if before else []
