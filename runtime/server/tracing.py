"""OpenTelemetry traces: a span for each request, exported over OTLP. Needs the extra `otel`.

Names follow the semantic conventions for HTTP servers and for generative AI:
https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/
"""

import threading
import time
from collections.abc import Iterator
from http import HTTPStatus

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

import qtool
from qtool.runtime.server.middleware import OPEN_PATHS, Handled

_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/responses": "chat",
    "/v1/embeddings": "embeddings",
}
_ATTRIBUTES = {
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "cached_tokens": "gen_ai.usage.cache_read.input_tokens",
    "completion_tokens": "gen_ai.usage.output_tokens",
    "finish_reasons": "gen_ai.response.finish_reasons",
    "ttft_seconds": "gen_ai.response.time_to_first_chunk",
    "max_tokens": "gen_ai.request.max_tokens",
    "temperature": "gen_ai.request.temperature",
    "error": "error.type",
}
"""By the field of the request's record."""
_PROPAGATOR = TraceContextTextMapPropagator()
_NS = 1_000_000_000
_CLOSE_S = 5.0


class RequestTracer:
    """Makes a span of each request that has ended, as a child of the span that its `traceparent` names.

    Spans wait in a queue and are sent by a thread of their own: a collector that is slow or gone costs spans,
    and never a request its time.
    """

    def __init__(self, provider: TracerProvider, model: str) -> None:
        """`model` is the name under which the server has its model."""
        self._provider = provider
        self._tracer = provider.get_tracer("qtool", qtool.__version__)
        self._model = model

    def record(self, handled: Handled) -> None:
        """Record a request; what probes and scrapers ask leaves no span."""
        if handled.path in OPEN_PATHS:
            return
        end = time.time_ns()
        operation = _OPERATIONS.get(handled.route)
        span = self._tracer.start_span(
            f"{operation} {self._model}" if operation else f"{handled.method} {handled.route}",
            context=_PROPAGATOR.extract(handled.headers),
            kind=SpanKind.SERVER,
            attributes=dict(self._attributes(handled, operation)),
            start_time=end - round(handled.seconds * _NS),
        )
        if handled.failed:
            span.set_status(StatusCode.ERROR)
        span.end(end)

    def close(self) -> None:
        """Send what waits, for some seconds at most: a collector may be gone."""
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(_CLOSE_S)

    def _attributes(self, handled: Handled, operation: str | None) -> Iterator[tuple[str, AttributeValue]]:
        yield "http.request.method", handled.method
        yield "url.path", handled.path
        yield "http.route", handled.route
        yield "qtool.request.id", handled.record.id
        if handled.status:
            yield "http.response.status_code", handled.status
        if handled.status >= HTTPStatus.BAD_REQUEST:
            yield "error.type", str(handled.status)
        if operation is not None:
            yield "gen_ai.operation.name", operation
            yield "gen_ai.provider.name", "qtool"
            yield "gen_ai.request.model", self._model
            yield "gen_ai.response.model", self._model
        for field, name in _ATTRIBUTES.items():
            if (value := handled.record.fields.get(field)) is not None:
                yield name, _attribute(value)


def _attribute(value: object) -> AttributeValue:
    if isinstance(value, bool | int | float | str):
        return value
    assert isinstance(value, list)
    return [str(item) for item in value]


def make_tracer(endpoint: str, model: str) -> RequestTracer:
    """A tracer that sends to the OTLP collector at a base URL, to its path /v1/traces.

    Everything else is read from OpenTelemetry's own variables: OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES,
    OTEL_EXPORTER_OTLP_HEADERS, OTEL_TRACES_SAMPLER and the rest.
    """
    resource = Resource.create({"service.name": "qtool", "service.version": qtool.__version__})
    resource = resource.merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    exporter = OTLPSpanExporter(f"{endpoint.rstrip('/')}/v1/traces")
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return RequestTracer(provider, model)
