# SPDX-License-Identifier: Apache-2.0
"""``POST /v1/rag/split``: files become chunks or a clear error."""

import pytest

from app.documents.extraction import Extraction
from app.documents.rag_request import RagChunk
from app.routes.split import router
from app.settings import Settings
from engine_ext.wire.vllm_compat import GracefulHTTPError
from tests.support.context import client_with, make_context
from tests.support.words import TOKENIZER

EXTRACTION = Extraction(TOKENIZER)


@pytest.fixture(scope="module", autouse=True)
def ended():
    yield
    EXTRACTION.close()


async def split(file, filename="a.txt", **params):
    context = make_context(settings=Settings(chunk_max_tokens=200), extraction=EXTRACTION)
    async with client_with(router, tessera=context) as client:
        return await client.post("/v1/rag/split", content=file, params={"filename": filename, **params})


async def chunks_of(*arguments, **params):
    answer = await split(*arguments, **params)
    assert answer.status_code == 200, answer.text
    return answer.json()["chunks"]


async def test_markdown_is_split_at_headings_into_chunks_as_other_endpoints_take_them():
    chunks = await chunks_of("# One\nSchöne Grüße.\n# Two\nb".encode(), "Guide.MD")
    assert [(chunk["title"], chunk["text"], chunk["tokens"]) for chunk in chunks] == [
        ("One", "Schöne Grüße.", 3),
        ("Two", "b", 2),
    ]
    assert chunks[0]["metadata"] == {"page": None, "start": 6, "end": 19}
    for chunk in chunks:
        RagChunk(**{name: value for name, value in chunk.items() if name != "tokens"})


async def test_chunks_are_as_long_as_asked_and_never_longer_than_the_server_takes():
    text = " ".join(map(str, range(1000))).encode()
    assert max(chunk["tokens"] for chunk in await chunks_of(text, max_tokens=16)) <= 16
    assert 100 < max(chunk["tokens"] for chunk in await chunks_of(text)) <= 200


async def test_ids_tell_contents_apart():
    first, second = await chunks_of(b"a\n\nb", max_tokens=16), await chunks_of(b"a\n\nc", max_tokens=16)
    assert first == await chunks_of(b"a\n\nb", max_tokens=16)
    assert first[0]["id"] != second[0]["id"]
    assert first[0]["id"].startswith("a.txt#1-")


@pytest.mark.parametrize("filename", ["a.zip", "a", "pdf", ".pdf"])
async def test_other_files(filename):
    with pytest.raises(GracefulHTTPError, match="can't be split; supported types: ") as raised:
        await split(b"a", filename)
    assert raised.value.http_status == 415


async def test_what_has_no_text():
    answer = await split(b"")
    error = answer.json()["error"]
    assert (answer.status_code, error["message"], error["param"]) == (400, "there is no text in the file", "body")


@pytest.mark.parametrize("params", [{"max_tokens": 15}, {"max_tokens": "x"}, {"filename": ""}])
async def test_bad_parameters(params):
    assert (await split(b"a", **params)).status_code == 422
