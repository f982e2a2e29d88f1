"""A server with a saved prefix, or with a draft package, gives the text of a plain one."""

from __future__ import annotations

from typing import Any

import pytest

from partita.runtime.generate.prefix_file import read_content
from partita.serve.served_package import ServedPackage
from tests.drafts import always_draft
from tests.serve.serving import SYSTEM, Running, running

QUESTIONS = ["hi", "return the value", "def add(a, b):", "a b c"]


def answer(server: Running, question: str) -> str:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    body: dict[str, Any] = {"model": "tiny", "messages": messages, "max_tokens": 12, "temperature": 0}
    told = server.post("/v1/chat/completions", {**body, "ignore_eos": True}).json()
    assert "choices" in told, (told, server.log)
    text: str = told["choices"][0]["message"]["content"]
    return text


@pytest.mark.parametrize("process", ["this", "child"])
def test_first_request_reuses_saved_prefix(server, package, prefix, process, monkeypatch):
    submit, tickets = ServedPackage.submit, []

    def noted(*given):
        tickets.append(submit(*given))
        return tickets[-1]

    monkeypatch.setattr(ServedPackage, "submit", noted)
    with running({"tiny": package}, process=process, prefix=prefix) as begun:
        text = answer(begun, QUESTIONS[0])
        copied = [ticket.copied_tokens for ticket in tickets]
        assert text == answer(server, QUESTIONS[0])
        known = len(read_content(prefix).tokens)
        assert copied == [known] and known > 16


def test_draft_package_keeps_answers(server, tiny_checkpoint, exported, monkeypatch):
    package = exported(tiny_checkpoint("llama"), attention="gqa", max_length=128)
    always_draft(monkeypatch)
    monkeypatch.setattr("partita.serve.served_package.REPORT_SECONDS", 0.0)
    wanted = [answer(server, question) for question in QUESTIONS]
    with running({"tiny": package}, draft=package) as drafting:
        assert [answer(drafting, question) for question in QUESTIONS] == wanted
        told = drafting.get("/report?view=json").json()["speculation"]
        assert 0 < told["accepted"] <= told["drafted"]
