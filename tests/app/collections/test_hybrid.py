# SPDX-License-Identifier: Apache-2.0
"""The retriever ``hybrid``: by words and meaning, with vectors that are computed once; and without them."""

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from app.collections import embeddings, hybrid
from app.collections.embeddings import EmbeddingError, Endpoint, LocalModel
from app.collections.hybrid import Hybrid
from app.collections.retrieval import Retrieval
from app.collections.retrievers import Ranked
from app.collections.store import About, Collections, Corpus
from app.settings import Settings
from tests.app.collections.endpoint import EndpointStandIn
from tests.app.collections.helpers import corpus_of, files_found, recall, record_of

TEXTS = {
    "kitten": "A kitten sleeps on the sofa.",
    "automobile": "The automobile needs petrol.",
    "dwelling": "Their dwelling is by the lake.",
    "pump": "Set PUMP_MAX_PRESSURE to 5.",
}


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embeddings, "_PAUSE_S", -1.0)


@pytest.fixture
def stand_in() -> Iterator[EndpointStandIn]:
    stand_in = EndpointStandIn()
    with stand_in.serving():
        yield stand_in


@pytest.fixture
def collections(tmp_path: Path) -> Collections:
    return Collections(tmp_path / "collections")


def stored(collections: Collections, texts: dict[str, str] = TEXTS) -> Corpus:
    about = collections.begin("default", "things", None, None, 99)
    for file, text in texts.items():
        collections.put(about, record_of(file, text))
    return collections.corpus("default", "things")


def made(stand_in: EndpointStandIn) -> Hybrid:
    return Hybrid.of_settings(Settings(retriever="hybrid", embeddings_url=f"{stand_in.url}?model=m"))


@pytest.mark.parametrize(
    ("question", "file"),
    [("my cat", "kitten"), ("Which car?", "automobile"), ("a home", "dwelling"), ("pump_max_pressure", "pump")],
)
async def test_words_and_meaning_are_found(stand_in: EndpointStandIn, question: str, file: str) -> None:
    assert (await files_found(made(stand_in), question, corpus_of(TEXTS), 2))[0] == file


async def test_vectors_are_computed_once(stand_in: EndpointStandIn, collections: Collections) -> None:
    """Also by another server, and after a file has changed only its passages'."""
    corpus = stored(collections)
    await files_found(made(stand_in), "my cat", corpus, 2)
    assert sorted(stand_in.texts) == sorted([*TEXTS.values(), "my cat"])
    again = Collections(collections.root).corpus("default", "things")
    stand_in.asked.clear()
    assert (await files_found(made(stand_in), "Which car?", again, 1)) == ["automobile"]
    assert stand_in.texts == ["Which car?"]
    stored(collections, {"kitten": "A kitten eats.", "copy": TEXTS["pump"]})
    stand_in.asked.clear()
    await files_found(made(stand_in), "my cat", collections.corpus("default", "things"), 2)
    assert sorted(stand_in.texts) == ["A kitten eats.", "my cat"]


async def test_another_model_has_vectors_of_its_own(stand_in: EndpointStandIn, collections: Collections) -> None:
    corpus = stored(collections)
    for model in ("m", "n", "m"):
        retriever = Hybrid(Endpoint(f"{stand_in.url}?model={model}"))
        assert (await files_found(retriever, "my cat", corpus, 1)) == ["kitten"]
    assert [len(collections.vectors(corpus.about).load(model)) for model in ("m", "n")] == [4, 4]
    assert stand_in.texts.count(TEXTS["pump"]) == 2


async def test_concurrent_questions_compute_vectors_once(stand_in: EndpointStandIn, collections: Collections) -> None:
    corpus, retriever = stored(collections), made(stand_in)
    await asyncio.gather(*(files_found(retriever, "my cat", corpus, 1) for _ in range(8)))
    assert stand_in.texts.count(TEXTS["pump"]) == 1


async def test_ingestion_computes_vectors(stand_in: EndpointStandIn, collections: Collections) -> None:
    corpus = stored(collections)
    retriever = made(stand_in)
    passages = corpus.file("kitten").passages
    assert await retriever.prepare(collections.vectors(corpus.about), passages) is None
    assert await retriever.prepare(collections.vectors(corpus.about), passages) is None
    assert stand_in.texts == [TEXTS["kitten"]]


async def test_without_the_endpoint_words_are_found_alone_and_it_is_told(
    stand_in: EndpointStandIn, collections: Collections
) -> None:
    corpus, retriever = stored(collections), made(stand_in)
    stand_in.answers["/v1/embeddings"] = 500, "broken"
    ranked = await retriever.rank("the sofa", corpus, 4)
    assert corpus.passages[ranked[0].place].file == "kitten"
    assert ranked.degraded == f"BM25 alone: {stand_in.url}/embeddings answered 500: broken"
    problem = await retriever.prepare(collections.vectors(corpus.about), corpus.passages)
    assert problem is not None
    assert problem.startswith("4 passages have no embeddings yet, and are found by their words alone: http")
    assert list(await retriever.rank("my cat", corpus, 4)) == []
    del stand_in.answers["/v1/embeddings"]
    assert await retriever.prepare(collections.vectors(corpus.about), corpus.passages) is None
    ranked = await retriever.rank("my cat", corpus, 1)
    assert ([corpus.passages[place].file for place, _ in ranked], ranked.degraded) == (["kitten"], None)


async def test_an_ingestion_says_in_its_summary_that_vectors_are_missing(
    stand_in: EndpointStandIn, collections: Collections
) -> None:
    corpus = stored(collections)
    stand_in.answers["/v1/embeddings"] = 500, "broken"

    async def lines():
        yield {"file": "bad", "status": "failed", "error": "unreadable"}
        yield {"file": "kitten", "status": "added", "passages": 1}
        yield {"file": "kitten", "index": 0, "status": "filled"}
        yield {"summary": {"files": {}}}

    async def told(about: About) -> list[dict]:
        return [line async for line in Retrieval(collections, made(stand_in)).prepared(about, lines())]

    *others, last = await told(corpus.about)
    assert [line["status"] for line in others] == ["failed", "added", "filled"]
    assert last["summary"]["search"].startswith("1 passages have no embeddings yet")
    del stand_in.answers["/v1/embeddings"]
    assert (await told(corpus.about))[-1] == {"summary": {"files": {}}}
    assert stand_in.texts == [TEXTS["kitten"]]


async def test_many_missing_vectors_are_computed_behind_the_question(
    stand_in: EndpointStandIn, collections: Collections, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hybrid, "_AT_ONCE", 2)
    corpus, retriever = stored(collections), made(stand_in)
    first = await retriever.rank("the sofa", corpus, 1)
    assert ([corpus.passages[place].file for place, _ in first], first.degraded) == (
        ["kitten"],
        "4 of 4 passages have no embeddings yet",
    )
    await asyncio.gather(*retriever._behind.values())
    second = await retriever.rank("my cat", corpus, 1)
    assert ([corpus.passages[place].file for place, _ in second], second.degraded) == (["kitten"], None)
    assert sorted(stand_in.texts) == sorted([*TEXTS.values(), "the sofa", "my cat"])


async def test_a_model_that_changed_behind_its_name_is_told(
    stand_in: EndpointStandIn, collections: Collections
) -> None:
    corpus = stored(collections)

    class Other:
        name = "m"

        async def embed(self, texts: Sequence[str]) -> np.ndarray:
            return np.ones((len(texts), 3), dtype=np.float32)

    await made(stand_in).rank("my cat", corpus, 1)
    ranked = await Hybrid(Other()).rank("the sofa", corpus, 1)
    assert [corpus.passages[place].file for place, _ in ranked] == ["kitten"]
    assert "m have another length than those stored" in (ranked.degraded or "")


async def test_a_reranker_has_the_last_word(stand_in: EndpointStandIn) -> None:
    url = f"{stand_in.url}?model=m&reranker=r"
    corpus, retriever = corpus_of(TEXTS), Hybrid.of_settings(Settings(retriever="hybrid", embeddings_url=url))
    ranked = await retriever.rank("my cat", corpus, 2)
    assert [corpus.passages[place].file for place, _ in ranked] == ["dwelling", "kitten"]  # the longest two
    assert (ranked[0].score, ranked.degraded) == (len(TEXTS["dwelling"]), None)
    stand_in.answers["/v1/rerank"] = 404, "no such model"
    ranked = await retriever.rank("my cat", corpus, 1)
    assert [corpus.passages[place].file for place, _ in ranked] == ["kitten"]
    assert (ranked.degraded or "").startswith("not reranked: http")


@pytest.mark.parametrize("texts", [{}, {"scan": "…"}])
async def test_an_empty_collection_has_nothing(stand_in: EndpointStandIn, texts: dict[str, str]) -> None:
    assert len(await made(stand_in).rank("owl", corpus_of(texts), 4)) == len(texts)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "hybrid needs --embeddings-url"),
        ({"embeddings_url": "file:///nowhere"}, "/nowhere has no model of embeddings"),
        ({"embeddings_url": "host:8001"}, "--embeddings-url is http://HOST/v1"),
    ],
)
def test_what_is_missing_is_told_at_the_start(given: dict[str, str], message: str) -> None:
    with pytest.raises(EmbeddingError, match=message):
        Hybrid.of_settings(Settings(retriever="hybrid", **given))


def test_embeddings_that_nothing_uses_are_refused() -> None:
    with pytest.raises(ValidationError, match="is for --retriever hybrid"):
        Settings(embeddings_url="http://host/v1")


async def test_most_answers_are_found_in_five_languages(minilm: Path) -> None:
    """Although the model knows English alone."""
    assert await recall(Hybrid(LocalModel(minilm))) >= 0.95


def test_first_ranks_count() -> None:
    """A passage that one ranking has first is before one that both have in the middle."""
    one, other = [0, *range(10, 19), 1], [2, *range(20, 29), 1]
    ranked = hybrid._fused(*([Ranked(place, 1.0) for place in ranking] for ranking in (one, other)))
    places = [each.place for each in ranked]
    assert places.index(0) < places.index(1)
    assert places.index(2) < places.index(1)
