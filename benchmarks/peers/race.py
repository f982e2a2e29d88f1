"""Children that take turns. All of a group stay open while there is memory for them, else each is opened for its turn.

A round asks every contender for every prompt once, and each round is begun by another contender, so that a machine that
slows down slows all of them down.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import psutil

from benchmarks.peers.children.serving import PROVIDER
from benchmarks.peers.plan import Entry, Places, child_command
from benchmarks.peers.prepare import busy_seconds, environ, others_cores
from benchmarks.peers.records import Start, Turn, Work

PAUSE_SECONDS = 0.5
"""Before a turn: the threads of the one before spin for a while before they sleep."""
TIMEOUT_SECONDS = 900.0
MEMORY_SHARE = 0.8
"""Of the memory that is free, what the children that are open together may be expected to take."""
GROWTH = 1.5
"""What a child is expected to take, as a multiple of its files."""
WARM_TOKENS = 4
SHORTEST_SECONDS = 0.2
"""The operating system accounts for time in hundredths of a second: of less, nothing is said."""


class ChildFailedError(Exception):
    """A child refused, crashed or hung; the message says which."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What all contenders of a run have in common."""

    prompts: tuple[int, ...]
    """Lengths."""
    new_tokens: int
    rounds: int
    threads: int
    start_prompt: int
    """Length of the prompt that time to first token is measured with."""
    vocabulary: int
    starts: int | None = None
    """Times that each is started anew; None: as many as rounds."""

    @property
    def length(self) -> int:
        """The most tokens that a prompt and its answer have together."""
        return max((*self.prompts, self.start_prompt)) + self.new_tokens

    def prompt(self, tokens: int) -> list[int]:
        """The same tokens for everybody; none of the first ten, which are special in many vocabularies."""
        return [10 + (7 + 31 * index) % (self.vocabulary - 10) for index in range(tokens)]


class Child:
    """A process that has one model open. Use it as a context manager."""

    def __init__(self, entry: Entry, shape: str, places: Places, settings: Settings) -> None:
        log = places.work / shape / f"{entry.peer}-{entry.form}.child.log"
        self.log = log
        with log.open("wb") as errors:
            self.process = subprocess.Popen(
                child_command(entry, places),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environ(settings.threads, {PROVIDER: entry.provider, **entry.environ}),
            )
        model = str(places.model(shape, entry).resolve())
        try:
            self.opened = self.ask({"model": model, "threads": settings.threads, "length": settings.length})
        except BaseException:
            self.close()
            raise

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """One answer. Raises ChildFailedError."""
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(question).encode() + b"\n")
            self.process.stdin.flush()
        except OSError:
            raise ChildFailedError(self._death()) from None
        with selectors.DefaultSelector() as waiting:
            waiting.register(self.process.stdout, selectors.EVENT_READ)
            if not waiting.select(TIMEOUT_SECONDS):
                self.process.kill()
                raise ChildFailedError(f"no answer within {TIMEOUT_SECONDS:.0f} s")
        line = self.process.stdout.readline()
        if not line:
            raise ChildFailedError(self._death())
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise ChildFailedError(answer["error"])
        return answer

    def _death(self) -> str:
        code = self.process.wait()
        lines = [each for each in self.log.read_text("utf-8", errors="replace").splitlines() if each.strip()]
        how = f"ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return f"{how}{': ' + lines[-1].strip()[:300] if lines else ''}"

    def close(self) -> None:
        """End the process."""
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(slots=True)
class Racer:
    """What one contender has done so far."""

    entry: Entry
    file_bytes: int
    starts: list[Start] = field(default_factory=list)
    turns: dict[int, list[tuple[Turn, dict[str, Any]]]] = field(default_factory=dict)
    opened: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    child: Child | None = None

    def works(self, settings: Settings) -> tuple[Work, ...]:
        """As records."""
        return tuple(
            Work(
                prompt_tokens=tokens,
                new_tokens=settings.new_tokens,
                turns=tuple(turn for turn, _ in turns),
                tokens=tuple(turns[0][1]["tokens"]),
                finite=all(answer["finite"] for _, answer in turns),
                tokens_per_turn_equal=all(answer["tokens"] == turns[0][1]["tokens"] for _, answer in turns),
            )
            for tokens, turns in self.turns.items()
            if turns
        )

    @property
    def peak_rss_bytes(self) -> int | None:
        """Over all turns."""
        peaks = [answer["peak_rss_bytes"] for turns in self.turns.values() for _, answer in turns]
        return max(peaks, default=None)


@dataclass(slots=True)
class Race:
    """The contenders of one shape and width."""

    racers: list[Racer]
    shape: str
    places: Places
    settings: Settings

    def run(self) -> None:
        """Starts, then turns; what fails is left out of what follows."""
        for number in range(self.settings.rounds if self.settings.starts is None else self.settings.starts):
            for racer in self._order(number):
                self._guarded(racer, self._start)
        together = self.fits_together()
        try:
            for number in range(self.settings.rounds + 1):
                for racer in self._order(number):
                    self._guarded(racer, lambda each, count=number: self._round(each, count, stays=together))
                say(f"  round {number} of {self.settings.rounds}{' (warm-up)' if not number else ''}")
        finally:
            for racer in self.racers:
                self._end(racer)

    def fits_together(self) -> bool:
        """All children may be open at the same time."""
        wanted = sum(racer.file_bytes for racer in self.racers if racer.error is None) * GROWTH
        return wanted < MEMORY_SHARE * psutil.virtual_memory().available

    def _order(self, number: int) -> list[Racer]:
        living = [racer for racer in self.racers if racer.error is None]
        turn = number % len(living) if living else 0
        return living[turn:] + living[:turn]

    def _guarded(self, racer: Racer, act: Any) -> None:
        try:
            act(racer)
        except ChildFailedError as error:
            racer.error = str(error)
            say(f"  {racer.entry.name}: {error}")
            self._end(racer)

    def _open(self, racer: Racer) -> Child:
        child = racer.child = Child(racer.entry, self.shape, self.places, self.settings)
        racer.opened = child.opened
        return child

    def _end(self, racer: Racer) -> None:
        if racer.child is not None:
            racer.child.close()
        racer.child = None

    def _start(self, racer: Racer) -> None:
        """A new process, one prompt, one token."""
        time.sleep(PAUSE_SECONDS)
        child = self._open(racer)
        answer = child.ask({"prompt": self.settings.prompt(self.settings.start_prompt), "new_tokens": 1})
        racer.starts.append(
            Start(
                import_seconds=child.opened["import_seconds"],
                load_seconds=child.opened["load_seconds"],
                prefill_seconds=answer["prefill_seconds"],
                peak_rss_bytes=answer["peak_rss_bytes"],
            )
        )
        self._end(racer)

    def _round(self, racer: Racer, number: int, *, stays: bool) -> None:
        """Every prompt once; the first round warms up and is not counted."""
        if racer.child is None:
            child = self._open(racer)
            if number:
                child.ask({"prompt": self.settings.prompt(max(self.settings.prompts)), "new_tokens": WARM_TOKENS})
        assert racer.child is not None
        for tokens in self.settings.prompts:
            time.sleep(PAUSE_SECONDS)
            turn, answer = self._turn(racer.child, tokens)
            if len(answer["tokens"]) != self.settings.new_tokens:
                raise ChildFailedError(
                    f"{len(answer['tokens'])} tokens where {self.settings.new_tokens} were asked for"
                )
            if number:
                racer.turns.setdefault(tokens, []).append((turn, answer))
        if not stays:
            self._end(racer)

    def _turn(self, child: Child, tokens: int) -> tuple[Turn, dict[str, Any]]:
        question = {"prompt": self.settings.prompt(tokens), "new_tokens": self.settings.new_tokens}
        before, own, began = busy_seconds(), _cpu(child), time.perf_counter()
        answer = child.ask(question)
        seconds = time.perf_counter() - began
        busy, mine = busy_seconds() - before, _cpu(child) - own
        turn = Turn(
            prefill_seconds=answer["prefill_seconds"],
            decode_seconds=answer["decode_seconds"],
            others_cores=others_cores(busy, mine, seconds) if seconds >= SHORTEST_SECONDS else None,
        )
        return turn, answer


def _cpu(child: Child) -> float:
    times = psutil.Process(child.process.pid).cpu_times()
    return float(times.user + times.system)


def say(text: str) -> None:
    """Tell whoever waits."""
    print(text, file=sys.stderr, flush=True)


def environments_missing(entries: list[Entry], places: Places) -> list[str]:
    """Interpreters that are not there."""
    return sorted({python for entry in entries if not os.access(python := places.python(entry), os.X_OK)})
