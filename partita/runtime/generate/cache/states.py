"""The stores of a package's states.

States of fixed shape have one buffer each, bound as past and present, so that nothing grows or is copied. Keys and
values have an entry per token, for all tokens or a sliding window. Recurrent and convolution states take in every token
that is fed, padding included.

Other graphs write the present to new memory in every step. Foreign graphs append keys and values: past [B, KV, T, D]
becomes present [B, KV, T + S, D]. Others return a state of fixed shape in another buffer. ONNX Runtime allocates the
present in its arena, in the memory where the session reads the past, and the next step reads it there. The graph itself
copies the past into the longer tensor, and the report counts these bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from partita import dtypes
from partita.errors import GenerationError
from partita.observations.facts import StateFact
from partita.observations.text_format import plural
from partita.package.contract import State
from partita.runtime.ort.binding import Binding
from partita.runtime.ort.buffers import CUDA_MEMORY, HOST_MEMORY, Buffer, host_buffer
from partita.runtime.ort.session import Session

Span = tuple[int, int] | None
"""Rows of the batch, first and end (exclusive); None: all."""
Place = int | slice
"""A row of the batch, or a slice of all rows if they hold the same sequence."""
RowStates = Mapping[str, npt.NDArray[Any]]
"""The states of one row on the host, by the graph's input name, without the batch axis. Keys and values have one entry
per token: [KV, T, D]. bfloat16 is stored as uint16."""
RowShapes = Mapping[str, tuple[tuple[int, ...], str]]
"""Shape and dtype of each state."""


KINDS = frozenset({"key", "value"})
"""Types of states with an entry per token."""
TOKENS_AXIS = 2
"""Types of keys and values."""


class StoredState:
    """A state in one buffer, which a step reads as past and writes as present, unless a subclass differs.

    The rows' cursors determine which entries are valid.
    """

    padding_is_safe = False
    """Whether entries beyond a row's cursor are never read."""

    def __init__(self, state: State, session: Session, batch: int) -> None:
        self.state, self._session, self._batch = state, session, batch
        self.buffer = self._first_buffer()
        self._address, self._shares_address = self.buffer.address(), True
        """Address after the last observed run, and whether past and present had one address in each of them."""
        self._address_changes = self._observed_runs = 0
        self._copied_bytes = 0
        """Bytes of the state that the last step copied."""

    def _first_buffer(self) -> Buffer:
        return self._session.state_buffer(self.state.past, self.state.shape, self.state.dtype)

    @property
    def separate(self) -> bool:
        """Whether a row can begin and continue independently of the others."""
        return True

    def bind(self, binding: Binding, span: Span = None) -> None:
        """Bind the buffer, or its part of the rows in `span`, as past and present."""
        bound = self.buffer if span is None else self.buffer.rows(*span)
        binding.bind_input(self.state.past, bound)
        binding.bind_output(self.state.present, bound)

    def begin(self, rows: Sequence[int]) -> None:
        """Do nothing: rows need no preparation for a first token."""

    def rewinds(self, tokens: int, filled: int) -> bool:
        """Whether a row with `filled` tokens can be rewound by `tokens`."""
        return tokens == 0

    def rewind(self, tokens: int) -> None:
        """Do nothing: entries beyond the cursor are not read."""

    def entries(self, tokens: int) -> tuple[slice, ...]:
        """Index of the part of a row's state for its first tokens: all of it."""
        return ()

    def row_shape(self, tokens: int) -> tuple[tuple[int, ...], str]:
        """Shape and dtype of the saved state of a row with this number of tokens."""
        shape, cut = self.state.shape, self.entries(tokens)
        sizes = [len(range(size)[part]) for size, part in zip(shape[1:], cut, strict=False)]
        return (*sizes, *shape[1 + len(cut) :]), self.state.dtype

    def saves(self, tokens: int, filled: int) -> bool:
        """Whether the state after a row's first `tokens` can be saved when it has `filled` tokens."""
        return tokens == filled and self.buffer.readable

    def save_row(self, row: int, tokens: int) -> npt.NDArray[Any]:
        """A copy of the state of a row after its first tokens. Requires `saves`."""
        return np.array(self.buffer.values()[row][self.entries(tokens)])

    def can_load(self) -> bool:
        """Whether the buffer can be partly written."""
        return self.buffer.readable

    def load_row(self, row: Place, values: npt.NDArray[Any]) -> None:
        """Write the state of a row from position 0."""
        place = (row, *(slice(size) for size in values.shape))
        self.buffer.change(lambda whole: whole.__setitem__(place, values))

    def clear(self) -> None:
        """Zero the buffer."""
        self.buffer.clear()

    def wipes(self, rows: Sequence[int]) -> bool:
        """Whether the buffer of these rows can be zeroed."""
        return self.buffer.readable or len(rows) == len(self.buffer)

    def wipe(self, rows: Sequence[int]) -> None:
        """Zero the rows' part."""
        self.buffer.clear_rows(rows)

    def record_addresses(self, outputs: Mapping[str, int]) -> None:
        """Compare the addresses of a run with each other and with the previous run."""
        present = outputs[self.state.present]
        self._observed_runs += 1
        self._shares_address = self._shares_address and self.buffer.address() == present
        self._address_changes += present != self._address
        self._address = present

    def fact(self) -> StateFact:
        """The observed facts."""
        return StateFact(
            past=self.state.past,
            present=self.state.present,
            layer=self.state.layer,
            kind=self.state.kind,
            memory=self.buffer.memory,
            size_bytes=self.buffer.size_bytes,
            same_address=self._shares_address,
            address_changes=self._address_changes,
            checked_steps=self._observed_runs,
            copied_bytes=self._copied_bytes,
        )

    def release(self) -> None:
        """Free the buffer."""
        self.buffer = self.buffer.released()


class FixedState(StoredState):
    """Keys or values of all tokens. Entries beyond a row's cursor are overwritten by its next tokens."""

    padding_is_safe = True

    def rewinds(self, tokens: int, filled: int) -> bool:
        """True: the cursor determines which entries are valid."""
        return 0 <= tokens <= filled

    def entries(self, tokens: int) -> tuple[slice, ...]:
        """The entries of these tokens: [KV, T, D] of [KV, N, D]."""
        return slice(None), slice(tokens)

    def saves(self, tokens: int, filled: int) -> bool:
        """True: each token has its own entry."""
        return tokens <= filled and self.buffer.readable


class RollingState(StoredState):
    """Keys or values of a sliding window: the graph drops the oldest entries and moves the others up.

    While a row's tokens fit the window, entries are placed as in `FixedState`; after that, it cannot be rewound.
    Padding is never fed, because it would displace entries. Source: ONNX Runtime's ContribOperators.md,
    GroupQueryAttention, `sliding_window_cache`: after T tokens, the last L are in entries 0 .. L - 1, with min(T,
    window) <= L <= min(T, capacity). The capacity of Partita's packages is the window.
    """

    @property
    def capacity(self) -> int:
        """Tokens that it holds before any is dropped."""
        return min(self.state.window or 0, self.state.shape[TOKENS_AXIS])

    def rewinds(self, tokens: int, filled: int) -> bool:
        """Whether no token was dropped."""
        return tokens == 0 or filled <= self.capacity

    def entries(self, tokens: int) -> tuple[slice, ...]:
        """The entries of these tokens: [KV, T, D] of [KV, rows, D]; all entries once some may be dropped."""
        return slice(None), slice(tokens if tokens <= self.capacity else None)

    def saves(self, tokens: int, filled: int) -> bool:
        """Whether no token was dropped, or `tokens` are all of the row's."""
        return (tokens == filled or tokens <= filled <= self.capacity) and self.buffer.readable


class RecurrentState(StoredState):
    """A recurrent or convolution state, zero before a row's first token. It cannot be rewound."""

    @property
    def separate(self) -> bool:
        """Whether single rows of the buffer can be zeroed."""
        return self.buffer.readable

    def begin(self, rows: Sequence[int]) -> None:
        """Zero the rows' part."""
        self.wipe(rows)


def moves(state: State) -> bool:
    """Whether each step writes a state to another buffer than it reads."""
    return state.growing_axis is not None or not state.in_place


class GrowingState(StoredState):
    """A state whose buffer is replaced after every step.

    A growing state has one length for all rows of the batch, so all rows hold the same sequence.
    """

    def _first_buffer(self) -> Buffer:
        """The state before the first token: length zero if it grows, else zeros."""
        state = self.state
        if state.growing_axis is None:
            return super()._first_buffer()
        shape = tuple(0 if axis == state.growing_axis else size for axis, size in enumerate(state.shape))
        return host_buffer(shape, state.dtype)

    @property
    def separate(self) -> bool:
        """Whether the batch has a single row."""
        return self._batch == 1

    def before_run(self, binding: Binding) -> None:
        """Bind the past, unless the graph reads none, and let ONNX Runtime allocate the present."""
        if self.state.past in binding.inputs:
            binding.bind_input(self.state.past, self.buffer)
        binding.bind_fresh_output(self.state.present, self._session.fresh_memory(self.state.past))

    def after_run(self, present: Buffer, tokens: int) -> None:
        """Make the present of the step the past of the next."""
        _check_growth(self.state, self.buffer, present, tokens)
        self._copied_bytes = self.buffer.size_bytes
        self.buffer = present

    def clear(self) -> None:
        """Make the state empty, or zero."""
        self.buffer = self._first_buffer()

    def begin(self, rows: Sequence[int]) -> None:
        """Prepare for a first token."""
        self.clear()

    def wipes(self, rows: Sequence[int]) -> bool:
        """True: new rows begin with an empty state."""
        return True

    def wipe(self, rows: Sequence[int]) -> None:
        """Do nothing."""

    def rewinds(self, tokens: int, filled: int) -> bool:
        """Whether the state has a token axis, a numpy dtype, and memory that can be read back."""
        if tokens == 0:
            return True
        known = self._session.fresh_memory(self.state.past).memory in (HOST_MEMORY, CUDA_MEMORY)
        return known and self.state.growing_axis is not None and not dtypes.dtype_named(self.state.dtype).upper_half

    def rewind(self, tokens: int) -> None:
        """Remove the last tokens, through host memory."""
        if tokens:
            self.buffer = _shortened(self.buffer, self.state, tokens)

    def entries(self, tokens: int) -> tuple[slice, ...]:
        """Index of the part of a row's state for its first tokens."""
        return (
            () if self.state.growing_axis is None else (*[slice(None)] * (self.state.growing_axis - 1), slice(tokens))
        )

    def saves(self, tokens: int, filled: int) -> bool:
        """Whether the state can be saved: after any token if it has a token axis, else after the last.

        False if its first axis is not the batch.
        """
        least = filled if self.state.growing_axis is None else 0
        return self.state.shape[0] == self._batch and least <= tokens <= filled and self.buffer.readable

    def can_load(self) -> bool:
        """Whether a state of fixed shape can be written."""
        return self.state.growing_axis is not None or self.buffer.readable

    def load_row(self, row: Place, values: npt.NDArray[Any]) -> None:
        """Load the state of all rows; a growing state stays in host memory until the next step has read it."""
        grows = self.state.growing_axis is not None
        self.buffer = host_buffer((self._batch, *values.shape), self.state.dtype) if grows else self._first_buffer()
        self.buffer.change(lambda whole: whole.__setitem__(..., values))


def _check_growth(state: State, past: Buffer, present: Buffer, tokens: int) -> None:
    """Raise GenerationError if the shape of present is not past plus the step's tokens."""
    before, after = list(past.value.shape()), list(present.value.shape())
    wanted = [size + tokens if axis == state.growing_axis else size for axis, size in enumerate(before)]
    if after != wanted:
        raise GenerationError(
            f"a step of {plural(tokens, 'token')} returned {state.present} {after} for {state.past} {before}, not "
            f"{wanted}: the graph's cache does not match its contract"
        )


def _shortened(buffer: Buffer, state: State, tokens: int) -> Buffer:
    """A state without its last tokens, in host memory."""
    assert state.growing_axis is not None
    whole = buffer.value.numpy()
    kept = whole.shape[state.growing_axis] - tokens
    shape = tuple(kept if axis == state.growing_axis else size for axis, size in enumerate(whole.shape))
    shorter = host_buffer(shape, state.dtype)
    if math.prod(shape):
        shorter.host[...] = np.take(whole, range(kept), axis=state.growing_axis)
    return shorter
