# SPDX-License-Identifier: Apache-2.0
"""``POST /v1/rag/chat``: a chat completion over document chunks; ``POST /v1/rag/plan``: its preview."""

from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.datastructures import State

from app.collections.retrieval import Retrieval
from app.documents.document import Document
from app.documents.rag_request import PlanRequest, RagChatRequest, chat_completion, chat_messages
from app.http.answers import Plan, RagChatAnswer
from app.http.openapi import EVENT_STREAM, answers
from app.http.sse import ReportInserter
from app.prompt.rendering import open_ticket, render
from app.routes.dependencies import AppState, ChatServing, Engine, RequestMarks
from app.routes.errors import DocumentsRoute, error_response
from cache.report import Report
from engine_ext.client.plan_preview import preview
from engine_ext.wire.caller import IS_PEER
from engine_ext.wire.request import RequestContext
from engine_ext.wire.vllm_compat import ChatCompletionResponse, ErrorResponse, load_aware_call, with_cancellation

router = APIRouter(prefix="/v1/rag", tags=["RAG"], route_class=DocumentsRoute)
Asked = TypeVar("Asked", bound=RagChatRequest)


_REFUSED = (
    HTTPStatus.NOT_FOUND,
    HTTPStatus.CONFLICT,
    HTTPStatus.GONE,
    HTTPStatus.NOT_IMPLEMENTED,
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
async def rag_chat(
    request: RagChatRequest, raw_request: Request, state: AppState, marks: RequestMarks, serving: ChatServing
) -> JSONResponse | StreamingResponse:
    """Answers with a ``chat.completion`` of OpenAI, or its event stream, plus the report in ``cache``."""
    request, ticket, documents = await _opened(request, state)
    with marks.issue(ticket, documents) as marked:
        chat_request = chat_completion(request, chat_messages(request, marked), stream=request.stream)
        answer = await serving.create_chat_completion(chat_request, raw_request)
    if isinstance(answer, ErrorResponse):
        return error_response(answer)
    if isinstance(answer, ChatCompletionResponse):
        return JSONResponse(_with_report(answer.model_dump(), ticket.report))
    return StreamingResponse(_stream(answer, ticket), media_type="text/event-stream")


@router.post(
    "/plan",
    summary="Preview what a request would reuse and compute",
    response_model=None,
    responses=answers(Plan, *_REFUSED),
)
async def rag_plan(request: PlanRequest, state: AppState, marks: RequestMarks, engine: Engine) -> JSONResponse:
    """Takes the body of ``/v1/rag/chat``. Changes nothing, not even the order of eviction, without ``prefetch``."""
    request, ticket, documents = await _opened(request, state)
    with marks.issue(ticket, documents) as marked:
        chat_request = chat_completion(request, chat_messages(request, marked))
        rendered = await render(state, ticket, chat_request, for_run=True)
    if isinstance(rendered, ErrorResponse):
        return error_response(rendered)
    plan = preview(engine.cache, rendered)
    if request.prefetch and plan["mode"] == "chunked":
        plan["prefetching"] = engine.prefetch(rendered)
    return JSONResponse(plan)


async def _opened(request: Asked, state: State) -> tuple[Asked, RequestContext, list[Document]]:
    """The request with what it retrieves as its chunks, its context and documents; raises as these two do."""
    retrieved = None
    if request.retrieve is not None:
        retrieval: Retrieval = state.tessera_retrieval
        request, retrieved = await retrieval.fill(request, request.retrieve)
    return request, *await open_ticket(request, state, retrieved)


def _with_report(response: dict[str, Any], report: Report | None) -> dict[str, Any]:
    if not IS_PEER.get():
        response.pop("kv_transfer_params", None)
    return {**response, "cache": report.to_dict() if report else None}


async def _stream(events: AsyncIterator[str], ticket: RequestContext) -> AsyncIterator[bytes]:
    inserter = ReportInserter(ticket, "cache")
    async for event in events:
        yield inserter.feed(event.encode())
    yield inserter.end()
