# SPDX-License-Identifier: Apache-2.0
"""Fields of requests over document chunks, and their translation into chat completions."""

from collections.abc import Sequence
from typing import Annotated, Any

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError, model_validator
from vllm.exceptions import VLLMValidationError

from app.documents.cache_options import CacheField
from app.documents.document import BadRequestError, Document, checked_document
from app.documents.openai_documents import DocumentsRequest
from app.documents.retrieve_field import RetrieveField
from cache.segments.chunk_ids import ChunkIds, GoneIdError, UnknownIdError
from engine_ext.client.request import IS_PEER
from engine_ext.wire.vllm_compat import ChatCompletionRequest

# Fields of vLLM's chat completions that have no meaning with chunks, or are peers' alone.
_RESERVED = {
    "messages",
    "documents",
    "kv_transfer_params",
    "echo",
    "truncate_prompt_tokens",
    "use_beam_search",
}


class RagChunk(BaseModel):
    """One document chunk. Its KV depends on ``title``, ``text`` and ``context`` only; ``id`` appears in the report.

    An ``id`` without a text stands for the text registered under it by ``POST /v1/rag/chunks``.
    """

    model_config = ConfigDict(extra="forbid")

    id: str | None = Field(None, min_length=1, max_length=1024)
    text: str | None = None
    title: str | None = None
    context: str | None = Field(
        None,
        description="text that the chunk is computed behind, and that is no part of the prompt, such as what precedes "
        "it in its document, or a summary; its last 512 tokens count",
    )
    metadata: dict[str, Any] | None = Field(None, description="ignored; never shown to the model")


Chunks = Annotated[list[Annotated[str | RagChunk, Field(union_mode="left_to_right")]], FailFast()]
"""Of many that are wrong, the first is told."""


class RagRequest(BaseModel):
    """Fields that all requests over chunks share."""

    model: str | None = None
    system: str = Field("", description="system prompt; empty: the chat template's opening only")
    chunks: Chunks
    cache: CacheField = Field(default_factory=CacheField)

    @model_validator(mode="after")
    def _check_extra(self) -> "RagRequest":
        reserved = _RESERVED - {"kv_transfer_params"} if IS_PEER.get() else _RESERVED
        unknown = set(self.model_extra or {}) - (set(ChatCompletionRequest.model_fields) - reserved)
        if unknown:
            raise VLLMValidationError(f"unknown field {min(unknown)!r}", parameter=min(unknown))
        return self


class RagChatRequest(RagRequest):
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

    chunks: Chunks = Field(default_factory=list, description="the document chunks; or give retrieve")
    retrieve: RetrieveField | None = None
    question: str | None = Field(None, description="the user's question; or give messages")
    messages: list[dict[str, Any]] | None = Field(
        None, description="a conversation instead of question; the chunks go before its first user text"
    )
    stream: bool = Field(False, strict=True)

    @property
    def finds_documents(self) -> bool:
        """Whether the documents are those that ``--documents auto`` finds."""
        return False

    @model_validator(mode="after")
    def _check_chunks(self) -> "RagChatRequest":
        if not self.finds_documents and ("chunks" in self.model_fields_set) == (self.retrieve is not None):
            raise VLLMValidationError("give either chunks or retrieve", parameter="chunks")
        return self

    @model_validator(mode="after")
    def _check_question(self) -> "RagChatRequest":
        if (self.question is None) == (self.messages is None):
            raise VLLMValidationError("give either question or messages", parameter="question")
        if self.question is not None and not self.question.strip():
            raise VLLMValidationError("the question is empty", parameter="question")
        return self


class PlanRequest(RagChatRequest):
    """A chat request to preview; without ``chunks`` and ``retrieve``, with the documents found in its messages."""

    prefetch: bool = Field(
        False,
        strict=True,
        description="start to load and compute what the request would wait for, ahead of it: a retriever knows the "
        "chunks before the question is complete",
    )

    @property
    def finds_documents(self) -> bool:
        """Whether the documents are those that ``--documents auto`` finds."""
        return "chunks" not in self.model_fields_set and self.retrieve is None

    def conversation(self) -> dict[str, Any]:
        """The body of the chat completion whose messages may have documents."""
        options = self.cache.model_dump(exclude_unset=True)
        return {**(self.model_extra or {}), "model": self.model, "messages": chat_messages(self, ""), "cache": options}


class IngestRequest(RagRequest):
    """Chunks to compute behind ``system``. Fields of chat completions that change the rendered prompt apply too."""

    model_config = ConfigDict(
        extra="allow",
        json_schema_extra={
            "example": {
                "system": "Answer from the documents.",
                "chunks": [{"id": "falcon", "text": "The access code of Falcon is 7342."}],
                "pin": True,
                "ttl_s": 86400,
            }
        },
    )

    pin: bool = Field(False, strict=True, description="never evict these chunks; DELETE, clear and ttl_s remove them")
    ttl_s: float | None = Field(
        None,
        gt=0,
        strict=True,
        allow_inf_nan=False,
        description="seconds after which the chunks are dropped; default: never",
    )


def documents_of(chunks: Sequence[str | RagChunk], ids: ChunkIds | None, namespace: str) -> list[Document]:
    """The chunks' documents; registered ids are looked up.

    Raises :class:`BadRequestError`, :class:`UnknownIdError`, and :class:`GoneIdError` for a chunk no longer cached.
    """
    return [_document(chunk, i, ids, namespace) for i, chunk in enumerate(chunks)]


def _document(chunk: str | RagChunk, index: int, ids: ChunkIds | None, namespace: str) -> Document:
    if isinstance(chunk, str):
        chunk = RagChunk(text=chunk)
    if chunk.text is None:
        return _registered(chunk, index, ids, namespace)
    return checked_document(chunk.text, chunk.id, chunk.title, f"chunks.{index}.text", chunk.context)


def _registered(chunk: RagChunk, index: int, ids: ChunkIds | None, namespace: str) -> Document:
    path = f"chunks.{index}"
    if chunk.id is None:
        raise BadRequestError("a chunk needs a text", f"{path}.text")
    if ids is None:
        raise UnknownIdError(f"{path}.id: unknown chunk id {chunk.id!r} (the chunk cache is off): send its text")
    try:
        content = ids.content(namespace, chunk.id)
    except (UnknownIdError, GoneIdError) as error:
        raise type(error)(f"{path}.id: {error}") from error
    return Document(content.text, chunk.id, content.title, content.context)


def documents_request(request: RagRequest, documents: list[Document]) -> DocumentsRequest:
    """The request as a chat completion over these documents; one that only computes them asks nothing."""
    chat = request if isinstance(request, RagChatRequest) else None
    body = {**(request.model_extra or {}), "model": request.model, "system": request.system}
    body |= {"messages": chat.messages, "stream": chat.stream} if chat else {"stream": False}

    def insert(marked: str) -> None:
        del body["system"]
        body["messages"] = chat_messages(chat, marked) if chat else system_and_user(request.system, marked + "?")

    return DocumentsRequest(body, documents, request.cache, insert)


def chat_completion(body: dict[str, Any]) -> ChatCompletionRequest:
    """vLLM's chat completion of a request whose documents were inserted."""
    try:
        return ChatCompletionRequest(**body)
    except ValidationError as error:
        raise RequestValidationError(error.errors()) from error


def chat_messages(request: RagChatRequest, marked: str) -> list[dict[str, Any]]:
    """The conversation for vLLM, with the marked chunks before the first user text."""
    if request.question is not None:
        return system_and_user(request.system, marked + request.question)
    system = [{"role": "system", "content": request.system}] if request.system else []
    messages = [dict(message) for message in request.messages or []]
    if system and messages and messages[0].get("role") in ("system", "developer"):
        raise VLLMValidationError("the system prompt is given twice: in system and in messages", parameter="messages")
    user = next((message for message in messages if message.get("role") == "user"), None)
    if user is None:
        raise VLLMValidationError("messages have no user message", parameter="messages")
    user["content"] = _prepended(user.get("content"), marked)
    return [*system, *messages]


def system_and_user(system: str, text: str) -> list[dict[str, Any]]:
    """A conversation of an optional system prompt and one user message."""
    user = {"role": "user", "content": text}
    return [{"role": "system", "content": system}, user] if system else [user]


def _prepended(content: Any, marked: str) -> Any:
    if isinstance(content, str):
        return marked + content
    parts = [dict(part) if isinstance(part, dict) else part for part in content] if isinstance(content, list) else []
    text = next((part for part in parts if isinstance(part, dict) and part.get("type") == "text"), None)
    if text is None:
        raise VLLMValidationError("the first user message has no text", parameter="messages")
    text["text"] = marked + str(text.get("text", ""))
    return parts
