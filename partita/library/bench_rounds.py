"""The rounds of a bench: a process per contender, each in its turn, and what becomes of those that crash or hang.

A process of its own per contender gives each its own peak memory, and leaves the others standing when native code ends
one of them. They are open at the same time, so there has to be memory for all; only one computes at a time.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from partita.bench.contenders import Lane
from partita.bench.records import Turn
from partita.errors import PartitaError, ProviderError
from partita.library.bench_child import Task
from partita.library.bench_entries import Entry
from partita.library.crossing import raise_told
from partita.observations.records import Environment
from partita.partition_reports import storage
from partita.partition_reports.records import Report
from partita.runtime.process.live_child import ChildLostError, LiveChild
from partita.signals import held

CHILD = "partita.library.bench_child"
PAUSE_SECONDS = 0.5
"""Before each turn: threads of the one before spin for a while after its last run."""
Say = Callable[[str], object]


@dataclass(slots=True)
class Racer:
    """One contender while the rounds go on."""

    entry: Entry
    child: LiveChild | None = None
    turns: list[Turn] = field(default_factory=list)
    loaded: dict[str, Any] = field(default_factory=dict)
    error: PartitaError | None = None
    observed: Report | None = None
    why_unknown: str = ""

    @property
    def alive(self) -> bool:
        """It has been opened and has not failed since."""
        return self.child is not None and self.error is None

    def ask(self, question: dict[str, Any], timeout_seconds: float) -> dict[str, Any]:
        """The answer of its process. Raises what was raised there; ProviderError when it crashed or hangs."""
        assert self.child is not None
        try:
            answer = self.child.ask(question, timeout_seconds)
        except ChildLostError as lost:
            raise ProviderError(f"its process {lost}") from lost
        raise_told(answer.get("error"))
        return answer

    def lane(self, file: Path | None) -> Lane:
        """What is known of it, for the figures."""
        return Lane(
            name=self.entry.name,
            chain=tuple(provider.ort_name for provider in self.entry.chain),
            package=self.entry.subject.name,
            turns=tuple(self.turns),
            error=" ".join(str(self.error).split()) if self.error is not None else "",
            unused=tuple(self.loaded.get("unused", ())),
            load_seconds=self.loaded.get("load_seconds"),
            observed=self.observed,
            why_unknown="" if self.observed is not None else self.why_unknown,
            file=str(file) if file is not None and self.observed is not None else None,
        )

    def environment(self) -> Environment | None:
        """The machine as its process sees it."""
        told = self.loaded.get("environment")
        return None if told is None else Environment.model_validate(told)


class Race:
    """All contenders. Use it as a context manager: it ends their processes."""

    def __init__(
        self, entries: Sequence[Entry], work: Mapping[str, Task], folder: Path, timeout_seconds: float, say: Say
    ) -> None:
        self.racers = [Racer(entry) for entry in entries]
        self.work, self.folder, self.timeout_seconds, self.say = work, folder, timeout_seconds, say

    def __enter__(self) -> Race:
        return self

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        for racer in self.racers:
            if racer.child is not None:
                racer.child.kill() if kind is not None else racer.child.close()

    def load(self) -> None:
        """Open the package once per contender, one after the other."""
        for number, racer in enumerate(self.racers):
            self.say(f"opening on {racer.entry.name}")
            with held():
                racer.child = LiveChild(CHILD, self.folder / f"{number}")
            try:
                racer.loaded = racer.ask({"load": self.question(racer)}, self.timeout_seconds)
            except PartitaError as error:
                racer.error = error
                racer.child.close()

    def question(self, racer: Racer) -> dict[str, Any]:
        """What a process has to know to open the package."""
        return {"where": dataclasses.asdict(racer.entry.where), "task": dataclasses.asdict(self.work[racer.entry.name])}

    def run(self, rounds: int) -> None:
        """A warm-up and `rounds` rounds, each begun by another contender."""
        for number in range(rounds + 1):
            turn = number % len(self.racers)
            for racer in self.racers[turn:] + self.racers[:turn]:
                if racer.alive:
                    self.say(f"{f'round {number} of {rounds}' if number else 'warm-up'}: {racer.entry.name}")
                    self.take_turn(racer, number)

    def take_turn(self, racer: Racer, number: int) -> None:
        """One generation of one contender."""
        time.sleep(PAUSE_SECONDS)
        try:
            racer.turns.append(Turn.model_validate(racer.ask({"turn": {"number": number}}, self.timeout_seconds)))
        except PartitaError as error:
            racer.error = error

    def observe(self, files: dict[str, Path]) -> None:
        """One more generation of each that did not fail, profiled. What fails here takes nothing from the figures.

        In a process of its own: the OpenVINO plugin was seen not to start again once its first session was closed.
        """
        for number, racer in enumerate(self.racers):
            if racer.alive and racer.child is not None:
                self.say(f"observing {racer.entry.name}")
                racer.child.close()
                with held():
                    racer.child = LiveChild(CHILD, self.folder / f"observed-{number}")
                try:
                    self.observe_one(racer, files.get(racer.entry.name, self.folder / f"{number}.json").resolve())
                except PartitaError as error:
                    racer.why_unknown = f"the observed round failed: {' '.join(str(error).split())}"

    def observe_one(self, racer: Racer, file: Path) -> None:
        """Keep the report of one contender, when it is about the providers that were measured."""
        told = racer.ask({"observe": {**self.question(racer), "file": str(file)}}, self.timeout_seconds)
        if told["active"] != racer.loaded["active"]:
            ran, wanted = (",".join(names) for names in (told["active"], racer.loaded["active"]))
            racer.why_unknown = f"the observed round ran on {ran}, and not on {wanted}"
            return
        racer.observed = storage.read(file)
