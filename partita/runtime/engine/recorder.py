"""What is kept of the steps of a generation: an observer of the loop, which does not know it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from partita.contract import PhaseName
from partita.runtime.engine.request import Finish
from partita.runtime.logprobs import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the generation loop: one session run, and what came of it."""

    phase: PhaseName
    """prefill while any row still reads its prompt."""
    index: int
    """0-based, over the whole generation."""
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
"""Of a generation that requests join and leave: it may go on for weeks, and at 8 rows a step takes more than a KiB."""


class Recorder:
    """Keeps the steps of one generation: all of them, or the last of one that is open, and those that were observed."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.row_prompts: tuple[int, ...] = ()
        """Tokens of each prompt that steps read; of none in an open generation."""
        self.prompt_tokens = 0
        """Tokens of the longest prompt; of an open generation, of all of them."""
        self.requests: int | None = None
        """That have joined an open generation; None for one whose rows all begin at once."""
        self.new_tokens = 0
        """Of all rows."""
        self.forgotten = 0
        """Steps that are not kept any more."""

    def on_prompts(self, lengths: tuple[int, ...]) -> None:
        """A generation begins with prompts of these lengths."""
        self.steps, self.new_tokens, self.forgotten, self.requests = [], 0, 0, None
        self.row_prompts, self.prompt_tokens = lengths, max(lengths, default=0)

    def on_begun(self, filled: Sequence[int]) -> None:
        """Rows have begun with so many tokens of their prompts each, which no step reads."""
        self.row_prompts = tuple(count - known for count, known in zip(self.row_prompts, filled, strict=False))

    def on_open(self) -> None:
        """A generation begins that requests join and leave."""
        self.on_prompts(())
        self.requests = 0

    def on_request(self, tokens: int) -> None:
        """A request joins an open generation, or goes on, with so many tokens to read."""
        self.prompt_tokens += tokens
        self.requests = (self.requests or 0) + 1

    def on_step(self, step: Step) -> None:
        """Append a step to those of this generation."""
        self.steps.append(step)
        self.new_tokens += sum(map(len, step.tokens))
        if self.requests is not None and len(self.steps) >= 2 * KEPT_STEPS:
            early, late = self.steps[:-KEPT_STEPS], self.steps[-KEPT_STEPS:]
            kept = [entry for entry in early if entry.observed]
            self.forgotten += len(early) - len(kept)
            self.steps = [*kept, *late]
