"""What a run leaves for its report: profiled runs, facts of sessions, and steps.

The first runs of each phase are profiled. The profile is parsed only when facts are needed, not during a step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from partita.observations.facts import NodeEvent, ProviderFacts, RunWindow, SessionFacts, StepFact
from partita.package.contract import PhaseName
from partita.providers.resolve import Resolution
from partita.runtime.generate.choice.sampling import TokenLogprobs
from partita.runtime.generate.request import Finish, Row
from partita.runtime.ort.native_log import parse_profile

if TYPE_CHECKING:
    from partita.runtime.ort.session import Session

OBSERVED_RUNS = {"prefill": 1, "decode": 4}
"""Minimum profiled session runs of each phase."""


class Window:
    """The profiled runs of one session. `open` is True while profiling is on."""

    def __init__(self, session: Session, phases: Collection[str]) -> None:
        self.open = session.profiling
        self._session = session
        self._due = Counter({phase: OBSERVED_RUNS[phase] for phase in phases})
        self._runs: list[tuple[str, int, int | None]] = []
        """Phase, new tokens and rows of the batch of each run; rows None: all."""
        self._earlier = 0
        """Runs of generations before the last."""
        self.rehearses = False
        """Runs belong to no generation: they are profiled but not counted."""
        self._rehearsed = 0
        """Number of uncounted runs; they come first."""
        self._profile: str | None = None

    def listening(self, phase: str) -> AbstractContextManager[None]:
        """Capture the log of a profiled run, the first of its phase."""
        return self._session.listening(phase) if self.open and not self.rehearses else nullcontext()

    def begin(self) -> None:
        """Begin a generation: earlier runs belong to earlier generations."""
        self._earlier = len(self._runs)

    def after_run(self, phase: str, new_tokens: int, rows: int | None = None, *, cut_short: bool = False) -> None:
        """Count a profiled run, and close the window when every phase has its runs. `rows`: None for all rows.

        `cut_short`: close it after Ctrl-C during the run; the profile contains the run completely or not at all.
        """
        if not self.open:
            return
        self._runs.append((phase, new_tokens, rows))
        if self.rehearses and not cut_short:
            self._rehearsed = len(self._runs)
            return
        self._due[phase] -= 1
        if cut_short or max(self._due.values()) <= 0:
            self.close()

    def close(self) -> None:
        """Stop profiling and keep the profile. May be called repeatedly."""
        if self.open:
            self.open = False
            self._profile = self._session.end_profiling()

    def events(self) -> tuple[tuple[NodeEvent, ...], tuple[RunWindow, ...]]:
        """Profiled node executions and runs; closes the window.

        Each phase has the runs of the last generation, or of earlier ones if the last has none.
        """
        self.close()
        if not self._profile:
            return (), ()
        events, runs = parse_profile(self._profile, [run[:2] for run in self._runs])
        own = {run.phase for run in runs[self._earlier :]}
        counted = tuple(
            replace(run, earlier=index < self._earlier, rows=self._runs[index][2])
            for index, run in enumerate(runs)
            if index >= self._rehearsed and (index >= self._earlier or run.phase not in own)
        )
        numbers = {run.run for run in counted}
        return tuple(event for event in events if event.run in numbers), counted


def session_facts(session: Session, chain: Sequence[Resolution], **others: Any) -> SessionFacts:
    """Facts of one session. `chain`: as the user gave it. `others`: the other fields of `SessionFacts`."""
    providers = {
        entry.provider.ort_name: ProviderFacts(
            patterns=entry.provider.node_patterns,
            message_patterns=entry.provider.message_patterns,
            budget=entry.budget,
            kernels=entry.provider.kernels,
        )
        for entry in chain
    }
    return SessionFacts(
        plan=session.plan,
        plan_devices=session.plan_devices,
        assigned=session.assigned(),
        log=session.log,
        registered=session.registered,
        load_seconds=session.load_seconds,
        providers=providers,
        pins=session.pins,
        cpu=session.cpu,
        run_log=dict(session.run_log.lines),
        **others,
    )


class Step(NamedTuple):
    """One step of the generation loop: one session run and its tokens. A tuple for speed: every token makes one."""

    phase: PhaseName
    """prefill if any row is in its prompt, else decode."""
    new_tokens: int
    """Tokens of the row with the most, without padding and rejected draft tokens."""
    row_tokens: int
    """Tokens over all rows: prompt tokens during prefill, otherwise one per decoding row."""
    tokens: tuple[tuple[int, ...], ...]
    """The new tokens of each row; empty for a row that has finished or is still in its prompt."""
    run_seconds: float
    """Wall time of the session run."""
    overhead_seconds: float
    """Wall time since the previous step, less `run_seconds`: feeding, sampling, and the caller's work in between."""
    finish: tuple[Finish | None, ...]
    """Finish reason of each row, set in this step or before; None while it is running or free."""
    observed: bool
    """Whether profiling was on."""
    file: str
    """The ONNX file of the run. A static pair runs part of a prompt with decode.onnx."""
    is_repeated: bool = False
    """Whether tokens were read again because their cached states were no longer valid."""
    drafted: int = 0
    """Draft tokens of all rows that were verified."""
    accepted: int = 0
    """Draft tokens of all rows that were accepted."""
    draft_seconds: float = 0.0
    """Drafting time, part of `overhead_seconds`, with runs of the draft model."""
    errors: tuple[str | None, ...] = ()
    """Error of each row that finished with `error`, else empty; () without any."""
    logprobs: tuple[tuple[TokenLogprobs, ...], ...] = ()
    """Log-probabilities of the new tokens of each row that requested them; () without any."""
    prefix_tokens: tuple[int, ...] = ()
    """Prompt tokens of each row that were in the prefix cache, since the previous step; () without any."""

    @property
    def fact(self) -> StepFact:
        """The step as a fact."""
        others = (each.name for each in fields(StepFact) if each.name not in ("tokens", "seconds"))
        named = {name: getattr(self, name) for name in others}
        return StepFact(tokens=self.new_tokens, seconds=self.run_seconds, **named)


def first_token_seconds(steps: Sequence[Step]) -> float | None:
    """Time from the start of the generation to the first new token of any row; None without one."""
    seconds = 0.0
    for step in steps:
        seconds += step.run_seconds + step.overhead_seconds
        if any(step.tokens):
            return seconds
    return None


KEPT_STEPS = 512
"""Steps kept if requests take turns, which may go on for weeks; with 8 rows, a step takes more than 1 KiB."""


class Recorder:
    """Keeps the steps since the last `begin`: all while each row has one request, else the last and profiled steps."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Clear the record."""
        self.steps: list[Step] = []
        self.takes_turns = False
        """Whether a row has had several requests; then counts of tokens are totals."""
        self.requests = 0
        self.new_tokens = 0
        """Tokens over all rows."""
        self.forgotten = 0
        """Number of steps that were dropped."""
        self.longest = self.max_new_tokens = 0
        """The longest text in tokens, and the largest token budget."""
        self.adapters: dict[str | None, None] = {}
        """Adapters of the requests, in order."""
        self._total = 0
        """Total prompt tokens."""
        self._rows: set[int] = set()
        """Rows that had a request."""

    @property
    def prompt_tokens(self) -> int:
        """Total prompt tokens if requests take turns, else those of the longest prompt."""
        return self._total if self.takes_turns else self.longest

    def on_request(self, index: int, row: Row) -> None:
        """Record a request in row `index`."""
        if not row.request.is_warm_up:
            self.adapters[row.request.adapter] = None
        self.longest = max(self.longest, row.known)
        self.max_new_tokens = max(self.max_new_tokens, row.request.max_new_tokens)
        self.requests += 1
        self._total += row.known
        self.takes_turns = self.takes_turns or index in self._rows
        self._rows.add(index)

    def on_step(self, step: Step) -> None:
        """Record a step."""
        self.steps.append(step)
        self.new_tokens += sum(map(len, step.tokens))
        if self.takes_turns and len(self.steps) >= 2 * KEPT_STEPS:
            early, late = self.steps[:-KEPT_STEPS], self.steps[-KEPT_STEPS:]
            kept = [entry for entry in early if entry.observed]
            self.forgotten += len(early) - len(kept)
            self.steps = [*kept, *late]
