"""One row of the batch: its request, how far it is, and the prefix that its prompt begins with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from partita.errors import GenerationError
from partita.observations.text_format import plural
from partita.runtime.generate.cache.base import RowStates
from partita.runtime.generate.choice.logprobs import TokenLogprobs, Watched
from partita.runtime.generate.choice.sampling import Sampler
from partita.runtime.generate.planner import RowView

if TYPE_CHECKING:
    from partita.runtime.generate.cache.cache import Cache


Tokens = npt.NDArray[np.int64]
"""[T]."""
BY_LENGTH = "the rotary frequencies of this package depend on the length of the text, or it has no cache"


@dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """Tokens, and the states of a row that has taken them in. Equal to itself alone: arrays have no one truth."""

    tokens: Tokens
    states: RowStates
    adapter: str | None = None
    """Name of the adapter of the row: states differ between adapters."""

    @property
    def size_bytes(self) -> int:
        """Of the states."""
        return sum(values.nbytes for values in self.states.values())


def common_tokens(one: Tokens, other: Tokens) -> int:
    """How many tokens two texts begin with alike."""
    count = min(len(one), len(other))
    different = np.flatnonzero(one[:count] != other[:count])
    return int(different[0]) if len(different) else count


def most_shared(common: Sequence[int]) -> int:
    """Of how many tokens others have in common with a text, the number that spares them most: each copies that many or
    none. 0 without any.
    """
    return max(common, key=lambda count: count * sum(other >= count for other in common), default=0)


def cut(prefix: Prefix, tokens: int, cache: Cache) -> Prefix:
    """The prefix of the first tokens of one; only where `cache.saves` them after all of it, or it has no more."""
    if tokens == len(prefix.tokens):
        return prefix
    shapes = cache.row_shapes(tokens)
    states = {name: values[tuple(map(slice, shapes[name][0]))] for name, values in prefix.states.items()}
    return Prefix(prefix.tokens[:tokens], states, prefix.adapter)


def saved_prefix(cache: Cache, row: int, tokens: Tokens, *, usable: bool) -> Prefix:
    """What a row has taken in, which are these tokens. `usable`: a longer text has the same keys for them.

    Raises GenerationError where that cannot be given out.
    """
    if not usable:
        raise GenerationError(f"{plural(len(tokens), 'token')} cannot be kept as a prefix: {BY_LENGTH}")
    if not cache.saves(len(tokens), cache.filled[row]):
        raise GenerationError("a state in bfloat16 cannot be read back from this device, so it cannot be kept")
    return Prefix(tokens.copy(), cache.save_row(row, len(tokens)))


def check_loads(cache: Cache, tokens: int, *, usable: bool) -> None:
    """Raise GenerationError where no row can begin a prompt of so many tokens with a prefix. `usable`: as there."""
    if not usable:
        raise GenerationError(f"a prompt of {plural(tokens, 'token')} cannot begin with a prefix: {BY_LENGTH}")
    if not cache.loads_rows:
        raise GenerationError(
            "a prefix cannot be copied into this cache, because it is in bfloat16 on a device; export with another "
            "`precision`"
        )


def load_prefix(cache: Cache, row: int, prefix: Prefix, prompt: Sequence[int], *, usable: bool) -> None:
    """Have a row that has just joined begin with a prefix of its prompt.

    `usable`: the prompt has the same keys for its tokens. The last token of a prompt is always read. Raises
    GenerationError for a prompt that begins otherwise, and where a row cannot take it in.
    """
    count, known = len(prefix.tokens), np.asarray(prompt, np.int64)
    check_loads(cache, len(known), usable=usable)
    common = min(common_tokens(prefix.tokens, known), len(known) - 1)
    if common < count and not cache.saves(common, count):
        raise GenerationError(
            f"the prompt has {plural(common, 'token')} in common with a prefix of {count}, and a state that sums up or "
            "drops tokens cannot go back to them; end the prefix where a token ends, at a line end as a rule, and give "
            "more text after it"
        )
    kept = cut(prefix, common, cache)
    cache.load_row(row, common, kept.states)


Finish = Literal["stop", "length", "cache_full", "error"]
Drafter = Callable[[npt.NDArray[np.int64], int], Sequence[int]]
"""At most so many draft tokens that may follow the tokens of a row [n]. 0 are asked for when a prompt has been read."""
Listener = Callable[[int, npt.NDArray[np.float32]], object]
"""Hears the logits [vocab] of the token at a 0-based position; they are valid until the next step."""


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt and what is wanted after it. Each has its own sampler, stop set, budget and end."""

    prompt: Sequence[int]
    sampler: Sampler | None = None
    """None: the row reads what it is given and adds nothing by itself."""
    max_new_tokens: int = 0
    stop_ids: frozenset[int] = frozenset()
    listener: Listener | None = None
    """Asks for the logits of every token, where the graph gives them."""
    listens_from: int = 0
    """The first position whose logits it is given."""
    any_logits: bool = False
    """Logits that are not finite are no error: who asks judges for himself, or looks at none."""
    fails_alone: bool = False
    """Logits that are not finite end this row, with `error`, and the others go on; else they end the run."""
    drafter: Drafter | None = None
    """Proposes draft tokens, so that a step can verify several; the tokens are the same without. Not used with a
    listener, nor where a row cannot be rewound.
    """
    rope_length: int = 0
    """Length of text whose rotary frequencies are to be used at least; 0: that of the text itself."""
    shares: int = 0
    """Tokens of the prompt that others begin with, too, as far as is known; see `engine.prefixes`."""
    prefix: Prefix | None = None
    """What the prompt begins with, and the states after it: only what follows is read."""
    adapter: str | None = None
    """Name of the adapter that its row has: what others have with another one is not the same."""
    continues_at: int | None = None
    """Tokens of the prompt from here on are fed as those that follow one are; None: all are read as a prompt."""
    singly: bool = False
    """They are fed one by one, as new tokens are."""
    trial: bool = False
    """A warm-up request, whose adapter is not recorded."""


@dataclass(slots=True)
class Row:
    """A request at work. Where its next token goes is the cache's to know."""

    request: Request
    history: npt.NDArray[np.int64]
    """[N]: the known tokens, prompt and new ones, and then padding."""
    known: int
    given: int
    """Tokens that it was given last, and those before them: the budget counts what is added after."""
    read_until: int
    """Tokens that count as read rather than as generated; those of a prompt, or all that were known at a re-prefill."""
    finish: Finish | None = None
    error: str | None = None
    """What went wrong in this row alone."""
    again: bool = field(default=False)
    """What it reads until `read_until` had been read before."""
    drafted: int = 0
    """Tokens of `history` after the known ones that are draft tokens, which the next step verifies."""
    gave_up: str | None = None
    """Why the row has no draft tokens any more; None while it may have some."""

    @classmethod
    def of(cls, request: Request, max_length: int) -> Row:
        """A row that has read nothing yet."""
        history = np.zeros(max_length, np.int64)
        count = len(request.prompt)
        history[:count] = request.prompt
        read_until = count if request.continues_at is None else request.continues_at
        return cls(request, history, count, count, read_until)

    @property
    def new_tokens(self) -> int:
        """Tokens that were added to what it was given last."""
        return self.known - self.given

    @property
    def is_plain(self) -> bool:
        """Whether a step without draft tokens adds one token to it, and nobody asks for its logits."""
        request = self.request
        return request.sampler is not None and request.listener is None and self.known < len(self.history)

    @property
    def drafts(self) -> tuple[int, ...]:
        """The draft tokens after the known ones."""
        return tuple(self.history[self.known : self.known + self.drafted].tolist())

    def view(self, filled: int) -> RowView:
        """The row for the planner, with `filled` of its tokens in the cache."""
        if self.finish is not None:
            return RowView(filled, 0, live=False)
        listens = self.request.listener is not None
        every = listens and filled >= self.request.listens_from or self.drafted > 0
        reads = filled < self.read_until
        most = self.read_until - filled if reads and self.read_until < self.known else None
        if listens and not every and self.request.listens_from < self.known:
            most = min(most or self.known, self.request.listens_from - filled)
        if self.request.singly and not reads:
            most = 1
        return RowView(filled, self.known - filled + self.drafted, reads, every, most=most)

    def room_for_drafts(self, filled: int) -> int:
        """How many draft tokens the next step could verify, with `filled` tokens in the cache: only when the last known
        token alone is still to be fed, and no more than the row can take.
        """
        if self.request.drafter is None or self.request.listener is not None or filled < self.read_until:
            return 0
        if filled != self.known - 1:
            return 0
        return max(0, min(len(self.history) - self.known, self.request.max_new_tokens - self.new_tokens) - 1)

    def draft(self, most: int) -> None:
        """Write at most `most` draft tokens after the known ones; 0 lets the drafter read the row."""
        assert self.request.drafter is not None
        self.drafted = 0
        tokens = self.request.drafter(self.history[: self.known], most)[:most]
        self.drafted = len(tokens)
        self.history[self.known : self.known + self.drafted] = tokens

    def stop_drafting(self, why: str) -> None:
        """Go on without draft tokens."""
        self.request = replace(self.request, drafter=None)
        self.drafted, self.gave_up = 0, why

    def read_again(self) -> None:
        """Read all known tokens from the beginning."""
        self.read_until, self.again = self.known, True

    def extend(self, tokens: Sequence[int]) -> None:
        """Give it more tokens to read, after which it goes on with its whole budget."""
        self.history[self.known : self.known + len(tokens)] = tokens
        self.known += len(tokens)
        self.given = self.read_until = self.known
        self.finish, self.again = None, False

    def rewind(self, tokens: int) -> None:
        """Forget its last tokens, after which it goes on.

        The last token that is kept is fed once more. That is a decode step, also where the token is one of the prompt:
        it had been read, and the step makes what any decode step makes.
        """
        self.known -= tokens
        self.given, self.read_until = min(self.given, self.known), min(self.read_until, self.known - 1)
        self.finish = None

    def add(self, token: int) -> None:
        """Append a token, and note whether the row ends with it."""
        self.history[self.known] = token
        self.known += 1
        if token in self.request.stop_ids:
            self.finish = "stop"
        elif self.new_tokens == self.request.max_new_tokens:
            self.finish = "length"
        elif self.known == len(self.history):
            self.finish = "cache_full"


Endings = tuple[tuple[Finish | None, ...], tuple[str | None, ...], tuple[str | None, ...]]
"""[B] each: why rows have finished, their own errors, and why they gave up drafting; empty without any of the last two.
"""


def endings(rows: Sequence[Row | None]) -> Endings:
    """How the rows of a batch have ended."""
    errors = tuple(None if row is None else row.error for row in rows)
    gave_up = tuple(None if row is None else row.gave_up for row in rows)
    finish = tuple(None if row is None else row.finish for row in rows)
    return finish, errors if any(errors) else (), gave_up if any(gave_up) else ()


def logprobs(rows: Sequence[Row | None]) -> tuple[tuple[TokenLogprobs, ...], ...]:
    """[B]: log-probabilities that samplers have noted since the last call; empty where none has."""
    samplers = [None if row is None else row.request.sampler for row in rows]
    found = tuple(sampler.told() if isinstance(sampler, Watched) else () for sampler in samplers)
    return found if any(found) else ()
