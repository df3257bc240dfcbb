# SPDX-License-Identifier: Apache-2.0
"""A server with traces sent to a collector and a JSON log."""

import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.engine.server import TesseraServer

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

pytestmark = pytest.mark.matrix

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector(ThreadingHTTPServer):
    """Collects spans from OTLP over HTTP."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _CollectorHandler)
        self.spans: list[Span] = []
        self.url = f"http://127.0.0.1:{self.server_port}/v1/traces"

    def trace(self, trace_id: str, *names: str) -> list[Span]:
        """A trace's spans, once all names have arrived from several processes in batches."""
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            spans = [span for span in self.spans if span.trace_id.hex() == trace_id]
            if sorted(span.name for span in spans) == sorted(names):
                return spans
            time.sleep(0.1)
        raise AssertionError(f"got {[span.name for span in spans]}, not {names}")


class _CollectorHandler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            for scope in resource.scope_spans:
                self.server.spans += scope.spans
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Logs nothing."""


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture(scope="module")
def server(collector: Collector, serve: Callable[..., TesseraServer]) -> TesseraServer:
    environment = {
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
        "OTEL_BSP_SCHEDULE_DELAY": "100",
        "TESSERA_LOG_LEVEL": "INFO",
    }
    flags = ("--otlp-traces-endpoint", collector.url, "--log-format", "json")
    return serve("tiny-llama", *flags, environment=environment)


def ask(server: TesseraServer, trace_id: str, *chunks: str, **body: Any) -> dict[str, Any]:
    headers = {"traceparent": f"00-{trace_id}-{PARENT}-01"}
    body = {"chunks": chunks, "question": "?", "max_tokens": 2, **body}
    response = server.client.post("/v1/rag/chat", json=body, headers=headers)
    assert response.status_code == 200, response.text
    return response.json()


def by_name(spans: list[Span], name: str) -> Span:
    (span,) = [span for span in spans if span.name == name]
    return span


def attributes(span: Span) -> dict[str, Any]:
    values = {item.key: item.value for item in span.attributes}
    return {key: getattr(value, value.WhichOneof("value")) for key, value in values.items()}


def test_spans_of_a_request_with_missing_chunks(server: TesseraServer, collector: Collector, text: Any) -> None:
    answer = ask(server, TRACE, text(100), text(120))
    names = ("tessera.request", "tessera.plan", "tessera.fill", "llm_request", "llm_request", "llm_request")
    spans = collector.trace(TRACE, *names)
    request, fill = by_name(spans, "tessera.request"), by_name(spans, "tessera.fill")
    assert request.parent_span_id.hex() == PARENT
    assert by_name(spans, "tessera.plan").parent_span_id == fill.parent_span_id == request.span_id
    parents = sorted(span.parent_span_id for span in spans if span.name == "llm_request")
    assert parents == sorted([request.span_id, fill.span_id, fill.span_id])
    assert all(request.start_time_unix_nano <= span.start_time_unix_nano for span in spans)
    assert attributes(fill)["tessera.fills"] == 2
    shown = attributes(request)
    assert shown["tessera.request_id"] == answer["id"]
    assert (shown["tessera.mode"], shown["tessera.chunks.filled"]) == ("chunked", 2)
    assert shown["tessera.tokens.reused"] == answer["cache"]["tokens"]["reused"]


def test_spans_of_requests_that_compute_no_chunk(server: TesseraServer, collector: Collector, text: Any) -> None:
    chunk = text(80)
    ask(server, TRACE.replace("0", "1"), chunk)
    for trace_id, fields, stages, shown in (
        (TRACE[::-1], {}, ["tessera.plan"], {"tessera.mode": "chunked", "tessera.chunks.hit": 1}),
        (
            TRACE.replace("a", "b"),
            {"cache": {"mode": "full"}},
            [],
            {"tessera.mode": "full", "tessera.reason": "cache.mode is full"},
        ),
    ):
        ask(server, trace_id, chunk, **fields)
        spans = collector.trace(trace_id, "tessera.request", *stages, "llm_request")
        assert shown.items() <= attributes(by_name(spans, "tessera.request")).items()
