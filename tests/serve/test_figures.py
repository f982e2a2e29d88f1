"""Metrics for Prometheus, the report of the running sessions, and health."""

from __future__ import annotations

import html
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from partita.library.run_report import make_report
from partita.partition_reports.records import Report
from tests.serve.serving import Running, running

BODY = {"model": "tiny", "prompt": "return the", "max_tokens": 5, "temperature": 0, "ignore_eos": True}


def test_requests_are_counted_in_metrics(server: Running) -> None:
    server.post("/v1/completions", BODY)
    before = {name: server.metric(name) for name in COUNTED}
    prompt = server.post("/v1/completions", BODY).json()["usage"]["prompt_tokens"]
    after = {name: server.metric(name) for name in COUNTED}
    grown = {name: after[name] - before[name] for name in COUNTED}
    assert grown == {
        **dict.fromkeys(COUNTED, 1),
        "partita_generated_tokens_total": 5,
        "partita_prompt_tokens_total": prompt,
        "partita_inter_token_seconds_count": 4,
    }
    assert 0 < server.metric("partita_time_to_first_token_seconds_sum") < 60
    assert server.metric("partita_slots") == 4
    answered = server.metric("partita_http_responses_total", endpoint="/v1/completions", status="200")
    server.get("/what/ever/comes")
    assert server.metric("partita_http_responses_total", endpoint="other", status="404") >= 1
    assert server.metric("partita_http_responses_total", endpoint="/v1/completions", status="200") == answered


COUNTED = (
    "partita_time_to_first_token_seconds_count",
    "partita_queue_seconds_count",
    "partita_request_seconds_count",
    "partita_inter_token_seconds_count",
    "partita_generated_tokens_total",
    "partita_prompt_tokens_total",
)


def test_placement_metrics_match_report(server: Running) -> None:
    report = Report.model_validate(server.get("/report").json())
    decode = next(phase for phase in report.phases if phase.name == "decode")
    labels = {"model": "tiny", "phase": "decode"}
    assert server.metric("partita_nodes", provider="CPU", **labels) == len(decode.nodes) > 0
    assert server.metric("partita_nodes_off_provider", **labels) == 0
    assert server.metric("partita_copies_per_token", **labels) == len(decode.copies)
    assert server.metric("partita_copy_bytes_per_token", **labels) == sum(c.bytes_per_run or 0 for c in decode.copies)
    assert server.metric("partita_cache_in_place") == 1


def test_metrics_are_valid_prometheus_and_openmetrics_text(server: Running) -> None:
    answer = server.get("/metrics")
    families = {family.name for family in text_string_to_metric_families(answer.text)}
    assert {"partita_time_to_first_token_seconds", "partita_slots_running", "process_resident_memory_bytes"} <= families
    assert answer.headers["content-type"].startswith("text/plain")
    newer = server.get("/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
    assert newer.headers["content-type"].startswith("application/openmetrics-text")


def test_report_covers_running_sessions_in_every_view(server: Running) -> None:
    report = Report.model_validate(server.get("/report").json())
    assert all(check.passed for check in report.checks), [check for check in report.checks if not check.passed]
    assert report.summary is not None and report.summary.state == "all" and report.summary.cache_in_place
    assert report.totals is not None and report.totals.finish_reason != "interrupted"
    assert "on CPU" in server.get("/report?view=brief").text
    page = server.get("/report", headers={"accept": "text/html,*/*"})
    assert page.headers["content-type"].startswith("text/html") and page.text.startswith("<!DOCTYPE html>")
    plain = server.get("/report?view=markdown")
    assert plain.headers["content-type"].startswith("text/markdown")
    allowed = re.search('http-equiv="Content-Security-Policy" content="([^"]*)"', page.text)
    assert allowed is not None
    assert page.headers["content-security-policy"] == f"{html.unescape(allowed[1])}; frame-ancestors 'none'"
    assert plain.headers["content-security-policy"] == "default-src 'none'; frame-ancestors 'none'"
    assert {each.headers["x-content-type-options"] for each in (page, plain, server.get("/health"))} == {"nosniff"}


@pytest.mark.parametrize("process", ["this", "child"])
def test_report_opens_no_session_and_does_not_block_generation(
    package: Path, process: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, goes_on = threading.Event(), threading.Event()

    def slow(*given: Any) -> Report:
        begun.set()
        assert goes_on.wait(60)
        return make_report(*given)

    with running({"tiny": package}, process=process) as server, ThreadPoolExecutor(1) as pool:
        monkeypatch.setattr("partita.library.engine.local.with_optimised", None)
        monkeypatch.setattr("partita.library.engine.base.make_report", slow)
        server.models["tiny"]._report_at = -1e9
        report = pool.submit(server.get, "/report")
        assert begun.wait(60)
        assert server.post("/v1/completions", BODY).status_code == 200
        goes_on.set()
        assert report.result().status_code == 200
        monkeypatch.setattr("partita.library.engine.base.make_report", None)
        assert server.get("/report?view=text").status_code == 200, "the last one is shown for some seconds"
