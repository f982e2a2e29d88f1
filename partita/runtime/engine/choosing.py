"""Tokens chosen on the device that has the logits: little crosses in place of a vocabulary.

A session of some nodes beside that of the model, so every package can have it, and what a graph gives stays what it is.
Whether a device chooses as the host does is tried on rows with known answers: equal logits, infinities, NaN. The first
form that is right is taken, and only where it is quicker than a copy.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from partita import dtypes
from partita.contract import Port
from partita.errors import PartitaError
from partita.runtime import selection
from partita.runtime.engine.choices import LARGEST, LIKELIEST, Choice, Row, choice_model, figure_dtype, keeps_axis
from partita.runtime.ort.binding import Binding
from partita.runtime.ort.buffers import NATIVE_ERRORS, Buffer, host_buffer
from partita.runtime.ort.errors import one_line
from partita.runtime.ort.session import NativeFailureError, Session

LEAST_BYTES = 1 << 15
"""Fewer are copied before a kernel has begun."""
PATIENCE_SECONDS = 0.1
"""To open a session on a GPU takes about as long, and a short text is over before that has paid."""
ROUNDS = 5
FAILURES: tuple[type[Exception], ...] = (PartitaError, NativeFailureError, OSError, *NATIVE_ERRORS)
"""Of a choice, which the host can make as well."""
DTYPES = ("float32", "float16")
"""Of logits that are compared on the host as they are: of others it compares what they are rounded to."""
Found = tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]
"""Places, ascending, and the logits there; of the likeliest token the place alone."""
NO_VALUES = np.empty(0, np.float32)


class Taker:
    """Takes what is chosen out of one buffer of logits."""

    def __init__(
        self, binding: Binding, choice: Choice, form: str, logits: Buffer, batch_and_rows: Sequence[int]
    ) -> None:
        axes = tuple(logits.value.shape())[:-1]
        taken = (*axes, choice.taken) if keeps_axis(form) else axes
        places, figures = host_buffer(taken, "int64"), host_buffer(axes, figure_dtype(form, logits.dtype))
        outputs = {"places": places, "figure": figures}
        if keeps_axis(form):
            outputs["values"] = host_buffer(taken, logits.dtype)
        binding.bind_input("logits", logits)
        for name, buffer in outputs.items():
            binding.bind_output(name, buffer)
        self.size_bytes = sum(buffer.size_bytes for buffer in outputs.values())
        self._binding, self._choice = binding, choice
        batch, rows = batch_and_rows
        self._places = places.host.reshape((batch, rows, choice.taken))
        self._figures = figures.host.reshape((batch, rows))
        self._values = outputs["values"].host.reshape(self._places.shape) if "values" in outputs else None

    def take(self) -> None:
        """Look at the logits as they are now. Raises GenerationError, ProviderError or ResourceError."""
        self._binding.run()

    def release(self) -> None:
        """Let go of the logits and of the session."""
        self._binding.release()

    def found(self, row: int, column: int, count: int) -> Found | None:
        """The `count` largest of a row, at most as many as the choice has, and all that equal the last of them; None
        where some may not be finite, or more may be equal.
        """
        if not np.isfinite(self._figures[row, column]):
            return None
        places = self._places[row, column]
        if self._choice.taken == 1 or self._values is None:
            return places, NO_VALUES
        values = self._values[row, column]
        edge = values[count - 1]
        if not values[-1] < edge:
            return None
        kept = int(np.count_nonzero(values >= edge))
        order = np.argsort(places[:kept])
        return places[:kept][order], values[:kept][order].astype(np.float32)


@dataclass(frozen=True, slots=True)
class Chooser:
    """Chooses on the device where the logits of a session are made, by one of the forms of a choice."""

    session: Session
    port: Port
    choice: Choice
    form: str
    seconds: float = 0.0
    """To choose for every row of a decode step."""
    copy_seconds: float = 0.0
    """To copy all their logits, and to choose on the host."""

    def taker(self, logits: Buffer, batch_and_rows: Sequence[int]) -> Taker:
        """For one buffer of logits. Raises NativeFailureError, or as `Binding.run` does."""
        model = self.model(logits.dtype, len(logits.value.shape()))
        return Taker(self.session.beside(self.port.name, model), self.choice, self.form, logits, batch_and_rows)

    def model(self, dtype: str, rank: int) -> bytes:
        """What computes it."""
        return choice_model(self.choice, self.form, dtype, rank)


class Choosing:
    """Who makes a choice on the device of a session, once copies have taken as long as it takes to find out."""

    def __init__(
        self, choice: Choice, session: Session, port: Port, shape: Sequence[int], batch_and_rows: Sequence[int]
    ) -> None:
        """`port`: the logits, which the device has; `shape`: theirs in a decode step."""
        self._choice, self._session, self._port = choice, session, port
        self._shape, self._batch_and_rows = shape, batch_and_rows
        self._copied_seconds = 0.0
        self._tried = dtypes.size_bytes(port.dtype, shape) < LEAST_BYTES
        self.chooser: Chooser | None = None
        self.failed: str | None = None
        """Why it is made on the host again."""

    def copied(self, seconds: float) -> None:
        """So long it took to bring logits to the host of which this choice alone was wanted."""
        self._copied_seconds += seconds

    def find(self) -> float:
        """Find out who is right, and quicker than the host, where it is time to; seconds that this took."""
        if self._tried or self._copied_seconds < PATIENCE_SECONDS:
            return 0.0
        self._tried, began = True, time.perf_counter()
        for form in self._choice.forms:
            chooser = Chooser(self._session, self._port, self._choice, form)
            right = _tried(chooser, self._shape, self._batch_and_rows)
            if right is not None and right.seconds < right.copy_seconds:
                self.chooser = right
            else:
                self._session.forget(chooser.model(self._port.dtype, len(self._shape)))
            if right is not None:
                break
        return time.perf_counter() - began

    def lost(self, error: Exception) -> None:
        """It could not be made on the device after all, for want of memory there, say."""
        self.chooser, self.failed = None, one_line(str(error))


def every_choice(session: Session, port: Port, shape: Sequence[int], batch: int) -> dict[Choice, Choosing]:
    """Who makes each choice, for logits of a decode step that have `shape`."""
    if port.dtype not in DTYPES:
        return {}
    return {choice: Choosing(choice, session, port, shape, (batch, 1)) for choice in (LIKELIEST, LARGEST)}


def _tried(chooser: Chooser, shape: Sequence[int], batch_and_rows: Sequence[int]) -> Chooser | None:
    """A form that the device computes, and as the host does, with its times; None for one that it does not."""
    name, dtype, choice = chooser.port.name, chooser.port.dtype, chooser.choice
    batch, rows = batch_and_rows
    try:
        logits, held = chooser.session.state_buffer(name, shape, dtype), host_buffer(shape, dtype)
        taker = chooser.taker(logits, batch_and_rows)
        seats = [(row, column) for row in range(batch) for column in range(rows)]
        for planted in _planted(shape[-1], len(seats)):
            held.host[...] = planted.reshape(held.host.shape)
            logits.write(held)
            taker.take()
            rows_there = held.host.reshape(planted.shape).astype(np.float32)  # rounded, where logits are float16
            found = [taker.found(*seat, choice.count) for seat in seats]
            if not all(_is_right(choice, row, each) for row, each in zip(rows_there, found, strict=True)):
                return None
        seconds = _lowest(taker.take)
        copy_seconds = _lowest(lambda: _on_host(choice, logits.copy(held).reshape(-1, shape[-1]).astype(np.float32)))
    except FAILURES:
        return None  # the host can do without
    return replace(chooser, seconds=seconds, copy_seconds=copy_seconds)


def _is_right(choice: Choice, row: Row, found: Found | None) -> bool:
    """Whether an answer is the host's. That the host has to look is an answer, too: the only one where the largest is
    not finite, and a fair one where others are not, or where many are equal.
    """
    if not np.isfinite(row.max()):
        return found is None
    places = np.array([row.argmax()]) if choice is LIKELIEST else selection.largest(row, choice.count)
    if found is None:
        return len(places) >= choice.taken > 1 or not np.isfinite(row).all()
    return np.array_equal(found[0], places) and (choice is LIKELIEST or np.array_equal(found[1], row[places]))


def _planted(vocab: int, count: int) -> Iterator[npt.NDArray[np.float32]]:
    """All rows that are tried, as many at a time as there are: [count, vocab]."""
    cases = list(_cases(vocab))
    for begin in range(0, len(cases), count):
        yield np.stack((cases[begin : begin + count] + cases[:1] * count)[:count])


def _cases(vocab: int) -> Iterator[Row]:
    """Rows [vocab] in which providers may differ."""
    plain = np.random.default_rng(0).standard_normal(vocab).astype(np.float16).astype(np.float32)
    middle, last = vocab // 2, vocab - 1
    yield plain
    for place in (0, middle, last):
        for value in (9.0, math.nan, -math.nan, math.inf):
            yield _with(plain, {place: value})
    for equal in ((0, last), (middle, middle + 1, last), (1, 2, 3, middle)):
        yield _with(plain, dict.fromkeys(equal, 9.0))
    yield np.zeros_like(plain)
    yield _with(-1000 - np.abs(plain), {middle: -999.0})
    yield _with(plain, {last: -math.inf, middle: 9.0})  # a token that a model rules out
    yield np.full_like(plain, math.nan)
    yield np.full_like(plain, -math.inf)


def _with(row: Row, values: Mapping[int, float]) -> Row:
    """The row with other values at some places."""
    changed = row.copy()
    changed[list(values)] = list(values.values())
    return changed


def _on_host(choice: Choice, rows: npt.NDArray[np.float32]) -> None:
    """What a step does whose logits cross."""
    for row in rows:
        row.max()
        choice.on_host(row)


def _lowest(work: Callable[[], object]) -> float:
    """Seconds of the quickest of some turns."""
    seconds = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return min(seconds)
