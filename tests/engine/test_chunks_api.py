# SPDX-License-Identifier: Apache-2.0
"""``/v1/rag/chunks`` and ``/v1/rag/plan``: chunks computed ahead are found, kept and dropped as requested."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from app.documents.document import MOST_DOCUMENTS
from tests.engine.server import TesseraServer
from tests.support.exactness import ask, assert_exact, segments, statuses
from tests.support.small_pool import PAGES, SMALL
from tests.support.waiting import until

Text = Callable[[int], str]

PIN_LIMIT = PAGES * 9 // 10


@pytest.fixture
def small(server: TesseraServer) -> TesseraServer:
    """For tests with the flags :data:`SMALL`: an empty pool of 1280 tokens; documents above 64 tokens are split."""
    server.post("/v1/cache/clear", {})
    return server


@pytest.fixture
def namespace(text: Text) -> str:
    return text(12)


def question(chunks: list[Any], **fields: Any) -> dict[str, Any]:
    return {"chunks": chunks, "question": "What?", "max_tokens": 1, "temperature": 0, **fields}


def error_of(server: TesseraServer, path: str, body: dict[str, Any], status: int) -> str:
    message: str = server.post(path, body, status)["error"]["message"]
    return message


def pages(server: TesseraServer, limit: int, **filters: Any) -> Any:
    """The list's pages, requested lazily."""
    cursor = {}
    while True:
        page = server.get("/v1/rag/chunks", limit=limit, **filters, **cursor)
        yield page["data"]
        if page["next_cursor"] is None:
            return
        cursor = {"cursor": page["next_cursor"]}


def listed(server: TesseraServer, **filters: Any) -> list[str]:
    return [entry["key"] for page in pages(server, 1000, **filters) for entry in page]


# Ingesting


def test_ingested_chunks_are_hit_by_the_next_chat(server, text):
    chunks = [text(40), {"id": text(8), "title": "Title", "text": text(60)}, text(900)]
    system = f"System {text(10)}"
    lines, summary = server.ingest([*chunks, chunks[0]], system=system)
    assert [(line["index"], line["id"]) for line in lines] == [(0, None), (1, chunks[1]["id"]), (2, None), (3, None)]
    assert [line["status"] for line in lines] == ["filled", "filled", "filled", "waited"]
    assert [line["progress"] for line in lines] == [{"done": n, "total": 4} for n in (1, 2, 3, 4)]
    assert [line["tokens"] for line in lines] == [42, 68, 902, 42]
    assert summary.pop("seconds") >= 0
    counts = {"hit": 0, "loaded": 0, "filled": 3, "waited": 1, "failed": 0}
    assert summary == {"documents": 4, **counts, "tokens": 1054, "cached": 3, "evicted": 0}
    report = server.chat(**question(chunks, system=system))["cache"]
    assert [chunk["status"] for chunk in report["chunks"]] == ["hit"] * 3
    assert [chunk["key"] for chunk in report["chunks"]] == [line["key"] for line in lines[:3]]
    again, summary = server.ingest(chunks, system=system)
    assert [line["status"] for line in again] == ["hit"] * 3
    assert (summary["hit"], summary["filled"]) == (3, 0)


@pytest.mark.parametrize("scope", ["system", "isolated"])
def test_ingested_chunks_are_found_behind_the_system_prompts_of_their_scope(scope, server, oracle, text):
    chunk, cache = text(70), {"scope": scope}
    server.ingest([chunk], system="One.", cache=cache)
    responses = [ask(server, "shared", [chunk], "What?", system=system, cache=cache) for system in ("One.", "Other.")]
    assert [statuses(response) for response in responses] == [["hit"], ["hit" if scope == "isolated" else "filled"]]
    for response in responses:
        assert_exact(response, oracle("tiny-llama"), "shared")


def test_an_id_alone_stands_for_its_text_and_title(server, oracle, text):
    chunk = {"id": text(10), "title": "Title", "text": text(60)}
    system = f"System {text(8)}"
    server.ingest([chunk], system=system)
    by_text = ask(server, "offset", [chunk, text(20)], "What?", system=system)
    by_id = ask(server, "offset", [{"id": chunk["id"]}, text(20)], "What?", system=system)
    assert by_id["cache"]["chunks"][0] == by_text["cache"]["chunks"][0]
    assert statuses(by_id) == ["hit", "filled"]
    assert segments(by_id["cache"])[1][0] == segments(by_text["cache"])[1][0]
    assert_exact(by_id, oracle("tiny-llama"), "offset")
    plan = server.post("/v1/rag/plan", question([{"id": chunk["id"]}], system=system))
    assert plan["chunks"] == by_id["cache"]["chunks"][:1]
    # Behind another system prompt it is another segment, computed from the id's text.
    assert statuses(ask(server, "shared", [{"id": chunk["id"]}], "What?", system=text(20))) == ["filled"]


def test_an_id_belongs_to_its_namespace_and_salt(server, namespace, text):
    server.ingest([{"id": "doc", "text": text(30)}], cache={"namespace": namespace}, cache_salt="secret")
    mine = {"cache": {"namespace": namespace}, "cache_salt": "secret"}
    assert server.chat(**question([{"id": "doc"}], **mine))["cache"]["chunks"][0]["status"] == "hit"
    for others in ({"cache": {"namespace": namespace}}, {**mine, "cache_salt": "guess"}, {"cache_salt": "secret"}):
        assert "unknown chunk id 'doc'" in error_of(server, "/v1/rag/chat", question([{"id": "doc"}], **others), 404)
    (entry,) = server.get("/v1/rag/chunks", namespace=namespace, kind="chunk")["data"]
    assert "secret" not in str(entry)


def test_unknown_ids_and_bad_filters_and_plans_are_refused(server, text):
    for path in ("/v1/rag/chat", "/v1/rag/plan", "/v1/rag/chunks"):
        body = {"chunks": ["a", {"id": text(9)}], **({} if path.endswith("chunks") else {"question": "What?"})}
        assert error_of(server, path, body, 404).startswith("chunks.1.id: unknown chunk id")
    assert "limit" in server.get("/v1/rag/chunks", 400, limit=0)["error"]["param"]
    for fields in ({"question": ""}, {"chunks": [""]}, {"chunks": [text(9000)]}, {"colour": "red"}):
        body = {**question([text(5)]), **fields}
        chat, plan = (server.post(f"/v1/rag/{name}", body, 400)["error"] for name in ("chat", "plan"))
        assert chat == plan


BAD_BODIES = [
    ({"chunks": []}, "chunks"),
    ({"chunks": ["a"] * (MOST_DOCUMENTS + 1)}, "chunks"),
    ({"chunks": ["a", {"text": " \n"}]}, "chunks.1.text"),
    ({"chunks": [["a"]]}, "chunks.0"),
    ({"chunks": [{"id": "", "text": "a"}]}, "chunks.0"),
    ({"chunks": [{"id": "x" * 1025, "text": "a"}]}, "chunks.0"),
    ({"ttl_s": 0}, "ttl_s"),
    ({"ttl_s": -1}, "ttl_s"),
    ({"ttl_s": "soon"}, "ttl_s"),
    ({"pin": "always"}, "pin"),
    ({"colour": "red"}, "colour"),
    ({"messages": []}, "messages"),
    ({"system": "x" * 9000}, "chunks"),
]


@pytest.mark.parametrize(("fields", "parameter"), BAD_BODIES)
def test_bad_bodies_name_the_field(fields, parameter, server):
    error = server.post("/v1/rag/chunks", {"chunks": ["a"], **fields}, 400)["error"]
    assert parameter in error["param"], error


@pytest.mark.parametrize("ttl", ["Infinity", "1e999", "NaN", "-Infinity"])
def test_a_time_to_live_that_json_has_no_number_for_is_refused(ttl, server):
    content = f'{{"chunks": ["a"], "ttl_s": {ttl}}}'
    response = server.client.post("/v1/rag/chunks", content=content, headers={"content-type": "application/json"})
    assert response.status_code == 400, response.text
    server.get("/v1/rag/chunks")  # which shows when chunks expire


@pytest.mark.serve_with(*SMALL)
def test_many_chunks_in_one_call(small, text):
    distinct = [text(10) for _ in range(25)]
    lines, summary = small.ingest(distinct * (MOST_DOCUMENTS // 25))
    assert len(lines) == MOST_DOCUMENTS
    assert lines[-1]["progress"] == {"done": MOST_DOCUMENTS, "total": MOST_DOCUMENTS}
    assert (summary["filled"], summary["failed"], summary["cached"]) == (25, 0, 25)
    assert summary["hit"] + summary["waited"] == MOST_DOCUMENTS - 25
    # They don't fit the model as one prompt: one error, and nothing computed.
    message = error_of(small, "/v1/rag/chat", question(distinct * (MOST_DOCUMENTS // 25)), 400)
    assert "the model's maximum context length is 8192" in message


@pytest.mark.serve_with(*SMALL)
def test_many_chunks_shorter_than_a_page_share_a_small_pool(small):
    """A round of a quarter of the pool's tokens may need more pages than the pool has."""
    lines, summary = small.ingest(["".join(pair) for pair in itertools.product("abcdefghijklmnop", repeat=2)])
    assert [line for line in lines if line["status"] == "failed"] == []
    assert summary["evicted"] > 0
    assert summary["cached"] + summary["evicted"] == summary["filled"]


def test_a_chunk_that_the_model_cannot_hold_fails_alone(server, text):
    """Chunks are split at --chunk-max-tokens, so only a long system prompt keeps a part from fitting."""
    lines, summary = server.ingest([text(20), text(5000), text(30)], system=text(5000))
    assert [line["index"] for line in lines] == [0, 1, 1, 2]
    assert [line["status"] for line in lines] == ["filled", "failed", "filled", "filled"]
    assert "don't fit the model's context length of 8192" in lines[1]["error"]
    assert [line.get("part") for line in lines] == [None, {"number": 1, "of": 2}, {"number": 2, "of": 2}, None]
    assert (summary["filled"], summary["failed"]) == (3, 1)


# Long documents


@pytest.mark.parametrize("scope", ["system", "isolated"])
@pytest.mark.parametrize("strategy", ["shared", "offset"])
@pytest.mark.serve_with(*SMALL)
def test_the_parts_of_a_long_document_are_chunks(strategy, scope, small, oracle, text):
    long, short = {"id": text(8), "text": text(150)}, text(20)
    cache = {"scope": scope}
    lines, _ = small.ingest([long, short], system="System", cache=cache)
    assert [line["progress"]["done"] for line in lines] == [0, 0, 1, 2]
    for chunks in ([long, short], [short, {"id": long["id"]}]):
        response = ask(small, strategy, chunks, "What?", system="System", cache=cache)
        assert statuses(response) == ["hit"] * 4
        place = chunks.index(short) ^ 1
        parts = [chunk for chunk in response["cache"]["chunks"] if "part" in chunk]
        found = [(part["index"], part["id"], part["tokens"]) for part in parts]
        assert found == [(place, long["id"], size) for size in (64, 64, 24)]
        assert [part["part"] for part in parts] == [{"number": n, "of": 3} for n in (1, 2, 3)]
        assert len(segments(response["cache"])[1]) == 4
        assert_exact(response, oracle("tiny-llama"), strategy)


# Listing, inspecting


def test_pages_cover_everything_once(server, namespace, text):
    """tests/app/catalog has what comes and goes meanwhile, and the filters."""
    lines, _ = server.ingest([text(20) for _ in range(23)], cache={"namespace": namespace})
    keys = [line["key"] for line in lines]
    got = [[entry["key"] for entry in page] for page in pages(server, 5, namespace=namespace, kind="chunk")]
    assert [key for page in got for key in page] == keys, "oldest first"
    assert {len(page) for page in got[:-1]} == {5}
    assert len(listed(server, namespace=namespace)) == 24  # with the system segment
    assert set(keys) < set(listed(server))


def test_one_chunk_shows_its_use(server, namespace, text):
    cache = {"namespace": namespace}
    chunk = {"id": "doc", "text": text(30)}
    (line,), _ = server.ingest([chunk], cache=cache, ttl_s=3600)
    path = f"/v1/rag/chunks/{line['key']}"
    before = server.get(path)
    shown = [before[name] for name in ("kind", "state", "namespace", "ids")]
    assert shown == ["chunk", "ready", namespace, ["doc"]]
    num_pages = -(-32 // server.stats()["occupancy"]["page_tokens"])
    assert (before["tokens"], before["pages"], before["hits"], before["leases"]) == (32, num_pages, 0, 0)
    assert before["created_at"] + 3600 == pytest.approx(before["expires_at"], abs=60)
    server.chat(**question([chunk], cache=cache))
    after = server.get(path)
    assert after["hits"] == 1
    assert after["last_used_at"] > before["last_used_at"]
    assert {**after, "hits": 0, "last_used_at": 0} == {**before, "hits": 0, "last_used_at": 0}
    assert server.get(path.upper().replace("/V1/RAG/CHUNKS", "/v1/rag/chunks")) == after


# The ends of chunks


def gone(server: TesseraServer, id: str, **fields: Any) -> str:
    """Reason for the missing chunk of an id; chat, plan and ingestion agree."""
    messages = {
        error_of(server, "/v1/rag/chat", question([{"id": id}], **fields), 410),
        error_of(server, "/v1/rag/plan", question([{"id": id}], **fields), 410),
        error_of(server, "/v1/rag/chunks", {"chunks": [{"id": id}], **fields}, 410),
    }
    (message,) = messages
    prefix, suffix = f"chunks.0.id: chunk id {id!r} is no longer cached (", "): send its text again"
    assert message.startswith(prefix)
    assert message.endswith(suffix)
    return message.removeprefix(prefix).removesuffix(suffix)


def test_a_deleted_chunk_is_gone(server, namespace, text):
    cache = {"cache": {"namespace": namespace}}
    chunks = [{"id": "a", "text": text(30)}, {"id": "b", "text": text(30)}]
    lines, _ = server.ingest(chunks, **cache)
    path = f"/v1/rag/chunks/{lines[0]['key']}"
    response = server.client.delete(path)
    assert response.json() == {"key": lines[0]["key"], "deleted": True}
    assert server.get(path, 404)["error"]["message"] == f"no cached segment has the key {lines[0]['key']}"
    assert server.client.delete(path).status_code == 404
    assert gone(server, "a", **cache) == "deleted"
    assert server.chat(**question([{"id": "b"}], **cache))["cache"]["chunks"][0]["status"] == "hit"
    # Sent again, it becomes another chunk with the same key and id.
    assert server.ingest(chunks[:1], **cache)[0][0]["status"] == "filled"
    assert server.chat(**question([{"id": "a"}], **cache))["cache"]["chunks"][0]["status"] == "hit"


def test_clearing_empties_one_namespace_or_all(server, text):
    spaces = [{"cache": {"namespace": text(10)}} for _ in range(2)]
    chunk = {"id": "doc", "text": text(30)}
    for space in spaces:
        server.ingest([chunk], **space)
    cleared = server.post("/v1/cache/clear", {"namespace": spaces[0]["cache"]["namespace"]})
    assert cleared == {"cleared": 2}
    assert gone(server, "doc", **spaces[0]) == "cleared"
    assert server.chat(**question([{"id": "doc"}], **spaces[1]))["cache"]["chunks"][0]["status"] == "hit"
    assert server.post("/v1/cache/clear", {"namespace": "nobody's"}) == {"cleared": 0}
    held = len(listed(server))
    assert held
    assert server.client.post("/v1/cache/clear").json() == {"cleared": held}
    assert gone(server, "doc", **spaces[1]) == "cleared"
    assert listed(server) == []
    assert server.stats()["occupancy"]["registered_ids"] == 0


def until_expired(server: TesseraServer, body: dict[str, Any]) -> None:
    until(lambda: server.client.post("/v1/rag/plan", json=body).status_code != 200, 30, "it never expired")


def test_a_chunk_expires(server, namespace, text):
    cache = {"cache": {"namespace": namespace}}
    chunks = [{"id": "brief", "text": text(30)}, {"id": "kept", "text": text(30)}]
    server.ingest(chunks, **cache, ttl_s=0.3)
    server.ingest(chunks[1:], **cache)  # the last setting counts
    # A lookup by id must notice the expiry itself.
    until_expired(server, question([{"id": "brief"}], **cache))
    assert gone(server, "brief", **cache) == "expired"
    plan = server.post("/v1/rag/plan", question(chunks, **cache))
    assert [chunk["status"] for chunk in plan["chunks"]] == ["missing", "hit"]
    assert len(listed(server, namespace=namespace, kind="chunk")) == 1
    assert statuses(server.chat(**question(chunks, **cache))) == ["filled", "hit"]


@pytest.mark.serve_with(*SMALL)
def test_an_evicted_chunk_is_gone(small, text):
    chunks = [{"id": f"d{i}", "text": text(60)} for i in range(40)]  # 2 pages each, of 40
    _, summary = small.ingest(chunks)
    assert (summary["filled"], summary["failed"]) == (40, 0)
    cached = [chunk["id"] for chunk in chunks if listed(small, id=chunk["id"])]
    assert (summary["cached"], summary["evicted"]) == (len(cached), 40 - len(cached))
    assert 10 <= len(cached) <= 19
    evicted = next(chunk["id"] for chunk in chunks if chunk["id"] not in cached)
    assert gone(small, evicted) == "evicted"
    assert server_statuses(small, [{"id": id} for id in cached[-3:]]) == ["hit"] * 3
    assert small.stats()["counters"]["removals"]["evicted"] >= summary["evicted"]


def server_statuses(server: TesseraServer, chunks: list[Any], **fields: Any) -> list[str]:
    return statuses(server.chat(**question(chunks, **fields)))


@pytest.mark.serve_with(*SMALL)
def test_pinned_chunks_stay_and_what_can_not_be_pinned_says_so(small, text):
    pinned = [{"id": f"p{i}", "text": text(60)} for i in range(20)]
    lines, summary = small.ingest(pinned, pin=True)
    kept = [line for line in lines if line["status"] != "failed"]
    assert len(kept) == PIN_LIMIT // 2
    assert summary["failed"] == 20 - len(kept)
    refused = next(line for line in lines if line["status"] == "failed")
    assert refused["error"] == f"pinning 2 more pages would exceed {PIN_LIMIT} of {PAGES} pages; {PIN_LIMIT} are pinned"
    assert "unknown chunk id" in error_of(small, "/v1/rag/chat", question([{"id": refused["id"]}]), 404)
    occupancy = small.stats()["occupancy"]
    assert occupancy["pages_pinned"] == PIN_LIMIT
    # In the remaining pages, each of these evicts the previous one.
    _, pressed = small.ingest([text(60) for _ in range(30)])
    assert (pressed["filled"], pressed["failed"]) == (30, 0)
    for line in kept:
        assert small.get(f"/v1/rag/chunks/{line['key']}")["pinned"] is True
    assert server_statuses(small, [{"id": line["id"]} for line in kept]) == ["hit"] * len(kept)
    # Without the pin, they are evicted like others.
    _, unpinned = small.ingest([chunk for chunk in pinned if chunk["id"] in {line["id"] for line in kept}])
    assert unpinned["hit"] == len(kept)
    assert small.stats()["occupancy"]["pages_pinned"] == 0
    small.ingest([text(60) for _ in range(60)])
    assert any(small.client.get(f"/v1/rag/chunks/{line['key']}").status_code == 404 for line in kept)


# Plans


def observed(server: TesseraServer) -> Any:
    """Stats and list, which planning must not change."""
    return server.stats(), [entry for page in pages(server, 1000) for entry in page]


def test_a_plan_says_what_the_chat_then_reports_and_changes_nothing(server, namespace, text):
    cached, missing = [text(50), text(120)], text(70)
    fields = {"system": f"System {text(8)}", "cache": {"namespace": namespace}}
    server.ingest(cached, **fields)
    body = question([cached[1], missing, cached[0], missing], **fields)
    before = observed(server)
    plan = server.post("/v1/rag/plan", body)
    assert observed(server) == before
    report = server.chat(**body)["cache"]
    assert [chunk["status"] for chunk in plan["chunks"]] == ["hit", "missing", "hit", "missing"]
    assert [chunk["status"] for chunk in report["chunks"]] == ["hit", "filled", "hit", "filled"]
    for name in ("mode", "reason", "position_strategy", "scope"):
        assert plan[name] == report[name]
    without_status = [{**chunk, "status": ""} for chunk in report["chunks"]]
    assert [{**chunk, "status": ""} for chunk in plan["chunks"]] == without_status
    tokens = plan["tokens"]
    assert tokens["prompt"] == report["tokens"]["prompt"]
    assert tokens["missing"] == 72  # counted once, although requested twice
    assert tokens["cached"] + 2 * tokens["missing"] + tokens["question"] == tokens["prompt"]
    occupancy = before[0]["occupancy"]
    assert plan["pages"] == {"needed": -(-72 // occupancy["page_tokens"]), "free": occupancy["pages_free"]}
    assert server.post("/v1/rag/plan", body)["tokens"] == {**tokens, "cached": tokens["cached"] + 144, "missing": 0}


FULL_REASONS = [
    ({"cache": {"mode": "full"}}, "cache.mode is full"),
    ({"chunks": []}, "the request has no chunks"),
    ({"prompt_logprobs": 1}, "prompt_logprobs need every prompt token computed"),
]


@pytest.mark.parametrize(("fields", "reason"), FULL_REASONS)
def test_a_plan_knows_why_a_request_will_run_in_full_attention(fields, reason, server, text):
    body = {**question([text(30)]), **fields}
    plan, report = server.post("/v1/rag/plan", body), server.chat(**body)["cache"]
    assert (plan["mode"], plan["reason"]) == (report["mode"], report["reason"]) == ("full", reason)
    assert report["tokens"]["reused"] == 0
    assert [chunk["status"] for chunk in report["chunks"]] == [None] * len(body["chunks"])


@pytest.mark.serve_with(*SMALL)
def test_a_plan_knows_what_the_pool_can_not_hold(small, text):
    def agreed(chunks: int) -> str:
        body = question([text(60) for _ in range(chunks)])
        plan, report = small.post("/v1/rag/plan", body), small.chat(**body)["cache"]
        assert (plan["mode"], plan["reason"]) == (report["mode"], report["reason"])
        return str(plan["reason"] or "")

    assert f"of {PAGES} can be freed" in agreed(25)
    small.ingest([text(60) for _ in range(15)], pin=True)
    assert agreed(10)


# Documentation


def test_the_examples_of_the_api_page_are_answered(server):
    """tests/app/http/test_openapi.py has the endpoints."""
    page = server.get("/openapi.json")
    for path in ("/v1/rag/chat", "/v1/rag/plan", "/v1/rag/chunks", "/v1/cache/clear", "/v1/cache/sleep"):
        schema = str(page["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"])
        name = schema.split("#/components/schemas/")[1].split("'")[0]
        response = server.client.post(path, json=page["components"]["schemas"][name]["example"])
        assert response.status_code == (409 if path == "/v1/cache/sleep" else 200), response.text  # it has no tiers
