# SPDX-License-Identifier: Apache-2.0
"""The report joins a stream's last event; all other events pass unchanged and immediately."""

import json
import re
from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from app.http import sse
from app.http.sse import ReportInserter
from engine_ext.client.request import CacheOptions, Ticket
from tests.app.helpers import make_report
from tests.fuzzing import json_values

DONE = "data: [DONE]\n\n"
USAGE = f"data: {json.dumps({'id': 'c1', 'choices': [], 'usage': {'total_tokens': 3}})}\n\n"


def chunk(text: str, **fields) -> str:
    data = {"id": "c1", "object": "chat.completion.chunk", "created": 5, "model": "m", **fields}
    return f"data: {json.dumps({**data, 'choices': [{'index': 0, 'delta': {'content': text}}]})}\n\n"


def finish(text: str = "", reason: str = "stop") -> str:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": reason}
    return f"data: {json.dumps({'id': 'c1', 'choices': [choice]})}\n\n"


def named(name: str, **fields) -> str:
    return f"event: {name}\ndata: {json.dumps({'type': name, **fields}, separators=(',', ':'))}\n\n"


def data(event: str) -> dict:
    assert event.endswith("\n\n")
    return json.loads(event[event.index("data: ") + 6 :])


class Stream:
    """A stream whose report is available after ``before`` events, as vLLM's with the last output."""

    def __init__(self) -> None:
        self.ticket = Ticket(CacheOptions())
        self.inserter = ReportInserter(self.ticket, "cache")
        self.report = make_report().to_dict()

    def feed(self, *events: str, report_before: int) -> list[str]:
        fed = []
        for i, event in enumerate(events):
            if i == report_before:
                self.ticket.report = self.report
            fed.append(self.inserter.feed(event.encode()).decode())
        assert self.inserter.end() == b""
        return fed


@pytest.mark.parametrize("more", [[], [USAGE], [finish("b"), finish("c", "length")]], ids=["one", "usage", "several"])
def test_completions_get_the_report_in_the_event_that_ends_the_first_choice(more):
    """No event is added: clients read `choices[0]` of each that they did not ask for otherwise."""
    stream, events = Stream(), [chunk("a"), finish("b"), *more, DONE]
    first, last, *rest = stream.feed(*events, report_before=1)
    assert [first, *rest] == [events[0], *events[2:]]
    assert data(last) == {**data(events[1]), "cache": stream.report}


@pytest.mark.parametrize(
    "event",
    [
        *(chunk("data: [DONE]"), chunk("message_stop"), chunk('{"finish_reason": "stop"}')),
        *(chunk("a", finish_reason="stop"), finish(reason="")),
        'data: {"choices": [{"finish_reason": null}, 7, null]}\n\n',
        'data: {"choices": {"finish_reason": "stop"}}\n\n',
        'data: [{"finish_reason": "stop"}]\n\n',
        *(DONE, ": ping\n\n", named("message_stop_soon")),
        named("content_block_delta", delta={"type": "text_delta", "text": "message_stop"}),
    ],
)
def test_events_that_only_look_like_the_last_pass_unchanged(event):
    assert Stream().feed(event, report_before=0) == [event]


def split_by_standard(stream: bytes) -> list[tuple[bytes, bytes]]:
    """Name and data of each complete event, parsed line by line as the standard requires."""
    events, name, data = [], b"", []
    for line in re.split(rb"\r\n|\n|\r", stream)[:-1]:
        field, _, value = line.partition(b":")
        value = value[1:] if value.startswith(b" ") else value
        if not line:
            events.append((name, b"\n".join(data)))
            name, data = b"", []
        elif field == b"event":
            name = value
        elif field == b"data":
            data.append(value)
    return [event for event in events if event != (b"", b"")]


def parts(stream: bytes, cuts: list[int]) -> list[bytes]:
    bounds = [0, *sorted(cut % (len(stream) + 1) for cut in cuts), len(stream)]
    return [stream[start:end] for start, end in pairwise(bounds)]


def with_report(events: list[tuple[bytes, bytes]], field: str, report: dict) -> Iterator[tuple[bytes, object]]:
    """Expected events."""
    is_reported = False
    for name, payload in events:
        try:
            parsed = json.loads(payload)
        except (ValueError, RecursionError):
            parsed = None
        is_last = isinstance(parsed, dict) and (
            name in (b"message_stop", b"response.completed") or parsed.get("choices") == [{"finish_reason": "stop"}]
        )
        yield name, {**parsed, field: report} if is_last and not is_reported else payload
        is_reported |= is_last


line_ends = st.sampled_from([b"\n", b"\r\n", b"\r"])
names = st.sampled_from([b"message_stop", b"response.completed", b"message_stop_soon", b"ping", b""])
texts = st.fixed_dictionaries({"id": st.text(), "text": st.text(alphabet="aé東😀")})
payloads = st.one_of(
    st.sampled_from([b"[DONE]", b'{"choices": [{"finish_reason": "stop"}]}', b"[" * 100_000]),
    json_values.map(lambda value: json.dumps(value, ensure_ascii=True).encode()),
    texts.map(lambda value: json.dumps(value, ensure_ascii=False).encode()),
    st.binary(max_size=30),
)


@st.composite
def streams(draw) -> bytes:
    """Common and unusual events: several data lines, other fields, arbitrary bytes between."""
    stream = b""
    for _ in range(draw(st.integers(0, 6))):
        end = draw(line_ends)
        lines = [b"event: " + draw(names)] if draw(st.booleans()) else []
        lines += draw(st.lists(st.sampled_from([b": ping", b"id: 7", b"retry: 1", b"data", b"x:\xff"]), max_size=2))
        space = draw(st.sampled_from([b"", b" "]))
        lines += [b"data:" + space + line for line in draw(payloads).split(b"\n")]
        stream += end.join(lines) + draw(st.sampled_from([2 * end, 2 * end, 2 * end, end, b""]))
    return stream + draw(st.binary(max_size=3))


@given(streams(), st.lists(st.integers(0, 10_000), max_size=8), st.sampled_from(["cache", "kv_transfer_params"]))
@example(named("message_stop", text="東").encode(), [49], "cache")
@example(b"data: {}\r\n\r\ndata: [DONE]\r\n\r\n", [11], "cache")
@example(b"event: message_stop\ndata: {}\n", [], "cache")
def test_whatever_the_stream_and_however_it_is_cut_the_report_joins_its_end_and_all_else_stays(stream, cuts, field):
    ticket = Ticket(CacheOptions())
    inserter = ReportInserter(ticket, field)
    assert b"".join(map(inserter.feed, parts(stream, cuts))) + inserter.end() == stream
    ticket.report = make_report().to_dict()
    inserter = ReportInserter(ticket, field)
    fed = b"".join(map(inserter.feed, parts(stream, cuts))) + inserter.end()
    report = ticket.report
    expected = list(with_report(split_by_standard(stream), field, report if field == "cache" else {"cache": report}))
    found = split_by_standard(fed)
    assert [name for name, _ in found] == [name for name, _ in expected]
    for (_, payload), (_, wanted) in zip(found, expected, strict=True):
        assert payload == wanted or repr(json.loads(payload)) == repr(wanted)  # as text, since NaN differs from itself


@pytest.mark.parametrize("part", [b"x", b"data: " + b"x" * 99, b"\r\nx"])
def test_an_event_without_an_end_is_not_kept(part, monkeypatch):
    monkeypatch.setattr(sse, "LONGEST_EVENT", 1000)
    stream = Stream()
    stream.ticket.report = stream.report
    fed = b""
    for _ in range(2000):
        fed += stream.inserter.feed(part)
        assert len(stream.inserter._rest) <= 1000 + len(part)
    assert fed + stream.inserter.end() == 2000 * part
    *_, after, _ = stream.feed("\n\n", finish("a"), DONE, report_before=0)
    assert "cache" in data(after)
