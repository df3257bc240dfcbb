# SPDX-License-Identifier: Apache-2.0
"""Retrievers: they rank a collection's passages by a question."""

import threading
from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import bm25s
from bm25s.stopwords import STOPWORDS_EN

from app.collections.store import Corpus
from app.collections.words import words_of
from cache.errors import ChunkCacheError
from engine_ext.client.threads import in_thread

ENTRY_POINTS: Final = "tessera.retrievers"
"""Entry points of any package: a name for ``--retriever``, and a class with the method of :class:`Retriever`."""


class UnknownRetrieverError(ValueError):
    """There is no retriever of the name, or it can't be made; the message says why."""


class RetrieverFailedError(ChunkCacheError):
    """The retriever could not rank passages; the message says why."""


class Ranked(NamedTuple):
    """A passage by its place in the corpus. Greater scores are better."""

    place: int
    score: float


class Ranking(list[Ranked]):
    """Ranked passages, and why they were ranked otherwise than the retriever is meant to."""

    def __init__(self, ranked: Sequence[Ranked], degraded: str | None = None) -> None:
        super().__init__(ranked)
        self.degraded = degraded


class Retriever(Protocol):
    """Ranks passages. Made once for a server, without arguments.

    ``prepare(vectors, passages)``, where it has one, is called with each file that is stored, and returns what to tell.
    """

    async def rank(self, query: str, corpus: Corpus, top_k: int) -> Sequence[Ranked]:
        """At most ``top_k`` passages that fit the query, the best first. An error refuses the request (502)."""
        ...


class Bm25:
    """Ranks by shared words, of which rare ones weigh more.

    From "The Probabilistic Relevance Framework: BM25 and Beyond" (Robertson and Zaragoza, 2009).
    """

    def __init__(self) -> None:
        self._indexes: WeakKeyDictionary[Corpus, bm25s.BM25 | None] = WeakKeyDictionary()
        self._lock = threading.Lock()

    async def rank(self, query: str, corpus: Corpus, top_k: int) -> Sequence[Ranked]:
        """See :meth:`Retriever.rank`."""
        return await in_thread(self._rank, query, corpus, top_k)

    def _rank(self, query: str, corpus: Corpus, top_k: int) -> Sequence[Ranked]:
        words = _without_stop_words(words_of(query))
        if not words or (index := self._index(corpus)) is None:
            return []
        found, scores = index.retrieve([words], k=min(top_k, len(corpus.passages)), show_progress=False)
        return [Ranked(int(i), float(score)) for i, score in zip(found[0], scores[0], strict=True) if score > 0]

    def _index(self, corpus: Corpus) -> bm25s.BM25 | None:
        """``None`` for a corpus without words."""
        with self._lock:
            if corpus not in self._indexes:
                words = [words_of(each.document.render()) for each in corpus.passages]
                index = bm25s.BM25() if any(words) else None
                if index is not None:
                    index.index(words, show_progress=False)
                self._indexes[corpus] = index
            return self._indexes[corpus]


def _without_stop_words(words: list[str]) -> list[str]:
    """Words without those that say little, unless there are no others: in "Who is in IT?", IT alone stays."""
    said = [word for word in words if word not in STOPWORDS_EN]
    return said if any(word.casefold() not in STOPWORDS_EN for word in said) else words
