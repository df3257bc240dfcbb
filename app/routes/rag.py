# SPDX-License-Identifier: Apache-2.0
"""``POST /v1/rag/chat``: a chat completion over document chunks; ``POST /v1/rag/plan``: its preview."""

from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, StreamingResponse

from app.context import ServerContext
from app.documents.rag_request import PlanRequest, RagChatRequest, chat_completion
from app.errors import error_response
from app.http.annotations import annotate
from app.http.answers import Plan, RagChatAnswer
from app.http.openapi import EVENT_STREAM, answers
from app.http.sse import ReportInserter
from app.intake import issued, render, take_found, take_in
from engine_ext.client.plan_preview import preview
from engine_ext.client.request import IS_PEER, Ticket
from engine_ext.wire.vllm_compat import ChatCompletionResponse, ErrorResponse, load_aware_call, with_cancellation

router = APIRouter(prefix="/v1/rag", tags=["RAG"])


_REFUSED = (
    HTTPStatus.NOT_FOUND,
    HTTPStatus.CONFLICT,
    HTTPStatus.GONE,
    HTTPStatus.BAD_GATEWAY,
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
    """Answers with a ``chat.completion`` of OpenAI, or its event stream, plus the report in ``cache``."""
    state = raw_request.app.state
    context: ServerContext = state.tessera
    taken, ticket = await take_in(context, request)
    with context.marks.issue(ticket, taken.documents) as marked:
        taken.insert(marked)
        answer = await state.openai_serving_chat.create_chat_completion(chat_completion(taken.body), raw_request)
    if isinstance(answer, ErrorResponse):
        return error_response(answer)
    if isinstance(answer, ChatCompletionResponse):
        return JSONResponse(_with_report(answer.model_dump(), ticket))
    return StreamingResponse(_stream(answer, ticket), media_type="text/event-stream")


@router.post(
    "/plan",
    summary="Preview what a request would reuse and compute",
    response_model=None,
    responses=answers(Plan, *_REFUSED),
)
async def rag_plan(request: PlanRequest, raw_request: Request) -> JSONResponse:
    """Takes the body of ``/v1/rag/chat``. Changes nothing, not even the order of eviction, without ``prefetch``.

    Without ``chunks`` and ``retrieve`` it shows the documents that ``--documents auto`` would find in the messages.
    """
    state = raw_request.app.state
    context: ServerContext = state.tessera
    taken, ticket = await (take_found if request.finds_documents else take_in)(context, request)
    with issued(context, taken, ticket) as marked:
        taken.insert(marked)
        rendered = await render(state, chat_completion(taken.body), for_run=True)
    if isinstance(rendered, ErrorResponse):
        return error_response(rendered)
    plan = preview(context.engine.cache, rendered)
    if request.finds_documents:
        plan["found"] = [document.model_dump() for document in ticket.found]
    if request.prefetch and plan["mode"] == "chunked":
        plan["prefetching"] = context.engine.prefetch(rendered)
    return JSONResponse(plan)


def _with_report(response: dict[str, Any], ticket: Ticket) -> dict[str, Any]:
    if not IS_PEER.get():
        response.pop("kv_transfer_params", None)
    if ticket.options.cite:
        annotate(response, ticket)
    return {**response, "cache": ticket.report}


async def _stream(events: AsyncIterator[str], ticket: Ticket) -> AsyncIterator[bytes]:
    inserter = ReportInserter(ticket, "cache")
    async for event in events:
        yield inserter.feed(event.encode())
    yield inserter.end()
