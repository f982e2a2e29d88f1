"""A package that a server goes on with: its prefix may be taken away while it runs, and so may its process."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from partita.errors import GenerationError, PartitaError, ProviderError
from partita.serve.restarting import AGAIN_SECONDS, Restarting


class Engine:
    """Opens with a prefix as long as its file is there."""

    there = True

    def __init__(self) -> None:
        self.opened: list[str | None] = []

    def open(self, chunk: Any, adapter: Any, speculation: Any, prefix: str | None = None) -> str:
        if prefix is not None and not self.there:
            raise GenerationError(f"{prefix}: no such file")
        self.opened.append(prefix)
        return "begun"


def test_answers_go_on_without_a_prefix_whose_file_was_taken_away() -> None:
    engine, said = Engine(), list[str]()
    kept = Restarting(lambda: engine, said.append)  # type: ignore[arg-type, return-value]
    assert kept.open(prefix="kept") and not said
    engine.there = False
    assert kept.open(prefix="kept")
    assert engine.opened == ["kept", None]
    assert said == ["kept: no such file; prompts are read from their beginning"]


def test_one_that_is_not_there_at_the_start_is_refused() -> None:
    engine = Engine()
    engine.there = False
    kept = Restarting(lambda: engine, print)  # type: ignore[arg-type, return-value]
    with pytest.raises(GenerationError):
        kept.open(prefix="kept")


class Loads:
    """What loading does, time after time: an engine, or an error."""

    def __init__(self, *outcomes: Any) -> None:
        self.outcomes, self.engines = list(outcomes), list[Closable]()

    def __call__(self) -> Any:
        outcome = self.outcomes.pop(0) if self.outcomes else None
        if outcome is not None:
            raise outcome
        self.engines.append(Closable())
        return self.engines[-1]


class Closable(Engine):
    lost = closed = False

    def open(self, *given: Any) -> str:
        if self.lost:
            raise ProviderError("the child process crashed")
        return super().open(*given)

    def close(self) -> None:
        self.closed = True


def is_up(kept: Restarting) -> bool:
    return kept.up


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr("partita.serve.restarting.time.monotonic", lambda: now[0])
    return now


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ProviderError("no device", where=Path("/srv/model")), "no device"),
        (OSError(errno.ENOSPC, "No space left on device", "/tmp/partita-x"), "No space left on device"),
        (OSError(errno.EAGAIN, "Resource temporarily unavailable"), "Resource temporarily unavailable"),
        (MemoryError(), "out of memory"),
        (RuntimeError("odd"), "internal error: RuntimeError: odd"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_whatever_ends_a_reload_is_an_error_of_ours_and_it_is_down_until_one_succeeds(
    clock: list[float], error: Exception, said: str
) -> None:
    told = list[str]()
    loads = Loads(None, error, error)
    kept = Restarting(loads, told.append)
    kept.open()
    loads.engines[0].lost = True
    with pytest.raises(PartitaError, match=said) as raised:
        kept.open()
    assert not is_up(kept) and loads.engines[0].closed
    with pytest.raises(ProviderError, match="it is tried again every 5 s") as again:
        kept.open()
    for each in (raised.value, again.value):  # clients are told what was `said`
        assert said in each.said and "/srv" not in each.said and "/tmp" not in each.said
    kept.try_again()
    assert len(loads.outcomes) == 1, "it was tried just now"
    clock[0] += AGAIN_SECONDS
    kept.try_again()
    assert not is_up(kept) and not loads.outcomes
    clock[0] += AGAIN_SECONDS
    kept.try_again()  # nobody has asked for anything
    assert is_up(kept) and str(kept.open()) == "begun" and len(loads.engines) == 2
    assert len(told) == 3, "an error that comes again and again is told once"
    assert said in told[1] and told[2] == "it is loaded again, and takes requests"
    kept.try_again()
    assert len(loads.engines) == 2


def test_what_is_loaded_again_while_the_server_ends_is_freed_and_not_told_of() -> None:
    told, loads = list[str](), Loads()

    def load() -> Any:
        if loads.engines:  # it takes long, and meanwhile the server ends
            kept.close()
        return loads()

    kept = Restarting(load, told.append)
    kept.open()
    loads.engines[0].lost = True
    with pytest.raises(GenerationError, match="closed"):
        kept.open()
    assert [engine.closed for engine in loads.engines] == [True, True]
    assert told == ["the child process crashed; it is loaded again"]
