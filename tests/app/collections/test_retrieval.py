# SPDX-License-Identifier: Apache-2.0
"""The field ``retrieve``: what is searched for, in the messages of every schema, and what is refused."""

import copy
from typing import Any

import pytest

from app.collections.retrieval import Retrieval, make_retrieval
from app.collections.retrievers import Ranked, Ranking, RetrieverFailedError
from app.collections.store import Collections, Corpus, UnknownCollectionError
from app.documents.rag_request import RagChatRequest
from app.documents.retrieve_field import RetrieveField
from app.settings import Settings
from tests.app.collections.helpers import record_of
from tests.app.helpers import refused

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
ANSWER = {"role": "assistant", "content": "Near the lake."}
CALL = {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]}
RESULT = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "ok"}]}


class Asked:
    """A retriever that notes its questions, and finds the first passages."""

    def __init__(self, degraded: str | None = None) -> None:
        self.queries: list[str] = []
        self._degraded = degraded

    async def rank(self, query: str, corpus: Corpus, top_k: int) -> Ranking:
        self.queries.append(query)
        return Ranking([Ranked(place, 1.0) for place in range(min(top_k, len(corpus.passages)))], self._degraded)


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def test_collections_are_not_kept_where_a_keyed_tiers_writers_could_change_them(tmp_path, monkeypatch, caplog):
    def root(**given):
        settings = Settings(chunk_cache_tiers=f"file://{tmp_path}/kv?size=1GiB", **given)
        return make_retrieval(settings).collections.root

    monkeypatch.setenv("TESSERA_HOME", str(tmp_path / "home"))
    folder, at_home, key = tmp_path / "kv" / "collections", tmp_path / "home" / "collections", tmp_path / "key"
    assert (root(), root(tier_key=key), root(tier_key=key, collections=folder)) == (folder, at_home, folder)
    assert not caplog.messages
    folder.mkdir(parents=True)
    assert root(tier_key=key) == at_home
    assert f"the collections in {folder} aren't signed" in caplog.text


@pytest.fixture
def asked():
    return Asked()


@pytest.fixture
def retrieval(tmp_path, asked):
    collections = Collections(tmp_path)
    about = collections.begin("default", "birds", "You know birds.", None, 60)
    for name in ("falcon", "heron"):
        collections.put(about, record_of(name, f"About the {name}."))
    return Retrieval(collections, asked)


async def fill(retrieval: Retrieval, path: str, turns: Any, **fields: Any) -> dict[str, Any]:
    body = {"retrieve": {"collection": "birds"}, "input" if path == RESPONSES else "messages": turns, **fields}
    body = copy.deepcopy(body)
    await retrieval.fill_body(path, body)
    return body


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
@pytest.mark.parametrize(
    ("turns", "query"),
    [
        ([user("Which bird?")], "Which bird?"),
        ([user("one"), ANSWER, user("two"), ANSWER, user("three")], "two\nthree"),
        ([user("Which bird?"), CALL, RESULT, CALL, RESULT, CALL, RESULT], "Which bird?"),
        ([user("one"), CALL, RESULT, ANSWER, user("two"), CALL, RESULT], "one\ntwo"),
        ([user([{"type": "text", "text": "a"}, {"type": "image_url"}, {"type": "text", "text": "b"}])], "a\nb"),
        ([user([{"type": "input_text", "text": "a"}])], "a"),
        ([user("Which bird?"), user(" \n"), user(None), user([])], "Which bird?"),
        ([{"role": "system", "content": 7}, user("Which bird?")], "Which bird?"),
    ],
)
async def test_the_query_is_the_last_two_messages_with_text(retrieval, asked, path, turns, query):
    body = await fill(retrieval, path, turns)
    assert asked.queries == [query]
    assert [each["data"]["text"] for each in body["documents"]] == ["About the falcon.", "About the heron."]


async def test_a_plain_input_and_a_query_are_searched_for(retrieval, asked):
    await fill(retrieval, RESPONSES, "Which bird?")
    await fill(retrieval, CHAT, [RESULT], retrieve={"collection": "birds", "query": "heron"})
    assert asked.queries == ["Which bird?", "heron"]


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
@pytest.mark.parametrize(
    ("turns", "parameter"),
    [
        ({"role": "user"}, ""),
        ([user("a"), None], ".1"),
        ([user(7)], ".0.content"),
        ([user([{"type": "text"}])], ".0.content.0.text"),
        ([user([{"type": "image"}, {"type": "input_text", "text": ["a"]}])], ".0.content.1.text"),
        ([user(["a", 7])], ".0.content.1"),
    ],
)
async def test_messages_of_wrong_types_are_refused(retrieval, path, turns, parameter):
    with refused(("input" if path == RESPONSES else "messages") + parameter):
        await fill(retrieval, path, turns)


@pytest.mark.parametrize("turns", [[], [RESULT], [user("")], [ANSWER], [user([{"type": "image"}])]])
async def test_without_text_there_is_nothing_to_search_for(retrieval, turns):
    with refused("messages", "needs a user message with text, or a query"):
        await fill(retrieval, CHAT, turns)
    request = RagChatRequest(retrieve={"collection": "birds"}, messages=turns)
    with refused("messages", "needs a user message with text, or a query"):
        await retrieval.fill(request, RetrieveField(collection="birds"))


@pytest.mark.parametrize("given", [{}, {"collection": ".."}, {"collection": "a\x00"}, {"collection": "x" * 65}, 7])
async def test_a_bad_field_is_refused_before_anything_is_read(retrieval, given):
    with refused("retrieve" + (".collection" if isinstance(given, dict) else "")):
        await fill(retrieval, CHAT, [user("a")], retrieve=given)
    with pytest.raises(UnknownCollectionError, match="no collection 'fish'"):
        await fill(retrieval, CHAT, [user("a")], retrieve={"collection": "fish"})


async def test_a_degraded_ranking_is_reported_and_a_retriever_that_fails_refuses_the_request(retrieval):
    degraded = Retrieval(retrieval.collections, Asked("BM25 alone: no endpoint"))
    request = RagChatRequest(retrieve={"collection": "birds", "top_k": 1}, question="Which?")
    _, found = await degraded.fill(request, request.retrieve)
    assert ([each.file for each in found.passages], found.degraded) == (["falcon"], "BM25 alone: no endpoint")
    _, found = await retrieval.fill(request, request.retrieve)
    assert found.degraded is None

    class Failing:
        async def rank(self, *_: Any) -> list[Ranked]:
            raise RuntimeError("no index")

    with pytest.raises(RetrieverFailedError, match="RuntimeError: no index"):
        await fill(Retrieval(retrieval.collections, Failing()), CHAT, [user("a")])
