"""Prometheus metrics. Dashboards and gateways read their names, so none ever changes."""

import time
from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from qtool.runtime.client import Client
from qtool.runtime.events import SequenceDone, SpeculationDone, StepDone

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_TOKENS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 32)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """What requests took, as the HTTP side sees it, and what the engine loop counts."""

    def __init__(self, client: Client) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_LoopCollector(client))
        self.ttft = self._histogram(
            "time_to_first_token", "From the request's arrival to an answer's first token", _SECONDS
        )
        self.tpot = self._histogram(
            "time_per_output_token", "Between an answer's tokens, on average over the answer", _TOKEN_SECONDS
        )
        self.end_to_end = self._histogram(
            "request_duration", "From the request's arrival to an answer's last token", _SECONDS
        )
        self._queue_time = self._histogram(
            "queue_time", "From a sequence's arrival to its first step", _SECONDS
        )
        self._step_time = self._histogram("step", "A step: scheduling, engine and sampling", _TOKEN_SECONDS)
        self._draft_tokens = self._counter("draft_tokens", "Drafts that were verified")
        self._accepted_tokens = self._counter("accepted_tokens", "Of these, the ones accepted")
        self._drafted_at = self._by_position("draft_position", "Drafts verified, by place in the draft")
        self._accepted_at = self._by_position("accepted_position", "Drafts accepted, by place in the draft")
        self._drafting_seconds = self._counter(
            "drafting_seconds", "Time spent on drafts before they are verified"
        )
        self._draft_length = Histogram(
            "qtool_draft_length_tokens",
            "Drafts of a sequence that a step verified, none included: the K that was chosen",
            buckets=_TOKENS,
            registry=self._registry,
        )
        self._acceptance_length = Histogram(
            "qtool_acceptance_length_tokens",
            "Tokens that a sequence with a draft got in a step: those accepted and the one that follows",
            buckets=_TOKENS[1:],
            registry=self._registry,
        )
        client.loop.observers.append(self._observe)
        self.prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts received")
        self._requests = Counter(
            "qtool_requests",
            "Requests answered, by route and HTTP status",
            ["route", "status"],
            registry=self._registry,
        )

    def count_request(self, route: str, status: int) -> None:
        """Count a request that ended; status 0 is a client that went away before there was one."""
        self._requests.labels(route, status).inc()

    def render(self) -> bytes:
        """The page that Prometheus scrapes, as CONTENT_TYPE."""
        return generate_latest(self._registry)

    def _observe(self, event: StepDone | SequenceDone) -> None:
        """Called in the engine loop's thread."""
        if isinstance(event, StepDone):
            self._step_time.observe(event.seconds)
            if event.speculation is not None:
                self._observe_drafts(event.speculation)
        else:
            self._queue_time.observe(event.queue_seconds)

    def _observe_drafts(self, done: SpeculationDone) -> None:
        self._drafting_seconds.inc(done.drafting_seconds)
        for length in done.lengths:
            self._draft_length.observe(length.drafted)
            if length.drafted:
                self._acceptance_length.observe(length.tokens)
                self._draft_tokens.inc(length.drafted)
                self._accepted_tokens.inc(length.accepted)
        for counter, counts in ((self._drafted_at, done.drafted), (self._accepted_at, done.accepted)):
            for place, count in enumerate(counts):
                counter.labels(place).inc(count)

    def _by_position(self, name: str, meaning: str) -> Counter:
        return Counter(f"qtool_{name}_tokens", meaning, ["position"], registry=self._registry)

    def _histogram(self, name: str, meaning: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"qtool_{name}_seconds", meaning, buckets=buckets, registry=self._registry)

    def _counter(self, name: str, meaning: str) -> Counter:
        return Counter(f"qtool_{name}", meaning, registry=self._registry)


class AnswerTimer:
    """Times one answer and counts its tokens."""

    def __init__(self, metrics: Metrics, arrived: float) -> None:
        """`arrived` is the request's time on `time.perf_counter`."""
        self._metrics = metrics
        self._arrived = arrived
        self._first: float | None = None
        self._num_tokens = 0

    def token(self) -> None:
        """One more token came."""
        self._num_tokens += 1
        if self._first is None:
            self._first = time.perf_counter()
            self._metrics.ttft.observe(self._first - self._arrived)

    def finish(self) -> None:
        """The last token came."""
        now = time.perf_counter()
        self._metrics.end_to_end.observe(now - self._arrived)
        if self._first is not None and self._num_tokens > 1:
            self._metrics.tpot.observe((now - self._first) / (self._num_tokens - 1))


@dataclass(frozen=True)
class _LoopCollector(Collector):
    """Reads the loop's counts when Prometheus asks, so that counting costs the loop nothing."""

    client: Client

    def collect(self) -> Iterator[Metric]:
        stats = self.client.loop.stats()
        usage = 1 - stats.num_free_blocks / stats.num_blocks
        yield GaugeMetricFamily("qtool_requests_running", "Sequences in the batch", stats.num_running)
        yield GaugeMetricFamily("qtool_requests_waiting", "Sequences that wait", stats.num_waiting)
        yield GaugeMetricFamily("qtool_kv_cache_usage_ratio", "Blocks of the KV pool in use, 0 to 1", usage)
        yield CounterMetricFamily(
            "qtool_preemptions", "Sequences that gave up their blocks", stats.num_preemptions
        )
        yield CounterMetricFamily(
            "qtool_prefix_cache_hit_tokens", "Prompt tokens found in the prefix cache", stats.num_hit_tokens
        )
        yield CounterMetricFamily(
            "qtool_prefix_cache_query_tokens", "Prompt tokens looked up there", stats.num_queried_tokens
        )
        yield CounterMetricFamily(
            "qtool_requests_refused", "Requests refused because of load", stats.num_refused
        )
        yield CounterMetricFamily(
            "qtool_generation_tokens",
            "Tokens generated, those of cancelled requests and behind stop strings included",
            stats.num_generated_tokens,
        )
        alias = "The same under the name that gateways read"
        yield GaugeMetricFamily("vllm:num_requests_running", alias, stats.num_running)
        yield GaugeMetricFamily("vllm:num_requests_waiting", alias, stats.num_waiting)
        yield GaugeMetricFamily("vllm:kv_cache_usage_perc", alias, usage)
