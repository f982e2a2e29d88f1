"""Prometheus metrics: requests, tokens, running rows, and the node placement of a package."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    Metric,
    PlatformCollector,
    ProcessCollector,
)
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from partita.observations.text_format import short_provider

if TYPE_CHECKING:
    from partita.partition_reports.records import Report

FIRST_TOKEN_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
BETWEEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5)
REQUEST_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class TokenMetrics(NamedTuple):
    """Metrics of one model that every token changes."""

    first: Histogram
    between: Histogram
    queue: Histogram
    prompt: Counter
    new: Counter


class Metrics(Collector):
    """All metrics of a server. Thread-safe."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
        GCCollector(registry=registry)
        model = ("model",)

        def histogram(name: str, help_text: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(f"partita_{name}", help_text, model, registry=registry, buckets=buckets)

        def counter(name: str, help_text: str, labels: Sequence[str] = model) -> Counter:
            return Counter(f"partita_{name}", help_text, labels, registry=registry)

        def gauge(name: str, help_text: str, labels: Sequence[str] = model) -> Gauge:
            return Gauge(f"partita_{name}", help_text, labels, registry=registry)

        self.responses = counter("http_responses", "HTTP responses.", ("endpoint", "status"))
        self.open = gauge("http_requests_open", "HTTP requests in progress.", ())
        self.request_seconds = histogram(
            "request_seconds", "Time from accepting a generation request to its end.", REQUEST_BUCKETS
        )
        self.first_token_seconds = histogram(
            "time_to_first_token_seconds", "Time from submission to the first token.", FIRST_TOKEN_BUCKETS
        )
        self.between_seconds = histogram(
            "inter_token_seconds", "Time between tokens of a completion, after the first.", BETWEEN_BUCKETS
        )
        self.queue_seconds = histogram("queue_seconds", "Time from submission to a row.", FIRST_TOKEN_BUCKETS)
        self.prompt_tokens = counter("prompt_tokens", "Tokens of accepted prompts.")
        self.new_tokens = counter("generated_tokens", "Tokens generated.")
        self.ended = counter("prompts_ended", "Completions by finish reason.", ("model", "reason"))
        self.refused = counter("requests_refused", "Requests rejected because a queue or the server was full.")
        """Model whose queue was full; empty if too many requests were open."""
        self.slots = gauge("slots", "Rows of the batch.")
        self.running = gauge("slots_running", "Running rows.")
        self.waiting = gauge("queue_waiting", "Prompts waiting for a row.")
        self.up = gauge("model_up", "1 while the model accepts requests, 0 after its process was lost.")
        self.reports: dict[str, Report] = {}
        """The last report of each model."""
        registry.register(self)

    def of_model(self, model: str) -> TokenMetrics:
        """The token metrics of a model."""
        return TokenMetrics(
            self.first_token_seconds.labels(model),
            self.between_seconds.labels(model),
            self.queue_seconds.labels(model),
            self.prompt_tokens.labels(model),
            self.new_tokens.labels(model),
        )

    def watch(
        self, model: str, slots: int, running: Callable[[], int], waiting: Callable[[], int], up: Callable[[], bool]
    ) -> None:
        """Add a model, whose functions are called at each scrape."""
        self.slots.labels(model).set(slots)
        self.running.labels(model).set_function(running)
        self.waiting.labels(model).set_function(waiting)
        self.up.labels(model).set_function(lambda: float(up()))
        self.refused.labels(model)
        self.request_seconds.labels(model)

    def collect(self) -> Iterator[Metric]:
        """The node placement of each model, from its report."""
        phase = ("model", "phase")
        nodes = _family("nodes", "Nodes by their provider.", (*phase, "provider"))
        fallbacks = _family("nodes_off_provider", "Nodes that are not on the first provider of the chain.", phase)
        copies = _family("copies_per_token", "Copies between memories in one run, with one token per row.", phase)
        size = _family("copy_bytes_per_token", "Bytes of these copies; copies of unknown size are excluded.", phase)
        in_place = _family("cache_in_place", "1 if every cache state stays in the same buffer, else 0.", ("model",))
        for model, report in list(self.reports.items()):
            for used in report.used_phases:
                where = model, used.name
                for share in used.providers:
                    nodes.add_metric((*where, short_provider(share.provider)), share.nodes)
                fallbacks.add_metric(where, len(report.fallback_nodes(used)))
                copies.add_metric(where, len(used.copies))
                size.add_metric(where, sum(copy.bytes_per_run or 0 for copy in used.copies))
            if report.summary is not None and report.summary.cache_in_place is not None:
                in_place.add_metric((model,), report.summary.cache_in_place)
        yield from (nodes, fallbacks, copies, size, in_place)

    def encoded(self, accept: str) -> tuple[bytes, str]:
        """All metrics in a format that the scraper accepts, and its content type."""
        try:
            encoder, content_type = choose_encoder(accept)
        except (TypeError, ValueError, LookupError):  # a malformed version
            encoder, content_type = choose_encoder("")
        return encoder(self.registry), content_type


def _family(name: str, help_text: str, labels: Sequence[str]) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"partita_{name}", help_text, labels=labels)
