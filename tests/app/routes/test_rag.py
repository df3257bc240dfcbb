# SPDX-License-Identifier: Apache-2.0
"""``POST /v1/rag/chat``: accepted bodies and the resulting conversations."""

import json

import pytest
from fastapi.exceptions import RequestValidationError
from vllm.exceptions import VLLMValidationError

from app.documents.document import Document
from app.documents.rag_request import RagChatRequest, RagChunk, chat_completion, chat_messages, documents_of
from app.prompt.marks import Marks
from app.routes.rag import _with_report, router
from app.settings import Settings
from cache.segments.chunk_ids import ChunkIds, GoneIdError, RegisteredText, UnknownIdError
from cache.segments.hashing import ChunkHash
from engine_ext.client.request import CacheOptions, Ticket
from engine_ext.wire.vllm_compat import ErrorResponse
from tests.app.helpers import make_report
from tests.app.helpers import refused as bad_request
from tests.support.context import client_with, make_context

IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}


def rag(**fields) -> RagChatRequest:
    return RagChatRequest(**{"chunks": ["one"], "question": "why?"} | fields)


def user(content) -> dict:
    return {"role": "user", "content": content}


def conversation(*messages: dict, **fields) -> RagChatRequest:
    return rag(question=None, messages=list(messages), **fields)


def test_a_bad_sampling_field_is_a_validation_error():
    with pytest.raises(RequestValidationError) as raised:
        chat_completion({"messages": [], "temperature": "hot"})
    assert raised.value.errors()[0]["loc"] == ("temperature",)


@pytest.mark.parametrize(
    ("fields", "parameter", "message"),
    [
        ({"temprature": True}, "temprature", "unknown field 'temprature'"),
        ({"documents": True}, "documents", "unknown field 'documents'"),
        ({"kv_transfer_params": True}, "kv_transfer_params", "unknown field 'kv_transfer_params'"),
        ({"question": None}, "question", "give either question or messages"),
        ({"messages": [user("why?")]}, "question", "give either question or messages"),
        ({"question": " \n"}, "question", "the question is empty"),
    ],
)
def test_unknown_fields_and_questions_that_are_none_are_refused(fields, parameter, message):
    with pytest.raises(VLLMValidationError, match=rf"{message}.*\(parameter={parameter}[,)]"):
        rag(**fields)


def test_chunks_are_strings_or_objects():
    request = rag(chunks=["one", {"id": "d2", "text": "two", "title": "T", "metadata": {"page": 5}}])
    assert documents_of(request.chunks, None, "default") == [Document("one"), Document("two", "d2", "T")]
    assert documents_of(rag(chunks=[]).chunks, None, "default") == []
    for bad, message in ((RagChunk(text=" \n"), "document's text is empty"), (RagChunk(title="T"), "needs a text")):
        with bad_request("chunks.1.text", message):
            documents_of(["one", bad], None, "default")


@pytest.fixture
def ids() -> ChunkIds:
    made = ChunkIds(lambda _: None)
    made.register("default", "d1", RegisteredText("one", "T"), ChunkHash(b"1"))
    made.register("default", "d2", RegisteredText("two"), ChunkHash(b"2"))
    made.removed(ChunkHash(b"2"), "expired")
    return made


@pytest.mark.parametrize(
    ("id", "namespace", "error", "message"),
    [
        ("d3", "default", UnknownIdError, "unknown chunk id 'd3': send its text"),
        ("d1", "other", UnknownIdError, "unknown chunk id 'd1': send its text"),
        ("d2", "default", GoneIdError, r"chunk id 'd2' is no longer cached \(expired\): send"),
    ],
)
def test_a_registered_chunk_needs_no_text_and_an_id_that_stands_for_nothing_is_named(
    ids, id, namespace, error, message
):
    assert documents_of([RagChunk(id="d1")], ids, "default") == [Document("one", "d1", "T")]
    with pytest.raises(error, match=f"chunks.0.id: {message}"):
        documents_of([RagChunk(id=id)], ids, namespace)


TEXT = {"type": "text", "text": "why?"}
MARKED = {"type": "text", "text": "<marked>why?"}
SYSTEM = {"role": "system", "content": "s"}
ASSISTANT = {"role": "assistant", "content": "a"}
LATER = [ASSISTANT, user("and?")]


@pytest.mark.parametrize(
    ("chat", "messages"),
    [
        (rag(), [user("<marked>why?")]),
        (rag(system="s"), [SYSTEM, user("<marked>why?")]),
        (conversation(user("why?"), system="s"), [SYSTEM, user("<marked>why?")]),
        (conversation(SYSTEM, user("why?")), [SYSTEM, user("<marked>why?")]),
        (conversation(ASSISTANT, user("why?"), *LATER), [ASSISTANT, user("<marked>why?"), *LATER]),
        (conversation(user([IMAGE, TEXT, TEXT])), [user([IMAGE, MARKED, TEXT])]),
    ],
)
def test_the_marked_chunks_go_before_the_first_user_text(chat, messages):
    before = chat.model_copy(deep=True)
    assert chat_messages(chat, "<marked>") == messages
    assert chat == before


NO_TEXTS = (None, 5, [], [IMAGE], ["x", 5, ["type", "text"]])
SYSTEMS = (SYSTEM, {**SYSTEM, "role": "developer"})


@pytest.mark.parametrize(
    ("chat", "message"),
    [
        *((conversation(*turns), "messages have no user message") for turns in ([], [SYSTEM], [{"content": "?"}])),
        *((conversation(user(each), user("why?")), "the first user message has no text") for each in NO_TEXTS),
        *((conversation(each, user("?"), system="t"), "the system prompt is given twice") for each in SYSTEMS),
    ],
)
def test_messages_need_a_users_text_and_one_system_prompt(chat, message):
    with pytest.raises(VLLMValidationError, match=rf"{message}.*\(parameter=messages[,)]"):
        chat_messages(chat, "")


def test_an_answer_has_the_report_instead_of_transfer_parameters():
    ticket = Ticket(CacheOptions(), report=make_report().to_dict())
    assert _with_report({"id": "c", "kv_transfer_params": {}}, ticket) == {"id": "c", "cache": ticket.report}


class FakeServing:
    """Fake of vLLM's chat serving."""

    def __init__(self, marks: Marks, answer):
        self.marks, self.answer = marks, answer

    async def create_chat_completion(self, request, raw_request):
        self.request = request
        self.prompt = self.marks.split(request.messages[-1]["content"])
        self.prompt.ticket.report = make_report().to_dict()
        return self.answer


async def post(answer, **body):
    context = make_context(settings=Settings(chunk_mode="offset"))
    serving = FakeServing(context.marks, answer)
    state = {"tessera": context, "openai_serving_chat": serving, "enable_server_load_tracking": False}
    async with client_with(router, **state) as client:
        return serving, await client.post("/v1/rag/chat", json={"chunks": ["one"], "question": "why?"} | body)


async def test_a_streams_last_event_has_the_report_and_sampling_fields_are_passed_on():
    end = {"id": "c1", "choices": [{"finish_reason": "stop"}]}

    async def events():
        yield 'data: {"id": "c1"}\n\n'
        yield f"data: {json.dumps(end)}\n\n"
        yield "data: [DONE]\n\n"

    sampling = {"temperature": 0.5, "top_k": 5, "stop": ["x"], "logprobs": True, "stream": True}
    serving, response = await post(events(), chunks=["one", {"id": "d2", "text": "two"}], **sampling)
    assert {name: getattr(serving.request, name) for name in sampling} == sampling
    assert serving.prompt.chunks == ("one\n\n", "two\n\n")
    assert serving.prompt.ticket.chunk_ids == (None, "d2")
    assert serving.prompt.ticket.options.position_strategy == "offset"
    assert response.headers["content-type"].startswith("text/event-stream")
    first, last, done, _ = response.text.split("\n\n")
    assert (first, done) == ('data: {"id": "c1"}', "data: [DONE]")
    assert json.loads(last[6:]) == {**end, "cache": make_report().to_dict()}


async def test_vllms_errors_keep_their_status_and_shape():
    error = {"message": "no such model", "type": "NotFoundError", "param": "model", "code": 404}
    _, response = await post(ErrorResponse(error=error))
    assert response.status_code == 404
    assert response.json()["error"] == error


@pytest.mark.parametrize(
    ("chunk", "status", "parameter", "message"),
    [
        ("", 400, "chunks.0.text", "a document's text is empty"),
        ({"id": "d1"}, 404, None, "chunks.0.id: unknown chunk id 'd1' (the chunk cache is off): send its text"),
    ],
)
async def test_errors_of_documents_have_openais_shape(chunk, status, parameter, message):
    _, response = await post(None, chunks=[chunk])
    error = response.json()["error"]
    assert response.status_code == status
    assert (error["message"], error["param"], error["code"]) == (message, parameter, status)
