# SPDX-License-Identifier: Apache-2.0
"""Spans of a request's way through the chunk cache, where vLLM's tracing is on.

vLLM sets OpenTelemetry up and makes a span per engine request; ours go around those.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, Self

from engine_ext.wire.request import FullAttentionError

if TYPE_CHECKING:
    from types import TracebackType

    from opentelemetry.context import Context
    from opentelemetry.trace import Tracer

TraceHeaders = Mapping[str, str] | None


class Span(Protocol):
    """Something that takes time; it ends with its ``with`` block."""

    @property
    def headers(self) -> TraceHeaders:
        """For vLLM's ``trace_headers``: its spans become children of this one."""

    def child(self, name: str) -> "Span":
        """A span within this one, which starts now."""

    def describe(self, attributes: Mapping[str, Any]) -> None:
        """Adds attributes, named ``tessera.…``; those in a mapping get its name in front."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: "TracebackType | None"
    ) -> None: ...


def start_request(headers: TraceHeaders, arrived: float | None = None, *, enabled: bool) -> Span:
    """The span of a request whose client sent ``headers``, from when it ``arrived`` (seconds since the epoch) or now.

    vLLM's span of the request starts when it arrived, and should not start before ours.
    """
    return _new_request(headers, arrived) if enabled else NoSpan(headers)


class NoSpan:
    """Tracing is off: nothing is recorded, and the client's headers are handed on."""

    def __init__(self, headers: TraceHeaders) -> None:
        self.headers = headers

    def child(self, name: str) -> Self:
        return self

    def describe(self, attributes: Mapping[str, Any]) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: "TracebackType | None"
    ) -> None:
        pass


class OpenTelemetrySpan:
    """A span that is exported. It is never the current one of its task: a generator's ``with`` block may be left in
    another context than it was entered in, so parents are named instead.
    """

    def __init__(self, tracer: "Tracer", name: str, parent: "Context", started_ns: int | None = None) -> None:
        from opentelemetry.trace import set_span_in_context

        self._tracer = tracer
        self._span = tracer.start_span(name, parent, start_time=started_ns)
        self._context = set_span_in_context(self._span, parent)

    @property
    def headers(self) -> TraceHeaders:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        headers: dict[str, str] = {}
        TraceContextTextMapPropagator().inject(headers, self._context)
        return headers

    def child(self, name: str) -> "OpenTelemetrySpan":
        return OpenTelemetrySpan(self._tracer, name, self._context)

    def describe(self, attributes: Mapping[str, Any]) -> None:
        for name, value in _flat("tessera", attributes):
            self._span.set_attribute(name, value)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: "TracebackType | None"
    ) -> None:
        """Ends the span. Falling back to full attention is an event, not an error; neither is a client that left."""
        from opentelemetry.trace import StatusCode

        if isinstance(error, Exception):
            self._span.record_exception(error)
            if not isinstance(error, FullAttentionError):
                self._span.set_status(StatusCode.ERROR, str(error))
        self._span.end()


def _new_request(headers: TraceHeaders, arrived: float | None) -> OpenTelemetrySpan:
    from opentelemetry.context import Context
    from opentelemetry.trace import get_tracer
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    parent = TraceContextTextMapPropagator().extract(headers or {}, Context())
    started_ns = None if arrived is None else int(arrived * 1e9)
    return OpenTelemetrySpan(get_tracer("tessera"), "tessera.request", parent, started_ns)


def _flat(prefix: str, attributes: Mapping[str, Any]) -> "list[tuple[str, Any]]":
    flat = []
    for name, value in attributes.items():
        if isinstance(value, Mapping):
            flat += _flat(f"{prefix}.{name}", value)
        elif value is not None:
            flat.append((f"{prefix}.{name}", value))
    return flat
