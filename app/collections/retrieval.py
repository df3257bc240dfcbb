# SPDX-License-Identifier: Apache-2.0
"""The request field ``retrieve``: passages of a collection in place of documents."""

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

from pydantic import ValidationError

from app.collections.passages import Passage
from app.collections.retrievers import Retriever, RetrieverFailedError, make_retriever
from app.collections.store import About, Collections
from app.documents.cache_options import parse_cache_field
from app.documents.document import BadRequestError
from app.documents.openai_documents import system_texts
from app.documents.rag_request import RagChatRequest, RagChunk
from app.documents.retrieve_field import RetrieveField
from app.settings import Settings
from cache.report import Retrieved
from cache.tiers.config import parse_tiers
from engine_ext.wire.caller import NamespaceRefusedError, own_namespace
from tools.folders import tessera_home

logger = logging.getLogger(__name__)
Request = TypeVar("Request", bound=RagChatRequest)
_TURNS = 2
"""User messages at the end of a conversation that make up its query: a follow-up rarely says what it is about."""


def make_retrieval(settings: Settings) -> "Retrieval":
    """Raises :class:`UnknownRetrieverError`."""
    return Retrieval(Collections(_folder(settings)), make_retriever(settings.retriever))


def _folder(settings: Settings) -> Path:
    if settings.collections is not None:
        return settings.collections
    tiers = [urlsplit(url) for url in parse_tiers(settings.chunk_cache_tiers or "")]
    directory = next((Path(unquote(url.path)) for url in tiers if url.scheme == "file"), tessera_home())
    return directory / "collections"


class Retrieval:
    """Finds passages by a server's collections and its retriever."""

    def __init__(self, collections: Collections, retriever: Retriever) -> None:
        self.collections = collections
        self._retriever = retriever

    async def fill(self, request: Request, field: RetrieveField) -> tuple[Request, list[Retrieved]]:
        """A request with the passages as its chunks, and their list for the report.

        Raises :class:`BadRequestError`, :class:`UnknownCollectionError` and :class:`RetrieverFailedError`.
        """
        turns = [request.question] if request.question is not None else _user_texts(request.messages)
        about, found = await self._find(field, turns, request.cache.namespace)
        chunks = [RagChunk(id=each.id, text=each.text, title=each.title) for each, _ in found]
        has_system = request.system or system_texts({"messages": request.messages})
        system = request.system if has_system else about.system
        return request.model_copy(update={"chunks": chunks, "system": system}), _listed(found)

    async def fill_body(self, path: str, body: dict[str, Any]) -> list[Retrieved]:
        """Puts passages into the body of a request to vLLM's chat endpoint ``path``, as ``documents``.

        Raises as :meth:`fill` does.
        """
        given = body.pop("retrieve")
        if body.get("documents") is not None:
            raise BadRequestError("give either documents or retrieve", "retrieve")
        turns = _user_texts(body.get("messages") or body.get("input"))
        if not turns:
            raise BadRequestError("retrieve needs a user message with text", "messages")
        about, found = await self._find(_parsed(given), turns, _namespace(body.get("cache")))
        body["documents"] = [
            {"id": each.id, "data": {"text": each.text, **({"title": each.title} if each.title else {})}}
            for each, _ in found
        ]
        if about.system and not system_texts(body):
            _add_system(path, body, about.system)
        return _listed(found)

    async def _find(
        self, field: RetrieveField, turns: Sequence[str], namespace: str | None
    ) -> tuple[About, list[tuple[Passage, float]]]:
        try:
            own = own_namespace(namespace)
        except NamespaceRefusedError as error:
            raise BadRequestError(str(error), "cache.namespace") from error
        corpus = await asyncio.to_thread(self.collections.corpus, own, field.collection)
        query = field.query or "\n".join(turns[-_TURNS:])
        try:
            ranked = await self._retriever.rank(query, corpus, field.top_k)
            return corpus.about, [(corpus.passages[place], score) for place, score in ranked]
        except Exception as error:  # another package's code
            logger.exception("The retriever %s failed.", type(self._retriever).__name__)
            raise RetrieverFailedError(f"the retriever failed: {type(error).__name__}: {error}") from error


def _namespace(cache: Any) -> str | None:
    given = dict(cache) if isinstance(cache, dict) else {}
    return parse_cache_field({"namespace": given.get("namespace")}).namespace


def _listed(found: Sequence[tuple[Passage, float]]) -> list[Retrieved]:
    return [
        Retrieved(id=each.id, file=each.file, number=each.number, page=each.page, title=each.title, score=score)
        for each, score in found
    ]


def _parsed(given: Any) -> RetrieveField:
    try:
        return RetrieveField.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        raise BadRequestError(first["msg"], ".".join(["retrieve", *map(str, first["loc"])])) from error


def _user_texts(turns: Any) -> list[str]:
    """The texts of a conversation's user messages, in order."""
    if isinstance(turns, str):
        return [turns]
    texts = []
    for turn in turns if isinstance(turns, list) else []:
        if isinstance(turn, dict) and turn.get("role") == "user":
            content = turn.get("content")
            parts = (
                [part.get("text") for part in content if isinstance(part, dict)] if isinstance(content, list) else []
            )
            texts.append(content if isinstance(content, str) else "\n".join(part for part in parts if part))
    return texts


def _add_system(path: str, body: dict[str, Any], system: str) -> None:
    """Puts a system prompt where the endpoint's schema has it."""
    if path == "/v1/chat/completions":
        body["messages"] = [{"role": "system", "content": system}, *body["messages"]]
    else:
        body["instructions" if path == "/v1/responses" else "system"] = system
