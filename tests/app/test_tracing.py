# SPDX-License-Identifier: Apache-2.0
"""Spans around requests: parents, attributes, and no spans with tracing off."""

import pytest

from engine_ext.chunks.chunk_cache import FillError
from engine_ext.client.call import Stages
from engine_ext.client.tracing import start_request

pytest.importorskip("opentelemetry.sdk")
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CALLER = {"traceparent": f"00-{TRACE}-{PARENT}-01"}


@pytest.fixture
def exported(monkeypatch):
    """Finished spans by name."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    return lambda: {span.name: span for span in exporter.get_finished_spans()}


def span_id(headers) -> str:
    return headers["traceparent"].split("-")[2]


def test_a_request_joins_its_clients_trace_and_has_its_stages_as_children(exported):
    with start_request(CALLER) as request, Stages(request.headers, request).stage("fill", fills=2) as headers:
        pass
    spans = exported()
    parent, fill = spans["tessera.request"], spans["tessera.fill"]
    assert f"{parent.context.trace_id:032x}" == TRACE
    assert f"{parent.parent.span_id:016x}" == PARENT
    assert request.headers["traceparent"].startswith(f"00-{TRACE}-")
    assert span_id(request.headers) == f"{parent.context.span_id:016x}"
    assert fill.parent.span_id == parent.context.span_id
    assert (span_id(headers), dict(fill.attributes)) == (f"{fill.context.span_id:016x}", {"tessera.fills": 2})


def test_a_request_without_a_trace_begins_one_when_it_arrived(exported):
    other = trace.NonRecordingSpan(trace.SpanContext(1, 2, is_remote=False))
    with trace.use_span(other), start_request(None, 1000.5):
        pass
    span = exported()["tessera.request"]
    assert (span.parent, span.start_time) == (None, 1_000_500_000_000)


def test_attributes_are_named_by_their_path(exported):
    with start_request(None) as span:
        span.describe({"mode": "chunked", "reason": None, "tokens": {"reused": 7}})
    attributes = dict(exported()["tessera.request"].attributes)
    assert attributes == {"tessera.mode": "chunked", "tessera.tokens.reused": 7}


@pytest.mark.parametrize(
    ("error", "status", "events"),
    [
        (RuntimeError("broken"), StatusCode.ERROR, 1),
        (FillError("aborted"), StatusCode.UNSET, 1),
        (GeneratorExit(), StatusCode.UNSET, 0),
    ],
)
def test_a_failure_is_an_error_and_falling_back_is_not(exported, error, status, events):
    with pytest.raises(type(error)), start_request(None):
        raise error
    span = exported()["tessera.request"]
    assert (span.status.status_code, len(span.events)) == (status, events)


def test_without_tracing_the_clients_headers_are_handed_on(exported):
    for headers in (CALLER, None):
        with Stages(headers).stage("plan") as within:
            assert within is headers
    assert exported() == {}
