# SPDX-License-Identifier: Apache-2.0
"""``POST /v1/rag/split``: files become chunks or a clear error."""

import asyncio
from types import SimpleNamespace

import pytest
from fastapi import FastAPI
from httpx import ASGITransport, AsyncClient
from vllm.exceptions import VLLMValidationError

from app.documents import extraction
from app.documents.rag_request import RagChunk
from app.routes.split import router
from app.settings import Settings
from engine_ext.wire.vllm_compat import GracefulHTTPError
from tests.app.pdfs import make_pdf
from tests.support.context import make_context
from tests.support.words import words


async def split(file, filename="a.txt", **params):
    app = FastAPI()
    app.include_router(router)
    app.state.tessera = make_context(settings=Settings(chunk_max_tokens=200))
    app.state.engine_client = SimpleNamespace(renderer=SimpleNamespace(num_tokens=words))
    async with AsyncClient(transport=ASGITransport(app), base_url="http://server") as client:
        return await client.post("/v1/rag/split", content=file, params={"filename": filename, **params})


async def chunks_of(*arguments, **params):
    answer = await split(*arguments, **params)
    assert answer.status_code == 200, answer.text
    return answer.json()["chunks"]


async def test_a_text():
    (chunk,) = await chunks_of("Schöne Grüße.".encode("utf-8-sig"))
    assert chunk == {"id": chunk["id"], "title": None, "text": "Schöne Grüße.", "tokens": 2}
    RagChunk(**{name: value for name, value in chunk.items() if name != "tokens"})


async def test_markdown():
    chunks = await chunks_of(b"# One\na\n# Two\nb", "Guide.MD")
    assert [(chunk["title"], chunk["text"]) for chunk in chunks] == [("One", "a"), ("Two", "b")]


async def test_a_pdf():
    pages = [["The access code of Falcon is 7342."], ["Falcon is in Riga.", "It rains."]]
    (chunk,) = await chunks_of(make_pdf(*pages), "report.pdf")
    assert chunk["text"] == "The access code of Falcon is 7342.\n\nFalcon is in Riga.\nIt rains."


async def test_chunks_are_as_long_as_asked_and_never_longer_than_the_server_takes():
    text = " ".join(map(str, range(1000))).encode()
    assert max(chunk["tokens"] for chunk in await chunks_of(text, max_tokens=16)) <= 16
    assert 100 < max(chunk["tokens"] for chunk in await chunks_of(text)) <= 200


async def test_ids_tell_contents_apart():
    first, second = await chunks_of(b"a\n\nb", max_tokens=16), await chunks_of(b"a\n\nc", max_tokens=16)
    assert first == await chunks_of(b"a\n\nb", max_tokens=16)
    assert first[0]["id"] != second[0]["id"]
    assert first[0]["id"].startswith("a.txt#1-")


@pytest.mark.parametrize("filename", ["a.docx", "a", "pdf", ".pdf"])
async def test_other_files(filename):
    with pytest.raises(GracefulHTTPError, match="can't be split; supported types: ") as raised:
        await split(b"a", filename)
    assert raised.value.http_status == 415


@pytest.mark.parametrize(
    ("file", "filename", "message"),
    [
        (b"\xff\xfe", "a.txt", "the file is not UTF-8 text: invalid start byte"),
        (b"", "a.txt", "there is no text in 'a.txt'"),
        (b"# Only a heading", "a.md", "there is no text in 'a.md'"),
        (b"not a PDF", "a.pdf", "this is not a PDF that can be read"),
        (b"%PDF-1.7\n1 0 obj", "a.pdf", "this is not a PDF that can be read"),
        (make_pdf([]), "a.pdf", "there is no text in this PDF"),
        (make_pdf(["a"], password="secret"), "a.pdf", "this PDF is encrypted"),
    ],
    ids=["not UTF-8", "empty", "headings", "text", "half a PDF", "an empty PDF", "an encrypted PDF"],
)
async def test_what_has_no_text(file, filename, message):
    with pytest.raises(VLLMValidationError, match=message):
        await split(file, filename)


async def test_a_pdf_of_too_many_pages(monkeypatch):
    monkeypatch.setattr(extraction, "MAX_PAGES", 2)
    with pytest.raises(extraction.ExtractionError, match="this PDF has 3 pages; at most 2 are read"):
        extraction.read_pdf(make_pdf(["a"], ["b"], ["c"]))


async def test_a_pdf_with_too_much_text(monkeypatch):
    monkeypatch.setattr(extraction, "MAX_CHARACTERS", 1 << 20)
    with pytest.raises(extraction.ExtractionError, match="more than 1 million characters"):
        extraction.read_pdf(make_pdf(["a" * (1 << 20)], ["b"]))


async def test_a_pdf_that_takes_too_long_is_given_up(monkeypatch):
    monkeypatch.setattr(extraction, "MAX_SECONDS", 0.01)
    with pytest.raises(extraction.ExtractionError, match="takes longer than"):
        await extraction.extracted(make_pdf(["a"]), ".pdf")


async def test_a_reader_that_ends_in_the_middle_is_an_error_in_words():
    with pytest.raises(extraction.ExtractionError, match="GiB of memory"):
        extraction._parsed(b"")


async def test_the_event_loop_goes_on_meanwhile():
    ticks = 0

    async def tick():
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0)

    ticking = asyncio.create_task(tick())
    await split(make_pdf(["a"]), "a.pdf")
    ticking.cancel()
    assert ticks > 100


@pytest.mark.parametrize("params", [{"max_tokens": 15}, {"max_tokens": "x"}, {"filename": ""}])
async def test_bad_parameters(params):
    assert (await split(b"a", **params)).status_code == 422
