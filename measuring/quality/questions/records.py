# SPDX-License-Identifier: Apache-2.0
"""Reads files of JSON records; errors name the place and the fault."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

_JSON_NAMES = {dict: "object", list: "list", str: "string", int: "number", float: "number", bool: "boolean"}
_EXPECTED = {
    "string_type": "a string",
    "list_type": "a list",
    "tuple_type": "a list",
    "model_type": "an object",
    "bool_type": "true or false",
}
_FAULTS = {
    "missing": "is missing",
    "extra_forbidden": "is an unknown field",
    "too_short": "is empty",
    "too_long": "has too many items",
}


class QuestionFileError(ValueError):
    """A question file can't be used. The message names the file, the line or record, and the field."""


@dataclass(frozen=True, slots=True)
class Record:
    """A JSON value of a file: the ``number``-th line or array element, counted from 1. ``place`` is for messages."""

    place: str
    number: int
    value: Any


def _not_blank(text: str) -> str:
    if not text.strip():
        raise PydanticCustomError("blank", "is empty")
    return text


Text = Annotated[str, AfterValidator(_not_blank)]
"""A string with more than white space in it."""

Checked = TypeVar("Checked", bound=BaseModel)


def read_records(path: Path) -> list[Record]:
    """The records of a JSON array, or of JSON lines; at least one. Raises :class:`QuestionFileError`."""
    text = _read(path)
    records = _elements(path, text) if text.lstrip().startswith("[") else _lines(path, text)
    if not records:
        raise QuestionFileError(f"{path}: has no questions in it")
    return records


def checked(model: type[Checked], record: Record) -> Checked:
    """The record as a ``model``; raises :class:`QuestionFileError` of its first fault."""
    try:
        return model.model_validate(record.value)
    except ValidationError as error:
        fault = error.errors()[0]
        place = ", ".join(filter(None, [record.place, ".".join(map(str, fault["loc"]))]))
        raise QuestionFileError(f"{place}: {_words(fault)}") from error


def _read(path: Path) -> str:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise QuestionFileError(f"{path}: {error.strerror}") from error
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise QuestionFileError(f"{path}, line {line}: is not UTF-8") from error


def _lines(path: Path, text: str) -> list[Record]:
    # Not splitlines(), which would also split inside strings, at characters such as U+2028.
    lines = [(f"{path}, line {number}", number, line) for number, line in enumerate(text.split("\n"), 1)]
    return [Record(place, number, _parse(line, place)) for place, number, line in lines if line.strip()]


def _elements(path: Path, text: str) -> list[Record]:
    elements = enumerate(_parse(text, str(path)), 1)
    return [Record(f"{path}, record {number}", number, value) for number, value in elements]


def _parse(text: str, place: str) -> Any:
    try:
        value = json.loads(text)
        if "\\u" in text:  # an escape may be half of a surrogate pair, which no request can carry
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except UnicodeEncodeError as error:
        raise QuestionFileError(f"{place}: invalid JSON: a string has half of a surrogate pair") from error
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}" if "\n" in text else f"column {error.colno}"
        raise QuestionFileError(f"{place}: invalid JSON at {where}: {error.msg}") from error
    except RecursionError as error:
        raise QuestionFileError(f"{place}: invalid JSON: nested too deeply") from error


def _words(fault: ErrorDetails) -> str:
    if expected := _EXPECTED.get(fault["type"]):
        return f"must be {expected}, not {_JSON_NAMES.get(type(fault['input']), 'null')}"
    return _FAULTS.get(fault["type"], fault["msg"])
