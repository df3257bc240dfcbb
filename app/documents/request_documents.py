# SPDX-License-Identifier: Apache-2.0
"""Registry keys of a request's documents, the same in routers and replicas."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

from pydantic_core import to_json

from app.documents.cache_options import cache_salt_of, parse_cache_field
from app.documents.document import BadRequestError, Document
from app.documents.found import finder
from app.documents.openai_documents import EXTRACTORS, finds_documents, system_texts
from app.documents.patterns import PATTERNS, Pattern, finds_by, patterns_of
from app.http.messages import object_in
from cache.report import FindsDocuments, ScopeName
from cache.segments.holdings import DocumentKey
from engine_ext.client.request import CacheOptions
from replicas.document_keys import id_key, text_keys
from replicas.routing import Wanted

RAG_PATHS = frozenset({"/v1/rag/chat", "/v1/rag/plan", "/v1/rag/chunks"})
CHARACTERS_PER_TOKEN = 4
"""An estimate, to weigh documents before tokenization."""
BEGINNING: Final = 1024
"""Characters, or token ids, that prompts have in common if one continues another."""


@dataclass(frozen=True, slots=True)
class Reading:
    """Replicas' settings that requests are read by; ``patterns`` are those of ``--documents``."""

    separator: str | None = None
    scope: ScopeName = "system"
    documents: FindsDocuments = "off"
    patterns: Sequence[Pattern] = PATTERNS

    @classmethod
    def of(cls, separator: str | None, scope: ScopeName, documents: str) -> Self:
        """By the replicas' flags; raises :class:`PatternError`."""
        return cls(separator, scope, finds_by(documents), patterns_of(documents))


_USUAL: Final = Reading()


def parse_body(path: str, body: bytes) -> dict[str, Any] | None:
    """The JSON object in a request that may have documents; ``None`` for any other request."""
    if path not in RAG_PATHS and path not in EXTRACTORS:
        return None
    return object_in(body)


def wanted_documents(path: str, body: dict[str, Any], reading: Reading = _USUAL) -> list[Wanted]:
    """The documents of a request to ``path``; none if a replica would refuse it."""
    try:
        return _of_rag(body, reading) if path in RAG_PATHS else _of_extractor(path, body, reading)
    except BadRequestError:
        return []


def conversation_of(body: Mapping[str, Any]) -> list[Wanted]:
    """A conversation or prompt without documents, by its beginning or its collection; none without a text.

    No replica claims it: its requests meet at its home (:mod:`replicas.routing`), whose prefix cache has it.
    """
    if isinstance(retrieve := body.get("retrieve"), dict):
        beginning, turns = [retrieve.get("collection")], [retrieve]  # its passages are at one replica
    else:
        beginning, turns = _beginning(body)
    if not turns or not beginning:
        return []
    # Pydantic's takes a tenth of the time of Python's for fractions; either keeps all other threads waiting.
    (key,) = text_keys([str(body.get("model") or "")], [to_json(beginning).decode()])
    return [Wanted(key, 1 + len(to_json(turns)) // CHARACTERS_PER_TOKEN)]


def _beginning(body: Mapping[str, Any]) -> tuple[Any, Any]:
    """The part of a conversation that later turns share, and the conversation."""
    turns = next((turns for name in ("messages", "input") if isinstance(turns := body.get(name), list)), None)
    if turns is not None:
        number = next((i for i, turn in enumerate(turns) if isinstance(turn, dict) and turn.get("role") == "user"), 0)
        beginning: Any = [body.get("system"), body.get("instructions"), turns[: number + 1]]
    else:
        turns = next((body[name] for name in ("prompt", "input") if body.get(name)), None)
        beginning = turns[:BEGINNING] if isinstance(turns, str | list) else None
    return beginning, turns


def keys_of(
    body: Mapping[str, Any], options: CacheOptions, systems: Iterable[str], documents: Iterable[Document]
) -> list[DocumentKey]:
    """Keys of documents by text. ``systems``: the texts before the documents, part of the key in scope ``system``."""
    shaping = {name: body[name] for name in ("tools", "chat_template_kwargs") if body.get(name)}
    before = [*(text for text in systems if text), json.dumps(shaping, sort_keys=True, default=str)]
    context = [str(body.get("model") or ""), options.namespace, options.scope]
    if options.scope == "system":
        context += before
    return text_keys(context, (f"{document.given.render()}{document.context or ''}" for document in documents))


def _of_rag(body: dict[str, Any], reading: Reading) -> list[Wanted]:
    options = parse_cache_field(body.get("cache")).options(cache_salt_of(body), CacheOptions(scope=reading.scope))
    chunks = body.get("chunks")
    named: list[Wanted | None] = []  # None: a document with text
    documents = []
    for chunk in chunks if isinstance(chunks, list) else []:
        fields = {"text": chunk} if isinstance(chunk, str) else chunk if isinstance(chunk, dict) else {}
        text, id, title = fields.get("text"), fields.get("id"), fields.get("title")
        if isinstance(text, str):
            before = fields.get("context")
            title, before = (each if isinstance(each, str) else None for each in (title, before))
            documents.append(Document(text, None, title, before))
            named.append(None)
        elif isinstance(id, str):
            named.append(Wanted(id_key(options.namespace, id), 0, is_required=True))
    by_text = iter(_by_text(body, options, documents, system_texts(body)))
    return [each or next(by_text) for each in named]


def _of_extractor(path: str, body: dict[str, Any], reading: Reading) -> list[Wanted]:
    find = finder(reading.patterns, lambda _: []) if finds_documents(body, reading.documents) else None
    request = EXTRACTORS[path](body, reading.separator, find)
    if request is None:
        return []
    field = parse_cache_field(request.cache)
    options = field.options(cache_salt_of(request.body), CacheOptions(scope=reading.scope))
    if request.found:
        options = field.as_found(options)
    return _by_text(request.body, options, request.documents, request.systems)


def _by_text(
    body: dict[str, Any], options: CacheOptions, documents: list[Document], systems: Iterable[str]
) -> list[Wanted]:
    keys = keys_of(body, options, systems, documents)
    return [
        Wanted(key, 1 + len(document.text) // CHARACTERS_PER_TOKEN)
        for key, document in zip(keys, documents, strict=True)
    ]
