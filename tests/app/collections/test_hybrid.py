# SPDX-License-Identifier: Apache-2.0
"""The retriever of ``--retriever URL``: by words and meaning, with vectors that are computed once; and without them."""

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest

from app.collections import embeddings, hybrid
from app.collections.embeddings import Endpoint, LocalModel
from app.collections.hybrid import Hybrid
from app.collections.retrieval import Retrieval
from app.collections.retrievers import Ranked
from app.collections.store import Collections, Corpus
from app.settings import Settings
from tests.app.collections.endpoint import EndpointStandIn
from tests.app.collections.helpers import corpus_of, recall, record_of

TEXTS = {
    "kitten": "A kitten sleeps on the sofa.",
    "automobile": "The automobile needs petrol.",
    "dwelling": "Their dwelling is by the lake.",
    "pump": "Set PUMP_MAX_PRESSURE to 5.",
}


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch):
    monkeypatch.setattr(embeddings, "_PAUSE_S", -1.0)


def stored(collections: Collections, texts: dict[str, str] = TEXTS) -> Corpus:
    about = collections.begin("default", "things", None, None, 99)
    for file, text in texts.items():
        collections.put(about, record_of(file, text))
    return collections.corpus("default", "things")


def made(stand_in: EndpointStandIn) -> Hybrid:
    return Hybrid.of_url(f"{stand_in.url}?model=m")


async def found(retriever: Hybrid, question: str, corpus: Corpus, top_k: int = 1) -> tuple[list[str], str | None]:
    """The files of the passages found, the best first, and what was missing."""
    ranked = await retriever.rank(question, corpus, top_k)
    return [corpus.passages[place].file for place, _ in ranked], ranked.degraded


@pytest.mark.parametrize(
    ("question", "file"),
    [("my cat", "kitten"), ("Which car?", "automobile"), ("a home", "dwelling"), ("pump_max_pressure", "pump")],
)
async def test_words_and_meaning_are_found(stand_in, question, file):
    assert await found(made(stand_in), question, corpus_of(TEXTS)) == ([file], None)


async def test_vectors_are_computed_once(stand_in, collections):
    """Also by another server, and after a file has changed only its passages'."""
    await found(made(stand_in), "my cat", stored(collections))
    assert sorted(stand_in.texts) == sorted([*TEXTS.values(), "my cat"])
    stand_in.asked.clear()
    again = Collections(collections.root).corpus("default", "things")
    assert await found(made(stand_in), "Which car?", again) == (["automobile"], None)
    assert stand_in.texts == ["Which car?"]
    stand_in.asked.clear()
    await found(made(stand_in), "my cat", stored(collections, {"kitten": "A kitten eats.", "copy": TEXTS["pump"]}))
    assert sorted(stand_in.texts) == ["A kitten eats.", "my cat"]


async def test_another_model_has_vectors_of_its_own(stand_in, collections):
    corpus = stored(collections)
    for model in ("m", "n", "m"):
        retriever = Hybrid(Endpoint(f"{stand_in.url}?model={model}"))
        assert await found(retriever, "my cat", corpus) == (["kitten"], None)
    assert [len(collections.vectors(corpus.about).load(model)) for model in ("m", "n")] == [4, 4]
    assert stand_in.texts.count(TEXTS["pump"]) == 2


async def test_concurrent_questions_compute_vectors_once(stand_in, collections):
    corpus, retriever = stored(collections), made(stand_in)
    await asyncio.gather(*(found(retriever, "my cat", corpus) for _ in range(8)))
    assert stand_in.texts.count(TEXTS["pump"]) == 1


async def test_without_the_endpoint_words_are_found_alone_and_it_is_told(stand_in, collections):
    corpus, retriever = stored(collections), made(stand_in)
    stand_in.answers["/v1/embeddings"] = 500, "broken"
    degraded = f"BM25 alone: {stand_in.url}/embeddings answered 500: broken"
    assert await found(retriever, "the sofa", corpus) == (["kitten"], degraded)
    assert await found(retriever, "my cat", corpus) == ([], degraded)
    del stand_in.answers["/v1/embeddings"]
    assert await found(retriever, "my cat", corpus) == (["kitten"], None)


async def test_an_ingestion_computes_vectors_or_says_in_its_summary_that_they_are_missing(stand_in, collections):
    corpus = stored(collections)
    stand_in.answers["/v1/embeddings"] = 500, "broken"

    async def lines():
        yield {"file": "bad", "status": "failed", "error": "unreadable"}
        yield {"file": "kitten", "status": "added", "passages": 1}
        yield {"file": "kitten", "index": 0, "status": "filled"}
        yield {"summary": {"files": {}}}

    async def told() -> list[dict]:
        return [line async for line in Retrieval(collections, made(stand_in)).prepared(corpus.about, lines())]

    *others, last = await told()
    assert [line["status"] for line in others] == ["failed", "added", "filled"]
    missing = "1 passages have no embeddings yet, and are found by their words alone: http"
    assert last["summary"]["search"].startswith(missing)
    del stand_in.answers["/v1/embeddings"]
    for _ in range(2):
        assert (await told())[-1] == {"summary": {"files": {}}}
    assert stand_in.texts == [TEXTS["kitten"]]


async def test_many_missing_vectors_are_computed_behind_the_question(stand_in, collections, monkeypatch):
    monkeypatch.setattr(hybrid, "_AT_ONCE", 2)
    corpus, retriever = stored(collections), made(stand_in)
    missing = "4 of 4 passages have no embeddings yet"
    assert await found(retriever, "the sofa", corpus) == (["kitten"], missing)
    await asyncio.gather(*retriever._behind.values())
    assert await found(retriever, "my cat", corpus) == (["kitten"], None)
    assert sorted(stand_in.texts) == sorted([*TEXTS.values(), "the sofa", "my cat"])


async def test_a_model_that_changed_behind_its_name_is_told(stand_in, collections):
    class Other:
        name = "m"

        async def embed(self, texts: Sequence[str]) -> np.ndarray:
            return np.ones((len(texts), 3), dtype=np.float32)

    corpus = stored(collections)
    await found(made(stand_in), "my cat", corpus)
    files, degraded = await found(Hybrid(Other()), "the sofa", corpus)
    assert files == ["kitten"]
    assert "m have another length than those stored" in (degraded or "")


async def test_a_reranker_has_the_last_word(stand_in):
    url = f"{stand_in.url}?model=m&reranker=r"
    corpus, retriever = corpus_of(TEXTS), Hybrid.of_url(url)
    assert await found(retriever, "my cat", corpus, 2) == (["dwelling", "kitten"], None)  # the longest two
    stand_in.answers["/v1/rerank"] = 404, "no such model"
    files, degraded = await found(retriever, "my cat", corpus)
    assert files == ["kitten"]
    assert (degraded or "").startswith("not reranked: http")


@pytest.mark.parametrize("texts", [{}, {"scan": "…"}])
async def test_an_empty_collection_has_nothing_and_a_key_in_the_url_is_not_shown(stand_in, texts):
    assert "sesame" not in repr(Settings(retriever="http://:sesame@host/v1?model=a"))
    assert len(await made(stand_in).rank("owl", corpus_of(texts), 4)) == len(texts)


async def test_most_answers_are_found_in_five_languages(minilm):
    """Although the model knows English alone."""
    assert await recall(Hybrid(LocalModel(minilm))) >= 0.95


def test_first_ranks_count():
    """A passage that one ranking has first is before one that both have in the middle."""
    one, other = [0, *range(10, 19), 1], [2, *range(20, 29), 1]
    ranked = hybrid._fused(*([Ranked(place, 1.0) for place in ranking] for ranking in (one, other)))
    places = [each.place for each in ranked]
    assert places.index(0) < places.index(1)
    assert places.index(2) < places.index(1)
