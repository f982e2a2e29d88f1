"""A worker process of a server that ends is started again, checked, and given the requests that wait."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from partita.errors import PartitaError, ProviderError
from partita.library.chain import ChainOptions, read_chain_options
from partita.library.engine import BatchOptions, PrefixRequest, Restarts
from partita.library.remote import RETRY_SECONDS, RemoteEngine
from partita.library.requests import Ticket, Work
from partita.library.sampling import Sampling
from partita.package import read_manifest
from tests.runtime.handmade import handmade, known_tokens

KEYS = ("key",)
CPU = ChainOptions(provider="cpu", threads=1)
PROMPT = tuple((7 * i + 3) % 64 for i in range(20))


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[RemoteEngine]:
    folder = handmade(tmp_path / "p", states=KEYS)
    found = RemoteEngine(
        folder, read_manifest(folder), CPU, read_chain_options(CPU), observe=False, refusal_seconds=0, with_text=False
    )
    yield found
    found.close()


def ask(engine: RemoteEngine) -> Ticket:
    ticket = engine.submit(Work(PROMPT, Sampling(temperature=0.0, max_new_tokens=4)))
    while ticket.state != "over":
        engine.step()
    return ticket


def is_up(engine: RemoteEngine) -> bool:
    return engine.up


def lose(engine: RemoteEngine) -> None:
    engine._worker.process.kill()
    engine._worker._thread.join(60)


def test_a_prefix_whose_file_was_removed_is_left_out(engine: RemoteEngine, tmp_path: Path) -> None:
    said, file = list[str](), tmp_path / "prefix"
    engine.save_prefix(PrefixRequest(PROMPT[:17], str(file)))
    engine.open(BatchOptions(prefix=str(file)))
    assert ask(engine).copied_tokens == 17
    engine.restarts = Restarts(said.append, lambda: None)
    file.unlink()
    lose(engine)
    assert list(ask(engine).answer.tokens) == known_tokens(PROMPT, 4, KEYS)
    assert "prompts are read from their beginning" in said[1]


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ProviderError("no device", where=Path("/srv/model")), "no device"),
        (OSError(errno.ENOSPC, "No space left on device", "/tmp/partita-x"), "No space left on device"),
        (RuntimeError("odd"), "internal error"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_it_is_down_until_a_restart_succeeds(
    engine: RemoteEngine, monkeypatch: pytest.MonkeyPatch, error: Exception, text: str
) -> None:
    now, said, start = [1000.0], list[str](), engine._start
    monkeypatch.setattr("partita.library.remote.time.monotonic", lambda: now[0])
    engine.open(BatchOptions())
    engine.restarts = Restarts(said.append, lambda: None)

    def fails() -> Any:
        raise error

    monkeypatch.setattr(engine, "_start", fails)
    lose(engine)
    for _ in range(2):
        failed = ask(engine).error
        assert isinstance(failed, PartitaError) and text in failed.said and "/tmp" not in failed.said
        assert "it is tried again every 5 s" in failed.said and not is_up(engine)
    assert len(said) == 2 and "not loaded: " in said[1]
    now[0] += RETRY_SECONDS
    engine.retry()
    assert not is_up(engine) and len(said) == 2, "an error that comes again is written once"
    monkeypatch.setattr(engine, "_start", start)
    engine.retry()
    assert not is_up(engine), "it was tried just now"
    now[0] += RETRY_SECONDS
    engine.retry()
    assert is_up(engine) and said[2] == "it is loaded again, and takes requests"
    assert list(ask(engine).answer.tokens) == known_tokens(PROMPT, 4, KEYS)
