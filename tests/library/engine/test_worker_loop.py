"""What a worker sends: updates of fast decode steps together, and everything before an answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from partita.foreign.folder import AS_IT_IS
from partita.library.chain import ChainOptions
from partita.library.engine import worker_loop
from partita.library.engine.base import BatchOptions
from partita.library.engine.requests import Work
from partita.library.engine.worker_loop import Host, Update
from partita.library.sampling import Sampling
from tests.runtime.handmade_packages import handmade, known_tokens

KEYS = ("key",)
PROMPT = (5, 9, 2, 40, 11)


class FakeChannel:
    def __init__(self) -> None:
        self.pushed: list[list[tuple[Any, ...]]] = []

    def push(self, event: Any) -> None:
        self.pushed.append(event)


def begin(folder: Path, channel: Any, count: int) -> Host:
    """A host with one request of `count` tokens."""
    host = Host(channel)
    package = handmade(folder, batch=1, states=KEYS)
    host.load(
        package, ChainOptions(provider="cpu", threads=1), AS_IT_IS, observe=False, refusal_seconds=0.0, text=False
    )
    host.engine.open(BatchOptions())
    host.submit(1, Work(PROMPT, Sampling(temperature=0.0, max_new_tokens=count)), False, True)
    return host


@pytest.mark.parametrize(("seconds", "sizes"), [(0.0, [1] * 9), (3600.0, [1, 8])], ids=["slow steps", "fast steps"])
def test_updates_of_fast_steps_are_sent_together(tmp_path, monkeypatch, seconds, sizes):
    monkeypatch.setattr(worker_loop, "PUSH_SECONDS", seconds)
    channel = FakeChannel()
    host = begin(tmp_path / "p", channel, 9)
    while host.step():
        pass
    assert [len(updates) for updates in channel.pushed] == sizes  # the first token is sent at once
    updates = [Update._make(update) for pushed in channel.pushed for update in pushed]
    tokens = [token for update in updates for piece in update.pieces for token in piece[2]]
    assert tokens == known_tokens(PROMPT, 9, KEYS) and updates[-1].pieces[0][4] == "length"
    assert all(update.step is not None for update in updates)
    host.engine.close()


def test_a_new_request_and_a_message_send_what_was_held_back(tmp_path, monkeypatch):
    monkeypatch.setattr(worker_loop, "PUSH_SECONDS", 3600.0)
    channel = FakeChannel()
    host = begin(tmp_path / "p", channel, 12)
    for _ in range(5):
        host.step()
    assert [len(updates) for updates in channel.pushed] == [1]
    host.push()
    assert [len(updates) for updates in channel.pushed] == [1, 4]
    host.submit(2, Work(PROMPT, Sampling(temperature=0.0, max_new_tokens=2)), False, True)
    host.step()  # it waits for the row, so the next step may be slow
    assert [len(updates) for updates in channel.pushed] == [1, 4, 1]
    host.engine.close()
