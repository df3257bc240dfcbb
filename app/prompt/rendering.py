# SPDX-License-Identifier: Apache-2.0
"""Rendering of a request with chunks up to the engine's input: segments, scope and cache salt."""

from dataclasses import dataclass
from typing import Any

from starlette.datastructures import State
from vllm.exceptions import VLLMValidationError

from app.documents.cache_options import decide_of, options_of
from app.documents.document import BadRequestError, Document
from app.documents.openai_documents import system_texts
from app.documents.rag_request import RagRequest, documents_of
from app.documents.request_documents import keys_of
from cache.hashing import CacheScope
from cache.layout import ChunkedPrompt
from engine_ext.client.engine import ChunkEngine
from engine_ext.wire.request import REQUEST_KEY, CacheOptions, RequestContext, cache_scope
from engine_ext.wire.vllm_compat import ChatCompletionRequest, ErrorResponse, lora_request_of


@dataclass(frozen=True, slots=True)
class Rendered:
    """A rendered request; ``prompt`` is ``None`` without chunks, ``options`` are those of the run."""

    options: CacheOptions
    prompt: ChunkedPrompt | None
    scope: CacheScope
    cache_salt: str | None
    lora_request: Any


def open_ticket(request: RagRequest, state: State) -> tuple[RequestContext, list[Document]]:
    """Context and documents of a request; raises as :func:`app.documents.rag_request.documents_of`."""
    engine: ChunkEngine = state.engine_client
    try:
        options = options_of(request.cache, state)
    except BadRequestError as error:
        raise VLLMValidationError(str(error), parameter=error.parameter) from error
    namespace = cache_scope(options, cache_salt_of(request)).namespace
    known = None
    if engine.manager is not None:
        engine.manager.expire()  # keeps ids and plans from finding expired chunks
        known = engine.manager.ids
    documents = documents_of(request.chunks, known, namespace)
    body = {**request.model_dump(include={"model", "system", "messages"}), **(request.model_extra or {})}
    keys = keys_of(body, request.cache, system_texts(body), documents)
    ids = tuple(document.id for document in documents)
    return RequestContext(options, ids, tuple(keys), decide=decide_of(request.cache, state)), documents


def cache_salt_of(request: RagRequest) -> str | None:
    """The request's ``cache_salt``, a field of vLLM's."""
    salt = (request.model_extra or {}).get("cache_salt")
    return salt if isinstance(salt, str) else None


async def render(state: State, ticket: RequestContext, chat_request: ChatCompletionRequest) -> Rendered | ErrorResponse:
    """Renders ``chat_request``, which carries the marks of ``ticket``, as vLLM's chat serving does."""
    serving = state.openai_serving_chat
    result = await serving.render_chat_request(chat_request)
    if isinstance(result, ErrorResponse):
        return result
    _, (engine_input,) = result
    lora_request, salt = lora_request_of(serving, chat_request), engine_input.get("cache_salt")
    engine: ChunkEngine = state.engine_client
    adapter, chunked = engine.adapters.name(lora_request), engine_input[REQUEST_KEY]
    options = chunked.options(adapter)
    return Rendered(options, chunked.prompt, cache_scope(options, salt, adapter), salt, lora_request)
