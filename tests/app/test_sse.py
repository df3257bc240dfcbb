# SPDX-License-Identifier: Apache-2.0
"""The report joins a stream's last event; every other event passes unchanged, at once."""

import json

import pytest

from app.sse import ReportInserter
from engine_ext.request import CacheOptions, Ticket
from tests.app.helpers import make_report

DONE = "data: [DONE]\n\n"


def chunk(text: str, **fields) -> str:
    data = {"id": "c1", "object": "chat.completion.chunk", "created": 5, "model": "m", **fields}
    return f"data: {json.dumps({**data, 'choices': [{'index': 0, 'delta': {'content': text}}]})}\n\n"


def named(name: str, **fields) -> str:
    return f"event: {name}\ndata: {json.dumps({'type': name, **fields}, separators=(',', ':'))}\n\n"


def data(event: str) -> dict:
    assert event.endswith("\n\n")
    return json.loads(event[event.index("data: ") + 6 :])


class Stream:
    """A stream whose engine reports after ``before`` events, as vLLM's does with the last output."""

    def __init__(self, field: str = "cache") -> None:
        self.ticket = Ticket(CacheOptions())
        self.inserter = ReportInserter(self.ticket, field)
        self.report = make_report()

    def feed(self, *events: str, report_before: int) -> list[str]:
        fed = []
        for i, event in enumerate(events):
            if i == report_before:
                self.ticket.report = self.report
            fed.append(self.inserter.feed(event))
        return fed


@pytest.mark.parametrize("report_before", [1, 2])
def test_completions_get_the_report_just_before_done(report_before):
    stream, events = Stream(), [chunk("a"), chunk("b"), DONE]
    *passed, last = stream.feed(*events, report_before=report_before)
    assert passed == events[:2]
    assert last.endswith(DONE)
    assert data(last.removesuffix(DONE)) == {
        "id": "c1",
        "object": "chat.completion.chunk",
        "created": 5,
        "model": "m",
        "choices": [],
        "cache": stream.report.to_dict(),
    }


def test_the_report_event_has_no_content_of_the_event_it_follows():
    stream = Stream()
    last = stream.feed(chunk("a", usage={"total_tokens": 3}, system_fingerprint="f"), DONE, report_before=1)[-1]
    assert data(last.removesuffix(DONE)).keys() == {"id", "object", "created", "model", "choices", "cache"}


@pytest.mark.parametrize("name", ["message_stop", "response.completed"])
def test_other_schemas_get_the_report_in_their_last_event(name):
    stream = Stream("kv_transfer_params")
    events = [named("start"), named("delta", text="é"), named(name, response={"id": "r"})]
    *passed, last = stream.feed(*events, report_before=2)
    assert passed == events[:2]
    assert last.startswith(f"event: {name}\ndata: ")
    report = {"cache": stream.report.to_dict()}
    assert data(last) == {"type": name, "response": {"id": "r"}, "kv_transfer_params": report}


@pytest.mark.parametrize("events", [[chunk("a"), DONE], [named("start"), named("message_stop")], [DONE], [""]])
def test_without_a_report_nothing_changes(events):
    assert Stream().feed(*events, report_before=99) == events


@pytest.mark.parametrize(
    "event",
    [
        chunk("data: [DONE]"),
        chunk('"message_stop"'),
        chunk("data: {"),
        ": ping\n\n",
        "event: ping\ndata: {}\n\n",
        named("message_stop_soon"),
    ],
)
def test_events_that_only_look_like_the_last_pass_unchanged(event):
    assert Stream().feed(event, report_before=0) == [event]


def test_text_outside_ascii_is_kept_in_an_edited_event():
    stream = Stream()
    (event,) = stream.feed(named("message_stop", text="東京 – é"), report_before=0)
    assert data(event)["text"] == "東京 – é"


def test_a_stream_of_nothing_but_done_stays_valid():
    assert Stream().feed(DONE, report_before=0) == [DONE]


@pytest.mark.parametrize(
    "event",
    [
        named("content_block_delta", delta={"type": "text_delta", "text": "message_stop"}),
        chunk("message_stop"),
    ],
)
def test_an_answer_that_is_the_name_of_a_last_event_passes_unchanged(event):
    assert Stream().feed(event, report_before=0) == [event]
