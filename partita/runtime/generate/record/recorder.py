"""What is kept of the steps of a generation: an observer of the loop, which does not know it."""

from __future__ import annotations

from typing import NamedTuple

from partita.package.contract import PhaseName
from partita.runtime.generate.choice.logprobs import TokenLogprobs
from partita.runtime.generate.request import Finish, Row


class Step(NamedTuple):
    """One step of the generation loop: one session run, and what came of it. A tuple, because each token makes one."""

    phase: PhaseName
    """prefill while any row still reads its prompt."""
    new_tokens: int
    """Tokens that the row with most of them took in; neither padding nor rejected draft tokens count."""
    row_tokens: int
    """Tokens taken in over all rows: prompt tokens while a prompt is read, then one per row that still goes on."""
    tokens: tuple[tuple[int, ...], ...]
    """The new tokens of each row; none for a row that has finished, or whose prompt has not been read to its end."""
    run_seconds: float
    """Wall time of the session run."""
    overhead_seconds: float
    """Wall time since the step before, less `run_seconds`: feeding, sampling, and what the caller did in between."""
    finish: tuple[Finish | None, ...]
    """Why a row has finished, in this step or an earlier one; None while it goes on, or is free."""
    observed: bool
    """Profiling was on."""
    file: str
    """ONNX file that ran it. A static pair reads part of a prompt with decode.onnx."""
    again: bool = False
    """It read tokens that had been read before, because what was cached of them was no longer valid."""
    drafted: int = 0
    """Draft tokens of all rows that it verified."""
    accepted: int = 0
    """Draft tokens that were accepted."""
    width: int = 0
    """S: tokens that each row was fed, padding and rejected draft tokens included."""
    draft_seconds: float = 0.0
    """Part of `overhead_seconds` that drafting took, runs of the draft model included."""
    errors: tuple[str | None, ...] = ()
    """What went wrong in a row alone, whose finish is `error` then; empty where nothing did in any."""
    logprobs: tuple[tuple[TokenLogprobs, ...], ...] = ()
    """How likely the new tokens of each row were, of rows that asked for it; empty where none did."""
    copied: tuple[int, ...] = ()
    """Tokens that each row has copied from what others read instead of reading them, since the step before; empty where
    none has.
    """
    gave_up: tuple[str | None, ...] = ()
    """Why a row has no draft tokens any more; empty where none gave up."""


KEPT_STEPS = 512
"""Steps kept of requests that take turns: they may go on for weeks, and at 8 rows a step takes more than a KiB."""


class Recorder:
    """Keeps the steps since the last `begin`: all steps of the prompts of one call; the last steps, and those that were
    profiled, of requests that take turns.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self, *, takes_turns: bool = False) -> None:
        """Forget everything. `takes_turns`: requests come and go; else each row answers one prompt."""
        self.steps: list[Step] = []
        self.takes_turns = takes_turns
        self.new_tokens = 0
        """Of all rows."""
        self.forgotten = 0
        """Steps that are not kept any more."""
        self.longest = self.max_new_tokens = 0
        """The longest text that was read, in tokens, and the largest budget."""
        self.adapters: dict[str | None, None] = {}
        """Adapters of the requests, in order."""
        self._requests = 0
        self._lengths: list[int] = []
        """Tokens of the prompt of each row, while no row had two."""
        self._total = 0
        """Tokens of all prompts."""
        self._reads: dict[int, int] = {}
        """Tokens of its prompt that a row reads, by row: without those that were copied."""

    @property
    def requests(self) -> int | None:
        """Requests so far, where they take turns; None where each row answers one prompt."""
        return self._requests if self.takes_turns else None

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts where requests take turns, else of the longest."""
        return self._total if self.takes_turns else max(self._lengths, default=0)

    @property
    def row_prompts(self) -> tuple[int, ...]:
        """Tokens of its prompt that each row reads; empty where requests take turns."""
        return () if self.takes_turns else tuple(self._reads.values())

    def on_request(self, index: int, row: Row, loaded: int) -> None:
        """A request gets row `index`; `loaded` tokens of its prompt are copied from a prefix."""
        if not row.request.trial:
            self.adapters[row.request.adapter] = None
        self.on_turn(index, row, row.known, loaded)

    def on_turn(self, index: int, row: Row, reads: int, loaded: int = 0) -> None:
        """A request reads so many tokens, and then generates."""
        self.longest = max(self.longest, row.known)
        self.max_new_tokens = max(self.max_new_tokens, row.request.max_new_tokens)
        self._requests += 1
        self._total += reads
        if index in self._reads:
            self.takes_turns = True
        if self.takes_turns:
            return
        self._lengths.append(reads)
        self._reads[index] = reads - loaded

    def on_step(self, step: Step) -> None:
        """Record a step."""
        self.steps.append(step)
        self.new_tokens += sum(map(len, step.tokens))
        for row, tokens in enumerate(step.copied):
            if tokens and row in self._reads:
                self._reads[row] -= tokens
        if self.takes_turns and len(self.steps) >= 2 * KEPT_STEPS:
            early, late = self.steps[:-KEPT_STEPS], self.steps[-KEPT_STEPS:]
            kept = [entry for entry in early if entry.observed]
            self.forgotten += len(early) - len(kept)
            self.steps = [*kept, *late]
