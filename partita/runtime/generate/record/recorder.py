"""Records the steps of a generation for its report; an observer of the loop."""

from __future__ import annotations

from typing import NamedTuple

from partita.package.contract import PhaseName
from partita.runtime.generate.choice.sampling import TokenLogprobs
from partita.runtime.generate.request import Finish, Row


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
        """Whether a row has had several requests."""
        self.new_tokens = 0
        """Tokens over all rows."""
        self.forgotten = 0
        """Number of steps that were dropped."""
        self.longest = self.max_new_tokens = 0
        """The longest text in tokens, and the largest token budget."""
        self.adapters: dict[str | None, None] = {}
        """Adapters of the requests, in order."""
        self._requests = 0
        self._lengths: list[int] = []
        """Prompt tokens of each row, while every row had one prompt."""
        self._total = 0
        """Total prompt tokens."""
        self._rows: set[int] = set()
        """Rows that had a request."""

    @property
    def requests(self) -> int | None:
        """Number of requests if they take turns; None if each row has one prompt."""
        return self._requests if self.takes_turns else None

    @property
    def prompt_tokens(self) -> int:
        """Total prompt tokens if requests take turns, else those of the longest prompt."""
        return self._total if self.takes_turns else max(self._lengths, default=0)

    def on_request(self, index: int, row: Row) -> None:
        """Record a request in row `index`."""
        reads = row.known
        if not row.request.is_warm_up:
            self.adapters[row.request.adapter] = None
        self.longest = max(self.longest, row.known)
        self.max_new_tokens = max(self.max_new_tokens, row.request.max_new_tokens)
        self._requests += 1
        self._total += reads
        if index in self._rows:
            self.takes_turns = True
        if self.takes_turns:
            return
        self._lengths.append(reads)
        self._rows.add(index)

    def on_step(self, step: Step) -> None:
        """Record a step."""
        self.steps.append(step)
        for new in step.tokens:
            self.new_tokens += len(new)
        if self.takes_turns and len(self.steps) >= 2 * KEPT_STEPS:
            early, late = self.steps[:-KEPT_STEPS], self.steps[-KEPT_STEPS:]
            kept = [entry for entry in early if entry.observed]
            self.forgotten += len(early) - len(kept)
            self.steps = [*kept, *late]
