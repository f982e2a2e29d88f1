"""Selects the largest logits of a step on the device, so that only these are copied to the host.

A session of a TopK and a ReduceSum runs on the output of the model's session. ONNX does not define how TopK orders NaN
or equal values: the sum shows whether all logits are finite, and with equal values at the end of the selection the host
selects. Correctness and speed of the device are checked once, on rows with known results.
"""

from __future__ import annotations

import math
import time
import timeit
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from partita import dtypes
from partita.errors import PartitaError
from partita.package.contract import Port
from partita.runtime.generate.choice.sampling import MOST_DRAWN, largest
from partita.runtime.ort.binding import Binding
from partita.runtime.ort.buffers import HEAD, NATIVE_ERRORS, Buffer, host_buffer
from partita.runtime.ort.errors import one_line
from partita.runtime.ort.session import NativeFailureError, Session

SELECTED = 64
"""More than `MOST_DRAWN`, so that values equal to the last value of a draw are usually included."""
LEAST_BYTES = 1 << 15
"""Vocabularies below this size are copied faster than a kernel starts."""
ROUNDS = 5
DTYPES = ("float32", "float16")
"""dtypes of logits that the host compares without conversion."""
FAILURES: tuple[type[Exception], ...] = (PartitaError, NativeFailureError, OSError, *NATIVE_ERRORS)
"""Errors of a device selection after which the host selects."""
Row = npt.NDArray[np.float32]
"""[vocab]."""
LargestLogits = tuple[npt.NDArray[np.int64], Row]
"""Token ids, ascending, and their logits."""


class DeviceChoice:
    """Selects the largest logits of one session's decode steps on its device."""

    def __init__(self, session: Session, port: Port, shape: Sequence[int], batch: int) -> None:
        """`port`: the logits output, on a device. `shape`: its shape in a decode step of `batch` rows."""
        self._session, self._port, self._shape, self._batch = session, port, tuple(shape), batch
        self._is_checked = port.dtype not in DTYPES or dtypes.size_bytes(port.dtype, shape) < LEAST_BYTES
        self.is_used = False
        self.failure: str | None = None
        """The reason for selecting on the host again."""
        self.seconds = self.copy_seconds = 0.0
        """Seconds of a selection for all rows of a decode step, and of copying all logits and selecting on the host."""

    def check(self) -> float:
        """Check once whether the device selects correctly and faster than the host; return the seconds of the check."""
        if self._is_checked:
            return 0.0
        self._is_checked, began = True, time.perf_counter()
        try:
            self.is_used = self._is_right() and self.seconds < self.copy_seconds
        except FAILURES:
            self.is_used = False
        if not self.is_used:
            self._session.forget(_model(self._port.dtype, len(self._shape)))
        return time.perf_counter() - began

    def selection(self, logits: Buffer, rows: int) -> Selection:
        """The selection among a buffer of logits, `rows` of each row of the batch.

        Raises NativeFailureError, and the errors of `Binding.run`.
        """
        model = _model(logits.dtype, len(logits.value.shape()))
        return Selection(self._session.binding_of(self._port.name, model), logits, (self._batch, rows))

    def fail(self, error: Exception) -> None:
        """Select on the host from now on, because of an error of the device, e.g. too little memory."""
        self.is_used, self.failure = False, one_line(str(error))

    def _is_right(self) -> bool:
        """Whether device and host select the same in rows with known results; measures both."""
        vocab, dtype = self._shape[-1], self._port.dtype
        logits = self._session.state_buffer(self._port.name, self._shape, dtype)
        held = host_buffer(self._shape, dtype)
        rows = math.prod(self._shape[:-1]) // self._batch
        selected = self.selection(logits, rows)
        for case in _cases(vocab):
            held.host[...] = case
            logits.write(held)
            selected.run()
            stored = held.host.reshape(-1, vocab)[0].astype(np.float32)  # rounded if logits are float16
            for count in (1, MOST_DRAWN):
                every = [selected.largest(row, column, count) for row in range(self._batch) for column in range(rows)]
                if not all(_is_selection(stored, count, found) for found in every):
                    return False

        def on_host() -> None:
            for row in logits.copy(held).reshape(-1, vocab).astype(np.float32):
                row.argmax()

        self.seconds, self.copy_seconds = _lowest(selected.run), _lowest(on_host)
        return True


class Selection:
    """The largest values of a buffer of logits [B, K, vocab], on its device."""

    def __init__(self, binding: Binding, logits: Buffer, batch_and_rows: tuple[int, int]) -> None:
        axes = tuple(logits.value.shape())[:-1]
        shape = (*axes, SELECTED)
        places, sums = host_buffer(shape, "int64"), host_buffer(axes, "float32")
        values = host_buffer(shape, logits.dtype)
        binding.bind_input("logits", logits)
        for name, buffer in (("places", places), ("sum", sums), ("values", values)):
            binding.bind_output(name, buffer)
        self.size_bytes = places.size_bytes + sums.size_bytes + values.size_bytes
        self._binding = binding
        self._places = places.host.reshape((*batch_and_rows, -1))
        self._values = values.host.reshape(self._places.shape)
        self._sums = sums.host.reshape(batch_and_rows)

    def run(self) -> None:
        """Select among the current logits. Raises GenerationError, ProviderError or ResourceError."""
        self._binding.run()

    def largest(self, row: int, column: int, count: int) -> LargestLogits | None:
        """The `count` largest logits of a row and all equal to the last; None if some are not finite or too many
        equal."""
        values = self._values[row, column]
        edge = values[count - 1]
        if not math.isfinite(self._sums[row, column]) or not values[-1] < edge:
            return None
        kept = int(np.count_nonzero(values >= edge))
        places = self._places[row, column][:kept]
        order = np.argsort(places)
        return places[order], values[:kept][order].astype(np.float32)

    def release(self) -> None:
        """Release the logits and the session."""
        self._binding.release()


def _is_selection(row: Row, count: int, found: LargestLogits | None) -> bool:
    """Whether a selection equals the host's. None is valid for rows that are not finite or have many equal values."""
    if not np.isfinite(row).all():
        return found is None
    places = largest(row, count)
    if found is None:
        return len(places) >= SELECTED
    return np.array_equal(found[0], places) and np.array_equal(found[1], row[places])


def _cases(vocab: int) -> Iterator[Row]:
    """Rows [vocab] for which providers may differ: equal values, infinities, NaN."""
    plain = np.random.default_rng(0).standard_normal(vocab).astype(np.float16).astype(np.float32)
    middle, last = vocab // 2, vocab - 1
    changes = [{place: value} for place in (0, middle, last) for value in (9.0, math.nan, math.inf)]
    changes += [{}, {0: 9.0, last: 9.0}, {middle: 9.0, middle + 1: 9.0, last: 9.0}, {last: -math.inf, middle: 9.0}]
    for change in changes:
        row = plain.copy()
        for place, value in change.items():
            row[place] = value
        yield row
    yield np.zeros_like(plain)


def _lowest(work: Callable[[], object]) -> float:
    """Seconds of the fastest of several runs."""
    return min(timeit.repeat(work, number=1, repeat=ROUNDS))


def _model(dtype: str, rank: int) -> bytes:
    """The selection model: logits […, vocab] to token ids, values and sum."""
    from onnx import TensorProto, parser

    kind = TensorProto.DataType.Name(dtypes.dtype_named(dtype).number).lower()
    axes = [f"d{axis}" for axis in range(rank - 1)]
    sums, few, every = (f"[{','.join([*axes, *last])}]" for last in ((), (str(SELECTED),), ("vocab",)))
    model = parser.parse_model(f"""{HEAD} choice ({kind}{every} logits)
        => (int64{few} places, {kind}{few} values, float{sums} sum)
        <int64[1] count = {{{SELECTED}}}, int64[1] last = {{-1}}> {{
            values, places = TopK(logits, count)
            wide = Cast<to = {TensorProto.FLOAT}>(logits)
            sum = ReduceSum<keepdims = 0>(wide, last)
        }}""")
    return bytes(model.SerializeToString())
