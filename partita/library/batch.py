"""The batch of a package in this process: rows that requests join and leave, and what is told of each."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import replace

from partita.errors import GenerationError
from partita.library.drafters import Drafting
from partita.library.engine import RowRequest
from partita.library.sampling import Sampling
from partita.library.speculation import NO_SPECULATION, Speculation
from partita.runtime.engine.loop import Engine
from partita.runtime.engine.prefix import Prefix
from partita.runtime.engine.recorder import Step
from partita.runtime.engine.request import Request
from partita.runtime.logprobs import Watched
from partita.runtime.runner import Runner
from partita.runtime.sampling import Sampler, make_sampler
from partita.spelling import spelled


class Batch:
    """Rows at work on a loaded package. Its runner observes the steps."""

    def __init__(self, runner: Runner, prefill_chunk: int, adapter: str | None = None, *, is_open: bool) -> None:
        """`is_open`: requests join and leave until somebody begins another; else the rows are those of one call."""
        self.prefill_chunk, self.adapter, self.is_open = prefill_chunk, adapter, is_open
        self._runner, self._adapters = runner, [adapter] * runner.executor.rows
        self._had: dict[str | None, None] = {}
        """Adapters that rows have had, in the order in which they came."""
        # Who hears an open generation hears it as it comes: a row does not stand still for as long as others read.
        patience = prefill_chunk if is_open else None
        self._engine = Engine(runner.executor, prefill_chunk, (runner,), shares=is_open, patience=patience)
        self._recorder = runner.recorder
        self._watched: dict[int, Watched] = {}
        """By row."""
        self._rested = True
        """Nobody has been at work, so what has passed is no time of the next step."""
        self.speculation = NO_SPECULATION
        self._drafting: Drafting | None = None
        self.longest, self.max_new_tokens = 0, 0
        """Of what was read and of what was asked after it, so far."""

    def speculate(self, asked: Speculation, drafting: Drafting | None) -> None:
        """Use draft tokens in rows that join from now on; None: no speculative decoding."""
        self.speculation, self._drafting = asked, drafting
        self._engine.control = None if drafting is None else drafting.control

    def join(
        self, request: Request, logprobs: int | None = None, adapter: str | None = None, *, trial: bool = False
    ) -> int:
        """Give a request a free row; its index. `logprobs`, `adapter` and `trial`: as `RowRequest` has them.

        Raises GenerationError, also for an adapter beside others where all rows have one; UsageError for a name that
        the package has not.
        """
        name = self.adapter if adapter is None else adapter
        others = {had for row, had in zip(self._engine.rows, self._adapters, strict=True) if row is not None}
        apart = self._runner.contract.adapters_by_row
        if not apart and others - {name}:
            raise GenerationError(
                f"{spelled('adapter', name)}: the rows of this package have one adapter together, and others are at "
                "work with another; wait until they are done"
            )
        self._runner.check_adapter(name)
        watched = None if logprobs is None or request.sampler is None else Watched(request.sampler, logprobs)
        self._begins()
        drafter = None if self._drafting is None else self._drafting.drafter()
        sampler = watched or request.sampler
        row = self._engine.join(replace(request, sampler=sampler, drafter=drafter, adapter=name))
        self._adapters = [name if apart is False or index == row else had for index, had in enumerate(self._adapters)]
        if not trial:
            self._had[name] = None
        try:
            self._runner.use_adapters(self._adapters)
        except BaseException:
            self._engine.leave(row)  # else nobody knows of it, and it is never free again
            raise
        self._watched.pop(row, None)
        if watched is not None:
            self._watched[row] = watched
        self._asks(len(request.prompt), len(request.prompt), request.max_new_tokens)
        return row

    @property
    def told_adapters(self) -> str | None:
        """The adapters of the rows of one call, or all that requests have had; None: there was none."""
        names = [*self._had] if self.is_open else self._adapters
        each = names if len(set(names)) > 1 else names[:1]
        return None if each in ([], [None]) else " / ".join(name or "none" for name in each)

    def _begins(self) -> None:
        """A row goes on; it has the batch for itself when no other was at work."""
        if not self._busy:
            self._rested = True

    def give(self, prefix: Prefix) -> None:
        """Have rows that join from now on begin with a prefix, where their prompts do. Raises GenerationError."""
        self._engine.give(prefix)

    def leave(self, row: int) -> None:
        """Free a row. Where each has an adapter of its own, it lets go of that."""
        self._engine.leave(row)
        self._watched.pop(row, None)
        if self._runner.contract.adapters_by_row and self._adapters[row] != self.adapter:
            self._adapters[row] = self.adapter
            self._runner.use_adapters(self._adapters)

    def halt(self, row: int) -> None:
        """End a row where it is."""
        self._engine.halt(row)

    def extend(self, row: int, tokens: Sequence[int], sampling: Sampling) -> None:
        """Give a row more tokens to read, and go on as `sampling` says. Raises GenerationError, UsageError."""
        self._begins()
        sampler: Sampler = make_sampler(sampling)
        if row in self._watched:
            sampler = self._watched[row] = self._watched[row].over(sampler)
        self._engine.extend(row, tokens, sampler, sampling.max_new_tokens)
        self._asks(len(tokens), self._engine.row(row).known, sampling.max_new_tokens or 0)

    def rewind(self, row: int, tokens: int) -> bool:
        """Take a row back by so many of its tokens. False where it cannot go back."""
        return self._engine.rewind(row, tokens)

    def saved(self, row: int) -> Prefix:
        """What a row has taken in. Raises GenerationError where it cannot be given out."""
        return self._engine.saved(row)

    def step(self) -> Step | None:
        """The next step; None when no row has anything to do."""
        if self._rested:
            self._engine.mark = time.perf_counter()
            self._rested = False
        step = self._engine.step()
        if step is None or not self._watched:
            return step
        told = tuple(self._watched[row].told() if row in self._watched else () for row in range(len(self._engine.rows)))
        return replace(step, logprobs=told)

    @property
    def _busy(self) -> bool:
        return any(row is not None and row.finish is None for row in self._engine.rows)

    def _asks(self, reads: int, tokens: int, max_new_tokens: int) -> None:
        """Note what is asked: `reads` tokens, after which the row has `tokens`."""
        self.longest = max(self.longest, tokens)
        self.max_new_tokens = max(self.max_new_tokens, max_new_tokens)
        if self.is_open:
            self._recorder.on_request(reads)


def loop_request(
    asked: RowRequest, stop_ids: Collection[int] = (), sampler: Sampler | None = None, *, fails_alone: bool = False
) -> Request:
    """What the loop is asked for a row. `stop_ids`: those of every row; `sampler`: one that rows share.

    Raises UsageError for an option out of range.
    """
    return Request(
        asked.prompt,
        sampler or make_sampler(asked.sampling),
        asked.sampling.max_new_tokens or 0,
        frozenset(stop_ids) | frozenset(asked.stop_ids),
        fails_alone=fails_alone,
        shares=asked.shares,
    )
