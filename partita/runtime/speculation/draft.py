"""A draft model: a smaller package with the same vocabulary proposes its likeliest tokens.

It has a cache of its own. It reads what is new of a row in one run, keeps the draft tokens that were accepted, and
rewinds the others. A draft token is the likeliest one also when the row samples: it is accepted most often.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from partita.runtime.engine.bound_graph import FEW_TOKENS
from partita.runtime.engine.executor import Runner
from partita.runtime.engine.planner import RowView, plan_step

CHUNK_TOKENS = 512
Ids = npt.NDArray[np.int64]


class DraftModel:
    """Draft tokens of one row at a time.

    Raises GenerationError when the draft's logits are not finite, ProviderError or ResourceError when its run fails.
    """

    def __init__(self, runner: Runner, vocab_size: int) -> None:
        """`runner`: of the draft package, batch size 1. `vocab_size`: of the model that verifies."""
        self._runner, self._vocab_size = runner, vocab_size
        self._fed = np.zeros(runner.contract.max_length, np.int64)
        runner.cache.prepare()

    def __call__(self, history: Ids, most: int, /) -> list[int]:
        """At most `most` tokens that the draft model continues `history` [n] with; with 0 it only reads it."""
        longest = self._runner.contract.max_length
        if len(history) > longest:
            return []
        self._rewind(history)
        logits, tokens = self._read(history), list[int]()
        while len(tokens) < most:
            token = int(logits.argmax())
            if token >= self._vocab_size or not np.isfinite(logits[token]):
                break
            tokens.append(token)
            if len(tokens) == most or len(history) == longest:
                break
            history = np.append(history, token)
            logits = self._read(history)
        return tokens

    def _rewind(self, history: Ids) -> None:
        """Forget what is not the row's text, and at least its last token, whose logits are needed."""
        cache = self._runner.cache
        same = min(cache.filled[0], len(history) - 1)
        wrong = np.flatnonzero(self._fed[:same] != history[:same])
        same = int(wrong[0]) if len(wrong) else same
        if not cache.rewind(0, cache.filled[0] - same):
            cache.release_row(0)

    def _read(self, text: Ids) -> npt.NDArray[np.float32]:
        """Feed what is not in the cache yet; the logits [vocab] after the last token."""
        runner = self._runner
        filled = runner.cache.filled
        logits = np.zeros(0, np.float32)
        while pending := len(text) - filled[0]:
            begin = filled[0]
            view = RowView(begin, pending, reads=pending > FEW_TOKENS or not begin)
            plan = plan_step([view], runner.capacity, CHUNK_TOKENS)
            assert plan is not None
            graph, count = runner.prepare(plan), plan.take[0]
            graph.tokens.fill(0)
            graph.tokens[0, :count] = self._fed[begin : begin + count] = text[begin : begin + count]
            runner.run(plan, graph, 0)
            if plan.ends:
                logits = graph.logits(0, plan.ends[0][1])
        return logits
