# SPDX-License-Identifier: Apache-2.0
"""Finds documents in requests to vLLM's own endpoints: one pure function per request schema.

Each function takes the JSON body and returns a copy without our fields, with the documents and the place for their
marked text; ``None`` for a request without documents and cache options.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, get_args

from app.documents.document import (
    MOST_DOCUMENTS,
    BadRequestError,
    Document,
    check_number,
    checked_document,
    parse_documents,
    pieces_of,
    separated,
    split_by_separator,
)
from app.documents.found import Find, FoundIn
from cache.report import FindsDocuments

Body = dict[str, Any]
NOT_BESIDE_DOCUMENTS: Final = ("echo", "store", "use_beam_search")
"""Fields that are refused beside documents."""
WITHOUT_DOCUMENTS: Final = (*NOT_BESIDE_DOCUMENTS, "truncate_prompt_tokens")
"""Fields of requests in which no documents are looked for."""
_WITH_TEXTS: Final = ("system", "messages", "input")


@dataclass(frozen=True, slots=True)
class DocumentsRequest:
    """A request with documents, of any schema. ``insert(marked)`` puts their marked text into ``body``.

    ``cache`` is the field of that name. ``opening`` is the text before the documents in schemas without messages. If
    the documents were ``found`` in texts of ``body``, ``insert(marks)`` puts a list of marks around them.
    """

    body: Body
    documents: list[Document]
    cache: Any
    insert: Callable[[Any], None]
    opening: str | None = None
    found: Sequence[FoundIn] = ()

    @property
    def systems(self) -> list[str]:
        """The texts before the documents, which are part of the documents' keys in the registry."""
        return system_texts(self.body) if self.opening is None else [self.opening]


@dataclass(frozen=True, slots=True)
class _TextField:
    """A place in the body that holds text: ``holder[key]``."""

    holder: Any
    key: Any
    path: str

    @property
    def text(self) -> str:
        return str(self.holder[self.key])

    def prepend(self, marked: str) -> None:
        self.holder[self.key] = marked + self.text


def from_chat(body: Body, separator: str | None, find: Find | None = None) -> DocumentsRequest | None:
    """``/v1/chat/completions``: ``documents``, a separator in a user message, or what ``find`` finds in the prompt."""
    body = _copied(body)
    return _from_messages(body, "messages", separator, find)


def from_responses(body: Body, separator: str | None, find: Find | None = None) -> DocumentsRequest | None:
    """``/v1/responses``: ``documents``, a separator in the input, or what ``find`` finds in the prompt."""
    body = {"store": False, **_copied(body)}
    if isinstance(body.get("input"), str):
        return _from_fields(body, [_TextField(body, "input", "input")], separator, find)
    return _from_messages(body, "input", separator, find)


def from_completion(body: Body, separator: str | None, find: Find | None = None) -> DocumentsRequest | None:
    """``/v1/completions``: ``system separator chunk … separator question``, or what ``find`` finds in the prompt."""
    body = dict(body)
    cache, separator = _pop_cache(body, separator)
    if "documents" in body:
        raise BadRequestError("documents need a chat endpoint; here, separate chunks by cache.separator", "documents")
    prompt = body.get("prompt")
    if not isinstance(prompt, str) or not separator or separator not in prompt:
        if isinstance(prompt, str) and (found := _found(body, cache, [_TextField(body, "prompt", "prompt")], find)):
            return found
        return _refuse_cache_without_documents(cache, find)
    system, *chunks, question = pieces_of(prompt, separator, "prompt")
    documents = separated(chunks, separator, "prompt")

    def insert(marked: str) -> None:
        body["prompt"] = system + marked + question

    return DocumentsRequest(body, documents, cache, insert, system)


def from_anthropic(body: Body, separator: str | None, find: Find | None = None) -> DocumentsRequest | None:
    """``/v1/messages``: consecutive ``document`` blocks of a user message, a separator, or what ``find`` finds.

    Documents in several places are refused: as plain text they could spell control tokens.
    """
    body, blocks = _copied(body), None
    for i, message in enumerate(_messages(body.get("messages"))):
        content, path = message.get("content"), f"messages.{i}.content"
        if message.get("role") != "user" or not isinstance(content, list):
            continue
        places = [k for k, block in enumerate(content) if _is_document(block)]
        if places and (blocks or places != list(range(places[0], places[-1] + 1))):
            raise BadRequestError("documents must stand one after another, in one message", f"{path}.{places[-1]}")
        if places:
            blocks = (content, places[0], places[-1] + 1, path)
    if blocks:
        return _from_blocks(body, *blocks)
    return _from_messages(body, "messages", separator, find)


EXTRACTORS: Mapping[str, Callable[[Body, str | None, Find | None], DocumentsRequest | None]] = {
    "/v1/chat/completions": from_chat,
    "/v1/completions": from_completion,
    "/v1/responses": from_responses,
    "/v1/messages": from_anthropic,
}


def finds_documents(body: Mapping[str, Any], default: FindsDocuments) -> bool:
    """Whether documents are looked for in a request's own text: ``cache.documents``, or the server's ``default``.

    Not in requests that can't have documents. Raises :class:`BadRequestError`.
    """
    cache = body.get("cache")
    wanted = cache.get("documents") if isinstance(cache, Mapping) else None
    if wanted not in (None, *get_args(FindsDocuments)):
        raise BadRequestError("cache.documents must be auto or off", "cache.documents")
    return (wanted or default) == "auto" and not any(body.get(name) for name in WITHOUT_DOCUMENTS)


def system_texts(body: Mapping[str, Any]) -> list[str]:
    """System prompts of a request in any of these schemas, or ours."""
    messages = [*_messages(body.get("messages")), *_messages(body.get("input"))]
    prompts = [message.get("content") for message in messages if message.get("role") in ("system", "developer")]
    return [text for prompt in (body.get("system"), body.get("instructions"), *prompts) for text in _texts(prompt)]


def _copied(body: Body) -> Body:
    """A copy of a body whose texts may be replaced, down to the parts of its messages."""
    lists = {name: [_copied_parts(each) for each in body[name]] for name in _WITH_TEXTS if _is_list(body, name)}
    return {**body, **lists}


def _copied_parts(holder: Any) -> Any:
    """A copy of a message, or of a part of one that has parts itself (the result of a tool)."""
    if not isinstance(holder, dict) or not _is_list(holder, "content"):
        return dict(holder) if isinstance(holder, dict) else holder
    return {**holder, "content": [_copied_parts(part) for part in holder["content"]]}


def _is_list(holder: Body, name: str) -> bool:
    return isinstance(holder.get(name), list)


def _texts(content: Any) -> list[str]:
    if isinstance(content, str):
        return [content]
    return [part["text"] for part in content if _is_text(part)] if isinstance(content, list) else []


def _from_blocks(body: Body, content: list[Any], first: int, end: int, path: str) -> DocumentsRequest:
    """Removes the document blocks ``[first, end)``; their marked text goes before the text behind them."""
    check_number(end - first, path)
    cache, _ = _pop_cache(body, None)
    documents = [_anthropic_document(content[k], f"{path}.{k}") for k in range(first, end)]
    followed_by_text = end < len(content) and _is_text(content[end])
    question = dict(content[end]) if followed_by_text else {"type": "text", "text": ""}
    content[first : end + followed_by_text] = [question]
    return DocumentsRequest(body, documents, cache, _TextField(question, "text", path).prepend)


def _from_messages(body: Body, name: str, separator: str | None, find: Find | None) -> DocumentsRequest | None:
    messages = enumerate(_messages(body.get(name)))
    fields = [field for i, m in messages if m.get("role") == "user" for field in _texts_in(m, f"{name}.{i}")]
    return _from_fields(body, fields, separator, find)


def _from_fields(
    body: Body, fields: list[_TextField], separator: str | None, find: Find | None
) -> DocumentsRequest | None:
    """Puts given documents before the first user text; else splits the first separated text; else finds documents."""
    cache, separator = _pop_cache(body, separator)
    if body.get("documents") is not None:
        documents = parse_documents(body.pop("documents"))
        if not fields:
            raise BadRequestError("documents need a user message with text", "messages")
        return DocumentsRequest(body, documents, cache, fields[0].prepend)
    field = next((field for field in fields if separator and separator in field.text), None)
    if field is not None and separator:
        documents, question = split_by_separator(field.text, separator, field.path)
        field.holder[field.key] = question
        return DocumentsRequest(body, documents, cache, field.prepend)
    if (found := _found(body, cache, _prompt_texts(body), find)) is not None:
        return found
    if cache is not None and fields:
        return DocumentsRequest(body, [], cache, fields[0].prepend)
    return _refuse_cache_without_documents(cache, find)


def _found(body: Body, cache: Any, fields: Iterable[_TextField], find: Find | None) -> DocumentsRequest | None:
    """The request with the documents that ``find`` finds in ``fields``, texts in the prompt's order; ``None``: none.

    Behind as many as a call may bring, everything stays ordinary text.
    """
    if find is None:
        return None
    found, left = list[tuple[_TextField, FoundIn]](), MOST_DOCUMENTS
    for field in fields:
        if not left:
            break
        within = FoundIn.of(field.path, field.text, find, left)
        found.append((field, within))
        left -= len(within.spans)
    documents = [document for _, within in found for document in within.documents]
    if not documents:
        return None

    def insert(marks: Sequence[str]) -> None:
        coming = iter(marks)
        for field, within in found:
            field.holder[field.key] = within.marked(coming)

    return DocumentsRequest(body, documents, cache, insert, found=[within for _, within in found])


def _prompt_texts(body: Body) -> Iterator[_TextField]:
    """The texts of a conversation that others than the model have written, in the order of the prompt."""
    for name in ("system", "instructions"):
        yield from _content_texts(body, name, name)
    for name in ("messages", "input"):
        if name == "input" and isinstance(body.get(name), str):
            yield _TextField(body, name, name)
        for i, message in enumerate(_messages(body.get(name))):
            if message.get("role") in ("system", "developer", "user", "tool"):
                yield from _texts_in(message, f"{name}.{i}")
            elif message.get("type") == "function_call_output":
                yield from _content_texts(message, "output", f"{name}.{i}.output")


def _pop_cache(body: Body, separator: str | None) -> tuple[Any, str | None]:
    """Removes the field ``cache``; its ``separator`` overrides the server's.

    That and ``documents`` (:func:`finds_documents`) concern these endpoints only.
    """
    cache = body.pop("cache", None)
    if not isinstance(cache, Mapping):
        return cache, separator
    own = cache.get("separator")
    if own is not None and (not isinstance(own, str) or not own):
        raise BadRequestError("cache.separator must be a string with at least one character", "cache.separator")
    return {name: value for name, value in cache.items() if name not in ("separator", "documents")}, own or separator


def _refuse_cache_without_documents(cache: Any, find: Find | None) -> DocumentsRequest | None:
    """Refuses the field ``cache`` where it can mean nothing; not where documents were looked for in vain."""
    if cache is None or find is not None:
        return None
    raise BadRequestError("the request has a cache field, but no text that chunks could belong to", "cache")


def _messages(messages: Any) -> Iterator[Body]:
    """The messages that are objects; vLLM refuses the others."""
    return (m for m in messages if isinstance(m, dict)) if isinstance(messages, list) else iter(())


def _texts_in(message: Body, path: str) -> Iterator[_TextField]:
    """The text fields of a message, in order."""
    yield from _content_texts(message, "content", f"{path}.content")


def _content_texts(holder: Body, name: str, path: str) -> Iterator[_TextField]:
    content = holder.get(name)
    if isinstance(content, str):
        yield _TextField(holder, name, path)
    for k, part in enumerate(content if isinstance(content, list) else ()):
        if _is_text(part):
            yield _TextField(part, "text", f"{path}.{k}.text")
        elif isinstance(part, dict) and part.get("type") == "tool_result":
            yield from _texts_in(part, f"{path}.{k}")


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in ("text", "input_text") and isinstance(part.get("text"), str)


def _is_document(block: Any) -> bool:
    return isinstance(block, dict) and block.get("type") == "document"


def _anthropic_document(block: Body, path: str) -> Document:
    """A document with a source of type ``text`` or ``content``; others would need text extraction."""
    given = block.get("source")
    source: Body = given if isinstance(given, dict) else {}
    kind = source.get("type")
    if kind == "text":
        text = source.get("data")
    elif kind == "content":
        inner = source.get("content")
        parts = inner if isinstance(inner, list) else []
        text = inner if isinstance(inner, str) else "\n".join(part["text"] for part in parts if _is_text(part))
    else:
        raise BadRequestError(f"document source {kind!r} is not supported; send text", f"{path}.source.type")
    context = block.get("context")
    if isinstance(context, str) and context.strip() and isinstance(text, str):
        text = f"{context.strip()}\n{text}"
    return checked_document(text, None, block.get("title"), f"{path}.source")
