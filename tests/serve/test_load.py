"""Many, disconnecting and slow clients: no response is lost and slots are freed; metrics, report and health."""

from __future__ import annotations

import html
import json
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from partita.library.run_report import make_report
from partita.partition_reports.records import Report
from partita.runtime.generate import record
from tests.memory import native_bytes, python_blocks, slope
from tests.serve.serving import COMPLETION, LONG, SECONDS, Running, raw, request_bytes, running, until


def test_64_clients_get_the_responses_of_sequential_requests(server):
    prompts = [f"return the {word} {number}" for number in range(16) for word in ("value", "list", "item", "other")]
    asked: Any = {"temperature": 0, "extra_body": {"ignore_eos": True}}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0, timeout=SECONDS) as client:

        def alone(number: int, *, stream: bool) -> tuple[str, int]:
            most = 3 + number % 13
            if not stream:
                answer = client.completions.create(model="tiny", prompt=prompts[number], max_tokens=most, **asked)
                return answer.choices[0].text, answer.usage.completion_tokens
            parts = list(
                client.completions.create(
                    model="tiny",
                    prompt=prompts[number],
                    max_tokens=most,
                    stream=True,
                    stream_options={"include_usage": True},
                    **asked,
                )
            )
            return "".join(part.choices[0].text for part in parts[:-1]), parts[-1].usage.completion_tokens

        with ThreadPoolExecutor(64) as pool:
            whole = list(pool.map(lambda number: alone(number, stream=number % 2 == 0), range(64)))
        assert [tokens for _, tokens in whole] == [3 + number % 13 for number in range(64)]
        for number in (0, 1, 30, 63):
            assert alone(number, stream=number % 2 == 1) == whole[number]
    until(lambda: server.is_idle)
    assert server.log == []


def test_disconnected_clients_free_their_slots_and_queue_entries(server):
    interrupted = 'partita_prompts_ended_total{model="tiny",reason="interrupted"}'
    before = [line for line in server.get("/metrics").text.splitlines() if line.startswith(interrupted)]
    with server.slowly():
        connections = [raw(server.address) for _ in range(6)]  # two more than rows
        for number, connection in enumerate(connections):
            connection.sendall(request_bytes(COMPLETION, {**LONG, "stream": number % 2 == 0}))
        until(lambda: server.models["tiny"].open_prompts == 6)
        for connection in connections:
            connection.close()
        until(lambda: server.is_idle)
    ended = server.metric("partita_prompts_ended_total", model="tiny", reason="interrupted")
    assert ended == (float(before[0].split()[-1]) if before else 0) + 6
    assert server.post(COMPLETION, {**LONG, "max_tokens": 2}).status_code == 200
    assert server.log == [], "a client that leaves is no error"


def test_slow_client_holds_no_slot_and_gets_full_response(server):
    with raw(server.address) as slow:
        slow.sendall(request_bytes(COMPLETION, {**LONG, "stream": True}))
        head = slow.recv(10)
        until(lambda: server.is_idle)  # the answer is made, though nobody has read it
        assert server.post(COMPLETION, {**LONG, "max_tokens": 2}).status_code == 200
        data = head
        while b"[DONE]" not in data:
            time.sleep(0.001)
            part = slow.recv(200)
            assert part
            data += part
    tokens = sum(json.loads(line[6:])["choices"][0]["text"] != "" for line in _events(data))
    assert tokens > 0 and b'"finish_reason":"length"' in data


def _events(data: bytes) -> list[bytes]:
    return [line for line in data.split(b"\n") if line.startswith(b"data: {")]


def test_full_queue_returns_503_with_retry_after(package):
    with running({"tiny": package}, max_queue=2) as small, ThreadPoolExecutor(12) as pool:
        with small.slowly():
            answers = list(pool.map(lambda _: small.post(COMPLETION, {**LONG, "max_tokens": 20}), range(12)))
        refused = [answer for answer in answers if answer.status_code == 503]
        assert refused and len(refused) + sum(answer.status_code == 200 for answer in answers) == 12
        assert all(answer.json()["error"]["code"] == "queue_full" for answer in refused)
        assert all(answer.headers["retry-after"] == "1" for answer in refused)
        assert small.metric("partita_requests_refused_total") == len(refused)
        answered = len(answers) - len(refused)
        assert small.metric("partita_request_seconds_count") == answered, "refusals are no fast answers"
        too_many = small.post(COMPLETION, {**LONG, "n": 7})
        assert too_many.status_code == 400 and too_many.json()["error"]["param"] == "n"
        assert small.post(COMPLETION, {**LONG, "prompt": ""}).status_code == 400
        assert small.metric("partita_request_seconds_count") == answered
        # OpenAI's client asks again, and so loses nothing.
        with openai.OpenAI(base_url=f"{small.url}/v1", api_key="x", max_retries=20, timeout=SECONDS) as client:
            asked = [
                pool.submit(client.completions.create, model="tiny", prompt="a b", max_tokens=4) for _ in range(12)
            ]
            assert all(answer.result().choices for answer in asked)


def test_request_timeout_returns_504_or_stream_error_event(package):
    with running({"tiny": package}, timeout=0.3) as hasty, hasty.slowly():
        answer = hasty.post(COMPLETION, LONG)
        assert answer.status_code == 504 and answer.json()["error"]["code"] == "request_timeout"
        assert answer.headers["x-should-retry"] == "false", "OpenAI's client would ask twice more"
        until(lambda: hasty.is_idle)
        streamed = hasty.post(COMPLETION, {**LONG, "stream": True})
        assert streamed.status_code == 200, "it had begun"
        last = streamed.content.split(b"\n\n")[-2]
        assert b'"request_timeout"' in last and b"[DONE]" not in streamed.content
        asked: Any = {key: value for key, value in LONG.items() if key != "ignore_eos"}
        asked["extra_body"] = {"ignore_eos": True}
        with openai.OpenAI(base_url=f"{hasty.url}/v1", api_key="x", max_retries=0) as client:
            with pytest.raises(openai.InternalServerError, match="server's time limit"):
                client.completions.create(**asked)
            with pytest.raises(openai.APIError, match="server's time limit"):
                list(client.completions.create(**asked, stream=True))
        until(lambda: hasty.is_idle)


def test_request_limit_returns_503(package):
    key = {"authorization": "Bearer secret"}
    with (
        running({"tiny": package}, max_requests=1, api_key=["secret"]) as single,
        single.slowly(),
        ThreadPoolExecutor(1) as pool,
    ):
        long = pool.submit(single.post, COMPLETION, LONG, headers=key)
        until(lambda: single.models["tiny"].open_prompts == 1)
        answer = single.get("/v1/models", headers=key)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "too_many_requests")
        assert single.get("/health").status_code == 200
        metrics = single.get("/metrics", headers=key)
        assert 'partita_requests_refused_total{model=""} 1.0' in metrics.text
        assert single.get("/metrics").status_code == 401
        assert long.result().status_code == 200


@pytest.mark.heavy
def test_memory_does_not_grow_with_requests(server, monkeypatch):
    """Memory slope over requests of every kind."""
    monkeypatch.setattr(record, "KEPT_STEPS", 16)
    process, each = psutil.Process(), 40

    def ask(count: int) -> None:
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(one, range(count)))

    def one(number: int) -> None:
        body = {**LONG, "max_tokens": 10, "stream": number % 3 == 0, "logprobs": 2}
        if number % 10 == 9:
            with raw(server.address) as gone:
                gone.sendall(request_bytes(COMPLETION, {**body, "max_tokens": 100}))
        elif number % 10 == 8:
            server.post(COMPLETION, {"model": "tiny"})
        else:
            assert server.post(COMPLETION, body).status_code == 200

    native, blocks = list[tuple[float, float]](), list[tuple[float, float]]()
    for turn in range(1, 9):
        ask(each)
        until(lambda: server.is_idle)
        native.append((turn * each, native_bytes()))
        blocks.append((turn * each, python_blocks()))
        if turn == 2:
            threads, connections = threading.active_count(), len(process.net_connections())
    assert slope(native[2:]) < 4096 and slope(blocks[2:]) < 15, "per request"
    assert threading.active_count() <= threads + 2 and len(process.net_connections()) <= connections + 40
    assert server.log == []


@contextmanager
def reading_slowly(server: Running) -> Iterator[tuple[threading.Event, list[str]]]:
    """Prompts are read once the event is set; the list is of those whose reading has begun."""
    whole = server.models["tiny"].text
    goes_on, begun = threading.Event(), list[str]()
    encode = whole.encode

    def slow(text: str) -> Any:
        begun.append(text)
        assert goes_on.wait(SECONDS)
        return encode(text)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(whole), "encode", lambda self, text: slow(text))
        try:
            yield goes_on, begun
        finally:
            goes_on.set()


def test_prompt_of_disconnected_client_is_not_encoded(server):
    with reading_slowly(server) as (goes_on, begun), ThreadPoolExecutor(1) as pool:
        first = pool.submit(server.post, COMPLETION, {**LONG, "prompt": "first", "max_tokens": 2})
        until(lambda: begun == ["first"])
        leaving = [raw(server.address) for _ in range(3)]
        for connection in leaving:
            connection.sendall(request_bytes(COMPLETION, {**LONG, "prompt": "gone"}))
        until(lambda: server.models["tiny"].unread == 4)
        for connection in leaving:
            connection.close()
        until(lambda: server.models["tiny"].unread == 1)
        goes_on.set()
        assert first.result().status_code == 200
        assert server.post(COMPLETION, {**LONG, "prompt": "last", "max_tokens": 2}).status_code == 200
        assert begun == ["first", "last"] and server.models["tiny"].unread == 0


def test_timeout_and_queue_limit_apply_while_prompts_are_encoded(package):
    with (
        running({"tiny": package}, timeout=0.5, max_queue=1) as hasty,
        reading_slowly(hasty) as (_, begun),
        ThreadPoolExecutor(6) as pool,
    ):
        answers = list(pool.map(lambda _: hasty.post(COMPLETION, {**LONG, "prompt": "a"}), range(6)))
        codes = sorted(answer.json()["error"]["code"] for answer in answers)
        assert codes == ["queue_full", *["request_timeout"] * 5], "4 rows and 1 that waits"
        assert begun == ["a"] and hasty.models["tiny"].unread == 0


# Metrics for Prometheus, the report of the running sessions, and health


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
