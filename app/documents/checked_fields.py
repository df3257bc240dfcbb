# SPDX-License-Identifier: Apache-2.0
"""Fields of requests that vLLM answers with status 500, or writes to its log, whatever they contain.

One check of a body's values, and one table of fields, before vLLM sees them.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, Final

from app.documents.document import BadRequestError
from app.http.json_size import MOST_VALUES

_INTEGERS: Final = range(-(1 << 63), 1 << 63)
"""Integers that vLLM's processes can send to one another."""
LONGEST_REQUEST_ID: Final = 256
MOST_ITEMS: Final = 1024
"""Of a list or an object: each that is wrong is a fault of its own, or several, to whoever checks them all.
Documents and token ids may be more."""
MOST_PROMPTS: Final = 512
"""Of a request: each is one to the engine, and all begin together."""
MOST_PARTS: Final = 1 << 14
"""Of a field, however deep."""
_LONG: Final = re.compile(
    "messages|prompt(_embeds|_token_ids)?|input|instructions|tools|documents|chunks|question|system|suffix|quer(y|ies)|text(_[12])?|data(_[12])?"
)
"""Fields whose texts may be as long as a body."""
_MOST_CHARACTERS: Final = 1 << 20
"""Of all others' texts: vLLM's errors quote what is wrong, on its event loop."""
_DOCUMENTS: Final = ("chunks", "documents")
_TOKENS: Final = re.compile("prompt|input|tokens|.*token_ids")
_LONGEST_MODEL: Final = 1024
_MOST_WORDS: Final = 1 << 14
"""Characters of words to stop at, or to leave out: vLLM tokenizes or looks for them on its event loop."""
_RULE: Final = re.compile(r"^[^\S\n]*\S[^\n]*?(?:::=|:(?!:))\s*[^\s:=]", re.MULTILINE)

Check = Callable[[Any], str | None]
"""Says what is wrong with a field."""


def check_fields(body: Mapping[str, Any], *, keeps_responses_apart: bool = True) -> None:
    """Check a body for vLLM; raise :class:`BadRequestError` naming the field at fault.

    vLLM's store of responses is one for all tenants: without ``keeps_responses_apart`` nobody may name one, or leave
    one there, which would be computed when the request has ended, and its tenant's limits no longer count it.
    """
    if len(body) > MOST_ITEMS:
        raise BadRequestError(f"a body of more than {MOST_ITEMS} fields", "body")
    for name, value in body.items():
        if wrong := _wrong_size(name, value):
            raise BadRequestError(wrong, name)
        if wrong := next(filter(None, map(_wrong_value, _values(value))), None):
            raise BadRequestError(wrong, name)
        if not _LONG.fullmatch(name) and (wrong := _wrong_length(value, _MOST_CHARACTERS)):
            raise BadRequestError(wrong, name)
        if _num_in_texts(value) > MOST_VALUES:
            raise BadRequestError(f"arguments of more than {MOST_VALUES} values", name)
    for name, check in _CHECKS.items():
        if body.get(name) is not None and (wrong := check(body[name])):
            raise BadRequestError(wrong, name)
    for name in () if keeps_responses_apart else ("previous_response_id", "request_id", "background"):
        if body.get(name) not in (None, False):
            raise BadRequestError(f"{name}: vLLM keeps the responses of all tenants in one place", name)


def check_request_id(value: Any) -> str | None:
    """The fault of a request's id, which goes into logs; ``None`` if it has none."""
    if not isinstance(value, str) or not value.isprintable() or len(value) > LONGEST_REQUEST_ID:
        return f"a request's id is text of at most {LONGEST_REQUEST_ID} printable characters"
    return None


def _values(value: Any) -> Iterator[Any]:
    """All scalars in a value, however deep."""
    return (each for each in _parts(value) if not isinstance(each, dict | list))


def _wrong_size(name: str, value: Any) -> str | None:
    if name == "prompt" and isinstance(value, list) and len(value) > MOST_PROMPTS and not isinstance(value[0], int):
        return f"{len(value)} prompts; {MOST_PROMPTS} are the most"
    if _TOKENS.fullmatch(name) and _are_integers(value):
        return None
    if name in _DOCUMENTS:  # their number has a limit of its own
        return _wrong_items(each for each in _parts(value) if each is not value)
    parts = list(islice(_parts(value), MOST_PARTS + 1))
    return f"more than {MOST_PARTS} values" if len(parts) > MOST_PARTS else _wrong_items(parts)


def _wrong_items(values: Iterable[Any]) -> str | None:
    most = max((len(each) for each in values if isinstance(each, dict | list)), default=0)
    return f"a list or an object has {most} items; {MOST_ITEMS} are the most" if most > MOST_ITEMS else None


def _parts(value: Any) -> Iterator[Any]:
    """A value, and all values in it."""
    left = [value]
    while left:
        yield (each := left.pop())
        left += each.values() if isinstance(each, dict) else each if isinstance(each, list) else ()


def _num_in_texts(value: Any) -> int:
    """At most as many values as are in texts that vLLM parses, on its event loop: the arguments of tools' calls."""
    texts = (each.get("arguments") for each in _parts(value) if isinstance(each, dict))
    return sum(text.count(sign) for text in texts if isinstance(text, str) for sign in "[{,")


def _are_integers(value: Any) -> bool:
    """Whether a value is a list of integers, or of such lists."""
    lists = value if isinstance(value, list) and value and isinstance(value[0], list) else [value]
    return all(isinstance(each, list) and set(map(type, each)) <= {int} for each in lists)


def _wrong_value(value: Any) -> str | None:
    if isinstance(value, float):
        return None if math.isfinite(value) else "a number that is infinite, or none"
    return "an integer of more than 64 bits" if isinstance(value, int) and value not in _INTEGERS else None


def _extra_arguments(value: Any) -> str | None:
    if not isinstance(value, dict):
        return "vllm_xargs is an object"
    return "kv_transfer_params is a field of its own" if "kv_transfer_params" in value else None


def _wrong_length(value: Any, most: int) -> str | None:
    number = sum(len(each) for each in _values(value) if isinstance(each, str))
    return f"{number} characters; {most} are the most" if number > most else None


def _words(value: Any) -> str | None:
    return _wrong_length(value, _MOST_WORDS)


def _structured_outputs(value: Any) -> str | None:
    if not isinstance(value, dict):
        return "structured_outputs is an object"
    grammar = value.get("grammar")
    if isinstance(grammar, str) and not _RULE.search(grammar):
        return "the grammar has no rule that derives anything"
    return _schema(value.get("json"))


def _response_format(value: Any) -> str | None:
    if not isinstance(value, dict):
        return "response_format is an object"
    named = value.get("json_schema")
    return _schema(named.get("schema")) if isinstance(named, dict) else None


def _schema(schema: Any) -> str | None:
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)  # as vLLM does
        except (ValueError, RecursionError):
            return None
    return "the schema is only a reference to itself" if isinstance(schema, dict) and _is_circular(schema) else None


def _is_circular(schema: dict[str, Any]) -> bool:
    """Whether the references that a schema begins with lead back to one of them, and to no value."""
    seen, at = set[str](), schema
    while isinstance(at, dict) and isinstance(reference := at.get("$ref"), str):
        if reference in seen or reference in ("#", "#/"):
            return True
        seen.add(reference)
        found: Any = schema
        for part in reference.removeprefix("#/").split("/"):
            found = found.get(part) if isinstance(found, dict) else None
        at = found
    return False


_CHECKS: Final[Mapping[str, Check]] = {
    "model": lambda value: "a model's name is shorter" if len(str(value)) > _LONGEST_MODEL else None,
    "request_id": check_request_id,
    "vllm_xargs": _extra_arguments,
    "kv_transfer_params": lambda value: None if isinstance(value, dict) else "kv_transfer_params is an object",
    "bad_words": _words,
    "stop": _words,
    "stop_sequences": _words,
    "structured_outputs": _structured_outputs,
    "response_format": _response_format,
}
