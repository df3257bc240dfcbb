# SPDX-License-Identifier: Apache-2.0
"""``POST /v1/rag/chat``: a chat completion over document chunks."""

from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from vllm.exceptions import VLLMValidationError

from app.cache_options import CacheField
from app.documents import Document
from app.marks import Marks
from app.settings import Settings
from app.sse import ReportInserter
from engine_ext.request import Ticket
from engine_ext.vllm_compat import (
    ChatCompletionRequest,
    ChatCompletionResponse,
    ErrorResponse,
    load_aware_call,
    with_cancellation,
)

router = APIRouter(prefix="/v1/rag", tags=["RAG"])

# Fields of vLLM's chat completions that have no meaning with chunks.
_RESERVED = {
    "messages",
    "documents",
    "kv_transfer_params",
    "echo",
    "truncate_prompt_tokens",
    "use_beam_search",
}


class RagChunk(BaseModel):
    """One document chunk. A chunk's KV depends on ``title`` and ``text`` only; ``id`` comes back in the report."""

    model_config = ConfigDict(extra="forbid")

    id: str | None = Field(None, min_length=1)
    text: str | None = None
    title: str | None = None
    metadata: dict[str, Any] | None = Field(None, description="kept by the client's side; not shown to the model")


class RagChatRequest(BaseModel):
    """Chunks and a question, with any sampling field of OpenAI's and vLLM's chat completions."""

    model_config = ConfigDict(
        extra="allow",
        json_schema_extra={
            "example": {
                "system": "Answer from the documents.",
                "chunks": ["The access code of Falcon is 7342.", {"id": "d2", "text": "Falcon is in Riga."}],
                "question": "What is the access code of Falcon?",
                "max_tokens": 32,
                "cache": {"position_strategy": "shared"},
            }
        },
    )

    model: str | None = None
    system: str = Field("", description="system prompt; empty: the chat template's opening only")
    chunks: list[Annotated[str | RagChunk, Field(union_mode="left_to_right")]]
    question: str | None = Field(None, description="the user's question; or give messages")
    messages: list[dict[str, Any]] | None = Field(
        None, description="a conversation instead of question; the chunks go before its first user text"
    )
    cache: CacheField = Field(default_factory=CacheField)
    stream: bool = False

    @model_validator(mode="after")
    def _check(self) -> "RagChatRequest":
        unknown = set(self.model_extra or {}) - (set(ChatCompletionRequest.model_fields) - _RESERVED)
        if unknown:
            raise VLLMValidationError(f"unknown field {min(unknown)!r}", parameter=min(unknown))
        if (self.question is None) == (self.messages is None):
            raise VLLMValidationError("give either question or messages", parameter="question")
        if self.question is not None and not self.question.strip():
            raise VLLMValidationError("the question is empty", parameter="question")
        return self


@router.post("/chat", summary="Chat over document chunks, reusing their KV", response_model=None)
@with_cancellation  # type: ignore[untyped-decorator]
@load_aware_call  # type: ignore[untyped-decorator]
async def rag_chat(request: RagChatRequest, raw_request: Request) -> JSONResponse | StreamingResponse:
    """Answers with an OpenAI ``chat.completion`` (or its event stream) and the field ``cache``: the report."""
    state = raw_request.app.state
    settings: Settings = state.tessera_settings
    documents = [_document(chunk, i) for i, chunk in enumerate(request.chunks)]
    options = request.cache.options(settings.chunk_position_strategy)
    ticket = Ticket(options, tuple(document.id for document in documents))
    marks: Marks = state.tessera_marks
    with marks.issue(ticket, documents) as marked:
        chat_request = _chat_request(request, marked)
        answer = await state.openai_serving_chat.create_chat_completion(chat_request, raw_request)
    if isinstance(answer, ErrorResponse):
        return JSONResponse(answer.model_dump(), status_code=answer.error.code)
    if isinstance(answer, ChatCompletionResponse):
        return JSONResponse(_with_report(answer.model_dump(), ticket))
    return StreamingResponse(_stream(answer, ticket), media_type="text/event-stream")


def _document(chunk: str | RagChunk, index: int) -> Document:
    if isinstance(chunk, str):
        chunk = RagChunk(text=chunk)
    if chunk.text is None:
        raise VLLMValidationError(
            f"unknown chunk id {chunk.id!r}: send its text" if chunk.id else "a chunk needs a text",
            parameter=f"chunks.{index}.{'id' if chunk.id else 'text'}",
        )
    if not chunk.text.strip():
        raise VLLMValidationError(f"the text of chunk {index} is empty", parameter=f"chunks.{index}.text")
    return Document(chunk.text, chunk.id, chunk.title)


def _chat_request(request: RagChatRequest, marked: str) -> ChatCompletionRequest:
    fields = {**(request.model_extra or {}), "model": request.model, "stream": request.stream}
    try:
        return ChatCompletionRequest(messages=_messages(request, marked), **fields)
    except ValidationError as error:
        raise RequestValidationError(error.errors()) from error


def _messages(request: RagChatRequest, marked: str) -> list[dict[str, Any]]:
    """The conversation as vLLM takes it, the marked chunks before its first user text."""
    system = [{"role": "system", "content": request.system}] if request.system else []
    if request.question is not None:
        return [*system, {"role": "user", "content": marked + request.question}]
    messages = [dict(message) for message in request.messages or []]
    if system and messages and messages[0].get("role") in ("system", "developer"):
        raise VLLMValidationError("the system prompt is given twice: in system and in messages", parameter="messages")
    user = next((message for message in messages if message.get("role") == "user"), None)
    if user is None:
        raise VLLMValidationError("messages have no user message", parameter="messages")
    user["content"] = _prepended(user.get("content"), marked)
    return [*system, *messages]


def _prepended(content: Any, marked: str) -> Any:
    if isinstance(content, str):
        return marked + content
    parts = [dict(part) for part in content] if isinstance(content, list) else []
    text = next((part for part in parts if part.get("type") == "text"), None)
    if text is None:
        raise VLLMValidationError("the first user message has no text", parameter="messages")
    text["text"] = marked + str(text.get("text", ""))
    return parts


def _with_report(response: dict[str, Any], ticket: Ticket) -> dict[str, Any]:
    response.pop("kv_transfer_params", None)
    return {**response, "cache": ticket.report.to_dict() if ticket.report else None}


async def _stream(events: AsyncIterator[str], ticket: Ticket) -> AsyncIterator[str]:
    inserter = ReportInserter(ticket, "cache")
    async for event in events:
        yield inserter.feed(event)
