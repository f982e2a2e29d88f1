"""A package that a server goes on with: its prefix may be taken away while it runs."""

from __future__ import annotations

from typing import Any

import pytest

from partita.errors import GenerationError
from partita.serve.restarting import Restarting


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
