"""Traces: a span a request, by OpenTelemetry's conventions."""

import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from qtool.errors import UsageError
from qtool.runtime.server.process import Address, serve
from qtool.runtime.server.settings import ServerSettings
from qtool.runtime.server.tracing import RequestTracer, make_tracer
from qtool.runtime.tokenizer import Tokenizer
from tests.runtime.fake import FakeEngine
from tests.runtime.served import Served, serving
from tests.runtime.test_operations import COMPLETION
from tests.runtime.test_process import process, url_of

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@dataclass(frozen=True)
class Traced:
    served: Served[FakeEngine]
    exporter: InMemorySpanExporter

    def post(self, path: str, body: dict[str, object], headers: dict[str, str] | None = None) -> ReadableSpan:
        """Send a request; the one span that was left since the last time."""
        httpx.post(self.served.url + path, json=body, headers=headers, timeout=60)
        return self.span()

    def span(self) -> ReadableSpan:
        """The one span that was left since the last time; one is made soon after its answer was sent."""
        end = time.monotonic() + 10
        while not (spans := self.exporter.get_finished_spans()):
            assert time.monotonic() < end
            time.sleep(0.01)
        self.exporter.clear()
        (span,) = spans
        return span


@contextmanager
def traced(byte_tokenizer: Tokenizer, engine: FakeEngine | None = None) -> Iterator[Traced]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    observers = [RequestTracer(provider, "model").record]
    with serving(engine or FakeEngine(num_blocks=64), byte_tokenizer, observers=observers) as served:
        yield Traced(served, exporter)


@pytest.mark.parametrize("stream", [False, True])
def test_a_completion_is_a_span_by_the_conventions(stream: bool, byte_tokenizer: Tokenizer) -> None:
    with traced(byte_tokenizer) as made:
        body = {**COMPLETION, "prompt": ["Once", "Twice"], "temperature": 0.5, "stream": stream}
        made.post("/v1/completions", body)
        span = made.post("/v1/completions", body, {"X-Request-Id": "abc"})
    assert (span.name, span.kind, span.parent) == ("text_completion model", SpanKind.SERVER, None)
    assert span.status.status_code is StatusCode.UNSET
    found = dict(span.attributes or {})
    ttft = found.pop("gen_ai.response.time_to_first_chunk")
    assert span.start_time is not None
    assert span.end_time is not None
    assert isinstance(ttft, float)
    assert 0 < ttft <= (span.end_time - span.start_time) / 1e9
    assert found == {
        "http.request.method": "POST",
        "url.path": "/v1/completions",
        "http.route": "/v1/completions",
        "http.response.status_code": 200,
        "qtool.request.id": "abc",
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "qtool",
        "gen_ai.request.model": "model",
        "gen_ai.response.model": "model",
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.response.finish_reasons": ("length", "length"),
        "gen_ai.usage.input_tokens": 9,
        "gen_ai.usage.cache_read.input_tokens": 7,  # one block of 4 each; the last token is always computed
        "gen_ai.usage.output_tokens": 10,
    }


def test_a_span_is_a_child_of_what_traceparent_names(byte_tokenizer: Tokenizer) -> None:
    chat = {"model": "model", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    with traced(byte_tokenizer) as made:
        parent = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}
        span = made.post("/v1/chat/completions", chat, parent)
        unsampled = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-00"}
        # Whoever asks has decided against it, so that the next span is of the next request.
        httpx.post(f"{made.served.url}/v1/chat/completions", json=chat, headers=unsampled)
        broken = made.post("/v1/chat/completions", chat, {"traceparent": "nonsense"})
    assert span.name == "chat model"
    assert span.context is not None
    assert span.parent is not None
    assert f"{span.context.trace_id:032x}" == TRACE_ID
    assert f"{span.parent.span_id:016x}" == PARENT_ID
    assert broken.parent is None


def test_refusals_and_failures_are_told_apart_and_probes_leave_nothing(byte_tokenizer: Tokenizer) -> None:
    engine = FakeEngine(num_blocks=64)
    with traced(byte_tokenizer, engine) as made:
        refused = made.post("/v1/completions", {**COMPLETION, "temperature": -1})
        too_long = made.post("/v1/completions", {**COMPLETION, "max_tokens": 9999})
        for path in ("/health", "/metrics", "/", "/v1/models"):
            httpx.get(made.served.url + path)
        assert made.span().name == "GET /v1/models"
        engine.fail_at = engine.num_steps + 2
        failed = made.post("/v1/completions", {**COMPLETION, "stream": True})
    assert refused.status.status_code is StatusCode.UNSET  # the client's fault
    assert (refused.attributes or {})["error.type"] == "400"
    assert "gen_ai.usage.output_tokens" not in (refused.attributes or {})
    assert too_long.status.status_code is StatusCode.UNSET
    assert (too_long.attributes or {})["error.type"] == "ParameterError"
    assert failed.status.status_code is StatusCode.ERROR
    assert (failed.attributes or {})["http.response.status_code"] == 200  # sent before it failed
    assert (failed.attributes or {})["error.type"] == "GenerationError"
    assert (failed.attributes or {})["gen_ai.usage.output_tokens"] == 2


class _Collector(BaseHTTPRequestHandler):
    """Takes in what an OTLP exporter posts."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        assert isinstance(self.server, _CollectorServer)
        self.server.received.append((self.path, dict(self.headers.items()), body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


class _CollectorServer(ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Collector)
        self.received: list[tuple[str, dict[str, str], bytes]] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


@pytest.fixture
def collector() -> Iterator[_CollectorServer]:
    with _CollectorServer() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def test_spans_reach_a_collector_over_otlp(
    collector: _CollectorServer, byte_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.name=mine,team=a")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-tenant=t1")
    tracer = make_tracer(f"{collector.url}/", "model")
    with serving(FakeEngine(num_blocks=64), byte_tokenizer, observers=[tracer.record]) as served:
        for _ in range(3):
            assert httpx.post(f"{served.url}/v1/completions", json=COMPLETION).status_code == 200
    tracer.close()
    ((path, headers, body),) = collector.received
    assert path == "/v1/traces"
    assert headers["x-tenant"] == "t1"
    (resource_spans,) = ExportTraceServiceRequest.FromString(body).resource_spans
    resource = {item.key: item.value.string_value for item in resource_spans.resource.attributes}
    assert (resource["service.name"], resource["team"]) == ("mine", "a")
    spans = [span for scope in resource_spans.scope_spans for span in scope.spans]
    assert [span.name for span in spans] == ["text_completion model"] * 3
    attributes = {item.key: item.value for item in spans[0].attributes}
    assert attributes["gen_ai.usage.output_tokens"].int_value == 5


def test_a_server_that_ends_sends_the_spans_it_still_holds(
    collector: _CollectorServer, tokenizer_folder: Path
) -> None:
    with process(tokenizer_folder, 0, otlp_endpoint=collector.url) as server:
        url = url_of(server)
        assert httpx.post(f"{url}/v1/completions", json=COMPLETION).status_code == 200
        server.send_signal(signal.SIGTERM)
        assert server.wait(20) == 0
    assert [path for path, _, _ in collector.received] == ["/v1/traces"]


def test_without_the_package_or_with_no_url_the_server_does_not_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "qtool.runtime.server.tracing", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    settings = ServerSettings(otlp_endpoint="http://127.0.0.1:9")
    with pytest.raises(
        UsageError, match=r"otel needs the package opentelemetry.* pip install -e '\.\[otel\]'"
    ):
        serve(Address(port=0), "model", lambda: pytest.fail("loaded"), lambda url: None, settings)
    with pytest.raises(UsageError, match="is no http URL"):
        ServerSettings(otlp_endpoint=str(Path("collector:4317")))
