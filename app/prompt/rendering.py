# SPDX-License-Identifier: Apache-2.0
"""Rendering of a request with chunks up to the resolved request for the engine."""

from starlette.datastructures import State
from vllm.sampling_params import SamplingParams

from app.documents.cache_options import decide_of, options_of
from app.documents.document import Document
from app.documents.openai_documents import system_texts
from app.documents.rag_request import RagRequest, documents_of
from app.documents.request_documents import cache_salt_of, keys_of
from cache.report import Found
from engine_ext.client.engine import ChunkEngine
from engine_ext.client.resolved import ResolvedRequest
from engine_ext.wire.request import REQUEST_KEY, RequestContext
from engine_ext.wire.vllm_compat import ChatCompletionRequest, ErrorResponse, lora_request_of


async def open_ticket(
    request: RagRequest, state: State, retrieved: Found | None = None
) -> tuple[RequestContext, list[Document]]:
    """Context and documents of a request; raises :class:`BadRequestError` and as :func:`documents_of`."""
    engine: ChunkEngine = state.engine_client
    options = options_of(request.cache, cache_salt_of(request.model_extra or {}), state)
    by_id = [chunk.id for chunk in request.chunks if not isinstance(chunk, str) and chunk.text is None and chunk.id]
    ids = await engine.cache.known_ids(options.namespace, by_id)
    documents = documents_of(request.chunks, ids, options.namespace)
    body = {**request.model_dump(include={"model", "system", "messages"}), **(request.model_extra or {})}
    keys = keys_of(body, options, system_texts(body), documents)
    given = tuple(document.id for document in documents)
    decide = decide_of(request.cache, state)
    return RequestContext(options, given, tuple(keys), decide=decide, retrieved=retrieved), documents


async def render(
    state: State, ticket: RequestContext, chat_request: ChatCompletionRequest, *, for_run: bool
) -> ResolvedRequest | ErrorResponse:
    """Renders ``chat_request``, which carries the marks of ``ticket``, as vLLM's chat serving does.

    ``for_run``: whether its sampling parameters count, as they do for an answer.
    """
    serving = state.openai_serving_chat
    result = await serving.render_chat_request(chat_request)
    if isinstance(result, ErrorResponse):
        return result
    _, (engine_input,) = result
    params = chat_request.to_sampling_params(1, serving.default_sampling_params) if for_run else SamplingParams()
    engine: ChunkEngine = state.engine_client
    adapter = lora_request_of(serving, chat_request)
    return engine.resolve(engine_input[REQUEST_KEY], params, adapter)
