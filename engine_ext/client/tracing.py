# SPDX-License-Identifier: Apache-2.0
"""Trace spans of a request in the chunk cache, if vLLM's tracing is on.

vLLM sets OpenTelemetry up and makes a span per engine request; Tessera's spans are their parents.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

from cache.errors import FullAttentionError

if TYPE_CHECKING:
    from types import TracebackType

    from opentelemetry.context import Context
    from opentelemetry.trace import Tracer

TraceHeaders = Mapping[str, str] | None


class TraceSpan:
    """An exported span, which ends with its ``with`` block.

    It is never its task's current span: a generator's ``with`` block may end in another context than it began in, so
    parents are explicit.
    """

    def __init__(self, tracer: "Tracer", name: str, parent: "Context", started_ns: int | None = None) -> None:
        from opentelemetry.trace import set_span_in_context

        self._tracer = tracer
        self._span = tracer.start_span(name, parent, start_time=started_ns)
        self._context = set_span_in_context(self._span, parent)

    @property
    def headers(self) -> TraceHeaders:
        """vLLM's ``trace_headers``, which make its spans children of this one."""
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        headers: dict[str, str] = {}
        TraceContextTextMapPropagator().inject(headers, self._context)
        return headers

    def child(self, name: str) -> "TraceSpan":
        """A child span that starts now."""
        return TraceSpan(self._tracer, name, self._context)

    def describe(self, attributes: Mapping[str, Any]) -> None:
        """Adds attributes, named ``tessera.…``, nested mappings by their path."""
        for name, value in _flat("tessera", attributes):
            self._span.set_attribute(name, value)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: "TracebackType | None"
    ) -> None:
        """Ends the span. A fallback to full attention is an event, not an error; a client's leaving is neither."""
        from opentelemetry.trace import StatusCode

        if isinstance(error, Exception):
            self._span.record_exception(error)
            if not isinstance(error, FullAttentionError):
                self._span.set_status(StatusCode.ERROR, str(error))
        self._span.end()


def start_request(headers: TraceHeaders, arrived: float | None = None) -> TraceSpan:
    """The span of a request with the client's ``headers``, from ``arrived`` (Unix time) or now.

    vLLM's span of the request starts when it arrived, and should not start before ours.
    """
    from opentelemetry.context import Context
    from opentelemetry.trace import get_tracer
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    parent = TraceContextTextMapPropagator().extract(headers or {}, Context())
    started_ns = None if arrived is None else int(arrived * 1e9)
    return TraceSpan(get_tracer("tessera"), "tessera.request", parent, started_ns)


def _flat(prefix: str, attributes: Mapping[str, Any]) -> "list[tuple[str, Any]]":
    flat = []
    for name, value in attributes.items():
        if isinstance(value, Mapping):
            flat += _flat(f"{prefix}.{name}", value)
        elif value is not None:
            flat.append((f"{prefix}.{name}", value))
    return flat
