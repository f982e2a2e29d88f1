"""The rows of a loaded package at work: the loop with adapters, log-probabilities and drafts of each request."""

from __future__ import annotations

import time
from collections.abc import Sequence

from partita.errors import GenerationError
from partita.library.drafters import Drafting
from partita.library.engine import BatchOptions
from partita.library.requests import Work
from partita.library.sampling import Sampling
from partita.runtime.engine.loop import PREFILL_CHUNK_TOKENS, Engine
from partita.runtime.engine.prefix import Prefix
from partita.runtime.engine.recorder import Step
from partita.runtime.engine.request import Request
from partita.runtime.logprobs import Watched
from partita.runtime.runner import Runner
from partita.runtime.sampling import Sampler, make_sampler
from partita.spelling import spelled


class Batch:
    """Rows at work on a loaded package. Its runner records the steps."""

    def __init__(
        self,
        runner: Runner,
        options: BatchOptions,
        *,
        drafting: Drafting | None = None,
        prefix: Prefix | None = None,
        takes_turns: bool = True,
    ) -> None:
        """`prefix`: that of `options`. `takes_turns`: prompts are read in chunks between steps of the running rows;
        else running rows wait for prompts. Raises GenerationError where no row can begin with the prefix.
        """
        self.options, self._runner, self._drafting = options, runner, drafting
        self.prefill_chunk = PREFILL_CHUNK_TOKENS if options.prefill_chunk is None else options.prefill_chunk
        self._adapters = [options.adapter] * runner.executor.rows
        self._had: dict[str | None, None] = {}
        """Adapters of requests so far, in order."""
        patience = self.prefill_chunk if takes_turns else None
        self.loop = Engine(runner.executor, self.prefill_chunk, (runner,), shares=True, patience=patience)
        self.loop.control = None if drafting is None else drafting.control
        self._prefix = None if takes_turns else prefix
        """The prefix that every prompt begins with."""
        if prefix is not None and takes_turns:
            self.loop.give(prefix)
        self._watched: dict[int, Watched] = {}
        """Samplers that note log-probabilities, by row."""
        self._rested = True
        """No row was running, so the time since the last step is not overhead of the next."""
        self.longest, self.max_new_tokens = 0, 0
        """Of the texts read and of the budgets so far."""

    def join(self, work: Work, tokens: Sequence[int], sampling: Sampling, shares: int) -> int:
        """Give a request a free row; its index. `tokens`: all that it reads. `shares`: how many of them waiting
        requests begin with, too.

        Raises GenerationError, also for another adapter than that of the running rows where all rows have one;
        UsageError, PackageError for the adapter.
        """
        name = self.options.adapter if work.adapter is None else work.adapter
        others = {had for row, had in zip(self.loop.rows, self._adapters, strict=True) if row is not None}
        apart = self._runner.contract.adapters_by_row
        if not apart and others - {name}:
            raise GenerationError(
                f"{spelled('adapter', name)}: the rows of this package have one adapter together, and others are at "
                "work with another; wait until they are done"
            )
        self._runner.check_adapter(name)
        self._begins()
        sampler: Sampler = make_sampler(sampling)
        watched = None if work.logprobs is None else Watched(sampler, work.logprobs)
        row = self.loop.join(
            Request(
                tokens,
                watched or sampler,
                sampling.max_new_tokens or 0,
                frozenset(work.stop_ids),
                fails_alone=True,
                drafter=None if self._drafting is None else self._drafting.drafter(),
                shares=shares,
                prefix=self._prefix,
                adapter=name,
            )
        )
        self._adapters = [had if apart and index != row else name for index, had in enumerate(self._adapters)]
        if not work.trial:
            self._had[name] = None
        try:
            self._runner.use_adapters(self._adapters)
        except BaseException:
            self.loop.leave(row)  # else it would never be free again
            raise
        self._watched.pop(row, None)
        if watched is not None:
            self._watched[row] = watched
        loaded = 0 if self._prefix is None else self._runner.cache.filled[row]
        self._note(row, len(tokens), len(tokens), sampling, loaded)
        return row

    @property
    def used_adapters(self) -> str | None:
        """The adapters of all requests so far; None when there was none."""
        return None if list(self._had) in ([], [None]) else " / ".join(name or "none" for name in self._had)

    def leave(self, row: int) -> None:
        """Free a row. Where each row has an adapter of its own, it gets that of the batch back."""
        self.loop.leave(row)
        self._watched.pop(row, None)
        if self._runner.contract.adapters_by_row and self._adapters[row] != self.options.adapter:
            self._adapters[row] = self.options.adapter
            self._runner.use_adapters(self._adapters)

    def extend(self, row: int, tokens: Sequence[int], sampling: Sampling) -> None:
        """Give a row more tokens to read, and continue as `sampling` says. Raises GenerationError, UsageError."""
        self._begins()
        sampler: Sampler = make_sampler(sampling)
        if row in self._watched:
            sampler = self._watched[row] = self._watched[row].over(sampler)
        self.loop.extend(row, tokens, sampler, sampling.max_new_tokens)
        self._note(row, len(tokens), self.loop.row(row).known, sampling)

    def step(self) -> Step | None:
        """Make the next step; None when no row has anything to do."""
        if self._rested:
            self.loop.mark = time.perf_counter()
            self._rested = False
        step = self.loop.step()
        if step is None or not self._watched:
            return step
        told = tuple(self._watched[row].told() if row in self._watched else () for row in range(len(self.loop.rows)))
        return step._replace(logprobs=told)

    def _begins(self) -> None:
        """A row begins: where none was running, timing begins anew."""
        if not any(row is not None and row.finish is None for row in self.loop.rows):
            self._rested = True

    def _note(self, row: int, reads: int, tokens: int, sampling: Sampling, loaded: int = 0) -> None:
        """Record a turn that reads so many tokens, of which `loaded` come from a prefix; then the row has `tokens`."""
        self.longest = max(self.longest, tokens)
        self.max_new_tokens = max(self.max_new_tokens, sampling.max_new_tokens or 0)
        self._runner.recorder.on_request(row, reads, loaded)
