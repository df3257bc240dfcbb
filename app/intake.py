# SPDX-License-Identifier: Apache-2.0
"""The intake of requests with documents, whatever their schema.

Each becomes a :class:`DocumentsRequest`, whose documents go into its prompt as marked text, and a :class:`Ticket`:
options for the engine on the way in, the cache report on the way out. Our own endpoints call :func:`take_in`; vLLM's
stand behind :class:`DocumentsMiddleware`.
"""

import json
import logging
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from functools import cache, partial
from http import HTTPStatus
from typing import Any, Final

from pydantic import ConfigDict, TypeAdapter, ValidationError
from starlette.datastructures import Headers, MutableHeaders, State
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from vllm.sampling_params import SamplingParams

from app.collections.retrievers import RetrieverFailedError
from app.context import ServerContext
from app.documents.cache_options import cache_salt_of, namespace_of, parse_cache_field
from app.documents.checked_fields import check_fields, check_request_id
from app.documents.document import BadRequestError, check_number
from app.documents.found import Find, finder
from app.documents.openai_documents import (
    EXTRACTORS,
    NOT_BESIDE_DOCUMENTS,
    DocumentsRequest,
    finds_documents,
    from_chat,
)
from app.documents.rag_request import PlanRequest, RagChatRequest, RagRequest, documents_of, documents_request
from app.documents.request_documents import keys_of
from app.errors import REFUSED, refusal_of
from app.http.annotations import annotating
from app.http.json_size import MOST_BYTES
from app.http.messages import (
    QUICK_BYTES,
    has_files,
    held,
    in_thread_if_long,
    is_event_stream,
    object_in,
    parsed_object,
    path_of,
    read_body,
    remember,
    replay,
)
from app.http.refusals import refusal
from app.http.sse import ReportInserter
from app.prompt.known import KnownPassages
from app.settings import Settings
from cache.report import FindsDocuments, Found
from engine_ext.client.defects import is_defect, place_of
from engine_ext.client.engine import ChunkEngine
from engine_ext.client.request import CALLER, PROGRESS, REQUEST_KEY, Progress, ResolvedRequest, Ticket
from engine_ext.client.threads import in_thread
from engine_ext.wire.vllm_compat import ChatCompletionRequest, ErrorResponse, lora_request_of

logger = logging.getLogger(__name__)

_INVOCATIONS: Final = "/invocations"
_CHAT: Final = "/v1/chat/completions"
_OF_PROMPTS: Final = frozenset(
    {
        _CHAT,
        "/v1/chat/completions/batch",
        "/v1/completions",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/responses",
        "/v1/systemone",
        _INVOCATIONS,
        "/generative_scoring",
        "/tokenize",
        "/detokenize",
    }
)
"""vLLM's endpoints that do nothing but read a prompt before they ask the engine."""

_OF_TOKENS: Final = ("/tokenize", "/detokenize")
_VLLMS: Any = ChatCompletionRequest.model_fields["messages"].annotation
_MESSAGES: Final[TypeAdapter[list[Any]]] = TypeAdapter(_VLLMS, config=ConfigDict(hide_input_in_errors=True))
"""Messages as vLLM takes them. Its own errors quote what they are about, which takes long if that is megabytes."""


def _check_messages(messages: Any) -> None:
    """Check messages as vLLM does while it renders them; raise :class:`BadRequestError`."""
    try:
        for message in _MESSAGES.validate_python(messages):
            for value in message.values() if isinstance(message, dict) else ():
                if isinstance(value, Iterator):  # pydantic checks its items as they are read
                    deque(value, maxlen=0)
    except ValidationError as error:
        raise BadRequestError("a message, or a part of one, has another form than vLLM takes", "messages") from error


class CheckedFieldsMiddleware:
    """Refuses what vLLM's endpoints would answer with status 500, before and after they try.

    What is known is refused with the field at fault. Whatever else vLLM fails at before it asks a living engine is the
    request's fault, too: 400. Our own code's failures stay 500.
    """

    def __init__(self, app: ASGIApp, engine: ChunkEngine) -> None:
        self._app = app
        self._engine = engine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] not in ("POST", "PUT", "PATCH") or has_files(scope):
            return await self._app(scope, receive, send)
        if (body := await read_body(receive)) is None:
            return None
        caller = CALLER.get()
        is_shared = path_of(scope) == "/v1/responses" and caller is not None and not caller.is_admin
        try:
            if wrong := check_request_id(Headers(scope=scope).get("x-request-id", "")):
                raise BadRequestError(wrong, "X-Request-Id")
            if (parsed := await parsed_object(scope, body)) is not None:
                await in_thread_if_long(len(body), check_fields, parsed, keeps_responses_apart=not is_shared)
                if len(body) > QUICK_BYTES and path_of(scope) == _CHAT:
                    await in_thread(_check_messages, parsed.get("messages"))
            # vLLM splits any text into tokens here, of which the engine would take no more than these.
            if path_of(scope) in _OF_TOKENS and len(body) > QUICK_BYTES + 16 * self._engine.model_config.max_model_len:
                raise BadRequestError("the body is longer than any prompt that the model takes", "prompt")
            if path_of(scope) == _INVOCATIONS and len(body) > MOST_BYTES // 2:  # it is written and read once more
                raise BadRequestError(f"the body is larger than {MOST_BYTES >> 21} MiB", "body")
        except BadRequestError as error:
            return await refusal_of(error)(scope, receive, send)
        receive = replay([body], receive)
        if path_of(scope) not in _OF_PROMPTS:
            return await self._app(scope, receive, send)
        return await self._tried(scope, receive, send)

    async def _tried(self, scope: Scope, receive: Receive, send: Send) -> None:
        progress = Progress()

        def is_vllms_failure(start: Message) -> bool:
            is_failure = start["status"] == HTTPStatus.INTERNAL_SERVER_ERROR
            return is_failure and not progress.is_servers and not self._engine.errored

        async def refuse(_: Message, parts: list[bytes]) -> None:
            said = object_in(b"".join(parts)) or {}
            error = said.get("error")
            await _not_processed(error.get("message") if isinstance(error, dict) else "")(scope, receive, send)

        began = False

        async def noted(message: Message) -> None:
            nonlocal began
            began = True
            await send(message)

        token = PROGRESS.set(progress)
        try:
            await self._app(scope, receive, held(noted, is_vllms_failure, refuse))
        except Exception as error:
            if began or progress.is_servers or self._engine.errored or is_defect(error):
                raise
            logger.error("vLLM failed at a request before it asked the engine: %s", place_of(error))
            await _not_processed(f"{type(error).__name__}: {error}")(scope, receive, send)
        finally:
            PROGRESS.reset(token)


def _not_processed(why: Any) -> JSONResponse:
    words = f"vLLM can't process this request: {str(why)[:300]}"
    return refusal(HTTPStatus.BAD_REQUEST, "bad_request", words)


class DocumentsMiddleware:
    """Rewrites requests to vLLM's endpoints that have anything of ours: documents, a separator, a field."""

    def __init__(self, app: ASGIApp, context: ServerContext) -> None:
        self._app = app
        self._context = context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_post = scope["type"] == "http" and scope["method"] == "POST" and not has_files(scope)
        if not is_post or (path := path_of(scope)) not in EXTRACTORS:
            return await self._app(scope, receive, send)
        if (body := await read_body(receive)) is None:
            return None
        try:
            taken = await self._taken(scope, path, body)
        except REFUSED as error:
            parameter = "retrieve" if isinstance(error, RetrieverFailedError) else "retrieve.collection"
            return await refusal_of(error, parameter)(scope, receive, send)
        if taken is None:
            return await self._app(scope, replay([body], receive), send)
        request, ticket = taken
        with issued(self._context, request, ticket) as marked:
            try:
                body = await in_thread_if_long(len(body), _inserted, request, marked)
            except BadRequestError as error:
                return await refusal_of(error)(scope, receive, send)
            remember(scope, body, request.body)
            MutableHeaders(scope=scope)["content-length"] = str(len(body))
            if request.body.get("stream"):
                send = _reporting(send, ReportInserter(ticket, "kv_transfer_params"))
            elif ticket.options.cite:
                send = annotating(ticket, send)
            return await self._app(scope, replay([body], receive), send)

    async def _taken(self, scope: Scope, path: str, body: bytes) -> tuple[DocumentsRequest, Ticket] | None:
        """The request, if it has anything of ours, and its ticket."""
        settings = self._context.settings
        if not await in_thread_if_long(len(body), _may_have_documents, body, settings):
            return None
        if (parsed := await parsed_object(scope, body)) is None:
            return None  # vLLM answers
        parsed, retrieved = dict(parsed), None
        if parsed.get("retrieve") is not None:
            retrieved = await self._context.retrieval.fill_body(path, parsed)
        find = await finder_for(self._context, parsed, self._context.finds)
        extract = partial(EXTRACTORS[path], parsed, settings.chunk_separator, find)
        # What is found, and what is learnt first, takes time that the length of the body doesn't tell.
        request = await (in_thread(extract) if find is not None else in_thread_if_long(len(body), extract))
        if request is None:
            return None
        for field in NOT_BESIDE_DOCUMENTS:
            if request.body.get(field):
                raise BadRequestError(f"{field} can't be combined with documents", field)
        return request, open_ticket(self._context, request, retrieved)


async def finder_for(context: ServerContext, body: Mapping[str, Any], default: FindsDocuments) -> Find | None:
    """The finder of documents in the texts of a request, by its namespace; ``None`` if none are to be found.

    Raises :class:`BadRequestError`.
    """
    if not finds_documents(body, default):
        return None
    namespace = namespace_of(body, cache_salt_of(body))
    known: KnownPassages = context.engine.renderer.known
    if known.is_new(namespace):  # the collections of an earlier process
        await in_thread(known.add_all, namespace, context.retrieval.collections.texts(namespace))
    return finder(context.patterns, partial(known.find, namespace))


def issued(
    context: ServerContext, request: DocumentsRequest, ticket: Ticket
) -> AbstractContextManager[str] | AbstractContextManager[list[str]]:
    """Yields the argument of ``request.insert``, valid inside the ``with`` block."""
    if request.found:
        return context.marks.issue_within(ticket, len(request.documents))
    return context.marks.issue(ticket, request.documents)


async def take_in(context: ServerContext, request: RagRequest) -> tuple[DocumentsRequest, Ticket]:
    """A request to our own endpoints, with what it retrieves and what it names by id, and its ticket.

    Raises :data:`REFUSED`.
    """
    retrieved = None
    if isinstance(request, RagChatRequest) and request.retrieve is not None:
        request, retrieved = await context.retrieval.fill(request, request.retrieve)
    check_number(len(request.chunks), "chunks")  # before any is looked for in tiers
    by_id = [chunk.id for chunk in request.chunks if not isinstance(chunk, str) and chunk.text is None and chunk.id]
    ids, namespace = None, ""
    if by_id:
        namespace = request.cache.salted_namespace(cache_salt_of(request.model_extra or {}))
        ids = await context.engine.cache.known_ids(namespace, by_id)
    taken = documents_request(request, documents_of(request.chunks, ids, namespace))
    return taken, open_ticket(context, taken, retrieved)


async def take_found(context: ServerContext, request: PlanRequest) -> tuple[DocumentsRequest, Ticket]:
    """A conversation with the documents found in it, and its ticket; raises :class:`BadRequestError`."""
    body = request.conversation()
    taken = await in_thread(from_chat, body, None, await finder_for(context, body, "auto"))
    assert taken is not None  # the body has a field cache
    return taken, open_ticket(context, taken)


def open_ticket(context: ServerContext, request: DocumentsRequest, retrieved: Found | None = None) -> Ticket:
    """The ticket of any request with documents; raises :class:`BadRequestError`."""
    field = parse_cache_field(request.cache)
    leaves_scope = bool(request.found) and field.scope is None
    options = field.options(cache_salt_of(request.body), context.defaults)
    if request.found:
        options = field.as_found(options)
    profile, documents = context.profile, request.documents
    keys = keys_of(request.body, options, request.systems, documents) if context.registry is not None else []
    return Ticket(
        options,
        tuple(document.id for document in documents),
        tuple(keys),
        tuple(document.context or "" for document in documents) if any(each.context for each in documents) else (),
        decide=profile.applied if profile is not None and field.leaves_the_choice else None,
        retrieved=retrieved,
        found=tuple(document for within in request.found for document in within.reported),
        leaves_scope=leaves_scope,
        labels=tuple(document.label for document in documents) if options.cite else (),
    )


async def render(
    state: State, chat_request: ChatCompletionRequest, *, for_run: bool
) -> ResolvedRequest | ErrorResponse:
    """Renders a request with marks, as vLLM's chat serving does, without running it.

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


def _inserted(request: DocumentsRequest, marked: str | list[str]) -> bytes:
    """The body with its documents; raises :class:`BadRequestError`."""
    request.insert(marked)
    return json.dumps(request.body).encode()


def _may_have_documents(body: bytes, settings: Settings) -> bool:
    return settings.documents != "off" or any(hint in body for hint in _hints(settings.chunk_separator))


@cache
def _hints(separator: str | None) -> tuple[bytes, ...]:
    """Byte strings of which a relevant body contains at least one; spares other requests the parsing."""
    fields = (b'"documents"', b'"document"', b'"cache"', b'"retrieve"')
    if separator is None:
        return fields
    # Verbatim or with escapes: the client chooses which characters to escape, and how.
    return (*fields, json.dumps(separator, ensure_ascii=False)[1:-1].encode(), b"\\u")


def _reporting(send: Send, inserter: ReportInserter) -> Send:
    """A ``send`` that inserts the report into a stream of events."""
    is_stream = False

    async def inserted(message: Message) -> None:
        nonlocal is_stream
        if message["type"] == "http.response.start":
            is_stream = is_event_stream(message)
        elif is_stream and message["type"] == "http.response.body":
            body = inserter.feed(message.get("body", b""))
            if not message.get("more_body"):
                body += inserter.end()
            message = {**message, "body": body}
        await send(message)

    return inserted
