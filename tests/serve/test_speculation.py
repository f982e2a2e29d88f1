"""Server responses are the same with speculative decoding."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import partita
from partita.options.generation import BatchOptions
from tests.drafts import always_draft, knowing
from tests.serve.serving import running

TEXT = "def add(a, b):\n    return a + b\n\ndef add(a, b):"
COMPLETION = "/v1/completions"


def test_speculation_keeps_completions_and_accepts_draft_tokens(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Package with four rows and `gqa` attention, as the serving page recommends."""
    always_draft(monkeypatch)
    monkeypatch.setattr("partita.serve.served_package.REPORT_SECONDS", 0.0)
    prompts, count = [TEXT, TEXT[4:], TEXT[:30], TEXT[:20]], 24
    with partita.load(package, providers="cpu", threads=1, observe=False) as model:
        ids = [model.encode(prompt) for prompt in prompts]
        asked: Any = {"max_new_tokens": count, "stop_token_ids": ()}
        plain = [model.generate([own] * 4, **asked).run() for own in ids]
    wanted = [one.results[0].text for one in plain]
    knowing(monkeypatch, *([*own, *one.tokens[0]] for own, one in zip(ids, plain, strict=True)))
    body = {"model": "tiny", "max_tokens": count, "temperature": 0, "ignore_eos": True, "logprobs": 1}
    with running({"tiny": package}, batch=BatchOptions(speculate="ngram")) as server:

        def answer(prompt: str) -> dict[str, Any]:
            found: dict[str, Any] = server.post(COMPLETION, {**body, "prompt": prompt}).json()["choices"][0]
            return found

        first = answer(TEXT)
        assert first["text"] == wanted[0] and len(first["logprobs"]["token_logprobs"]) == count
        told = server.get("/report?view=json").json()["speculation"]
        assert 0 < told["accepted"] < told["drafted"]
        with ThreadPoolExecutor(4) as pool:
            assert [found["text"] for found in pool.map(answer, prompts)] == wanted
