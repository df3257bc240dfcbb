# SPDX-License-Identifier: Apache-2.0
"""``/v1/rag/collections`` without an engine: names, deletions and long lists; tests/engine has the rest."""

import json
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from httpx import ASGITransport, AsyncClient, Response

from app.catalog import collection_ingestion
from app.routes import collections
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
