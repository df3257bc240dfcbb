# SPDX-License-Identifier: Apache-2.0
"""Adds the cache report to a stream of server-sent events, delaying none of them."""

import json
from typing import Any

from engine_ext.request import Ticket

_DONE = "data: [DONE]"
_TERMINAL_EVENTS = ("event: message_stop\n", "event: response.completed\n")


class ReportInserter:
    """Follows one stream's events; the last one gets the report.

    OpenAI's completions end with ``[DONE]``: the report comes just before it, as an event without choices (like
    OpenAI's usage event). Other schemas name their last event: the report is put into it.
    """

    def __init__(self, ticket: Ticket, field: str) -> None:
        self._ticket = ticket
        self._field = field
        self._last = ""

    def feed(self, event: str) -> str:
        """``event`` as it goes to the client."""
        if self._ticket.report is None:
            return self._remember(event)
        if event.startswith(_DONE):
            return self._report_event() + event
        if event.startswith(_TERMINAL_EVENTS):
            return _edit(event, self._with_report)
        return self._remember(event)

    def _remember(self, event: str) -> str:
        if "data: {" in event:
            self._last = event
        return event

    def _report_event(self) -> str:
        return _edit(self._last, lambda data: self._with_report({**_identity(data), "choices": []}))

    def _with_report(self, data: dict[str, Any]) -> dict[str, Any]:
        assert self._ticket.report is not None
        report = self._ticket.report.to_dict()
        if self._field == "cache":
            return {**data, "cache": report}
        return {**data, self._field: {"cache": report}}


def _identity(data: dict[str, Any]) -> dict[str, Any]:
    return {name: data[name] for name in ("id", "object", "created", "model") if name in data}


def _edit(event: str, change: Any) -> str:
    head, separator, payload = event.partition("data: {")
    if not separator:
        return ""
    data = json.loads("{" + payload)
    return f"{head}data: {json.dumps(change(data), ensure_ascii=False)}\n\n"
