"""The token loop: a generator of steps. Knows token ids only: no text, no printing, no providers.

A row is one prompt of the batch. Prompts are read in chunks. With keys and values alone, rows of different lengths are
padded on the right: what padding writes into the cache lies beyond the row's cursor, causal masking hides it, and the
row's next tokens replace it. A state that sums up what it is fed has no cursor, so all rows then end together: the
longer ones begin alone, and each of the others begins when it has as much left as they have, its states zeroed.

    row 0   ▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒     prompt of 21 tokens
    row 1   ...............▒▒▒▒▒▒     prompt of 6 tokens, after 15 steps' worth of padding that is forgotten
"""

from __future__ import annotations

import time
from collections.abc import Collection, Generator, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from partita.errors import GenerationError, PartitaError, UsageError
from partita.partition_reports.wording import plural
from partita.runtime.feed import Feed
from partita.runtime.runner import Finish, PhaseName, Runner, Step
from partita.runtime.sampling import Sampler

PREFILL_CHUNK_TOKENS = 512
PADDING = 0
"""Any id of the vocabulary will do."""

__all__ = ["PREFILL_CHUNK_TOKENS", "Step", "generate"]


def generate(
    runner: Runner, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, sampler: Sampler,
    stop_ids: Collection[int] = frozenset(), prefill_chunk: int = PREFILL_CHUNK_TOKENS,
) -> Generator[Step, None, None]:  # fmt: skip
    """Generate up to `max_new_tokens` tokens after each prompt, one prompt of token ids per row of the batch.

    A row ends with `stop` (its last token is in `stop_ids`), `length`, or `cache_full` (prompt and new tokens together
    fill the cache). Bad arguments raise at once: UsageError for an option, GenerationError for a prompt. The iterator
    raises GenerationError when logits are not finite, ProviderError or ResourceError when a run fails. Closing it is
    always safe.
    """
    for option, value in (("--max-new-tokens", max_new_tokens), ("--prefill-chunk", prefill_chunk)):
        if value < 1:
            raise UsageError(f"{option} is {value}; it must be at least 1")
    check_prompts(runner, prompts)
    return Generation(runner, prompts, max_new_tokens, sampler, frozenset(stop_ids), prefill_chunk).steps()


def check_prompts(runner: Runner, prompts: Sequence[Sequence[int]]) -> None:
    """Raise GenerationError for prompts that this package cannot take."""
    batch, limit = runner.batch, runner.max_length
    if len(prompts) != batch:
        raise GenerationError(
            f"{plural(len(prompts), 'prompt')} for a package of batch size {batch}; give {batch}, or export with "
            f"--batch-size {max(len(prompts), 1)}"
        )
    for row, prompt in enumerate(prompts):
        where = f"prompt {row + 1}" if batch > 1 else "the prompt"
        if not len(prompt):
            raise GenerationError(f"{where} is empty; give at least one token to begin with")
        if len(prompt) > limit:
            raise GenerationError(
                f"{where} has {len(prompt)} tokens and the cache holds {limit}; shorten it, or export with a larger "
                f"--max-length than {limit}"
            )
        for position, token in enumerate(prompt):
            if not 0 <= token < runner.vocab_size:
                raise GenerationError(
                    f"{where} has token id {token} at position {position}; the vocabulary has ids 0 to "
                    f"{runner.vocab_size - 1}: is the tokenizer that of the model?"
                )
    if not runner.cache.clears_rows and len({len(prompt) for prompt in prompts}) > 1:
        raise GenerationError(
            "prompts of different lengths: one row's part of a bfloat16 state on this device cannot be zeroed; give "
            "prompts of equal length, or export with another --precision"
        )


class Generation:
    """The state of one generation: for each row what is known, what is in the cache, and how it ended."""

    def __init__(
        self, runner: Runner, prompts: Sequence[Sequence[int]], max_new_tokens: int, sampler: Sampler,
        stop_ids: frozenset[int], prefill_chunk: int,
    ) -> None:  # fmt: skip
        self.runner, self.sampler, self.stop_ids = runner, sampler, stop_ids
        self.max_new_tokens, self.prefill_chunk = max_new_tokens, prefill_chunk
        self.lengths = np.array([len(prompt) for prompt in prompts], np.int64)
        self.targets, self.again = self.lengths, False
        """Tokens per row that are being read, and whether they were read before."""
        self.rope_length = 0
        """The length of text that the keys of the last step have their rotary frequencies for."""
        self.known = [len(prompt) for prompt in prompts]
        """Tokens per row that are known: prompt and new ones."""
        self.history = np.full((runner.batch, runner.max_length), PADDING, np.int64)
        for row, prompt in enumerate(prompts):
            self.history[row, : len(prompt)] = prompt
        self.filled = np.zeros(runner.batch, np.int64)
        """Tokens per row that are in the cache, which is where the row's next token goes."""
        self.finish: list[Finish | None] = [None] * runner.batch
        self.mark = 0.0
        """When the last step ended."""

    def steps(self) -> Generator[Step, None, None]:
        """Read the prompts, then add tokens until every row has finished."""
        runner = self.runner
        runner.steps, runner.prompt_tokens = [], int(self.lengths.max())
        if runner.must_clear:
            runner.cache.clear()
            runner.must_clear = False
        self.mark = time.perf_counter()
        try:
            yield from self.read(self.lengths, again=False)
            while None in self.finish:
                if self.outgrows_its_keys():
                    going = [finish is None for finish in self.finish]
                    yield from self.read(np.where(going, self.known, 0), again=True)
                else:
                    yield self.decode_step()
        except PartitaError:
            runner.must_clear = True  # what a failed run left in the cache may not be finite
            raise

    def read(self, targets: npt.NDArray[np.int64], *, again: bool) -> Iterator[Step]:
        """Read the first `targets` [B] tokens of every row from the beginning; a row of 0 stays out of it."""
        self.targets, self.again = targets, again
        self.filled[:] = 0
        self.rope_length = int(targets.max())
        self.runner.cache.clear_rows(range(self.runner.batch))
        while (self.filled < targets).any():
            yield self.prefill_step()

    def prefill_step(self) -> Step:
        """Feed every row the next part of its prompt; a row whose prompt is read waits."""
        left = self.targets - self.filled
        turn = self.turn(left)
        feed = self.prefill_feed(turn)
        taken = np.minimum(turn, feed.new_tokens)
        ends = {row: int(taken[row]) - 1 for row in range(len(left)) if 0 < left[row] == taken[row]}
        feed.choose(sorted(set(ends.values())) or (0,))
        feed.tokens.fill(PADDING)
        for row, count in enumerate(taken):
            begin = self.filled[row]
            feed.tokens[row, :count] = self.history[row, begin : begin + count]
        return self.step("prefill", feed, taken, ends)

    def turn(self, left: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """[B]: tokens that each row may be fed next. `left` [B]: those it has not read yet.

        With states that padding would spoil: none for rows that have to wait, and for the others as many as come before
        the next row begins. Rows that begin now have their states zeroed.
        """
        cache = self.runner.cache
        if cache.padding_is_safe:
            return left
        longest, read = int(self.targets.max()), int(self.filled.max())
        begins = longest - self.targets
        if read:
            cache.clear_rows(np.flatnonzero(begins == read).tolist())
        until = min(begins[begins > read].tolist(), default=longest)
        return np.where(begins <= read, until - read, 0)

    def prefill_feed(self, turn: npt.NDArray[np.int64]) -> Feed:
        """The graph and number of tokens for the next part of the prompts. `turn` [B]: tokens that rows may be fed."""
        runner, longest = self.runner, int(turn.max())
        fixed, first = runner.chunk_fixed, not self.filled.any()
        if fixed is None:
            may_take = self.prefill_chunk if runner.can_append_chunks else longest if first else 1
            size = min(may_take, longest)
            ends = {int(count) for count in turn if 0 < count <= size}
            return runner.prefill_feed(size, max(len(ends), 1))
        ends = {int(count) for count in turn if 0 < count <= fixed}
        may_append = first or fixed == 1 or runner.can_append_chunks
        fits = int(self.filled.max()) + fixed <= runner.max_length
        served = len(ends) <= (runner.prefill_rows or fixed)
        unpadded = runner.cache.padding_is_safe or longest >= fixed
        usable = may_append and fits and served and unpadded
        return runner.prefill_feed(fixed, max(len(ends), 1)) if usable else runner.decode_feed()

    def outgrows_its_keys(self) -> bool:
        """True when the next decode step is for a text so long that the keys of shorter ones do not go with it."""
        limit = self.runner.manifest.graph.rereads_at
        return limit is not None and self.rope_length <= limit < self.next_length()

    def next_length(self) -> int:
        """Tokens of the longest row after the next decode step. Rows that have finished count: what is cached of the
        others was made beside them.
        """
        return max(int(filled) + (finish is None) for filled, finish in zip(self.filled, self.finish, strict=True))

    def decode_step(self) -> Step:
        """Feed every row its last token. A row that has finished is fed too, where it does no harm."""
        feed = self.runner.decode_feed()
        feed.choose((0,))
        self.rope_length = self.next_length()
        for row, count in enumerate(self.known):
            feed.tokens[row, 0] = self.history[row, count - 1]
        going = [row for row, finish in enumerate(self.finish) if finish is None]
        taken = np.zeros(len(self.finish), np.int64)
        taken[going] = 1
        return self.step("decode", feed, taken, dict.fromkeys(going, 0))

    def step(self, phase: PhaseName, feed: Feed, taken: npt.NDArray[np.int64], ends: dict[int, int]) -> Step:
        """Run once and add a token to each row of `ends`, which maps it to the position its logits are at.

        `taken` [B]: how many of the tokens fed are the row's own.
        """
        # A row with a full cache has finished: what it writes over its last token is never read.
        feed.place(np.minimum(self.filled, self.runner.max_length - feed.new_tokens), self.rope_length)
        run_seconds, observed = feed.run()
        self.filled += taken
        tokens: list[int | None] = [None] * len(taken)
        for row, position in ends.items():
            tokens[row] = self.add_token(row, feed.logits(row, position))
        now = time.perf_counter()
        step = Step(
            phase=phase,
            index=len(self.runner.steps),
            new_tokens=int(taken.max()),
            row_tokens=int(taken.sum()),
            tokens=tuple(tokens),
            run_seconds=run_seconds,
            overhead_seconds=now - self.mark - run_seconds,
            finish=tuple(self.finish),
            observed=observed,
            file=feed.file,
            again=phase == "prefill" and self.again,
        )
        self.mark = now
        self.runner.steps.append(step)
        return step

    def add_token(self, row: int, logits: npt.NDArray[np.float32]) -> int | None:
        """Sample the next token of a row, and note whether the row ends. None when the cache has no room for it."""
        known = self.known[row]
        # The largest value is NaN if any is, so one pass finds both.
        if not np.isfinite(logits.max()):
            raise GenerationError(
                f"the logits of step {len(self.runner.steps)}, row {row}, are not finite; export the "
                "checkpoint in a higher --precision, or check its weights"
            )
        if known == self.runner.max_length:
            self.finish[row] = "cache_full"
            return None
        token = self.sampler(logits, self.history[row, :known])
        self.history[row, known] = token
        self.known[row] = known + 1
        if token in self.stop_ids:
            self.finish[row] = "stop"
        elif known + 1 - self.lengths[row] == self.max_new_tokens:
            self.finish[row] = "length"
        elif known + 1 == self.runner.max_length:
            self.finish[row] = "cache_full"
        return token
