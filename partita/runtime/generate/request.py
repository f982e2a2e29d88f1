"""One row of the batch: its request, its progress, and the prefix of its prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from partita.runtime.generate.choice.sampling import RecordingSampler, Sampler, TokenLogprobs
from partita.runtime.generate.planner import RowView

if TYPE_CHECKING:
    from partita.runtime.generate.cache import Cache, RowStates


Tokens = npt.NDArray[np.int64]
"""[T]."""
BY_LENGTH = "the rotary frequencies of this package depend on the length of the text, or it has no KV cache"


@dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """Tokens, and the states of a row that has read them. Compares by identity, because arrays have no truth value."""

    tokens: Tokens
    states: RowStates
    adapter: str | None = None
    """Name of the row's adapter; states differ between adapters."""

    def cut(self, tokens: int, cache: Cache) -> Prefix:
        """Its first `tokens`. Requires `cache.saves` for them, or that it has no more."""
        if tokens == len(self.tokens):
            return self
        shapes = cache.row_shapes(tokens)
        states = {name: values[tuple(map(slice, shapes[name][0]))] for name, values in self.states.items()}
        return Prefix(self.tokens[:tokens], states, self.adapter)


Finish = Literal["stop", "length", "cache_full", "error"]
Drafter = Callable[[npt.NDArray[np.int64], int], Sequence[int]]
"""Returns at most N draft tokens after the tokens of a row [n]. Called with 0 after a prompt was prefilled."""
Listener = Callable[[int, npt.NDArray[np.float32]], object]
"""Called with a 0-based position and the logits [vocab] after its token, valid until the next step."""


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt and its generation settings: sampler, stop tokens, budget."""

    prompt: Sequence[int]
    sampler: Sampler | None = None
    """None: the row reads its tokens and generates none."""
    max_new_tokens: int = 0
    stop_ids: frozenset[int] = frozenset()
    listener: Listener | None = None
    """Called with the logits of every token, if the graph computes them."""
    listens_from: int = 0
    """The first position that `listener` is called for."""
    any_logits: bool = False
    """Logits that are not finite are no error."""
    fails_alone: bool = False
    """Logits that are not finite end only this row, with `error`; False: they end the run."""
    drafter: Drafter | None = None
    """Proposes draft tokens; the output does not change. Not used with a listener, or if a row cannot be rewound."""
    rope_length: int = 0
    """Minimum text length for the rotary frequencies; 0: that of the text itself."""
    adapter: str | None = None
    """Adapter name of its row; states of other adapters are not shared."""
    continues_at: int | None = None
    """Position from which prompt tokens are run by decode steps; None: the whole prompt is prefilled."""
    one_by_one: bool = False
    """Tokens from `continues_at` are run one by one, like new tokens."""
    is_warm_up: bool = False
    """A warm-up request, whose adapter is not recorded."""


@dataclass(slots=True)
class Row:
    """A request in progress. Its position in the cache is kept by the cache."""

    request: Request
    history: npt.NDArray[np.int64]
    """[N]: prompt and new tokens, then padding."""
    known: int
    read_until: int
    """Tokens that count as prefill: those of the prompt, or all known tokens when the row is read again."""
    finish: Finish | None = None
    error: str | None = None
    """An error of this row only."""
    is_repeated: bool = field(default=False)
    """Whether the tokens up to `read_until` had been read before."""
    drafted: int = 0
    """Draft tokens in `history` after the known tokens; the next step verifies them."""

    @classmethod
    def of(cls, request: Request, max_length: int) -> Row:
        """A new row with nothing cached."""
        history = np.zeros(max_length, np.int64)
        count = len(request.prompt)
        history[:count] = request.prompt
        read_until = count if request.continues_at is None else request.continues_at
        return cls(request, history, count, read_until)

    @property
    def new_tokens(self) -> int:
        """Number of tokens after its prompt."""
        return self.known - len(self.request.prompt)

    @property
    def has_no_drafts(self) -> bool:
        """Whether a step without draft tokens adds one token to it, and it has no listener."""
        request = self.request
        return request.sampler is not None and request.listener is None and self.known < len(self.history)

    @property
    def drafts(self) -> tuple[int, ...]:
        """Its draft tokens."""
        return tuple(self.history[self.known : self.known + self.drafted].tolist())

    def view(self, filled: int) -> RowView:
        """The planner's view of the row with `filled` cached tokens."""
        if self.finish is not None:
            return RowView(filled, 0, needs_cache=False)
        listens = self.request.listener is not None
        every = listens and filled >= self.request.listens_from or self.drafted > 0
        reads = filled < self.read_until
        most = self.read_until - filled if reads and self.read_until < self.known else None
        if listens and not every and self.request.listens_from < self.known:
            most = min(most or self.known, self.request.listens_from - filled)
        if self.request.one_by_one and not reads:
            most = 1
        return RowView(filled, self.known - filled + self.drafted, reads, every, token_limit=most)

    def max_drafts(self, filled: int) -> int:
        """Maximum draft tokens in the next step with `filled` cached tokens.

        0 unless the last token alone is pending.
        """
        if self.request.drafter is None or self.request.listener is not None or filled < self.read_until:
            return 0
        if filled != self.known - 1:
            return 0
        return max(0, min(len(self.history) - self.known, self.request.max_new_tokens - self.new_tokens) - 1)

    def draft(self, most: int) -> None:
        """Get at most `most` draft tokens from the drafter; 0 only prefills it."""
        assert self.request.drafter is not None
        self.drafted = 0
        tokens = self.request.drafter(self.history[: self.known], most)[:most]
        self.drafted = len(tokens)
        self.history[self.known : self.known + self.drafted] = tokens

    def read_again(self) -> None:
        """Mark all known tokens to be read again from the beginning."""
        self.read_until, self.is_repeated = self.known, True

    def add(self, token: int) -> None:
        """Append a token, and set the finish reason if the row ends with it."""
        self.history[self.known] = token
        self.known += 1
        if token in self.request.stop_ids:
            self.finish = "stop"
        elif self.known - len(self.request.prompt) == self.request.max_new_tokens:
            self.finish = "length"
        elif self.known == len(self.history):
            self.finish = "cache_full"


Endings = tuple[tuple[Finish | None, ...], tuple[str | None, ...]]
"""[B] each: finish reasons, and errors of single rows; the latter is empty without any."""


def endings(rows: Sequence[Row | None]) -> Endings:
    """The finish reasons and errors of the rows of a batch."""
    errors = tuple(None if row is None else row.error for row in rows)
    return tuple(None if row is None else row.finish for row in rows), errors if any(errors) else ()


def logprobs(rows: Sequence[Row | None]) -> tuple[tuple[TokenLogprobs, ...], ...]:
    """[B]: log-probabilities recorded by samplers since the last call; empty if none."""
    samplers = [None if row is None else row.request.sampler for row in rows]
    found = tuple(sampler.take_records() if isinstance(sampler, RecordingSampler) else () for sampler in samplers)
    return found if any(found) else ()
