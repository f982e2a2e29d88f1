"""What every store of states can be asked. A store holds the states of one kind of behaviour.

Keys and values, fixed or rolling, and recurrent states are implementations, and none moves: one buffer is past and
present. One whose buffers grow (a graph of another exporter) is told of every step and binds its buffers anew for each.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy.typing as npt

from partita.observations.facts import StateFact

if TYPE_CHECKING:  # a process whose packages run in children does without ONNX Runtime
    from partita.runtime.ort.binding import Binding
    from partita.runtime.ort.buffers import Buffer

Span = tuple[int, int] | None
"""Rows of the batch, from the first to before the second of these; None: all."""
Place = int | slice
"""A row of the batch, or all of them, which have the same."""
RowStates = Mapping[str, npt.NDArray[Any]]
"""What one row has in each state, on the host, by the name that graphs read the state as. Without the axis of the
batch, and of keys and values as many entries as tokens: [KV, T, D]. bfloat16 shows as uint16.
"""
RowShapes = Mapping[str, tuple[tuple[int, ...], str]]
"""Shape and dtype of each of them."""


class Store(Protocol):
    """The states of one kind, over all layers."""

    @property
    def padding_is_safe(self) -> bool:
        """Whether tokens fed beyond a row's cursor leave nothing behind that is read."""

    def named(self) -> Iterable[tuple[str, Buffer]]:
        """The buffer of each state, by the name that graphs read it as."""

    @property
    def moves(self) -> bool:
        """Whether the buffers of a step are others than those of the step before: `before_run` is called if so."""

    @property
    def has_parts(self) -> bool:
        """Whether `bind` can bind some rows of the batch alone."""

    def bind(self, binding: Binding, span: Span = None) -> None:
        """Bind every buffer as past and as present of a binding, or its part of the rows in `span`."""

    def before_run(self, binding: Binding, new_tokens: int) -> None:
        """Bind what this step of `new_tokens` per row reads and writes; only of stores that move."""

    def after_run(self, binding: Binding, take: Sequence[int]) -> None:
        """A step fed `take` [B] tokens of each row's own; what it wrote is what the next one reads."""

    def clear(self) -> None:
        """Make every state zero, as before the first token."""

    @property
    def separate(self) -> bool:
        """Whether a row of the batch can begin, and go on, while the others are where they are."""

    def begin(self, rows: Sequence[int]) -> None:
        """Prepare these rows of the batch for a first token."""

    def wipes(self, rows: Sequence[int]) -> bool:
        """Whether `wipe` can zero these rows and leave the others as they are."""

    def wipe(self, rows: Sequence[int]) -> None:
        """Zero what these rows have, as `wipes` has allowed."""

    def rewinds(self, tokens: int, filled: int) -> bool:
        """Whether a row that has `filled` tokens can be taken back by so many tokens."""

    def rewind(self, row: int, tokens: int) -> None:
        """Take a row back by so many tokens, which `rewinds` has allowed."""

    def release_row(self, row: int) -> None:
        """A row is free: nothing reads what it has."""

    def row_shapes(self, tokens: int) -> RowShapes:
        """What the states of a row are that has so many tokens, given out."""

    def saves(self, tokens: int, filled: int) -> bool:
        """Whether the states after a row's first `tokens` can be given out once it has `filled`."""

    def save_row(self, row: int, tokens: int) -> RowStates:
        """The states of a row after its first tokens, as copies; what `saves` has allowed."""

    def loads(self) -> bool:
        """Whether a row can take in such states while the others stay as they are."""

    def load_row(self, row: Place, states: RowStates) -> None:
        """Make what `save_row` gave the states of a row, which goes on after its tokens; where `loads`."""

    def look(self, outputs: Mapping[str, int]) -> None:
        """Take note of where a run left the states; `outputs` are the addresses of its outputs by name."""

    def facts(self) -> tuple[StateFact, ...]:
        """What was seen of every state."""

    def release(self) -> None:
        """Let go of the buffers; facts can still be asked for."""
