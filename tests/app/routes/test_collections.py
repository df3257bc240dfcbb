# SPDX-License-Identifier: Apache-2.0
"""``/v1/rag/collections`` without an engine: names, deletions and long lists; tests/engine has the rest."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from httpx import ASGITransport, AsyncClient, Response

from app.catalog import collection_ingestion
from app.documents.rag_request import IngestRequest
from app.routes import collections
from cache.segments.chunk_ids import ChunkName, IdConflictError, RegisteredText
from cache.segments.hashing import ChunkHash
from engine_ext.wire.vllm_compat import ErrorResponse
from tests.support.engineless import computed, make_app

PATH = "/v1/rag/collections"
NAMES = ["%2e%2e", "%2E", "a%00", "a%0A", "-a", "ä", "x" * 65, "a%2F..%2Fb", "a b", "%ff"]


@pytest.fixture
def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FastAPI]:
    monkeypatch.setattr(collection_ingestion, "ingestion_of", computed)
    app = make_app(tmp_path / "collections")
    yield app
    app.state.tessera.extraction.close()


@pytest.fixture
async def client(app: FastAPI) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(transport=ASGITransport(app), base_url="http://server") as made:
        yield made


async def put(client: AsyncClient, files: Mapping[str, str | bytes], name: str = "birds", **fields: str) -> Response:
    given = [("files", (file, content)) for file, content in files.items()]
    return await client.post(f"{PATH}/{name}", files=given, data=fields)


def lines(answer: Response) -> list[Any]:
    assert answer.status_code == 200, answer.text
    return [json.loads(line) for line in answer.text.splitlines()]


async def files_of(client: AsyncClient) -> list[str]:
    return [each["file"] for each in (await client.get(f"{PATH}/birds")).json()["data"]]


@pytest.mark.parametrize("name", NAMES)
async def test_a_name_that_no_collection_can_have_is_refused_everywhere(
    client: AsyncClient, tmp_path: Path, name: str
) -> None:
    asked = [
        await put(client, {"a.txt": "A"}, name),
        await client.get(f"{PATH}/{name}"),
        await client.get(f"{PATH}/{name}/passages", params={"file": "a.txt"}),
        await client.delete(f"{PATH}/{name}"),
        await client.delete(f"{PATH}/{name}", params={"file": "a.txt"}),
    ]
    assert {answer.status_code for answer in asked} <= {400, 404, 405}
    assert not (tmp_path / "collections").exists()


@pytest.mark.parametrize("namespace", ["%00a", "a%00", "a%0A", "", "x" * 129])
async def test_a_namespace_that_nobody_can_have_gets_nothing_stored(
    client: AsyncClient, tmp_path: Path, namespace: str
) -> None:
    url = f"{PATH}/birds?namespace={namespace}"
    assert (await client.post(url, files=[("files", ("a.txt", "A"))])).status_code == 400
    assert (await client.get(url)).status_code == 400
    assert not (tmp_path / "collections").exists()


async def test_unknown_collections_and_files_are_not_found(client: AsyncClient) -> None:
    for answer in (
        await client.get(f"{PATH}/birds"),
        await client.get(f"{PATH}/birds/passages", params={"file": "a.txt"}),
        await client.delete(f"{PATH}/birds"),
        await client.delete(f"{PATH}/birds", params={"file": "a.txt"}),
    ):
        assert (answer.status_code, answer.json()["error"]["message"]) == (404, "there is no collection 'birds'")
    await put(client, {"a.txt": "A"})
    for file in ("b.txt", "A.txt", "../a.txt", "%", "a.txt\x00", "x" * 5000, "a%"):
        for answer in (
            await client.get(f"{PATH}/birds/passages", params={"file": file}),
            await client.delete(f"{PATH}/birds", params={"file": file}),
        ):
            words = f"collection 'birds' has no file {file!r}"
            assert (answer.status_code, answer.json()["error"]["message"]) == (404, words)
    assert await files_of(client) == ["a.txt"]


@pytest.mark.parametrize("call", ["get", "delete"])
async def test_an_empty_file_name_is_not_the_whole_collection(client: AsyncClient, call: str) -> None:
    await put(client, {"a.txt": "A"})
    url = f"{PATH}/birds{'/passages' if call == 'get' else ''}"
    assert (await getattr(client, call)(url, params={"file": ""})).status_code == 400
    assert await files_of(client) == ["a.txt"]


async def test_a_deleted_file_and_a_deleted_collection_are_gone(client: AsyncClient) -> None:
    await put(client, {"a.txt": "A", "b.txt": "B"})
    deleted = {"collection": "birds", "file": "a.txt", "passages": 1, "deleted": True}
    assert (await client.delete(f"{PATH}/birds", params={"file": "a.txt"})).json() == deleted
    assert (await client.delete(f"{PATH}/birds", params={"file": "a.txt"})).status_code == 404
    assert await files_of(client) == ["b.txt"]
    assert (await client.delete(f"{PATH}/birds")).json()["passages"] == 1
    assert (await client.delete(f"{PATH}/birds")).status_code == 404
    assert (await client.get(PATH)).json()["data"] == []


async def test_namespaces_do_not_see_each_others_files(client: AsyncClient) -> None:
    await put(client, {"a.txt": "A"})
    for call in (client.get, client.delete):
        assert (await call(f"{PATH}/birds", params={"namespace": "other"})).status_code == 404
    assert await files_of(client) == ["a.txt"]


async def test_names_of_files_are_kept_as_they_are_or_refused(client: AsyncClient) -> None:
    good = ["../../a.txt", "/etc/b.txt", "5.00\u202fPM.txt", "x" * 508 + ".txt"]
    bad = ["x" * 509 + ".txt", "a\x7f.txt"]
    found = lines(await put(client, dict.fromkeys([*good, *bad], "text")))
    statuses = {line["file"]: line["status"] for line in found if "passages" in line or "error" in line}
    assert statuses == dict.fromkeys(good, "added") | dict.fromkeys(bad, "failed")
    assert await files_of(client) == sorted(good)


async def test_what_is_refused_is_not_stored(
    app: FastAPI, client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A system prompt that the model can't take; an id that stands for another text; a passage that is no chunk."""

    async def refused(request: IngestRequest, *arguments: Any) -> Any:
        if request.system == "too long":
            error = {"message": "the system prompt is too long", "type": "BadRequestError", "code": 400}
            return ErrorResponse.model_validate({"error": error})
        return await computed(request, *arguments)

    monkeypatch.setattr(collection_ingestion, "ingestion_of", refused)
    answer = await put(client, {"a.txt": "A"}, system="too long")
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, "the system prompt is too long")
    (stored,) = [line for line in lines(await put(client, {"b.txt": "B"}, "others")) if line.get("id")]
    ids = app.state.engine_client.cache.usable().manager.ids
    await client.delete(f"{PATH}/others")
    ids.restore(ChunkName("default", stored["id"]), RegisteredText("another text", None), ChunkHash(b"key"))
    answer = await put(client, {"b.txt": "B"}, "others")
    assert (answer.status_code, "another text" in answer.json()["error"]["message"]) == (409, True)
    (failed, *_) = lines(await put(client, {"b.txt": "B", "c.txt": "C"}, "others"))
    assert (failed["file"], failed["status"]) == ("b.txt", "failed")
    monkeypatch.setattr(collection_ingestion, "LONGEST_NAME", 2000)
    assert (await put(client, {"d" * 1100 + ".txt": "D"}, "longs")).status_code == 400  # for a chunk's id
    listed = (await client.get(PATH)).json()["data"]
    assert [(each["name"], each["files"]) for each in listed] == [("others", 1)]


async def test_what_is_registered_while_a_file_is_stored_costs_its_passages_only(
    client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[IngestRequest] = []

    async def conflict(request: IngestRequest, *arguments: Any) -> Any:
        asked.append(request)
        if len(asked) % 2 == 0:  # the first is the check
            raise IdConflictError("it stands for another text")
        return await computed(request, *arguments)

    monkeypatch.setattr(collection_ingestion, "ingestion_of", conflict)
    first, second, _ = lines(await put(client, {"a.txt": "A", "b.txt": "B"}))
    for line in (first, second):
        assert (line["status"], line["error"]) == ("added", "its passages weren't computed: it stands for another text")
    assert await files_of(client) == ["a.txt", "b.txt"]


async def test_files_that_come_while_their_collection_is_deleted(client: AsyncClient) -> None:
    """They are stored, or refused as of a deleted collection; nothing else."""
    answers = await asyncio.gather(
        *(put(client, {f"{number}.txt": f"Text {number}."}) for number in range(20)),
        *(client.delete(f"{PATH}/birds") for _ in range(20)),
    )
    assert {answer.status_code for answer in answers[:20]} <= {200, 409}
    assert {answer.status_code for answer in answers[20:]} <= {200, 404}
    assert (await put(client, {"after.txt": "After."})).status_code == 200
    assert "after.txt" in await files_of(client)


async def test_an_error_names_each_file_once(client: AsyncClient) -> None:
    answer = await put(client, {"a.txt": "", "b.zip": "PK"})
    assert (answer.status_code, answer.json()["error"]["message"]) == (
        400,
        "a.txt: there is no text in the file; b.zip: files of the type '.zip' can't be read",
    )


async def test_long_lists_are_written_item_by_item(app: FastAPI, client: AsyncClient) -> None:
    """Counted in turns of the event loop between the parts of an answer."""
    await put(client, {"a.txt": "\n\n".join(f"Word {number}." for number in range(3000))}, max_tokens="16")
    parts = [part async for part in (await passages(app)).body_iterator]
    listed = json.loads("".join(parts))
    assert [each["number"] for each in listed["data"]] == list(range(1, len(parts) - 1))
    assert max(map(len, parts)) < 1000 < len("".join(parts))
    assert (await client.get(f"{PATH}/birds/passages", params={"file": "a.txt"})).json() == listed


async def passages(app: FastAPI) -> Any:
    return await collections.list_passages("birds", "a.txt", app.state.tessera.retrieval)
