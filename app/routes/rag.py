# SPDX-License-Identifier: Apache-2.0
"""``POST /v1/rag/chat``: a chat completion over document chunks; ``POST /v1/rag/plan``: what it would take."""

from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, StreamingResponse

from app.documents.rag_request import RagChatRequest, chat_completion, chat_messages
from app.http.answers import EVENT_STREAM, Plan, RagChatAnswer, answers
from app.http.sse import ReportInserter
from app.prompt.rendering import open_ticket, render
from engine_ext.client.plan_preview import preview
from engine_ext.wire.request import RequestContext
from engine_ext.wire.vllm_compat import ChatCompletionResponse, ErrorResponse, load_aware_call, with_cancellation

router = APIRouter(prefix="/v1/rag", tags=["RAG"])


_REFUSED = (
    HTTPStatus.NOT_FOUND,
    HTTPStatus.CONFLICT,
    HTTPStatus.GONE,
    HTTPStatus.NOT_IMPLEMENTED,
    HTTPStatus.SERVICE_UNAVAILABLE,
)


@router.post(
    "/chat",
    summary="Chat over document chunks, reusing their KV",
    response_model=None,
    responses=answers(RagChatAnswer, *_REFUSED, content=EVENT_STREAM),
)
@with_cancellation  # type: ignore[untyped-decorator]
@load_aware_call  # type: ignore[untyped-decorator]
async def rag_chat(request: RagChatRequest, raw_request: Request) -> JSONResponse | StreamingResponse:
    """Answers with an OpenAI ``chat.completion`` (or its event stream) and the field ``cache``: the report."""
    state = raw_request.app.state
    ticket, documents = open_ticket(request, state)
    with state.tessera_marks.issue(ticket, documents) as marked:
        chat_request = chat_completion(request, chat_messages(request, marked), stream=request.stream)
        answer = await state.openai_serving_chat.create_chat_completion(chat_request, raw_request)
    if isinstance(answer, ErrorResponse):
        return JSONResponse(answer.model_dump(), status_code=answer.error.code)
    if isinstance(answer, ChatCompletionResponse):
        return JSONResponse(_with_report(answer.model_dump(), ticket))
    return StreamingResponse(_stream(answer, ticket), media_type="text/event-stream")


@router.post(
    "/plan",
    summary="What a request would find in the cache, and what it would compute",
    response_model=None,
    responses=answers(Plan, *_REFUSED),
)
async def rag_plan(request: RagChatRequest, raw_request: Request) -> JSONResponse:
    """Takes the same body as ``/v1/rag/chat``; runs nothing and changes nothing, not even the order of eviction."""
    state = raw_request.app.state
    ticket, documents = open_ticket(request, state)
    with state.tessera_marks.issue(ticket, documents) as marked:
        chat_request = chat_completion(request, chat_messages(request, marked))
        rendered = await render(state, ticket, chat_request, for_run=True)
    if isinstance(rendered, ErrorResponse):
        return JSONResponse(rendered.model_dump(), status_code=rendered.error.code)
    return JSONResponse(preview(state.engine_client.cache, rendered))


def _with_report(response: dict[str, Any], ticket: RequestContext) -> dict[str, Any]:
    response.pop("kv_transfer_params", None)
    return {**response, "cache": ticket.report.to_dict() if ticket.report else None}


async def _stream(events: AsyncIterator[str], ticket: RequestContext) -> AsyncIterator[bytes]:
    inserter = ReportInserter(ticket, "cache")
    async for event in events:
        yield inserter.feed(event.encode())
    yield inserter.end()
