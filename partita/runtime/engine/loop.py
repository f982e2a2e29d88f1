"""The loop: schedule, plan, run, sample. Knows token ids only: no text, no printing, no providers.

Rows join with a request and leave when it has finished; what a row gets in a step is decided by the scheduler and the
planner. Whoever wants to know of the steps observes them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Protocol

import numpy as np
import numpy.typing as npt

from partita.errors import GenerationError
from partita.observations.text_format import plural
from partita.runtime.engine.bound_graph import BoundGraph
from partita.runtime.engine.checks import check_prompt, room_for
from partita.runtime.engine.drafting import DraftControl, Verified, draft, get_ready
from partita.runtime.engine.executor import Executor
from partita.runtime.engine.planner import RowView, StepPlan, plan_step
from partita.runtime.engine.prefix import Prefix, check_loads, load_prefix, saved_prefix
from partita.runtime.engine.prefixes import Prefixes
from partita.runtime.engine.recorder import Step
from partita.runtime.engine.request import Finish, Request, Row
from partita.runtime.engine.scheduler import Policy, prompts_first, rows_at_work_first
from partita.runtime.engine.seen import Seen, look
from partita.runtime.engine.steady import LiveRow, SteadyStep, steady_step
from partita.runtime.sampling import Draws, Sampler, greedy
from partita.spelling import spelled

PREFILL_CHUNK_TOKENS = 512
PADDING = 0
"""Any id of the vocabulary will do."""


class Observer(Protocol):
    """Hears of the steps of a generation."""

    def on_prompts(self, lengths: tuple[int, ...]) -> None:
        """A generation begins with prompts of these lengths."""

    def on_step(self, step: Step) -> None:
        """Called after each session run, with its rows, tokens and times."""


@dataclass
class Engine:
    """Rows of one batch at work. One at a time per executor."""

    executor: Executor
    prefill_chunk: int = PREFILL_CHUNK_TOKENS
    observers: Sequence[Observer] = ()
    policy: Policy = prompts_first
    shares: bool = False
    """What prompts begin with alike is read once, and copied."""
    patience: int | None = None
    """So many tokens of prompts are read at most before the rows at work have a step; None: they wait for all."""
    control: DraftControl | None = None
    """Chooses the number of draft tokens; None: as many as fit."""
    rows: list[Row | None] = field(init=False)
    """[B]: what each row of the batch is at; None for a free one."""
    made: int = field(default=0, init=False)
    """Steps so far."""
    rope_length: int = field(default=0, init=False)
    """The length of text that the keys of the last step have their rotary frequencies for."""
    mark: float = field(default=0.0, init=False)
    """When the last step ended."""
    longest_rope: int = field(default=0, init=False)
    """The largest `rope_length` so far."""
    read: int = field(default=0, init=False)
    """Tokens of prompts, padding included, since the last step of the rows at work."""
    prefixes: Prefixes | None = field(default=None, init=False)
    steady: SteadyStep | None = field(default=None, init=False)
    """The step that goes on as it is; None once a row has changed, and while there is none."""

    def __post_init__(self) -> None:
        self.rows = [None] * self.executor.rows
        self.executor.cache.prepare()
        if self.shares and not self.executor.contract.rereads:
            self.prefixes = Prefixes(self.executor.cache, self.executor.graphs, self.keeps_keys)
        self.mark = time.perf_counter()

    # --- rows ---------------------------------------------------------------------------------------------------------

    def join(self, request: Request) -> int:
        """Give a request a free row of the batch, whatever the others are at.

        Raises GenerationError when there is none, and for a bad prompt.
        """
        self.steady = None
        check_prompt(request.prompt, self.executor.contract, "the prompt")
        if None not in self.rows:
            raise GenerationError(
                f"no row of the batch is free; wait for one to finish, or export with a larger {spelled('batch_size')}"
            )
        row, cache = self.rows.index(None), self.executor.cache
        if not any(self.rows):
            self.rope_length = 0  # that of texts which have left
        cache.release_row(row)
        if request.prefix is not None:
            load_prefix(cache, row, request.prefix, request.prompt, usable=self.keeps_keys(len(request.prompt)))
        self.rows[row] = Row.of(request, self.executor.contract.max_length)
        if request.prefix is None and self.prefixes is not None:
            try:
                self.prefixes.join(row, self.rows)
            except BaseException:
                self.leave(row)  # nobody else knows of it
                raise
        return row

    def leave(self, row: int) -> None:
        """Free a row, finished or not."""
        self.steady = None
        self.rows[row] = None
        if self.prefixes is not None:
            self.prefixes.leave(row)
        self.executor.cache.release_row(row)

    def give(self, prefix: Prefix) -> None:
        """Have rows whose prompts begin so begin with a prefix of an earlier run.

        Raises GenerationError where none can; rows have to share what they have in common.
        """
        if self.prefixes is None:
            check_loads(self.executor.cache, len(prefix.tokens), usable=False)
        else:
            self.prefixes.give(prefix)

    def saved(self, row: int) -> Prefix:
        """What a row has taken in, for others to begin with. Raises GenerationError where it cannot be given out."""
        entry, count = self.row(row), self.executor.cache.filled[row]
        return saved_prefix(self.executor.cache, row, entry.history[:count], usable=self.keeps_keys(count))

    def keeps_keys(self, length: int) -> bool:
        """Whether the cached keys of a text are those of any longer one that has this many tokens."""
        limit = self.executor.contract.rereads_at
        if limit is None:
            return not (self.executor.takes_rope_length or self.executor.contract.rereads)
        return max(length, self.longest_rope) <= limit

    def halt(self, row: int) -> None:
        """End a row where it is, as a stop token would: it adds nothing more, and keeps what it has."""
        entry = self.row(row)
        self.steady = None
        entry.finish = entry.finish or "stop"

    def extend(
        self, row: int, tokens: Sequence[int], sampler: Sampler | None = None, max_new_tokens: int | None = None
    ) -> None:
        """Give a row more tokens to read, as a next turn: it goes on after what it has in the cache, and with its whole
        budget, also when it had finished; with another sampler and budget where they are given.

        Raises GenerationError for tokens that it cannot take, and for a row that failed.
        """
        entry, contract = self.row(row), self.executor.contract
        self.steady = None
        check_prompt(tokens, contract, "what follows")
        if entry.known + len(tokens) > contract.max_length:
            raise GenerationError(
                f"{plural(len(tokens), 'token')} after {entry.known}, and the cache holds {contract.max_length}",
                remedy=room_for(entry.known + len(tokens), contract),
            )
        if entry.error is not None:
            raise GenerationError(f"row {row} of the batch has failed: {entry.error}")
        request = entry.request
        entry.request = replace(
            request,
            sampler=sampler or request.sampler,
            max_new_tokens=request.max_new_tokens if max_new_tokens is None else max_new_tokens,
        )
        limit = contract.rereads_at
        outgrows = limit is not None and self.rope_length <= limit < entry.known + len(tokens)
        cache = self.executor.cache
        if outgrows or row in cache.spoiled or row in cache.unjudged:  # all is read again
            cache.release_row(row)
        entry.extend(tokens)

    def rewind(self, row: int, tokens: int) -> bool:
        """Take a row back by so many of its known tokens, also when it had finished: it goes on from there.

        The last token that is kept is fed once more, because what follows it comes of its logits. False, and nothing
        done, where the cache cannot go back: a recurrent state, or rotary frequencies that depend on the length of the
        text. Raises GenerationError unless a token is left.
        """
        entry, cache = self.row(row), self.executor.cache
        self.steady = None
        if not 0 < tokens < entry.known:
            raise GenerationError(f"row {row} has {plural(entry.known, 'token')}: it cannot go back by {tokens}")
        back = max(0, cache.filled[row] - (entry.known - tokens - 1))
        changes = self.executor.takes_rope_length or self.executor.contract.rereads_at is not None
        if entry.error is not None or changes or not cache.rewind(row, back):
            return False
        entry.rewind(tokens)
        if self.prefixes is not None:
            self.prefixes.leave(row)  # what it waited for begins as it did before
        return True

    def row(self, index: int) -> Row:
        """The row of the batch that is at work there."""
        entry = self.rows[index]
        if entry is None:
            raise GenerationError(f"row {index} of the batch is free")
        return entry

    # --- steps --------------------------------------------------------------------------------------------------------

    def step(self) -> Step | None:
        """Make the next step. None when no row has anything to do.

        Raises GenerationError when logits are not finite, ProviderError or ResourceError when the run fails.
        """
        steady, self.steady = self.steady, None  # none where this step fails
        if steady is not None and steady.graph.is_bound and not (steady.drafts and self.drafts_again(steady)):
            return self.step_again(steady)
        self.reread_if_outgrown()
        filled, began = self.executor.cache.filled, time.perf_counter()
        drafts = draft(self.rows, self.executor, self.control, self.plan)
        plan = drafts.plan or self.plan()
        if plan is None:
            return None
        if not plan.reads:
            ready = self.executor.will_decode()  # once, and in the time of no step
            self.mark, began = self.mark + ready, began + ready
        graph = self.executor.prepare(plan)
        _write_tokens(graph.tokens, plan, self.rows, filled)
        again = any(row is not None and row.again and count for row, count in zip(self.rows, plan.take, strict=True))
        if self.executor.takes_rope_length:
            self.rope_length = max(self.next_rope_length(plan), self.rope_length if plan.reads else 0)
            self.longest_rope = max(self.longest_rope, self.rope_length)
        outcome = self.executor.run(plan, graph, self.rope_length)
        drafted = [0 if row is None else row.drafted for row in self.rows]
        self._note_judged(plan)
        tokens = self.hear(plan, graph)
        get_ready(self.rows, self.executor, plan)
        # Rejected draft tokens are gone again.
        rereads = self.executor.contract.rereads and not plan.reads  # what was read before is no token of this step
        kept = [
            max(len(new), 1 - anew) if count or (rereads and take) else take
            for take, count, new, anew in zip(plan.take, drafted, tokens, _anew(self.rows), strict=True)
        ]
        verified = [Verified(count, len(new) - 1) for count, new in zip(drafted, tokens, strict=True) if count and new]
        now = time.perf_counter()
        step = Step(
            phase="prefill" if plan.reads else "decode",
            new_tokens=max(kept),
            row_tokens=sum(kept),
            tokens=tokens,
            run_seconds=outcome.run_seconds,
            overhead_seconds=now - self.mark - outcome.run_seconds,
            finish=_finish(self.rows),
            observed=outcome.observed,
            file=outcome.file,
            again=plan.reads and again,
            drafted=sum(drafted),
            accepted=sum(row.accepted for row in verified),
            width=plan.new_tokens,
            draft_seconds=drafts.seconds,
            errors=_errors(self.rows),
            copied=() if self.prefixes is None else self.prefixes.told(len(self.rows)),
            gave_up=_gave_up(self.rows),
        )
        self.mark = now
        self.made += 1
        first, end = plan.span or (0, len(self.rows))
        self.read = self.read + plan.new_tokens * (end - first) if plan.reads else 0
        if self.prefixes is not None:
            self.prefixes.after_step(step.row_tokens if plan.reads else 0, outcome.run_seconds)
        if self.control is not None and drafts.live and not plan.reads:
            self.control.record(drafts.live, max(drafted), now - began, verified)
        self.steady = steady_step(graph, self.executor, self.rows, plan)
        for observer in self.observers:
            observer.on_step(step)
        return step

    def drafts_again(self, steady: SteadyStep) -> bool:
        """Whether the rows of a steady step may have draft tokens in the next step."""
        return self.control is None or not self.control.rests(len(steady.rows))

    def step_again(self, steady: SteadyStep) -> Step:
        """The next step, which is the last one with other tokens. What `step` looks at besides is as it was."""
        cache = self.executor.cache
        try:
            run_seconds = steady.run()
        except BaseException:  # Ctrl-C included: nobody knows what it left
            cache.dirty = True
            raise
        tokens: list[tuple[int, ...]] = [()] * len(self.rows)
        ended = False
        for entry in steady.rows:
            tokens[entry.place] = self.next_token(entry, steady.graph)
            ended = ended or entry.row.finish is not None
        now = time.perf_counter()
        step = Step(
            "decode",
            1,
            len(steady.rows),
            tuple(tokens),
            run_seconds,
            now - self.mark - run_seconds,
            _finish(self.rows) if ended else steady.finish,
            False,
            steady.graph.file,
            width=1,
            errors=_errors(self.rows) if ended else steady.errors,
            gave_up=steady.gave_up,
        )
        self.mark = now
        self.made += 1
        self.read = 0
        if cache.dirty and self.prefixes is not None:
            self.prefixes.after_step(0, run_seconds)
        if not ended:
            self.steady = steady
        for observer in self.observers:
            observer.on_step(step)
        return step

    def next_token(self, entry: LiveRow, graph: BoundGraph) -> tuple[int, ...]:
        """Add the next token to a row of a steady step."""
        row, logits = entry.row, entry.logits
        if logits is not None and row.request.sampler is greedy:
            token = int(logits.argmax())
            if isfinite(logits[token]):  # NaN if any is
                row.add(token)
                return (token,)
        return self.add_token(entry.place, row, look(row, graph, entry.place, 0))

    def _note_judged(self, plan: StepPlan) -> None:
        """Of rows in the middle of a prompt nobody looks at logits."""
        ended = {index for index, _ in plan.ends}
        if plan.reads:
            self.executor.cache.unjudged.update(i for i, take in enumerate(plan.take) if take and i not in ended)
        self.executor.cache.unjudged -= ended

    def plan(self) -> StepPlan | None:
        """The next step of the rows as they are."""
        graphs, filled = self.executor.graphs, self.executor.cache.filled
        if self.executor.contract.rereads:
            views = [self.begin_again(index, row) for index, row in enumerate(self.rows)]
            return plan_step(views, graphs, self.prefill_chunk)
        if self.prefixes is not None:
            self.prefixes.before_step(self.rows)
        views = [_row_view(row, count) for row, count in zip(self.rows, filled, strict=True)]
        if self.prefixes is not None:
            views = self.prefixes.views(self.rows, views)
        waited = self.patience is not None and self.read >= self.patience
        policy = rows_at_work_first if waited else self.policy
        return plan_step(policy(views, graphs), graphs, self.prefill_chunk)

    def begin_again(self, index: int, row: Row | None) -> RowView:
        """A row of a graph without a cache for the planner: nothing of it is anywhere, so all of it is to be fed."""
        if row is None or row.finish is not None or self.executor.cache.filled[index] == row.known:
            return RowView(0, 0, live=False)
        reads = self.executor.cache.filled[index] < row.read_until
        self.executor.cache.release_row(index)
        return RowView(0, row.known, reads, reads and row.request.listener is not None)

    def hear(self, plan: StepPlan, graph: BoundGraph) -> tuple[tuple[int, ...], ...]:
        """Tell listeners their logits, and add the next tokens to each row that was fed its last one."""
        tokens: list[tuple[int, ...]] = [()] * len(self.rows)
        for index, row in enumerate(self.rows):
            if row is not None and row.request.listener is not None:
                begin = self.executor.cache.filled[index] - plan.take[index]
                for position in plan.positions:
                    if position < plan.take[index] and begin + position >= row.request.listens_from:
                        row.request.listener(begin + position, graph.logits(index, position))
        for index, position in plan.ends:
            row = self.row(index)
            row.again = False
            if row.drafted:
                tokens[index] = self.verify(index, row, graph)
            elif row.request.sampler is not None:
                tokens[index] = self.add_token(index, row, look(row, graph, index, position))
            elif row.request.listener is None and not np.isfinite(graph.logits(index, position).max()):
                self.fail(index, row)  # nobody draws of what is read for a prefix, and it would be kept
        return tuple(tokens)

    def verify(self, index: int, row: Row, graph: BoundGraph) -> tuple[int, ...]:
        """Choose the token after the last known one, and after each draft token that was chosen; forget the others.

        Sampling from the logits of the model and comparing leaves its distribution as it is. Logits before the last
        draft token that are not finite may be so because of a draft token after them.
        """
        drafts, row.drafted = row.drafts, 0
        found: tuple[int, ...] = ()
        spoilt = False
        for position, token in enumerate((*drafts, None)):
            seen = look(row, graph, index, position)
            spoilt = token is not None and not seen.finite
            if spoilt:
                break
            new = self.add_token(index, row, seen)
            found += new
            if row.finish is not None or new != (token,):
                break
        rejected = len(drafts) + 1 - max(len(found), 1)
        if rejected:
            spoilt = spoilt or not look(row, graph, index, len(drafts)).finite
            self.take_back(index, row, rejected, spoilt=spoilt)
        return found

    def take_back(self, index: int, row: Row, tokens: int, *, spoilt: bool) -> None:
        """Rewind rejected draft tokens. `spoilt`: the values they left in the cache are not finite, and change results
        although they are masked (0 times NaN): the row reads its text again, and has no more draft tokens.
        """
        cache = self.executor.cache
        if spoilt:
            row.stop_drafting("a rejected draft token gave numbers that are not finite")
        if spoilt and row.finish is None and cache.wipe(index):
            self.read_again(index, row)
            return
        cache.rewind(index, tokens)
        if spoilt and row.finish is None:  # the row cannot be zeroed here, and may be felt by others
            cache.dirty = True
        elif spoilt:
            cache.unjudged.add(index)

    def add_token(self, index: int, row: Row, seen: Seen) -> tuple[int, ...]:
        """The next token of a row, by the logits of a position; none when the cache has no room for it."""
        sampler = row.request.sampler
        assert sampler is not None
        if not seen.finite and self.fail(index, row):
            return ()
        if row.known == len(row.history):
            row.finish = "cache_full"
            return ()
        if seen.few is not None:
            token = sampler.among(*seen.few) if isinstance(sampler, Draws) else int(seen.few[0][0])
        else:
            assert seen.whole is not None
            token = sampler(seen.whole, row.history[: row.known])
        row.add(token)
        return (token,)

    def fail(self, index: int, row: Row) -> bool:
        """Logits that are not finite end the row alone, where it is to: True then. Raises GenerationError where they
        end the run; where they are no error, nothing is done.
        """
        said = (
            f"the logits of step {self.made}, row {index}, are not finite; export the checkpoint in a higher "
            f"{spelled('precision')}, or check its weights"
        )
        if row.request.fails_alone and self.executor.cache.wipe(index):
            row.finish, row.error = "error", said
            return True
        self.executor.cache.dirty = True
        if not row.request.any_logits:
            raise GenerationError(said)
        return False

    # --- rotary frequencies that depend on the length of the text -----------------------------------------------------

    def reread_if_outgrown(self) -> None:
        """Have the rows at work read again when the text gets so long that the cached keys do not go with it."""
        limit = self.executor.contract.rereads_at
        if limit is None or not self.rope_length or not self.rope_length <= limit < self.next_length():
            return
        for index, row in enumerate(self.rows):
            if row is not None and row.finish is None:
                self.read_again(index, row)
        self.rope_length = 0

    def read_again(self, index: int, row: Row) -> None:
        """Have a row read from its beginning what it knows."""
        self.executor.cache.release_row(index)
        row.read_until, row.again = row.known, True

    def next_length(self) -> int:
        """Tokens of the longest row after the next step, finished ones included: other keys were made beside theirs."""
        filled = self.executor.cache.filled
        taken = [(row, count) for row, count in zip(self.rows, filled, strict=True) if row is not None]
        return max((count + (row.finish is None) for row, count in taken), default=0)

    def next_rope_length(self, plan: StepPlan) -> int:
        """The length of text that this step's rotary frequencies are for: that of what is read, or of what is there."""
        rows = [row for row in self.rows if row is not None]
        asked = max((row.request.rope_length for row in rows), default=0)
        going = (row.read_until for row in rows if row.finish is None)
        return max(asked, max(going, default=0) if plan.reads else self.next_length())


def _row_view(row: Row | None, filled: int) -> RowView:
    """A row for the planner; a free one has nothing to do and nothing to lose."""
    return RowView(0, 0, live=False) if row is None else row.view(filled)


def _anew(rows: Sequence[Row | None]) -> list[bool]:
    """Rows that will read again, so that nothing that they were fed in a step is kept."""
    return [row is not None and row.again for row in rows]


def _finish(rows: Sequence[Row | None]) -> tuple[Finish | None, ...]:
    """Why rows have finished."""
    return tuple(None if row is None else row.finish for row in rows)


def _errors(rows: Sequence[Row | None]) -> tuple[str | None, ...]:
    """What went wrong in rows alone; empty where nothing did."""
    found = tuple(None if row is None else row.error for row in rows)
    return found if any(found) else ()


def _gave_up(rows: Sequence[Row | None]) -> tuple[str | None, ...]:
    """Why rows have no draft tokens any more; empty where none gave up."""
    found = tuple(None if row is None else row.gave_up for row in rows)
    return found if any(found) else ()


def _write_tokens(
    tokens: npt.NDArray[np.int64], plan: StepPlan, rows: Sequence[Row | None], filled: Sequence[int]
) -> None:
    """Fill [B, S] with the rows' own tokens, and padding after them."""
    tokens.fill(PADDING)
    for index, row in enumerate(rows):
        if row is not None and (count := plan.take[index]):
            begin = filled[index]
            tokens[index, :count] = row.history[begin : begin + count]
