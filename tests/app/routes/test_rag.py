# SPDX-License-Identifier: Apache-2.0
"""``POST /v1/rag/chat``: accepted bodies and the resulting conversations."""

import json

import pytest
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from httpx import ASGITransport, AsyncClient
from pydantic import ValidationError
from vllm.exceptions import VLLMValidationError

from app.documents.document import Document
from app.documents.rag_request import (
    RagChatRequest,
    RagChunk,
    chat_completion,
    chat_messages,
    documents_of,
    documents_request,
)
from app.errors import answer_errors
from app.prompt.marks import Marks
from app.routes.rag import _with_report, router
from app.settings import Settings
from cache.segments.chunk_ids import ChunkIds, GoneIdError, RegisteredText, UnknownIdError
from cache.segments.hashing import ChunkHash
from engine_ext.client.request import CacheOptions, Ticket
from engine_ext.wire.vllm_compat import ChatCompletionRequest, ErrorResponse
from tests.app.helpers import make_report
from tests.app.helpers import refused as bad_request
from tests.support.context import make_context

USER = {"role": "user", "content": "why?"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}


def rag(**fields) -> RagChatRequest:
    return RagChatRequest(**{"chunks": ["one"], "question": "why?"} | fields)


def refused(parameter: str, message: str):
    return pytest.raises(VLLMValidationError, match=rf"{message}.*\(parameter={parameter}[,)]")


def test_sampling_fields_of_chat_completions_are_passed_on():
    request = rag(model="m", temperature=0.5, max_tokens=3, top_k=5, stream=True, stop=["x"], logprobs=True)
    taken = documents_request(request, [])
    taken.insert("<marked>")
    made = chat_completion(taken.body)
    assert isinstance(made, ChatCompletionRequest)
    assert (made.model, made.temperature, made.model_dump()["max_tokens"], made.top_k) == ("m", 0.5, 3, 5)
    assert (made.stream, made.stop, made.logprobs) == (True, ["x"], True)
    assert made.messages == [{"role": "user", "content": "<marked>why?"}]


@pytest.mark.parametrize("name", ["chunk", "temprature", "documents", "kv_transfer_params", "echo", "use_beam_search"])
def test_unknown_and_meaningless_fields_are_refused(name):
    with refused(name, f"unknown field '{name}'"):
        rag(**{name: True})


def test_a_bad_sampling_field_is_a_validation_error():
    with pytest.raises(RequestValidationError) as raised:
        chat_completion({"messages": [], "temperature": "hot"})
    assert raised.value.errors()[0]["loc"] == ("temperature",)


@pytest.mark.parametrize("fields", [{"question": None}, {"messages": [USER]}])
def test_either_question_orchat_messages(fields):
    with refused("question", "give either question or messages"):
        rag(**fields)


@pytest.mark.parametrize("question", ["", " \n"])
def test_an_empty_question_is_refused(question):
    with refused("question", "the question is empty"):
        rag(question=question)


@pytest.mark.parametrize(
    "fields",
    [
        {"chunks": None},
        {"chunks": "one"},
        {"chunks": [5]},
        {"chunks": [{"text": "one", "txt": "two"}]},
        {"chunks": [{"id": ""}]},
        {"cache": {"mode": "x"}},
        {"cache": {"separator": "|"}},
    ],
)
def test_bad_chunks_and_options_are_refused(fields):
    with pytest.raises(ValidationError) as raised:
        rag(**fields)
    assert raised.value.errors()[0]["loc"][0] in fields


def test_chunks_are_strings_or_objects():
    request = rag(chunks=["one", {"id": "d2", "text": "two", "title": "T", "metadata": {"page": 5}}])
    documents = documents_of(request.chunks, None, "default")
    assert documents == [Document("one"), Document("two", "d2", "T")]


def test_no_chunks_are_no_error():
    assert rag(chunks=[]).chunks == []


@pytest.mark.parametrize(
    ("chunk", "parameter", "message"),
    [
        ("", "chunks.1.text", "a document's text is empty"),
        (RagChunk(text=" \n"), "chunks.1.text", "a document's text is empty"),
        ("\ud800", "chunks.1.text", "a document's text is not Unicode text"),
        (RagChunk(text="one", title="\ud800"), "chunks.1.title", "a document's title is not Unicode text"),
        (RagChunk(), "chunks.1.text", "a chunk needs a text"),
        (RagChunk(title="T"), "chunks.1.text", "a chunk needs a text"),
    ],
)
def test_a_bad_chunk_is_named(chunk, parameter, message):
    with bad_request(parameter, message):
        documents_of(["one", chunk], None, "default")


def chunk_ids() -> ChunkIds:
    made = ChunkIds()
    made.register("default", "d1", RegisteredText("one", "T"), ChunkHash(b"1"))
    made.register("default", "d2", RegisteredText("two"), ChunkHash(b"2"))
    made.removed(ChunkHash(b"2"), "expired")
    return made


def test_a_registered_chunk_needs_no_text():
    assert documents_of([RagChunk(id="d1")], chunk_ids(), "default") == [Document("one", "d1", "T")]


@pytest.mark.parametrize(
    ("id", "namespace", "error", "message"),
    [
        ("d3", "default", UnknownIdError, "chunks.0.id: unknown chunk id 'd3': send its text"),
        ("d1", "other", UnknownIdError, "chunks.0.id: unknown chunk id 'd1': send its text"),
        (
            "d2",
            "default",
            GoneIdError,
            r"chunks.0.id: chunk id 'd2' is no longer cached \(expired\): send",
        ),
    ],
)
def test_an_id_that_stands_for_nothing_is_named(id, namespace, error, message):
    with pytest.raises(error, match=message):
        documents_of([RagChunk(id=id)], chunk_ids(), namespace)


def test_the_question_follows_the_marked_chunks():
    assert chat_messages(rag(), "<marked>") == [{"role": "user", "content": "<marked>why?"}]
    assert chat_messages(rag(system="s"), "<marked>") == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "<marked>why?"},
    ]


def conversation(*messages: dict, **fields) -> RagChatRequest:
    return rag(question=None, messages=list(messages), **fields)


def test_the_marked_chunks_go_before_the_first_user_text():
    assistant = {"role": "assistant", "content": "a"}
    request = conversation(assistant, USER, assistant, {"role": "user", "content": "and?"})
    marked = [
        assistant,
        {"role": "user", "content": "<marked>why?"},
        assistant,
        {"role": "user", "content": "and?"},
    ]
    assert chat_messages(request, "<marked>") == marked
    assert request.messages[1] == USER  # the request itself is unchanged


def test_the_marked_chunks_go_before_the_first_text_part():
    parts = [IMAGE, {"type": "text", "text": "why?"}, {"type": "text", "text": "really?"}]
    request = conversation({"role": "user", "content": parts})
    (message,) = chat_messages(request, "<marked>")
    assert message["content"] == [IMAGE, {"type": "text", "text": "<marked>why?"}, parts[2]]
    assert parts[1] == {"type": "text", "text": "why?"}


@pytest.mark.parametrize("role", ["system", "developer"])
def test_a_system_prompt_is_given_once(role):
    with refused("messages", "the system prompt is given twice"):
        chat_messages(conversation({"role": role, "content": "s"}, USER, system="t"), "")
    assert len(chat_messages(conversation({"role": role, "content": "s"}, USER), "")) == 2
    assert len(chat_messages(conversation(USER, system="t"), "")) == 2


@pytest.mark.parametrize("messages", [[], [{"role": "system", "content": "s"}], [{"content": "why?"}]])
def test_messages_need_a_user(messages):
    with refused("messages", "messages have no user message"):
        chat_messages(conversation(*messages), "")


@pytest.mark.parametrize("content", [None, 5, [], [IMAGE], ["x", 5, ["type", "text"]]])
def test_the_first_user_message_needs_text(content):
    with refused("messages", "the first user message has no text"):
        chat_messages(conversation({"role": "user", "content": content}, USER), "")


def test_an_answer_has_the_report_instead_of_transfer_parameters():
    ticket = Ticket(CacheOptions())
    assert _with_report({"id": "c", "kv_transfer_params": {"cache": {}}}, ticket) == {"id": "c", "cache": None}
    ticket.report = make_report().to_dict()
    assert _with_report({"id": "c"}, ticket) == {"id": "c", "cache": ticket.report}


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
    app = FastAPI()
    app.include_router(router)
    answer_errors(app)
    app.state.tessera = context = make_context(settings=Settings(chunk_position_strategy="offset"))
    app.state.openai_serving_chat = serving = FakeServing(context.marks, answer)
    app.state.enable_server_load_tracking = False
    async with AsyncClient(transport=ASGITransport(app), base_url="http://server") as client:
        return serving, await client.post("/v1/rag/chat", json={"chunks": ["one"], "question": "why?"} | body)


async def test_a_streams_last_event_has_the_report():
    end = {"id": "c1", "choices": [{"finish_reason": "stop"}]}

    async def events():
        yield 'data: {"id": "c1"}\n\n'
        yield f"data: {json.dumps(end)}\n\n"
        yield "data: [DONE]\n\n"

    serving, response = await post(events(), stream=True, chunks=["one", {"id": "d2", "text": "two"}])
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
