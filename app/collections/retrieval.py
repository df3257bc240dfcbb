# SPDX-License-Identifier: Apache-2.0
"""The request field ``retrieve``: passages of a collection in place of documents."""

import importlib.metadata
import logging
from collections.abc import AsyncIterator, Sequence
from itertools import starmap
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

from app.collections.embeddings import EmbeddingError
from app.collections.hybrid import Hybrid
from app.collections.passages import Passage
from app.collections.retrievers import ENTRY_POINTS, Ranking, Retriever, RetrieverFailedError, UnknownRetrieverError
from app.collections.store import About, Collections
from app.documents.cache_options import namespace_of
from app.documents.document import BadRequestError, parsed_field
from app.documents.openai_documents import system_texts
from app.documents.rag_request import RagChatRequest, RagChunk
from app.documents.retrieve_field import RetrieveField
from app.settings import Settings
from cache.report import Found, Retrieved
from engine_ext.client.threads import in_thread
from machine.folders import tessera_home

logger = logging.getLogger(__name__)
Request = TypeVar("Request", bound=RagChatRequest)
_TEXT_PARTS = ("text", "input_text")
_TURNS = 2
"""Messages with text at the end of a conversation that make up its query: a follow-up rarely says what it is about."""


def make_retrieval(settings: Settings) -> "Retrieval":
    """Raises :class:`UnknownRetrieverError`."""
    return Retrieval(Collections(_folder(settings)), make_retriever(settings))


def make_retriever(settings: Settings) -> Retriever:
    """The server's retriever; raises :class:`UnknownRetrieverError`."""
    name = settings.retriever.get_secret_value()
    if "://" in name:
        try:
            return Hybrid.of_url(name)
        except EmbeddingError as error:
            raise UnknownRetrieverError(str(error)) from error
    found = {each.name: each for each in importlib.metadata.entry_points(group=ENTRY_POINTS)}
    if name not in found:
        raise UnknownRetrieverError(
            f"there is no retriever {name!r}; there are {', '.join(sorted(found))} and, by URL, embedding models"
        )
    try:
        retriever: Retriever = found[name].load()()
    except Exception as error:  # another package's code
        raise UnknownRetrieverError(f"retriever {name!r} can't be made: {type(error).__name__}: {error}") from error
    return retriever


def _folder(settings: Settings) -> Path:
    if settings.collections is not None:
        return settings.collections
    tiers = [urlsplit(url) for url in settings.tiers()]
    directory = next((Path(unquote(url.path)) for url in tiers if url.scheme == "file"), tessera_home())
    folder = directory / "collections"
    if settings.tier_key is None:
        return folder
    at_home = tessera_home() / "collections"  # databases aren't signed, and others may write to the tier
    if folder.is_dir() and folder != at_home:
        logger.warning(
            "the collections in %s aren't signed: --collections %s has them used nevertheless", folder, folder
        )
    return at_home


class Retrieval:
    """Finds passages by a server's collections and its retriever."""

    def __init__(self, collections: Collections, retriever: Retriever) -> None:
        self.collections = collections
        self._retriever = retriever

    async def fill(self, request: Request, field: RetrieveField) -> tuple[Request, Found]:
        """A request with the passages as its chunks, and their list for the report.

        Raises :class:`BadRequestError`, :class:`UnknownCollectionError` and :class:`RetrieverFailedError`.
        """
        turns = [request.question] if request.question is not None else _user_texts(request.messages, "messages")
        about, passages, found = await self._find(field, turns, request.cache.salted_namespace(None))
        chunks = [RagChunk(id=each.id, text=each.text, title=each.title, context=context) for each, context in passages]
        has_system = request.system or system_texts({"messages": request.messages})
        system = request.system if has_system else about.system
        return request.model_copy(update={"chunks": chunks, "system": system}), found

    async def fill_body(self, path: str, body: dict[str, Any]) -> Found:
        """Puts passages into the body of a request to vLLM's chat endpoint ``path``, as ``documents``.

        Raises as :meth:`fill` does.
        """
        given = body.pop("retrieve")
        if body.get("documents") is not None:
            raise BadRequestError("give either documents or retrieve", "retrieve")
        turns = next((_user_texts(body[name], name) for name in ("messages", "input") if body.get(name)), [])
        field = parsed_field(RetrieveField, "retrieve", given)
        about, passages, found = await self._find(field, turns, namespace_of(body))
        body["documents"] = [
            {"id": each.id, "data": _fields(text=each.text, title=each.title, context=context)}
            for each, context in passages
        ]
        if about.system and not system_texts(body):
            _add_system(path, body, about.system)
        return found

    async def prepared(self, about: About, lines: AsyncIterator[dict[str, Any]]) -> AsyncIterator[dict[str, Any]]:
        """The lines of an ingestion; the retriever prepares each file that is stored, or the summary says why not."""
        prepare = getattr(self._retriever, "prepare", None)
        problem: str | None = None
        async for line in lines:
            if problem is not None and "summary" in line:
                line["summary"]["search"] = problem
            yield line
            if prepare is not None and "index" not in line and line.get("status", "failed") != "failed":
                record = await in_thread(self.collections.record, about, line["file"])
                if record is not None:
                    problem = await prepare(self.collections.vectors(about), record.passages) or problem

    async def _find(
        self, field: RetrieveField, turns: Sequence[str], namespace: str
    ) -> tuple[About, list[tuple[Passage, str]], Found]:
        """The collection, passages of it with their contexts, and their list for the report."""
        query = field.query or "\n".join(turns[-_TURNS:])
        if not query.strip():
            raise BadRequestError("retrieve needs a user message with text, or a query", "messages")
        corpus = await in_thread(self.collections.corpus, namespace, field.collection)
        try:
            ranked = await self._retriever.rank(query, corpus, field.top_k)
            passages = [(corpus.passages[place], score) for place, score in ranked]
        except Exception as error:  # another package's code
            logger.exception("The retriever %s failed.", type(self._retriever).__name__)
            raise RetrieverFailedError(f"the retriever failed: {type(error).__name__}: {error}") from error
        degraded = ranked.degraded if isinstance(ranked, Ranking) else None
        behind = [(each, corpus.files[each.file].context_of(each)) for each, _ in passages]
        return corpus.about, behind, Found(list(starmap(_listed, passages)), degraded)


def _fields(**fields: str | None) -> dict[str, str]:
    return {name: value for name, value in fields.items() if value}


def _listed(passage: Passage, score: float) -> Retrieved:
    return Retrieved(
        id=passage.id,
        file=passage.file,
        number=passage.number,
        page=passage.page,
        title=passage.title,
        score=score,
    )


def _user_texts(turns: Any, path: str) -> list[str]:
    """The texts of a conversation's user messages that have any, in order.

    Takes the messages of all schemas, whose parts of other types are passed over. Raises :class:`BadRequestError`.
    """
    if isinstance(turns, str):
        turns = [{"role": "user", "content": turns}]
    texts = []
    for i, turn in enumerate(_checked(turns, list, path)):
        if _checked(turn, dict, f"{path}.{i}").get("role") == "user":
            content = turn.get("content")
            where = f"{path}.{i}.content"
            if isinstance(content, list):
                found = [_part_text(part, f"{where}.{k}") for k, part in enumerate(content)]
            else:
                found = [] if content is None else [_part_text(content, where)]
            texts.append("\n".join(text for text in found if text.strip()))
    return [text for text in texts if text]


def _part_text(part: Any, path: str) -> str:
    if isinstance(part, dict):
        if part.get("type", "text") not in _TEXT_PARTS:
            return ""
        part, path = part.get("text"), f"{path}.text"
    text: str = _checked(part, str, path)
    return text


def _checked(value: Any, kind: type, path: str) -> Any:
    if not isinstance(value, kind):
        names: dict[type, str] = {list: "a list", dict: "an object", str: "a string"}
        raise BadRequestError(f"{path} must be {names[kind]}, not {type(value).__name__}", path)
    return value


def _add_system(path: str, body: dict[str, Any], system: str) -> None:
    """Puts a system prompt where the endpoint's schema has it."""
    if path == "/v1/chat/completions":
        body["messages"] = [{"role": "system", "content": system}, *body["messages"]]
    else:
        body["instructions" if path == "/v1/responses" else "system"] = system
