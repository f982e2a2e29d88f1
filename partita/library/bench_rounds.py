"""The rounds of a bench: each contender loads its package in a worker process, and generates in its turn.

What is measured is what a program gets of `load` and `Model.generate`: text included, and the time at which a step
reaches this process. A worker for each gives each its own peak memory, and a crash ends one contender. All are open at
the same time, so there has to be memory for all; only one computes at a time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from partita.bench.contenders import Lane
from partita.bench.records import Turn
from partita.errors import PartitaError
from partita.library.bench_entries import Entry
from partita.library.chain import read_chain_options
from partita.library.engine import ReportRequest
from partita.library.model import Model
from partita.library.notes import not_used
from partita.library.remote import RemoteEngine
from partita.options import BenchOptions
from partita.partition_reports import storage
from partita.partition_reports.records import Report
from partita.process import peak_rss_bytes

PAUSE_SECONDS = 0.5
"""Before each turn: threads of the one before spin for a while after its last run."""
Say = Callable[[str], object]


@dataclass(slots=True)
class Racer:
    """One contender while the rounds go on."""

    entry: Entry
    options: BenchOptions
    engine: RemoteEngine | None = None
    model: Model | None = None
    turns: list[Turn] = field(default_factory=list)
    unused: tuple[str, ...] = ()
    """Providers of its chain that are not used, in words."""
    used: tuple[str, ...] = ()
    """The others, by ONNX Runtime's names."""
    load_seconds: float | None = None
    error: PartitaError | None = None
    observed: Report | None = None
    why_unknown: str = ""

    @property
    def alive(self) -> bool:
        """It has been opened and has not failed since."""
        return self.model is not None and self.error is None

    def open(self, *, observe: bool = False) -> None:
        """Load the package in a worker process. Raises what `load` raises; ProviderError when it takes too long."""
        subject = self.entry.subject
        self.engine = RemoteEngine(
            subject.path.absolute(),
            subject.manifest,
            self.entry.where,
            read_chain_options(self.entry.where),
            observe=observe,
            refusal_seconds=0.0,
            choice=subject.choice,
            load_timeout=self.options.timeout_seconds,
        )
        self.model = Model(self.engine)

    def load(self) -> None:
        """Open it and note what became of its chain."""
        self.open()
        assert self.engine is not None
        opened, names = self.engine.opened, {provider.ort_name: provider.name for provider in self.entry.chain}
        self.load_seconds = opened.load_seconds
        lost = [entry for entry in opened.chain if entry.status != "active"]
        told = [not_used(names.get(entry.provider, entry.provider), entry, with_remedy=False) for entry in lost]
        self.unused = (*told, *(f"{name} was assigned no nodes" for name in opened.idle))
        self.used = tuple(entry.provider for entry in opened.chain if entry.status == "active")

    def take_turn(self, number: int) -> Turn:
        """Generate greedily and measure it. To the last token: where a model would stop, every contender goes on."""
        assert self.model is not None and self.engine is not None
        seconds = self.options.timeout_seconds
        late = threading.Timer(seconds, self.engine.abort, (f"gave no answer within {seconds:g} s",))
        late.daemon = True
        late.start()
        try:
            began = time.perf_counter()
            generation = self.model.generate(
                [list(prompt) for prompt in self.entry.subject.prompts],
                max_new_tokens=self.options.max_new_tokens,
                stop_token_ids=(),
                prefill_chunk=self.options.prefill_chunk,
            )
            times = [began]
            first: float | None = None
            for step in generation:
                times.append(time.perf_counter())
                if first is None and any(step.tokens):
                    first = times[-1] - began
        finally:
            late.cancel()
        took = [after - before for before, after in zip(times, times[1:], strict=False)]
        steps = list(zip(generation.progress.steps, took, strict=True))
        prefill, decode = ([each for each in steps if each[0].phase == phase] for phase in ("prefill", "decode"))
        return Turn(
            round=number,
            prefill_ms=tuple(1000 * seconds for _, seconds in prefill),
            prefill_tokens=sum(step.row_tokens for step, _ in prefill),
            decode_ms=tuple(1000 * seconds for _, seconds in decode),
            decode_tokens=sum(step.row_tokens for step, _ in decode),
            decode_outside_ms=1000 * sum(seconds - step.run_seconds for step, seconds in decode),
            first_token_ms=None if first is None else 1000 * first,
            tokens=generation.tokens,
            peak_rss_bytes=peak_rss_bytes(self.engine.process_id),
        )

    def close(self, *, at_once: bool = False) -> None:
        """End its process."""
        if self.engine is not None:
            if at_once:
                self.engine.abort("was interrupted")
            self.engine.close()

    def lane(self, file: Path | None) -> Lane:
        """What is known of it, for the figures."""
        return Lane(
            name=self.entry.name,
            chain=tuple(provider.ort_name for provider in self.entry.chain),
            package=self.entry.subject.name,
            turns=tuple(self.turns),
            error=" ".join(str(self.error).split()) if self.error is not None else "",
            unused=self.unused,
            load_seconds=self.load_seconds,
            observed=self.observed,
            why_unknown="" if self.observed is not None else self.why_unknown,
            file=str(file) if file is not None and self.observed is not None else None,
        )


class Race:
    """All contenders. Use it as a context manager: it ends their processes."""

    def __init__(self, entries: Sequence[Entry], options: BenchOptions, say: Say) -> None:
        self.racers = [Racer(entry, options) for entry in entries]
        self.say = say

    def __enter__(self) -> Race:
        return self

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        for racer in self.racers:
            racer.close(at_once=kind is not None)

    def load(self) -> None:
        """Open the package once per contender, one after the other."""
        for racer in self.racers:
            self.say(f"opening on {racer.entry.name}")
            try:
                racer.load()
            except PartitaError as error:
                racer.error = error

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
            racer.turns.append(racer.take_turn(number))
        except PartitaError as error:
            racer.error = error

    def observe(self, files: dict[str, Path]) -> None:
        """One more generation of each that did not fail, profiled. What fails here takes nothing from the figures.

        In a process of its own: the OpenVINO plugin was seen not to start again once its first session was closed.
        """
        for racer in self.racers:
            if racer.alive:
                self.say(f"observing {racer.entry.name}")
                racer.close()
                try:
                    self.observe_one(racer, files.get(racer.entry.name))
                except PartitaError as error:
                    racer.why_unknown = f"the observed round failed: {' '.join(str(error).split())}"

    def observe_one(self, racer: Racer, file: Path | None) -> None:
        """Keep the report of one contender, when it is about the providers that were measured, and write it."""
        racer.open(observe=True)
        assert racer.engine is not None
        used = tuple(entry.provider for entry in racer.engine.opened.chain if entry.status == "active")
        if used != racer.used:
            racer.why_unknown = f"the observed round ran on {','.join(used)}, and not on {','.join(racer.used)}"
            return
        racer.take_turn(0)
        report = racer.engine.report(ReportRequest())
        report = report.model_copy(update={"request": report.request.model_copy(update={"verb": "bench"})})
        if file is not None:
            storage.write(report, file.resolve())
        racer.observed = report
