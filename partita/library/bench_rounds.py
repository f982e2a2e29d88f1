"""The rounds of a bench: each contender loads its package in a worker process and generates in turn.

The times are those of `load` and `Model.generate`, with text and the transfer to this process. All packages are open at
the same time, but only one computes.
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
from partita.options.bench import BenchOptions
from partita.partition_reports import storage
from partita.process import peak_rss_bytes

PAUSE_SECONDS = 0.5
"""Pause before each turn: threads of the last one spin for a while after its last run."""
Say = Callable[[str], object]


@dataclass(slots=True)
class Racer:
    """One contender while the rounds go on."""

    entry: Entry
    options: BenchOptions
    engine: RemoteEngine | None = None
    model: Model | None = None
    used: tuple[str, ...] = ()
    """Active providers, by ONNX Runtime's names."""
    error: PartitaError | None = None
    lane: Lane = field(init=False)

    def __post_init__(self) -> None:
        """Begin the figures."""
        chain = tuple(provider.ort_name for provider in self.entry.chain)
        self.lane = Lane(self.entry.name, chain, package=self.entry.subject.name)

    @property
    def alive(self) -> bool:
        """Whether it is open and has not failed."""
        return self.model is not None and self.error is None

    def fail(self, error: PartitaError) -> None:
        """Note the error that ends its turns."""
        self.error, self.lane.error = error, " ".join(str(error).split())

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
        """Open it and note the state of its chain."""
        self.open()
        assert self.engine is not None
        opened, names = self.engine.opened, {provider.ort_name: provider.name for provider in self.entry.chain}
        self.lane.load_seconds = opened.load_seconds
        lost = [entry for entry in opened.chain if entry.status != "active"]
        inactive = [not_used(names.get(entry.provider, entry.provider), entry, with_remedy=False) for entry in lost]
        self.lane.unused = (*inactive, *(f"{name} was assigned no nodes" for name in opened.idle))
        self.used = tuple(entry.provider for entry in opened.chain if entry.status == "active")

    def take_turn(self, number: int) -> Turn:
        """Generate greedily, ignoring stop tokens, and measure it."""
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
                racer.fail(error)

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
            racer.lane.turns += (racer.take_turn(number),)
        except PartitaError as error:
            racer.fail(error)

    def observe(self, files: dict[str, Path]) -> None:
        """One more profiled generation of each contender that did not fail; an error here does not change the figures.

        It runs in a new process: the OpenVINO plugin does not start again after its first session is closed.
        """
        for racer in self.racers:
            if racer.alive:
                self.say(f"observing {racer.entry.name}")
                racer.close()
                try:
                    self.observe_one(racer, files.get(racer.entry.name))
                except PartitaError as error:
                    racer.lane.why_unknown = f"the observed round failed: {' '.join(str(error).split())}"

    def observe_one(self, racer: Racer, file: Path | None) -> None:
        """Store and write the report of one contender, if it ran on the providers that were measured."""
        racer.open(observe=True)
        assert racer.engine is not None
        used = tuple(entry.provider for entry in racer.engine.opened.chain if entry.status == "active")
        if used != racer.used:
            racer.lane.why_unknown = f"the observed round ran on {','.join(used)}, and not on {','.join(racer.used)}"
            return
        racer.take_turn(0)
        report = racer.engine.report(ReportRequest())
        report = report.model_copy(update={"request": report.request.model_copy(update={"verb": "bench"})})
        if file is not None:
            storage.write(report, file.resolve())
            racer.lane.file = str(file)
        racer.lane.observed = report
