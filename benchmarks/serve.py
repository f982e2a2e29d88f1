"""A server under load: many clients at once, some of which read slowly or go away.

    python -m benchmarks.serve PACKAGE --clients 64 --requests 1000

starts `partita serve PACKAGE` and asks it with OpenAI's client. It prints what came of the requests, times to the first
token and to the end (p50, p99), tokens per second, and the memory of the server after a tenth of the requests and after
all. tests/serve/test_load.py finds leaks.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import psutil

WORDS = ("return", "the", "value", "of", "a", "list", "item", "given", "other", "string")
SECONDS = 600.0


@dataclass(slots=True)
class Load:
    """What came of the requests so far."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    outcomes: Counter[str] = field(default_factory=Counter)
    first: list[float] = field(default_factory=list)
    """Seconds to the first token, of streams."""
    whole: list[float] = field(default_factory=list)
    """Seconds to the end, of every request that was answered."""
    tokens: int = 0


def ask(client: Any, model: str, number: int, most: int, load: Load) -> None:
    """One request: a stream or not, of a kind that follows from its number."""
    prompt = " ".join(WORDS[(number * step) % len(WORDS)] for step in range(1, 4 + number % 24))
    asked = {"model": model, "prompt": prompt, "max_tokens": most, "temperature": 0, "extra_body": {"ignore_eos": True}}
    began, first, tokens = time.perf_counter(), None, 0
    try:
        if number % 2:
            answer = client.completions.create(**asked)
            tokens = answer.usage.completion_tokens
        else:
            for chunk in client.completions.create(stream=True, stream_options={"include_usage": True}, **asked):
                first = first or time.perf_counter() - began
                tokens = chunk.usage.completion_tokens if chunk.usage else tokens
                if number % 20 == 0:
                    time.sleep(0.05)  # a slow reader
        outcome = "answered" if tokens == most else "short"
    except Exception as error:  # noqa: BLE001 - counted by its name
        outcome = type(error).__name__
    with load.lock:
        load.outcomes[outcome] += 1
        load.tokens += tokens
        if outcome == "answered":
            load.whole.append(time.perf_counter() - began)
            load.first += [] if first is None else [first]


def leave(host: str, port: int, model: str, load: Load) -> None:
    """A client that goes away in the middle of its answer."""
    body = json.dumps({"model": model, "prompt": "return", "max_tokens": 100, "stream": True}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    with socket.create_connection((host, port), timeout=SECONDS) as connection:
        connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        connection.recv(64)
    with load.lock:
        load.outcomes["left"] += 1


def percentile(values: Sequence[float], share: float) -> float | None:
    """The value below which `share` of them are; None of nothing."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else None


def memory_mib(process: psutil.Process) -> float:
    """Of the server and its children."""
    each: list[int] = [one.memory_info().rss for one in (process, *process.children(recursive=True))]
    return sum(each) / 2**20


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Serve, ask, end; the figures."""
    from openai import OpenAI

    command = [sys.executable, "-m", "partita", "serve", options.package, "--port", "0", "--json"]
    command += ["--provider", options.provider, "--max-queue", str(options.clients)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ})
    assert child.stdout is not None
    lines: list[str] = []
    while not lines or lines[-1] != "}\n":
        lines.append(child.stdout.readline())
        if not lines[-1]:
            raise SystemExit("the server did not begin")
    told = json.loads("".join(lines))
    if "error" in told:
        raise SystemExit(child.wait())  # it has said why
    model, process = told["models"][0]["name"], psutil.Process(child.pid)
    host, _, port = told["url"].removeprefix("http://").rpartition(":")
    load = Load()
    try:
        with OpenAI(base_url=f"{told['url']}/v1", api_key="none", max_retries=0, timeout=SECONDS) as client:

            def one(number: int) -> None:
                if number % 25 == 24:
                    leave(host, int(port), model, load)
                else:
                    ask(client, model, number, options.tokens, load)

            early = max(options.clients, options.requests // 10)
            with ThreadPoolExecutor(options.clients) as pool:
                list(pool.map(one, range(early)))
                before = memory_mib(process)
                began, tokens = time.perf_counter(), load.tokens
                list(pool.map(one, range(early, options.requests)))
                seconds, tokens = time.perf_counter() - began, load.tokens - tokens
        after = memory_mib(process)
    finally:
        child.send_signal(signal.SIGTERM)
    return {
        "package": options.package,
        "slots": told["models"][0]["slots"],
        "clients": options.clients,
        "requests": sum(load.outcomes.values()),
        "seconds": seconds,
        "outcomes": dict(load.outcomes),
        "first_token_p50_seconds": percentile(load.first, 0.5),
        "first_token_p99_seconds": percentile(load.first, 0.99),
        "request_p50_seconds": percentile(load.whole, 0.5),
        "request_p99_seconds": percentile(load.whole, 0.99),
        "tokens_per_second": tokens / seconds,
        "server_mib_early": before,
        "server_mib_late": after,
        "exit_code": child.wait(),
    }


def main() -> None:
    """Read the options, print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package")
    parser.add_argument("--provider", default="cpu")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=16, help="of each answer")
    for name, value in run(parser.parse_args()).items():
        print(f"{name:<26} {value}")


if __name__ == "__main__":
    main()
