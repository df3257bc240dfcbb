# SPDX-License-Identifier: Apache-2.0
"""Adds the cache report to a stream of server-sent events without delaying events."""

import json
import re
from typing import Any, Final

from app.http.annotations import annotate
from engine_ext.client.request import Ticket

# Atomic groups: the two bytes of one CRLF are not two line ends.
_EVENT_END: Final = re.compile(rb"(?>\r\n|\n|\r)(?>\r\n|\n|\r)")
_LINE_END: Final = re.compile(rb"\r\n|\n|\r")
_TERMINAL_EVENTS: Final = (b"message_stop", b"response.completed")
_FINISH: Final = b"finish_reason"
LONGEST_EVENT: Final = 64 << 20
"""Bytes of an event that are buffered until it ends; longer events pass unread."""


class ReportInserter:
    """Parses one stream; adds the report as a field to its last event.

    That is the one with a ``finish_reason`` of OpenAI's completions (many clients read ``choices[0]`` of every event,
    so the report gets no event of its own), and the terminal event that other schemas name. Everything else passes
    unchanged, however it is divided into parts. An event passes as soon as it is complete.
    """

    def __init__(self, ticket: Ticket, field: str) -> None:
        self._ticket = ticket
        self._field = field
        self._rest = bytearray()
        self._is_rest_unread = False
        self._is_reported = False
        self._content = ""
        """The answer's so far, if it is to be cited."""

    def feed(self, part: bytes) -> bytes:
        """Bytes for the client after ``part`` has arrived."""
        searched = max(0, len(self._rest) - 2)
        self._rest += part
        events, start = [], 0
        while (found := _EVENT_END.search(self._rest, max(start, searched))) is not None:
            event, start = bytes(self._rest[start : found.end()]), found.end()
            events.append(event if self._is_rest_unread else self._read(event))
            self._is_rest_unread = False
        del self._rest[:start]
        if self._is_rest_unread or len(self._rest) > LONGEST_EVENT:
            self._is_rest_unread = True
            # Keep two bytes: together with the next part they may be the event's end.
            events.append(bytes(self._rest[:-2]))
            del self._rest[:-2]
        return b"".join(events)

    def end(self) -> bytes:
        """The rest of a stream that has ended: an incomplete event."""
        return bytes(self._rest)

    def _read(self, event: bytes) -> bytes:
        report, cites = self._ticket.report, self._ticket.options.cite
        if self._is_reported or (report is None and not cites):
            return event
        name, data = _fields(event)
        parsed = _parsed(data) if cites or name in _TERMINAL_EVENTS or _FINISH in data else None
        if parsed is None:
            return event
        if cites:
            self._content += _content(parsed)
        if report is None or not (name in _TERMINAL_EVENTS or _is_finished(parsed)):
            return event
        self._is_reported = True
        kept = [line for line in _LINE_END.split(event) if line and line.partition(b":")[0] != b"data"]
        return b"".join(line + b"\n" for line in kept) + _event(self._with_report(parsed))

    def _with_report(self, data: dict[str, Any]) -> dict[str, Any]:
        if self._ticket.options.cite:
            annotate(data, self._ticket, self._content)
        report = {"cache": self._ticket.report}
        return {**data, **(report if self._field == "cache" else {self._field: report})}


def _fields(event: bytes) -> tuple[bytes, bytes]:
    """Name and data of an event, parsed as in the HTML standard."""
    name, data = b"", []
    for line in _LINE_END.split(event):
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"event":
            name = value
        elif field == b"data":
            data.append(value)
    return name, b"\n".join(data)


def _parsed(data: bytes) -> dict[str, Any] | None:
    try:
        parsed = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return parsed if isinstance(parsed, dict) else None


def _content(data: dict[str, Any]) -> str:
    """The text that an event of OpenAI's chat completions adds to the answer."""
    choices = data.get("choices")
    first = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
    return (first.get("delta") or {}).get("content") or ""


def _is_finished(data: dict[str, Any]) -> bool:
    """Whether an event of OpenAI's completions ends a choice."""
    choices = data.get("choices")
    return isinstance(choices, list) and any(isinstance(each, dict) and each.get("finish_reason") for each in choices)


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"
