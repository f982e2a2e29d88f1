"""The generation loop: schedule, plan, run, sample. Rows join with a request and leave when it has finished."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from partita.errors import GenerationError
from partita.observations.text_format import plural
from partita.runtime.generate.checks import check_prompt
from partita.runtime.generate.choice.drafting import NO_DRAFTS, DraftLengths, Drafts, VerifiedDraft, draft, get_ready
from partita.runtime.generate.choice.next_tokens import NextTokens, SteadyStep, steady_step
from partita.runtime.generate.executor import Runner
from partita.runtime.generate.planner import Policy, RowView, StepPlan, plan_step, prompts_first, rows_at_work_first
from partita.runtime.generate.prefixes import Prefixes
from partita.runtime.generate.record import Step
from partita.runtime.generate.request import (
    BY_LENGTH,
    Drafter,
    Prefix,
    Request,
    Row,
    endings,
    logprobs,
)

PREFILL_CHUNK_TOKENS = 512
PADDING = 0
"""Any id of the vocabulary works."""


@dataclass
class GenerationLoop:
    """The rows of one batch. A runner supports one loop at a time."""

    runner: Runner
    prefill_chunk: int = PREFILL_CHUNK_TOKENS
    policy: Policy = prompts_first
    shares: bool = False
    """Prefix cache: common prefixes of prompts are prefilled once and copied."""
    patience: int | None = None
    """Maximum prompt tokens to prefill between steps of decoding rows; None: prompts first."""
    records: bool = False
    """Record requests and steps with the runner's recorder."""
    control: DraftLengths | None = None
    """Chooses the number of draft tokens; None: as many as fit."""
    drafter: Drafter | None = None
    """The drafter of requests without one."""
    rows: list[Row | None] = field(init=False)
    """[B]: None for a free row."""
    rope_length: int = field(default=0, init=False)
    """Text length of the last step's rotary frequencies."""
    mark: float = field(default=0.0, init=False)
    """End time of the last step."""
    longest_rope: int = field(default=0, init=False)
    """The largest `rope_length` so far."""
    prompt_tokens_run: int = field(default=0, init=False)
    """Prompt tokens since the last decode step, padding included."""
    prefixes: Prefixes = field(init=False)
    steady_step: SteadyStep | None = field(default=None, init=False)
    """The decode step to repeat; None after a row has changed."""

    def __post_init__(self) -> None:
        runner = self.runner
        self.rows = [None] * runner.rows
        self.adapter = runner.adapters.names[0]
        """The adapter of requests without one."""
        runner.cache.prepare()
        self.tokens = NextTokens(runner.cache)
        usable = self.keeps_keys if self.shares and not runner.contract.cacheless else None
        self.prefixes = Prefixes(runner.cache, runner.capacity, usable)
        self._rested = True
        """No row was running, so the time until the next step is not overhead."""

    # --- rows ---------------------------------------------------------------------------------------------------------

    def add_request(self, request: Request) -> int:
        """Give a request a free row of the batch; return its index.

        Raises GenerationError if no row is free or the prompt is invalid; UsageError and PackageError for its adapter.
        """
        check_prompt(request.prompt, self.runner.contract, "the prompt")
        if None not in self.rows:
            raise GenerationError(
                "no row of the batch is free; wait for one to finish, or export with a larger `batch_size`"
            )
        self.steady_step = None
        self._rested = self._rested or not any(row is not None and row.finish is None for row in self.rows)
        if not any(self.rows):
            self.rope_length = 0  # discard the length of earlier texts
        request = replace(
            request,
            adapter=self.adapter if request.adapter is None else request.adapter,
            drafter=request.drafter or self.drafter,
        )
        entry = Row.of(request, self.runner.contract.max_length)
        index = self.prefixes.free_row(self.rows, entry.history[: entry.known], request.adapter)
        self.rows[index] = entry
        try:
            self._use_adapters(index)
            self.prefixes.add_row(index, self.rows)
        except BaseException:
            self.runner.cache.release_row(index)  # it may hold tokens of another request
            self.release_row(index)
            raise
        if self.records:
            self.runner.recorder.on_request(index, entry)
        return index

    def release_row(self, index: int) -> None:
        """Free a row, finished or not."""
        entry, cache = self.rows[index], self.runner.cache
        self.steady_step = None
        self.rows[index] = None
        if entry is not None and 0 < cache.lengths[index] < entry.read_until:
            cache.wipe(index)  # the logits of its prompt were not checked
            cache.release_row(index)
        self.prefixes.release_row(index, entry)
        if self.runner.contract.adapters_by_row:
            self._use_adapters(index)

    def _use_adapters(self, index: int) -> None:
        """Run each row with its adapter, or all rows with that of row `index` if a batch supports one adapter."""
        names = [self.adapter if row is None else row.request.adapter for row in self.rows]
        self.runner.use_adapters(*(names if self.runner.contract.adapters_by_row else names[index : index + 1]))

    def save_prefix(self, row: int) -> Prefix:
        """The cached tokens of a row and their states. Raises GenerationError if they cannot be read back."""
        cache, count = self.runner.cache, self.runner.cache.lengths[row]
        if not self.keeps_keys(count):
            raise GenerationError(f"{plural(count, 'token')} cannot be saved as a prefix: {BY_LENGTH}")
        if not cache.saves(count, count):
            raise GenerationError("a state in bfloat16 cannot be read back from this device, so it cannot be saved")
        return Prefix(self.row(row).history[:count].copy(), cache.save_row(row, count))

    def keeps_keys(self, length: int) -> bool:
        """Whether the cached keys of a text of this length are valid for any longer text."""
        limit = self.runner.contract.recompute_above
        if limit is None:
            return not (self.runner.has_rope_length or self.runner.contract.cacheless)
        return max(length, self.longest_rope) <= limit

    def row(self, index: int) -> Row:
        """The request of a row. Raises GenerationError for a free row."""
        entry = self.rows[index]
        if entry is None:
            raise GenerationError(f"row {index} of the batch is free; start a prompt in it first")
        return entry

    # --- steps --------------------------------------------------------------------------------------------------------

    def step(self) -> Step | None:
        """Run the next step; None when no row has pending tokens.

        Raises GenerationError when logits are not finite, ProviderError or ResourceError when the run fails.
        """
        steady, self.steady_step = self.steady_step, None  # stays None if this step fails
        if steady is not None and steady.graph.is_bound and not steady.drafts:
            step = self._repeat_step(steady, NO_DRAFTS)
        else:
            began = time.perf_counter()
            if self._rested:
                self.mark, self._rested = began, False
            if steady is None or not steady.graph.is_bound:
                steady = None
                self._reread_if_outgrown()
            drafts = draft(self.rows, self.runner, self.control, self.plan)
            plan = drafts.plan or (self.plan() if steady is None else None)
            if plan is not None:
                step = self._step(plan, drafts, began)
            elif steady is not None:
                step = self._repeat_step(steady, drafts)
            else:
                return None
        if self.records:
            self.runner.recorder.on_step(step)
        return step

    def _step(self, plan: StepPlan, drafts: Drafts, began: float) -> Step:
        """Run the step of a plan."""
        runner, filled = self.runner, self.runner.cache.lengths
        if not plan.is_prefill:
            ready = runner.will_decode()  # once; not counted in a step's time
            self.mark, began = self.mark + ready, began + ready
        graph = runner.prepare(plan)
        _write_tokens(graph.tokens, plan, self.rows, filled)
        again = any(
            row is not None and row.is_repeated and count for row, count in zip(self.rows, plan.counts, strict=True)
        )
        if runner.has_rope_length:
            self.rope_length = max(self._next_rope_length(plan), self.rope_length if plan.is_prefill else 0)
            self.longest_rope = max(self.longest_rope, self.rope_length)
        seconds = runner.run(plan, graph, self.rope_length)
        drafted = [0 if row is None else row.drafted for row in self.rows]
        tokens = self.tokens.after_run(self.rows, plan, graph)
        get_ready(self.rows, runner, plan)
        kept = self._cached_counts(plan, drafted, tokens)
        verified = [
            VerifiedDraft(count, len(new) - 1) for count, new in zip(drafted, tokens, strict=True) if count and new
        ]
        finish, errors = endings(self.rows)
        now = time.perf_counter()
        step = Step(
            phase="prefill" if plan.is_prefill else "decode",
            new_tokens=max(kept),
            row_tokens=sum(kept),
            tokens=tokens,
            run_seconds=seconds,
            overhead_seconds=now - self.mark - seconds,
            finish=finish,
            observed=graph.observed,
            file=graph.file,
            is_repeated=plan.is_prefill and again,
            drafted=sum(drafted),
            accepted=sum(row.accepted for row in verified),
            draft_seconds=drafts.seconds,
            errors=errors,
            logprobs=logprobs(self.rows),
            prefix_tokens=self.prefixes.pop_reused(len(self.rows)),
        )
        self.mark = now
        self.tokens.step_count += 1
        first, end = plan.span or (0, len(self.rows))
        self.prompt_tokens_run = self.prompt_tokens_run + plan.new_tokens * (end - first) if plan.is_prefill else 0
        if self.control is not None and drafts.decoding_rows and not plan.is_prefill:
            self.control[drafts.decoding_rows].record(max(drafted), now - began, verified)
        self.steady_step = steady_step(graph, runner, self.rows, plan)
        return step

    def _repeat_step(self, steady: SteadyStep, drafts: Drafts) -> Step:
        """Repeat a decode step with the next tokens. Its time ends with the run; sampling counts for the next step."""
        began, now, tokens, ended = steady.run(self.tokens)
        finish, errors = endings(self.rows) if ended else steady.endings
        new_logprobs = logprobs(self.rows) if steady.watched else ()
        # Half the time of `Step(...)`.
        step = Step._make(
            ("decode", 1, len(steady.rows), tokens, now - began, began - self.mark, finish, False, steady.graph.file)
            + (False, 0, 0, drafts.seconds, errors, new_logprobs, ())
        )
        if drafts.decoding_rows and self.control is not None:
            self.control[drafts.decoding_rows].record(0, drafts.seconds + time.perf_counter() - began, ())
        self.mark = now
        self.tokens.step_count += 1
        self.prompt_tokens_run = 0
        if not ended:
            self.steady_step = steady
        return step

    def _cached_counts(self, plan: StepPlan, drafted: Sequence[int], tokens: Sequence[Sequence[int]]) -> list[int]:
        """[B]: new tokens that each row took in, without rejected draft tokens and tokens that are read again."""
        rereads = self.runner.contract.cacheless and not plan.is_prefill
        anew = [row is not None and row.is_repeated for row in self.rows]
        return [
            max(len(new), 1 - again) if count or (rereads and take) else take
            for take, count, new, again in zip(plan.counts, drafted, tokens, anew, strict=True)
        ]

    def plan(self) -> StepPlan | None:
        """The next step of the current rows."""
        capacity, filled = self.runner.capacity, self.runner.cache.lengths
        if self.runner.contract.cacheless:
            views = [self._uncached_view(index, row) for index, row in enumerate(self.rows)]
            return plan_step(views, capacity, self.prefill_chunk)
        waiting = self.prefixes.before_step(self.rows)
        views = [
            RowView(filled[index], 0, needs_cache=False) if row is None or index in waiting else row.view(filled[index])
            for index, row in enumerate(self.rows)
        ]
        waited = self.patience is not None and self.prompt_tokens_run >= self.patience
        policy = rows_at_work_first if waited else self.policy
        return plan_step(policy(views, capacity), capacity, self.prefill_chunk)

    def _uncached_view(self, index: int, row: Row | None) -> RowView:
        """The planner's view of a row of a graph without a cache: all of its text is fed again."""
        cache = self.runner.cache
        if row is None or row.finish is not None or cache.lengths[index] == row.known:
            return RowView(0, 0, needs_cache=False)
        reads = cache.lengths[index] < row.read_until
        cache.release_row(index)
        return RowView(0, row.known, reads, reads and row.request.listener is not None)

    # --- rotary frequencies that depend on the length of the text -----------------------------------------------------

    def _reread_if_outgrown(self) -> None:
        """Read running rows again when the text exceeds the length that the cached keys are for."""
        limit = self.runner.contract.recompute_above
        if limit is None or not self.rope_length or not self.rope_length <= limit < self._next_length():
            return
        for index, row in enumerate(self.rows):
            if row is not None and row.finish is None:
                self.runner.cache.release_row(index)
                row.read_again()
        self.rope_length = 0

    def _next_length(self) -> int:
        """Tokens of the longest row after the next step, including finished rows, which other keys depend on."""
        taken = [(row, n) for row, n in zip(self.rows, self.runner.cache.lengths, strict=True) if row is not None]
        return max((count + (row.finish is None) for row, count in taken), default=0)

    def _next_rope_length(self, plan: StepPlan) -> int:
        """The text length of this step's rotary frequencies."""
        rows = [row for row in self.rows if row is not None]
        wanted = max((row.request.rope_length for row in rows), default=0)
        going = (row.read_until for row in rows if row.finish is None)
        return max(wanted, max(going, default=0) if plan.is_prefill else self._next_length())


def serve(
    runner: Runner,
    requests: Iterable[Request],
    *,
    prefill_chunk: int = PREFILL_CHUNK_TOKENS,
    policy: Policy = prompts_first,
    records: bool = False,
) -> Iterator[Step]:
    """The steps of requests that begin together, at most one per row, until all have finished.

    `records`: begin a new record of the runner.
    """
    engine = GenerationLoop(runner, prefill_chunk, policy, records=records)
    if records:
        runner.begin()
    for request in requests:
        engine.add_request(request)
    return iter(engine.step, None)


def _write_tokens(
    tokens: npt.NDArray[np.int64], plan: StepPlan, rows: Sequence[Row | None], filled: Sequence[int]
) -> None:
    """Fill [B, S] with the rows' own tokens, and padding after them."""
    tokens.fill(PADDING)
    for index, row in enumerate(rows):
        if row is not None and (count := plan.counts[index]):
            begin = filled[index]
            tokens[index, :count] = row.history[begin : begin + count]
