# SPDX-License-Identifier: Apache-2.0
"""Citations as annotations of OpenAI's chat completions and responses, whole and streamed."""

import json
from typing import Any

import pytest

from app.http.annotations import annotate
from app.http.sse import ReportInserter
from engine_ext.client.request import CacheOptions, Ticket

TEXT = "A b. C d."
REPORT = {
    "citations": [
        {"start": 0, "end": 4, "chunks": [{"chunk": 1, "share": 0.7}, {"chunk": 0, "share": 0.3}]},
        {"start": 5, "end": 9, "chunks": [{"chunk": 0, "share": 0.5, "is_weak": True}]},
    ],
    "chunks": [{"index": 0, "id": None}, {"index": 1, "id": "9f"}],
    "retrieved": [{"id": "9f", "file": "manual.pdf", "page": 3}],
}
PLACES = [
    {"start_index": 0, "end_index": 4, "url": "9f", "title": "manual.pdf, page 3"},
    {"start_index": 0, "end_index": 4, "url": "#chunk-1", "title": "Opening hours"},
]
OF_MESSAGE = [{"type": "url_citation", "url_citation": each} for each in PLACES]
OF_RESPONSE = [{"type": "url_citation", **each} for each in PLACES]


def ticket() -> Ticket:
    return Ticket(CacheOptions(cite=True), report=REPORT, labels=("Opening hours", ""), cited=TEXT)


def completed(ticket: Ticket, **message: str) -> Any:
    """The annotated message of a chat completion."""
    answer: dict[str, Any] = {"choices": [{"message": message}]}
    annotate(answer, ticket)
    return answer["choices"][0]["message"]


def streamed(*deltas: dict[str, Any]) -> Any:
    """The last event's delta."""
    inserter = ReportInserter(ticket(), "cache")
    events = [{"choices": [{"delta": delta}]} for delta in deltas]
    events[-1]["choices"][0]["finish_reason"] = "stop"
    *first, last = (inserter.feed(f"data: {json.dumps(each)}\n\n".encode()) for each in events)
    assert not any(b"annotations" in each for each in first)
    return json.loads(last.removeprefix(b"data: "))["choices"][0]["delta"]


def test_a_chat_completion_whole_and_streamed() -> None:
    assert completed(ticket(), content=TEXT)["annotations"] == OF_MESSAGE
    assert streamed({"role": "assistant"}, {"content": "A b."}, {"content": " C d."}, {})["annotations"] == OF_MESSAGE
    assert streamed({"content": "A b."}, {"content": " C d."})["annotations"] == OF_MESSAGE


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_response_and_the_event_that_completes_it(wrapped: bool) -> None:
    response: dict[str, Any] = {"output": [{"type": "message", "content": [{"text": TEXT}]}]}
    annotate({"response": response} if wrapped else response, ticket())
    assert response["output"][0]["content"][0]["annotations"] == OF_RESPONSE


def test_nothing_in_a_text_that_the_client_does_not_get_whole_and_without_citations() -> None:
    """A parser has taken reasoning out."""
    assert "annotations" not in completed(ticket(), content="C d.", reasoning="A b.")
    assert "annotations" not in streamed({"reasoning": "A b."}, {"content": " C d."}, {})
    uncited = Ticket(CacheOptions(cite=True), report={"chunks": [], "uncited": "in full attention"})
    assert completed(uncited, content=TEXT) == {"content": TEXT}
