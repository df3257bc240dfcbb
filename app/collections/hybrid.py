# SPDX-License-Identifier: Apache-2.0
"""The retriever of ``--retriever URL``: words and embeddings, joined by their ranks."""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple, Self
from urllib.parse import unquote, urlsplit
from weakref import WeakKeyDictionary

import numpy as np

from app.collections.embeddings import Embedder, EmbeddingError, Endpoint, LocalModel, Matrix
from app.collections.passages import Passage
from app.collections.retrievers import Bm25, Ranked, Ranking
from app.collections.store import Corpus, Vectors, digest_of
from engine_ext.client.threads import in_thread

logger = logging.getLogger(__name__)
_CANDIDATES: Final = 50
"""Passages that each ranking contributes."""
_RANK_CONSTANT: Final = 5
"""Small, so that a first rank counts. With the usual 60, two middling ranks outweigh it, and a model that does not know
a language outvotes the words."""
_RERANKED: Final = 20
_AT_ONCE: Final = 256
"""Passages without vectors that a question waits for; more are embedded behind it."""


class _Embedded(NamedTuple):
    """The vectors of a corpus: row by row of the passages at ``places``; ``missing`` ones have none."""

    places: list[int]
    matrix: Matrix
    missing: list[Passage]


class Hybrid:
    """Ranks by BM25 and by embeddings, and joins both by reciprocal rank fusion; then perhaps by a reranker.

    From "Reciprocal Rank Fusion Outperforms Condorcet and Individual Rank Learning Methods" (Cormack and others, 2009).
    Vectors are kept with the passages, and computed once. While the model can't be asked, BM25 ranks alone.
    """

    def __init__(self, embedder: Embedder, reranker: Endpoint | None = None) -> None:
        self._bm25 = Bm25()
        self._embedder = embedder
        self._reranker = reranker
        self._embedded: WeakKeyDictionary[Corpus, asyncio.Task[_Embedded]] = WeakKeyDictionary()
        self._behind: dict[tuple[str, str], asyncio.Task[None]] = {}

    @classmethod
    def of_url(cls, url: str) -> Self:
        """By ``--retriever URL``; raises :class:`EmbeddingError`."""
        if url.startswith("file:"):
            return cls(LocalModel(Path(unquote(urlsplit(url).path))))
        endpoint = Endpoint(url)
        return cls(endpoint, endpoint if endpoint.reranker else None)

    async def rank(self, query: str, corpus: Corpus, top_k: int) -> Ranking:
        """See :meth:`app.collections.retrievers.Retriever.rank`."""
        by_words = await self._bm25.rank(query, corpus, max(_CANDIDATES, top_k))
        if not corpus.passages:
            return Ranking([])
        try:
            by_meaning, degraded = await self._by_meaning(query, corpus, max(_CANDIDATES, top_k))
        except EmbeddingError as error:
            logger.warning("BM25 alone: %s", error)
            return Ranking(by_words[:top_k], f"BM25 alone: {error}")
        fused = _fused(by_words, by_meaning)
        if self._reranker is None:
            return Ranking(fused[:top_k], degraded)
        try:
            return Ranking((await self._reranked(self._reranker, query, corpus, fused, top_k))[:top_k], degraded)
        except EmbeddingError as error:
            logger.warning("not reranked: %s", error)
            return Ranking(fused[:top_k], f"not reranked: {error}")

    async def prepare(self, vectors: Vectors, passages: Sequence[Passage]) -> str | None:
        """Computes the vectors of stored passages; returns why it could not."""
        by_digest = {digest_of(passage): passage for passage in passages}
        missing = await in_thread(vectors.missing, self._embedder.name, by_digest)
        try:
            await self._compute(vectors, [by_digest[digest] for digest in missing])
        except EmbeddingError as error:
            logger.warning("%d passages have no embeddings yet: %s", len(missing), error)
            return f"{len(missing)} passages have no embeddings yet, and are found by their words alone: {error}"
        return None

    async def _by_meaning(self, query: str, corpus: Corpus, count: int) -> tuple[list[Ranked], str | None]:
        asked, embedded = await asyncio.gather(self._embedder.embed([query]), self._of_corpus(corpus))
        if embedded.matrix.shape[1] not in (0, asked.shape[1]):
            raise EmbeddingError(f"the vectors of {self._embedder.name} have another length than those stored")
        scores = await in_thread(np.matmul, embedded.matrix, asked[0]) if embedded.places else np.empty(0)
        best = np.argsort(-scores, kind="stable")[:count]
        ranked = [Ranked(embedded.places[row], float(scores[row])) for row in best]
        without = len(embedded.missing)
        return ranked, f"{without} of {len(corpus.passages)} passages have no embeddings yet" if without else None

    async def _of_corpus(self, corpus: Corpus) -> _Embedded:
        """The vectors of a corpus; concurrent questions wait for the first one's."""
        task = self._embedded.get(corpus)
        if task is None or (task.done() and (task.cancelled() or task.exception() or task.result().missing)):
            task = self._embedded[corpus] = asyncio.create_task(self._read(corpus))
        return await asyncio.shield(task)

    async def _read(self, corpus: Corpus) -> _Embedded:
        stored = await in_thread(corpus.vectors.load, self._embedder.name) if corpus.vectors else {}
        embedded = await in_thread(_gathered, corpus, stored)
        if corpus.vectors is None or 0 < len(embedded.missing) <= _AT_ONCE:
            stored |= await self._compute(corpus.vectors, embedded.missing)
            return await in_thread(_gathered, corpus, stored)
        if embedded.missing:
            self._compute_behind(corpus, embedded.missing)
        return embedded

    def _compute_behind(self, corpus: Corpus, missing: Sequence[Passage]) -> None:
        """Computes vectors behind the questions that miss them, for one at a time of a collection."""
        about = corpus.about
        running = self._behind.get((about.namespace, about.name))
        if running is None or running.done():
            task = asyncio.create_task(self._computed_behind(corpus.vectors, missing))
            self._behind[about.namespace, about.name] = task

    async def _computed_behind(self, vectors: Vectors | None, missing: Sequence[Passage]) -> None:
        try:
            await self._compute(vectors, missing)
        except EmbeddingError as error:
            logger.warning("%d passages have no embeddings yet: %s", len(missing), error)

    async def _compute(self, vectors: Vectors | None, passages: Sequence[Passage]) -> dict[str, bytes]:
        """Computes vectors, and stores each part of them at once; raises :class:`EmbeddingError`."""
        computed: dict[str, bytes] = {}
        for start in range(0, len(passages), _AT_ONCE):
            part = passages[start : start + _AT_ONCE]
            rows = await self._embedder.embed([passage.document.render().strip() for passage in part])
            made = {
                digest_of(passage): row.astype(np.float16).tobytes() for passage, row in zip(part, rows, strict=True)
            }
            if vectors is not None:
                await in_thread(vectors.save, self._embedder.name, made)
            computed |= made
        return computed

    async def _reranked(
        self, reranker: Endpoint, query: str, corpus: Corpus, fused: Sequence[Ranked], top_k: int
    ) -> list[Ranked]:
        candidates = fused[: max(_RERANKED, top_k)]
        if not candidates:
            return []
        texts = [corpus.passages[place].document.render().strip() for place, _ in candidates]
        scores = await reranker.rerank(query, texts)
        scored = [Ranked(place, score) for (place, _), score in zip(candidates, scores, strict=True)]
        return sorted(scored, key=lambda each: -each.score)


def _gathered(corpus: Corpus, stored: Mapping[str, bytes]) -> _Embedded:
    found = [stored.get(digest_of(passage)) for passage in corpus.passages]
    places = [place for place, vector in enumerate(found) if vector is not None]
    rows = [np.frombuffer(vector, dtype=np.float16) for vector in found if vector is not None]
    missing = [passage for passage, vector in zip(corpus.passages, found, strict=True) if vector is None]
    if len({len(row) for row in rows}) > 1:
        raise EmbeddingError("stored vectors have different lengths: the model has changed behind its name")
    return _Embedded(places, np.array(rows, dtype=np.float32).reshape(len(rows), -1 if rows else 0), missing)


def _fused(*rankings: Sequence[Ranked]) -> list[Ranked]:
    scores: defaultdict[int, float] = defaultdict(float)
    for ranking in rankings:
        for rank, (place, _) in enumerate(ranking, 1):
            scores[place] += 1 / (_RANK_CONSTANT + rank)
    return sorted((Ranked(place, score) for place, score in scores.items()), key=lambda each: -each.score)
