"""Serving with a saved prefix: the system prompt is not prefilled after a restart."""

from __future__ import annotations

from typing import Any

import pytest

from partita.library.engine.requests import Ticket, Work
from partita.runtime.generate.prefix_file import read_content
from partita.serve.responses import ResponseChoice
from partita.serve.served_package import ServedPackage
from tests.serve.serving import SYSTEM, Running, running

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "hi"}],
    "max_tokens": 8,
    "temperature": 0,
}


def answer(server: Running) -> str:
    told = server.post(CHAT, BODY).json()
    assert "choices" in told, (told, server.log)
    text: str = told["choices"][0]["message"]["content"]
    return text


@pytest.mark.parametrize("process", ["this", "child"])
def test_first_request_reuses_saved_prefix(server, package, prefix, process, monkeypatch):
    submit = ServedPackage.submit

    def noted(self: ServedPackage, work: Work, choice: ResponseChoice) -> Ticket:
        tickets.append(submit(self, work, choice))
        return tickets[-1]

    tickets: list[Ticket] = []
    monkeypatch.setattr(ServedPackage, "submit", noted)
    with running({"tiny": package}, process=process, prefix=prefix) as begun:
        text = answer(begun)
        copied = [ticket.copied_tokens for ticket in tickets]
        assert text == answer(server)
        known = len(read_content(prefix).tokens)
        assert copied == [known] and known > 16
