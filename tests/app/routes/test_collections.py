# SPDX-License-Identifier: Apache-2.0
"""``/v1/rag/collections`` without an engine: names, bad files, deletions, long lists; tests/engine has the rest."""

import asyncio
import json

import pytest
from vllm.exceptions import VLLMValidationError

from app.catalog import collection_ingestion
from app.routes import collections
from cache.segments.chunk_ids import ChunkName, IdConflictError, RegisteredText
from cache.segments.hashing import ChunkHash
from engine_ext.wire.vllm_compat import ErrorResponse
from tests.app.pdfs import make_pdf
from tests.serving import client_of
from tests.support.engineless import computed, make_app

PATH = "/v1/rag/collections"
NAMES = ["%2e%2e", "%2E", "a%00", "a%0A", "-a", "ä", "x" * 65, "a%2F..%2Fb", "a b", "%ff"]


@pytest.fixture
def app(tmp_path, monkeypatch):
    monkeypatch.setattr(collection_ingestion, "ingestion_of", computed)
    app = make_app(tmp_path / "collections")
    yield app
    app.state.tessera.extraction.close()


@pytest.fixture
async def client(app):
    async with client_of(app) as made:
        yield made


async def put(client, files, name="birds", **fields):
    given = [("files", (file, content)) for file, content in files.items()]
    return await client.post(f"{PATH}/{name}", files=given, data=fields)


async def about_file(client, file):
    """Answers about the passages of a file, and about its deletion."""
    return [
        await client.get(f"{PATH}/birds/passages", params={"file": file}),
        await client.delete(f"{PATH}/birds", params={"file": file}),
    ]


def lines(answer):
    assert answer.status_code == 200, answer.text
    return [json.loads(line) for line in answer.text.splitlines()]


def told(answer):
    return answer.status_code, answer.json()["error"]["message"]


async def files_of(client):
    return [each["file"] for each in (await client.get(f"{PATH}/birds")).json()["data"]]


@pytest.mark.parametrize("name", NAMES)
async def test_a_name_that_no_collection_can_have_is_refused_everywhere(client, tmp_path, name):
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
async def test_a_namespace_that_nobody_can_have_gets_nothing_stored(client, tmp_path, namespace):
    name = f"birds?namespace={namespace}"
    assert (await put(client, {"a.txt": "A"}, name)).status_code == 400
    assert (await client.get(f"{PATH}/{name}")).status_code == 400
    assert not (tmp_path / "collections").exists()


async def test_unknown_collections_and_files_are_not_found(client):
    whole = [await client.get(f"{PATH}/birds"), await client.delete(f"{PATH}/birds")]
    for answer in (*whole, *await about_file(client, "a.txt")):
        assert told(answer) == (404, "there is no collection 'birds'")
    await put(client, {"a.txt": "A"})
    for file in ("b.txt", "A.txt", "../a.txt", "%", "a.txt\x00", "x" * 5000, "a%"):
        for answer in await about_file(client, file):
            assert told(answer) == (404, f"collection 'birds' has no file {file!r}")
    for answer in await about_file(client, ""):  # which is not the whole collection
        assert answer.status_code == 400
    assert await files_of(client) == ["a.txt"]


async def test_a_deleted_file_and_a_deleted_collection_are_gone(client):
    await put(client, {"a.txt": "A", "b.txt": "B"})
    deleted = {"collection": "birds", "file": "a.txt", "passages": 1, "deleted": True}
    assert (await client.delete(f"{PATH}/birds", params={"file": "a.txt"})).json() == deleted
    assert (await client.delete(f"{PATH}/birds", params={"file": "a.txt"})).status_code == 404
    assert await files_of(client) == ["b.txt"]
    assert (await client.delete(f"{PATH}/birds")).json()["passages"] == 1
    assert (await client.delete(f"{PATH}/birds")).status_code == 404
    assert (await client.get(PATH)).json()["data"] == []


async def test_namespaces_do_not_see_each_others_files(client):
    await put(client, {"a.txt": "A"})
    for call in (client.get, client.delete):
        assert (await call(f"{PATH}/birds", params={"namespace": "other"})).status_code == 404
    assert (await client.get(PATH, params={"namespace": "other"})).json()["data"] == []
    assert await files_of(client) == ["a.txt"]


async def test_names_of_files_are_kept_as_they_are_or_refused(client):
    good = ["../../a.txt", "/etc/b.txt", "5.00\u202fPM.txt", "x" * 508 + ".txt"]
    bad = ["x" * 509 + ".txt", "a\x7f.txt"]
    found = lines(await put(client, dict.fromkeys([*good, *bad], "text")))
    statuses = {line["file"]: line["status"] for line in found if "passages" in line or "error" in line}
    assert statuses == dict.fromkeys(good, "added") | dict.fromkeys(bad, "failed")
    assert await files_of(client) == sorted(good)


@pytest.mark.parametrize("raises", [False, True])
async def test_a_system_prompt_that_the_model_cannot_take_stores_nothing(client, monkeypatch, caplog, raises):
    """Whether vLLM says so or raises: it is no error of the server."""
    message = "the system prompt is too long"

    async def refused(request, *arguments):
        if raises:
            raise VLLMValidationError(message, parameter="input_tokens", value=9999)
        return ErrorResponse.model_validate({"error": {"message": message, "type": "BadRequestError", "code": 400}})

    monkeypatch.setattr(collection_ingestion, "ingestion_of", refused)
    assert told(await put(client, {"a.txt": "A", "b.txt": "B"})) == (400, message)
    assert (await client.get(PATH)).json()["data"] == []
    assert not caplog.records


async def test_a_passage_whose_id_stands_for_another_text_or_is_too_long_is_not_stored(app, client, monkeypatch):
    (stored,) = [line for line in lines(await put(client, {"b.txt": "B"})) if line.get("id")]
    ids = app.state.engine_client.cache.usable().manager.ids
    await client.delete(f"{PATH}/birds")
    ids.restore(ChunkName("default", stored["id"]), RegisteredText("another text", None), ChunkHash(b"key"))
    status, message = told(await put(client, {"b.txt": "B"}))
    assert (status, "another text" in message) == (409, True)
    (failed, *_) = lines(await put(client, {"b.txt": "B", "c.txt": "C"}))
    assert (failed["file"], failed["status"]) == ("b.txt", "failed")
    monkeypatch.setattr(collection_ingestion, "LONGEST_NAME", 2000)
    assert (await put(client, {"d" * 1100 + ".txt": "D"}, "longs")).status_code == 400
    listed = (await client.get(PATH)).json()["data"]
    assert [(each["name"], each["files"]) for each in listed] == [("birds", 1)]


async def test_what_is_registered_while_a_file_is_stored_costs_its_passages_only(client, monkeypatch):
    asked = []

    async def conflict(request, *arguments):
        asked.append(request)
        if len(asked) % 2 == 0:  # the first is the check
            raise IdConflictError("it stands for another text")
        return await computed(request, *arguments)

    monkeypatch.setattr(collection_ingestion, "ingestion_of", conflict)
    first, second, _ = lines(await put(client, {"a.txt": "A", "b.txt": "B"}))
    for line in (first, second):
        assert (line["status"], line["error"]) == ("added", "its passages weren't computed: it stands for another text")
    assert await files_of(client) == ["a.txt", "b.txt"]


async def test_files_that_come_while_their_collection_is_deleted(client):
    """They are stored, or refused as of a deleted collection; nothing else."""
    answers = await asyncio.gather(
        *(put(client, {f"{number}.txt": f"Text {number}."}) for number in range(20)),
        *(client.delete(f"{PATH}/birds") for _ in range(20)),
    )
    assert {answer.status_code for answer in answers[:20]} <= {200, 409}
    assert {answer.status_code for answer in answers[20:]} <= {200, 404}
    assert (await put(client, {"after.txt": "After."})).status_code == 200
    assert "after.txt" in await files_of(client)


async def test_passages_are_never_longer_than_the_server_takes(app, client):
    text = " ".join(map(str, range(10_000)))
    for status in ("added", "unchanged"):
        assert lines(await put(client, {"a.txt": text}, max_tokens="100000"))[0]["status"] == status
    most = app.state.tessera.settings.chunk_max_tokens
    listed = (await client.get(f"{PATH}/birds/passages", params={"file": "a.txt"})).json()["data"]
    assert most / 2 < max(passage["tokens"] for passage in listed) <= most
    assert (await client.get(f"{PATH}/birds")).json()["max_tokens"] == most


async def test_an_error_names_each_file_once(client):
    message = "a.txt: there is no text in the file; b.zip: files of the type '.zip' can't be read"
    answer = await put(client, {"a.txt": "", "b.zip": "PK"})
    assert (told(answer), answer.json()["error"]["param"]) == ((400, message), "files")


async def test_bad_files_fail_alone_and_lose_nothing(client):
    await put(client, {"owls.txt": "Owls hunt at night."})
    bad = {
        "owls.txt": b"\x00\x01\x02",
        "new\nline.txt": "x",  # its name is sent as new%0Aline.txt
        "scan.pdf": make_pdf([]),
        "archive.zip": b"PK\x03\x04",
        "empty.md": "",
        "heron.html": "<html><head><title>x</title></head><body><h1>Heron</h1><p>Grey.</p></body></html>",
    }
    *found, last = lines(await put(client, bad))
    errors = {line["file"]: line["error"] for line in found if "error" in line}
    for file, words in (
        ("owls.txt", "not text"),
        ("scan.pdf", "extra ocr"),
        ("archive.zip", "files of the type '.zip' can't be read"),
        ("empty.md", "no text"),
    ):
        assert words in errors.pop(file)
    assert not errors
    assert last["summary"]["files"] == {"added": 2, "changed": 0, "unchanged": 0, "failed": 4}
    listed = [await client.get(f"{PATH}/birds/passages", params={"file": file}) for file in ("owls.txt", "heron.html")]
    (owls,), (heron,) = (answer.json()["data"] for answer in listed)
    assert (owls["text"], heron["title"]) == ("Owls hunt at night.", "Heron")


async def test_a_file_that_is_too_large_loses_nothing(app, client):
    await put(client, {"owls.txt": "Owls hunt at night."})

    async def body():
        yield b'--x\r\ncontent-disposition: form-data; name="files"; filename="owls.txt"\r\n\r\n'
        for _ in range(app.state.tessera.settings.max_body_size // (1 << 20) + 1):
            yield b"a" * (1 << 20)

    headers = {"content-type": "multipart/form-data; boundary=x"}
    answer = await client.post(f"{PATH}/birds", content=body(), headers=headers)
    assert (answer.status_code, answer.json()["error"]["reason"]) == (413, "body_too_large")
    assert (await client.get(f"{PATH}/birds/passages", params={"file": "owls.txt"})).json()["data"]


async def test_a_collection_has_one_system_prompt(client):
    await put(client, {"a.txt": "A"}, system="You know birds.")
    assert (await put(client, {"b.txt": "B"}, system="Another.")).status_code == 409
    assert await files_of(client) == ["a.txt"]


async def test_long_lists_are_written_in_parts(app, client):
    """The event loop goes on between them."""
    await put(client, {"a.txt": "\n\n".join(f"Word {number}." for number in range(3000))}, max_tokens="16")
    answer = await collections.list_passages("birds", "a.txt", app.state.tessera)
    parts = [part async for part in answer.body_iterator]
    listed = json.loads("".join(parts))
    assert [each["number"] for each in listed["data"]] == list(range(1, len(listed["data"]) + 1))
    assert max(map(len, parts)) < 10_000 < 100_000 < len("".join(parts))
    assert (await client.get(f"{PATH}/birds/passages", params={"file": "a.txt"})).json() == listed
