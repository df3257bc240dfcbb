# SPDX-License-Identifier: Apache-2.0
"""Documents of a request, and their text in the prompt."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

from pydantic import BaseModel, ValidationError

MOST_DOCUMENTS: Final = 5000
"""Documents that one call may bring."""
Model = TypeVar("Model", bound=BaseModel)
_BLANK_LINES: Final = re.compile(r"\A(?:[^\S\n]*+\n)++")

CONTEXT_TOKENS: Final = 512
"""Tokens of a document's context that count: its last ones."""


class BadRequestError(ValueError):
    """A request that can't be served as sent. ``parameter`` is the path of the field at fault."""

    def __init__(self, message: str, parameter: str) -> None:
        super().__init__(message)
        self.parameter = parameter


def parsed_field(model: type[Model], name: str, value: Any) -> Model:
    """The field ``name`` of a request; raises :class:`BadRequestError` naming the value at fault."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        raise BadRequestError(first["msg"], ".".join([name, *map(str, first["loc"])])) from error


@dataclass(frozen=True, slots=True)
class Document:
    """One chunk's content before tokenization."""

    text: str
    id: str | None = None
    title: str | None = None
    context: str | None = None
    """Text that its KV is computed behind, and that is no part of the prompt: what precedes it, a title, a summary."""
    is_verbatim: bool = False
    """Whether it stands in a prompt as it is: it was found there."""

    @property
    def given(self) -> "Document":
        """The document as a request gives it that has it in a field."""
        return replace(self, is_verbatim=False)

    @property
    def label(self) -> str:
        """Its name for people: the title, or how its text begins."""
        words = (self.title or "").split() or self.text[:200].split()
        return " ".join(words)[:80]

    def render(self) -> str:
        """The chunk's text in the prompt. A function of the document alone, never of its neighbours.

        Blank lines before it are left out, but its first line keeps its indentation: code needs it.
        """
        if self.is_verbatim:
            return self.text
        title = f"{self.title.strip()}\n" if self.title and self.title.strip() else ""
        return f"{title}{_BLANK_LINES.sub('', self.text)}".rstrip() + "\n\n"


def checked_document(text: Any, id: Any, title: Any, path: str, context: Any = None) -> Document:
    """A document of checked fields; raises :class:`BadRequestError` naming ``path``."""
    for name, value in (("text", text), ("id", id), ("title", title), ("context", context)):
        if not isinstance(value, str) and (value is not None or name == "text"):
            raise BadRequestError(f"a document's {name} must be a string, not {type(value).__name__}", path)
    if not text.strip():
        raise BadRequestError("a document's text is empty", path)
    return Document(text, id, title, context or None)


def parse_documents(documents: Any, path: str = "documents") -> list[Document]:
    """Documents from JSON: vLLM's and Hugging Face's objects, Cohere's, or plain strings.

    These are ``{title?, text}`` and ``{id?, data: {title?, snippet}}``. Raises :class:`BadRequestError`.
    """
    if not isinstance(documents, list):
        raise BadRequestError(f"{path} must be a list, not {type(documents).__name__}", path)
    check_number(len(documents), path)
    return [_parse_document(document, f"{path}.{i}") for i, document in enumerate(documents)]


def _parse_document(document: Any, path: str) -> Document:
    if isinstance(document, str):
        return checked_document(document, None, None, path)
    if not isinstance(document, Mapping):
        raise BadRequestError(f"a document must be an object or a string, not {type(document).__name__}", path)
    fields = document.get("data", document)
    if isinstance(fields, str):
        return checked_document(fields, document.get("id"), None, f"{path}.data")
    if not isinstance(fields, Mapping):
        raise BadRequestError("a document's data must be an object or a string", f"{path}.data")
    name = next((name for name in ("text", "snippet") if name in fields), None)
    if name is None:
        raise BadRequestError("a document needs a text (or data.snippet)", path)
    title, context = fields.get("title"), fields.get("context")
    return checked_document(fields[name], document.get("id"), title, f"{path}.{name}", context)


def check_number(number: int, path: str) -> None:
    """Refuse more documents than a call may bring; raise :class:`BadRequestError` naming ``path``."""
    if number > MOST_DOCUMENTS:
        raise BadRequestError(f"a call may bring at most {MOST_DOCUMENTS} chunks, not {number}", path)


def pieces_of(text: str, separator: str, path: str) -> list[str]:
    """Split a text, unless that would make more documents than a call may bring; raise :class:`BadRequestError`."""
    check_number(text.count(separator), path)
    return text.split(separator)


def split_by_separator(text: str, separator: str, path: str) -> tuple[list[Document], str]:
    """Splits ``chunk separator chunk separator question`` into documents and question; an empty piece is neither."""
    *chunks, question = pieces_of(text, separator, path)
    return separated(chunks, separator, path), question.strip() if chunks else question


def separated(chunks: Sequence[str], separator: str, path: str) -> list[Document]:
    """The documents between separators; an empty one is none.

    Blanks behind a separator are no indentation, unless it ends its line.
    """
    texts = chunks if separator.endswith("\n") else [chunk.lstrip(" \t") for chunk in chunks]
    return [checked_document(text, None, None, path) for text in texts if text.strip()]
