# SPDX-License-Identifier: Apache-2.0
"""Retrievers: they rank a collection's passages by a question."""

import asyncio
import importlib.metadata
import threading
from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import bm25s

from app.collections.store import Corpus
from cache.errors import ChunkCacheError

ENTRY_POINTS: Final = "tessera.retrievers"
"""Entry points of any package: a name for ``--retriever``, and a class with the method of :class:`Retriever`."""
_WORD: Final = r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|[^\W\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]+"
"""A word, or a character of the scripts that put no spaces between words (Chinese, Japanese, Korean)."""


class UnknownRetrieverError(ValueError):
    """There is no retriever of the name, or it can't be loaded; the message says why."""


class RetrieverFailedError(ChunkCacheError):
    """The retriever could not rank passages; the message says why."""


class Ranked(NamedTuple):
    """A passage by its place in the corpus. Greater scores are better."""

    place: int
    score: float


class Retriever(Protocol):
    """Ranks passages. Made once for a server, without arguments."""

    async def rank(self, query: str, corpus: Corpus, top_k: int) -> Sequence[Ranked]:
        """At most ``top_k`` passages that fit the query, the best first. An error refuses the request (502)."""
        ...


class Bm25:
    """Ranks by shared words, of which rare ones weigh more.

    From "The Probabilistic Relevance Framework: BM25 and Beyond" (Robertson and Zaragoza, 2009).
    """

    def __init__(self) -> None:
        self._indexes: WeakKeyDictionary[Corpus, bm25s.BM25] = WeakKeyDictionary()
        self._lock = threading.Lock()

    async def rank(self, query: str, corpus: Corpus, top_k: int) -> Sequence[Ranked]:
        """See :meth:`Retriever.rank`."""
        return await asyncio.to_thread(self._rank, query, corpus, top_k)

    def _rank(self, query: str, corpus: Corpus, top_k: int) -> Sequence[Ranked]:
        words = _words([query])
        if not corpus.passages or not words[0]:
            return []
        with self._lock:
            index = self._indexes.get(corpus)
            if index is None:
                index = self._indexes[corpus] = bm25s.BM25()
                index.index(_words([each.document.render() for each in corpus.passages]), show_progress=False)
        count = min(top_k, len(corpus.passages))
        found, scores = index.retrieve(words, k=count, show_progress=False)
        return [Ranked(int(i), float(score)) for i, score in zip(found[0], scores[0], strict=True) if score > 0]


def make_retriever(name: str) -> Retriever:
    """The retriever of an entry point; raises :class:`UnknownRetrieverError`."""
    found = {each.name: each for each in importlib.metadata.entry_points(group=ENTRY_POINTS)}
    if name not in found:
        raise UnknownRetrieverError(f"there is no retriever {name!r}; there are {', '.join(sorted(found))}")
    try:
        retriever: Retriever = found[name].load()()
    except Exception as error:  # another package's code
        raise UnknownRetrieverError(f"retriever {name!r} can't be made: {type(error).__name__}: {error}") from error
    return retriever


def _words(texts: list[str]) -> list[list[str]]:
    words: list[list[str]] = bm25s.tokenize(
        texts, token_pattern=_WORD, stopwords="en", return_ids=False, show_progress=False
    )
    return words
