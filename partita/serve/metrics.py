"""Figures for Prometheus: what requests waited for and got, what is at work, and where the nodes of a package run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
)
from prometheus_client.exposition import choose_encoder

from partita.observations.text_format import short_provider
from partita.partition_reports.outcome import strays, used_phases

if TYPE_CHECKING:
    from partita.partition_reports.records import Report

FIRST_TOKEN_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
BETWEEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5)
REQUEST_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """Every figure of one server. Counting is safe from any thread."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
        GCCollector(registry=registry)
        model = ("model",)

        def histogram(name: str, told: str, labels: Sequence[str], buckets: Sequence[float]) -> Histogram:
            return Histogram(f"partita_{name}", told, labels, registry=registry, buckets=buckets)

        def counter(name: str, told: str, labels: Sequence[str]) -> Counter:
            return Counter(f"partita_{name}", told, labels, registry=registry)

        def gauge(name: str, told: str, labels: Sequence[str] = model) -> Gauge:
            return Gauge(f"partita_{name}", told, labels, registry=registry)

        self.responses = counter("http_responses", "HTTP responses.", ("endpoint", "status"))
        self.open = gauge("http_requests_open", "HTTP requests that are being answered.", ())
        self.request_seconds = histogram(
            "request_seconds",
            "From the arrival of a request for text, once it is taken, to its end.",
            model,
            REQUEST_BUCKETS,
        )
        self.first_token_seconds = histogram(
            "time_to_first_token_seconds", "From submission to the first token.", model, FIRST_TOKEN_BUCKETS
        )
        self.between_seconds = histogram(
            "inter_token_seconds", "Between tokens of an answer, after the first.", model, BETWEEN_BUCKETS
        )
        self.queue_seconds = histogram("queue_seconds", "From submission to a row.", model, FIRST_TOKEN_BUCKETS)
        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts that were taken.", model)
        self.new_tokens = counter("generated_tokens", "Tokens generated.", model)
        self.ended = counter("prompts_ended", "Prompts by how they ended.", ("model", "reason"))
        self.refused = counter("requests_refused", "Requests turned away for lack of room.", model)
        """Of the model whose queue was full; without one, where too many requests were open."""
        self.slots = gauge("slots", "Rows of the batch.")
        self.running = gauge("slots_running", "Rows at work.")
        self.waiting = gauge("queue_waiting", "Prompts that wait for a row.")
        self.up = gauge("model_up", "1 while the model takes requests, 0 after it was lost.")
        phase = ("model", "phase")
        self.nodes = gauge("nodes", "Nodes by the provider that runs them.", ("model", "phase", "provider"))
        self.off_provider = gauge("nodes_off_provider", "Nodes that are not on the first provider of the chain.", phase)
        self.copies = gauge("copies_per_token", "Copies between memories in one run, which makes a token a row.", phase)
        self.copy_bytes = gauge(
            "copy_bytes_per_token", "Bytes of these copies; those whose size is not known are left out.", phase
        )
        self.in_place = gauge("cache_in_place", "1 when every state of the cache stays in its buffer, 0 when not.")
        self._placed: dict[str, frozenset[tuple[Gauge, tuple[str, ...]]]] = {}
        """The placement that is told, by model."""

    def watch(
        self, model: str, slots: int, running: Callable[[], int], waiting: Callable[[], int], up: Callable[[], bool]
    ) -> None:
        """Take note of a model: what is at work there is asked for when somebody looks."""
        self.slots.labels(model).set(slots)
        self.running.labels(model).set_function(running)
        self.waiting.labels(model).set_function(waiting)
        self.up.labels(model).set_function(lambda: float(up()))
        for counter in (self.prompt_tokens, self.new_tokens, self.refused):
            counter.labels(model)
        for histogram in (self.first_token_seconds, self.between_seconds, self.queue_seconds, self.request_seconds):
            histogram.labels(model)

    def place(self, model: str, report: Report) -> None:
        """Take note of where the nodes of a model run, by its report, in place of what was known before."""
        found: dict[tuple[Gauge, tuple[str, ...]], float] = {}
        for phase in used_phases(report):
            where = model, phase.name
            for share in phase.providers:
                found[self.nodes, (*where, short_provider(share.provider))] = share.nodes
            found[self.off_provider, where] = len(strays(report, phase))
            found[self.copies, where] = len(phase.copies)
            found[self.copy_bytes, where] = sum(copy.bytes_per_run or 0 for copy in phase.copies)
        if report.summary is not None and report.summary.cache_in_place is not None:
            found[self.in_place, (model,)] = report.summary.cache_in_place
        for gauge, labels in self._placed.get(model, frozenset()) - found.keys():
            gauge.remove(*labels)
        for (gauge, labels), value in found.items():
            gauge.labels(*labels).set(value)
        self._placed[model] = frozenset(found)

    def written(self, accept: str) -> tuple[bytes, str]:
        """All figures in the format that a scraper accepts, and its content type."""
        try:
            encoder, content_type = choose_encoder(accept)
        except (TypeError, ValueError, LookupError):  # of a version that is none
            encoder, content_type = choose_encoder("")
        return encoder(self.registry), content_type
