# SPDX-License-Identifier: Apache-2.0
"""Hooks for schemathesis: short answers, and the media type of JSON lines."""

import json
from typing import Any

import schemathesis

MOST_TOKENS = 4
_CHATS = ("/v1/rag/chat", "/v1/chat/completions", "/v1/chat/completions/batch")
_OTHERS = ("/v1/completions", "/v1/messages", "/invocations")
_LENGTHS = {**dict.fromkeys((*_CHATS, *_OTHERS), "max_tokens"), "/v1/responses": "max_output_tokens"}


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: dict[str, Any]) -> None:
    """Shortens answers to keep cases fast; invalid lengths stay, for the server to refuse."""
    name = _LENGTHS.get(case.operation.path)
    if name is None or not isinstance(case.body, dict):
        return
    if not isinstance(case.body.get(name), bool | str | list | dict | float) and (case.body.get(name) or 99) > 0:
        case.body = {**case.body, name: MOST_TOKENS}


@schemathesis.deserializer("application/x-ndjson")
def json_lines(context: Any, response: Any) -> list[Any]:
    """One JSON value per line."""
    return [json.loads(line) for line in response.text.splitlines()]
