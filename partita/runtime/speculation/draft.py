"""A draft model: a smaller package of the same vocabulary says what it would go on with, token by token.

It reads what the row has, in a cache of its own, and only when it is asked: a prompt, or what was generated meanwhile,
it reads in one go then. What was confirmed of its guesses is there already, and it goes back by the others. A guess is
its likeliest token, however the row draws: of all that do not depend on the draw it proves right most often.
"""

from __future__ import annotations

import bisect
import time

import numpy as np
import numpy.typing as npt

from partita.runtime.engine.bound_graph import FEW_TOKENS
from partita.runtime.engine.executor import Executor
from partita.runtime.engine.guesses import Guessed
from partita.runtime.engine.planner import RowView, plan_step
from partita.runtime.speculation.asking import Asking

CHUNK_TOKENS = 512
TIMED_STEPS, TIMED_CHUNKS, TIMED_TOKENS = 3, 2, 32
"""Steps of one token that are timed before a draft is asked for the first time, and chunks, of so many tokens. The
first of each makes buffers, so the quickest counts.
"""
CLASSES = (0.0, 0.2, 0.4, 0.6, 0.8, 0.9, 0.97)
"""Guesses are told apart by the probability that the draft gives them: at least so much."""
PRIORS = (0.15, 0.3, 0.5, 0.65, 0.8, 0.9, 0.95)
"""What share of them is thought to be right before any was judged."""
UNLIKELY = 0.3
"""Where the probabilities of the guesses so far have a product below this, no further one is made."""
Ids = npt.NDArray[np.int64]


class DraftGuesser:
    """Guesses of one row at a time. See `engine.guesses.Guesser`.

    Raises GenerationError when the draft's logits are not finite, ProviderError or ResourceError when its run fails.
    """

    def __init__(self, executor: Executor, vocab_size: int) -> None:
        """`executor`: of the draft, of batch size 1, and nobody else's. `vocab_size`: of the model that confirms."""
        self._executor, self._vocab_size = executor, vocab_size
        self._fed = np.zeros(executor.contract.max_length, np.int64)
        executor.cache.prepare()

    def __call__(self, history: Ids, most: int, /) -> Guessed:
        """What the draft goes on with."""
        longest = self._executor.contract.max_length
        if len(history) > longest or not most:
            return Guessed()
        self._go_back(history)
        tokens, evidence, chance, text = list[int](), list[int](), 1.0, history
        while len(tokens) < most and chance >= UNLIKELY and len(text) <= longest:
            logits = self.read(text)
            token = int(logits.argmax())
            if token >= self._vocab_size or not np.isfinite(logits[token]):
                break
            likely = 1 / float(np.exp(logits - logits[token]).sum())
            chance *= likely
            tokens.append(token)
            evidence.append(bisect.bisect(CLASSES, likely) - 1)
            text = np.append(text, token)
        return Guessed(tokens, evidence)

    def behind(self, history: Ids, /) -> int:
        """Tokens that it has not read, beside the last one."""
        return len(history) - 1 - self._same(history)

    def _same(self, history: Ids) -> int:
        """Tokens from the first that it has read as they are; never the last one: what follows comes of its logits."""
        same = min(self._executor.cache.filled[0], len(history) - 1)
        wrong = np.flatnonzero(self._fed[:same] != history[:same])
        return int(wrong[0]) if len(wrong) else same

    def _go_back(self, history: Ids) -> None:
        """Forget what is not the row's text, and at least its last token."""
        cache = self._executor.cache
        if not cache.rewind(0, cache.filled[0] - self._same(history)):
            cache.release_row(0)  # and all is read anew

    def read(self, text: Ids) -> npt.NDArray[np.float32]:
        """Feed what is not in the cache yet; the logits [vocab] after the last token of it."""
        executor = self._executor
        filled = executor.cache.filled
        logits = np.zeros(0, np.float32)
        while pending := len(text) - filled[0]:
            begin = filled[0]
            view = RowView(begin, pending, reads=pending > FEW_TOKENS or not begin)
            plan = plan_step([view], executor.graphs, CHUNK_TOKENS)
            assert plan is not None
            graph, count = executor.prepare(plan), plan.take[0]
            graph.tokens.fill(0)
            graph.tokens[0, :count] = self._fed[begin : begin + count] = text[begin : begin + count]
            executor.run(plan, graph, 0)
            if plan.ends:
                logits = graph.logits(0, plan.ends[0][1])
        return logits


def timed(executor: Executor) -> Asking:
    """What a draft takes for a guess, and for a token where it reads several: measured before it is asked for any. Its
    cache is empty afterwards. Raises as `DraftGuesser`.
    """
    guesser, length = DraftGuesser(executor, executor.contract.vocab_size), executor.contract.max_length
    begin = TIMED_STEPS + 1
    if length < begin + 2:
        return Asking()
    text = np.zeros(min(begin + TIMED_TOKENS, length), np.int64)

    def seconds(known: int) -> float:
        began = time.perf_counter()
        guesser.read(text[:known])
        return time.perf_counter() - began

    seconds(1)
    step = min([seconds(known) for known in range(2, begin + 1)])
    chunks = list[float]()
    for _ in range(TIMED_CHUNKS):
        if not executor.cache.rewind(0, executor.cache.filled[0] - begin):
            executor.cache.prepare()
            return Asking()
        chunks.append(seconds(len(text)))
    executor.cache.prepare()
    return Asking(step, max(min(chunks) - step, 0.0) / (len(text) - begin - 1))
