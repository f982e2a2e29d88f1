"""Worker process messages: updates of short steps are batched without delaying a finished request."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from partita.library.engine import worker_loop
from partita.library.engine.worker_loop import Host


class Sent:
    """A channel that keeps the messages."""

    def __init__(self) -> None:
        self.messages: list[Any] = []

    def push(self, event: Any) -> None:
        self.messages.append(event)


class Steps:
    """An engine whose steps take so many seconds; `ends`: the last one ends the request."""

    lost_by = None

    def __init__(self, host: Host, seconds: list[float], *, ends: bool) -> None:
        self.host, self.seconds, self.ends, self.number, self.now = host, seconds, ends, 0, 0.0

    def step(self) -> bool:
        if self.number == len(self.seconds):
            return False
        self.now += self.seconds[self.number]
        self.number += 1
        end = (None, 0.0, None, 0) if self.ends and self.number == len(self.seconds) else None
        self.host._pieces.append((1, "", (self.number,), (), None, end))
        return True


@pytest.mark.parametrize(
    ("seconds", "ends", "messages"),
    [
        ([0.0003] * 6, False, [[1], [2, 3, 4, 5, 6]]),
        ([0.0003] * 9, True, [[1], [2, 3, 4, 5, 6, 7, 8], [9]]),
        ([0.01, 0.0003, 0.01, 0.0003], False, [[1], [2], [3], [4]]),
    ],
    ids=["nothing more to do", "a request ends", "a long step may follow"],
)
def test_updates_of_short_steps_are_sent_together(
    monkeypatch: pytest.MonkeyPatch, seconds: list[float], ends: bool, messages: list[list[int]]
) -> None:
    channel: Any = Sent()
    host = Host(channel)
    engine: Any = Steps(host, seconds, ends=ends)
    monkeypatch.setattr(worker_loop, "time", SimpleNamespace(perf_counter=lambda: engine.now))
    host.engine = engine
    for _ in seconds:
        assert host.step()
    assert ends or not host.step()
    tokens = [[piece[2][0] for update in message for piece in update[0]] for message in channel.messages]
    assert tokens == messages
