"""The token loop: a generator of steps. Knows token ids only: no text, no printing, no providers.

A row is one prompt of the batch. Prompts are read in chunks; rows of different lengths are padded on the right. What
padding writes into the cache lies beyond the row's cursor: causal masking hides it,
and the row's next tokens replace it.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Generator, Sequence

import numpy as np
import numpy.typing as npt

from partita.errors import GenerationError, PartitaError, UsageError
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
            f"{len(prompts)} prompts for a package of batch size {batch}; give {batch}, or export with "
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
    if not runner.cache.padding_is_safe and len({len(prompt) for prompt in prompts}) > 1:
        raise GenerationError("this model has states that padding would spoil; give prompts of equal length")


class Generation:
    """The state of one generation: for each row what is known, what is in the cache, and how it ended."""

    def __init__(
        self, runner: Runner, prompts: Sequence[Sequence[int]], max_new_tokens: int, sampler: Sampler,
        stop_ids: frozenset[int], prefill_chunk: int,
    ) -> None:  # fmt: skip
        self.runner, self.sampler, self.stop_ids = runner, sampler, stop_ids
        self.max_new_tokens, self.prefill_chunk = max_new_tokens, prefill_chunk
        self.lengths = np.array([len(prompt) for prompt in prompts], np.int64)
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
        self.mark = time.perf_counter()
        try:
            while (self.filled < self.lengths).any():
                yield self.prefill_step()
            while None in self.finish:
                yield self.decode_step()
        except PartitaError:
            runner.must_clear = True  # what a failed run left in the cache may not be finite
            raise
        runner.must_clear = not runner.cache.padding_is_safe

    def prefill_step(self) -> Step:
        """Feed every row the next part of its prompt; a row whose prompt is read waits."""
        left = self.lengths - self.filled
        feed = self.prefill_feed(left)
        taken = np.minimum(left, feed.new_tokens)
        ends = {row: int(taken[row]) - 1 for row in range(len(left)) if 0 < left[row] == taken[row]}
        feed.choose(sorted(set(ends.values())) or (0,))
        feed.tokens.fill(PADDING)
        for row, count in enumerate(taken):
            begin = self.filled[row]
            feed.tokens[row, :count] = self.history[row, begin : begin + count]
        return self.step("prefill", feed, taken, ends)

    def prefill_feed(self, left: npt.NDArray[np.int64]) -> Feed:
        """The graph and number of tokens for the next part of the prompts. `left` [B]: prompt tokens not yet read."""
        runner, longest = self.runner, int(left.max())
        fixed = runner.chunk_fixed
        may_append = runner.can_append_chunks or not self.filled.any()
        if fixed is None:
            size = min(self.prefill_chunk, longest) if runner.can_append_chunks else longest
            ends = {int(count) for count in left if 0 < count <= size}
            return runner.prefill_feed(size, max(len(ends), 1))
        ends = {int(count) for count in left if 0 < count <= fixed}
        fits = int(self.filled.max()) + fixed <= runner.max_length
        served = len(ends) <= (runner.prefill_rows or fixed)
        unpadded = runner.cache.padding_is_safe or int(left.min()) >= fixed
        usable = may_append and fits and served and unpadded
        return runner.prefill_feed(fixed, max(len(ends), 1)) if usable else runner.decode_feed()

    def decode_step(self) -> Step:
        """Feed every row its last token. A row that has finished is fed too, where it does no harm."""
        feed = self.runner.decode_feed()
        feed.choose((0,))
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
        feed.place(np.minimum(self.filled, self.runner.max_length - feed.new_tokens))
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
