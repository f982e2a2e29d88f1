"""The likeliest token of each row, taken on the device that has the logits: it crosses in place of a vocabulary.

A session of one or two nodes beside that of the model, so every package can have it, and what a graph gives stays what
it is. Whether a device chooses as the host does is tried on rows with known answers: equal logits, infinities, NaN.
ONNX says nothing of NaN, and providers differ: WebGPU's ReduceMax leaves it out, its ReduceSum does not (ONNX Runtime
1.27). So the first form that is right is taken, and only where it is quicker than a copy.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from partita import dtypes
from partita.contract import Port
from partita.errors import PartitaError
from partita.runtime.ort.binding import Binding
from partita.runtime.ort.buffers import Buffer, host_buffer
from partita.runtime.ort.session import NativeFailureError, Session

SUMMED = "ArgMax, ReduceSum"
FORMS = ("ArgMax, ReduceMax", SUMMED, "TopK")
"""The token, and a figure beside it that is finite only where all are, or where the token's own is the largest."""
LEAST_BYTES = 16384
"""Fewer are copied before a kernel has begun."""
PATIENCE_SECONDS = 0.1
"""To open a session on a GPU takes about as long, and a short text is over before that has paid."""
ROUNDS = 5
OPSET, IR_VERSION = 14, 8


class Taker:
    """Takes the tokens out of one buffer of logits."""

    def __init__(self, binding: Binding, form: str, logits: Buffer, batch_and_rows: Sequence[int]) -> None:
        shape = (*tuple(logits.value.shape())[:-1], *((1,) if form == "TopK" else ()))
        self._binding = binding
        tokens, figures = host_buffer(shape, "int64"), host_buffer(shape, figure_dtype(form, logits.dtype))
        self._tokens, self._figures = (each.host.reshape(tuple(batch_and_rows)) for each in (tokens, figures))
        self.size_bytes = tokens.size_bytes + figures.size_bytes
        binding.bind_input("logits", logits)
        binding.bind_output("token", tokens)
        binding.bind_output("figure", figures)

    def take(self) -> None:
        """Look at the logits as they are now. Raises GenerationError, ProviderError or ResourceError."""
        self._binding.run()

    def release(self) -> None:
        """Let go of the logits and of the session."""
        self._binding.release()

    def all(self) -> list[int | None]:
        """The tokens of all rows, one after the other."""
        batch, rows = self._tokens.shape
        return [self.token(row, column) for row in range(batch) for column in range(rows)]

    def token(self, row: int, column: int) -> int | None:
        """The first of a row's largest; None where some may not be finite."""
        return int(self._tokens[row, column]) if np.isfinite(self._figures[row, column]) else None


@dataclass(frozen=True, slots=True)
class Chooser:
    """Chooses on the device where the logits of a session are made, by one of `FORMS`."""

    session: Session
    port: Port
    form: str
    seconds: float = 0.0
    """To choose for every row of a decode step."""
    copy_seconds: float = 0.0
    """To copy all their logits, and to choose on the host."""

    def taker(self, logits: Buffer, batch_and_rows: Sequence[int]) -> Taker:
        """For one buffer of logits. Raises NativeFailureError, or as `Binding.run` does."""
        model = likeliest_model(self.form, logits.dtype, len(logits.value.shape()))
        return Taker(self.session.beside(self.port.name, model), self.form, logits, batch_and_rows)


class Choosing:
    """Who chooses tokens on the device of a session, once copies have taken as long as it takes to find out."""

    def __init__(self, session: Session, port: Port, shape: Sequence[int], batch_and_rows: Sequence[int]) -> None:
        """`port`: the logits, which the device has; `shape`: theirs in a decode step."""
        self._session, self._port, self._shape, self._batch_and_rows = session, port, shape, batch_and_rows
        self._copied_seconds = 0.0
        self._tried = dtypes.size_bytes(port.dtype, shape) < LEAST_BYTES
        self.chooser: Chooser | None = None

    def copied(self, seconds: float) -> None:
        """So long it took to bring logits to the host of which the largest was wanted."""
        self._copied_seconds += seconds

    def find(self) -> float:
        """Find out who is right, and quicker than the host, where it is time to; seconds that this took."""
        if self._tried or self._copied_seconds < PATIENCE_SECONDS:
            return 0.0
        self._tried, began = True, time.perf_counter()
        tried = (_tried(self._session, self._port, form, self._shape, self._batch_and_rows) for form in FORMS)
        right = next((chooser for chooser in tried if chooser is not None), None)
        if right is not None and right.seconds < right.copy_seconds:
            self.chooser = right
        return time.perf_counter() - began


def _tried(
    session: Session, port: Port, form: str, shape: Sequence[int], batch_and_rows: Sequence[int]
) -> Chooser | None:
    """A form that the device computes, and as the host does, with its times; None for one that it does not."""
    chooser = Chooser(session, port, form)
    try:
        logits, held = session.state_buffer(port.name, shape, port.dtype), host_buffer(shape, port.dtype)
        taker = chooser.taker(logits, batch_and_rows)
        for rows, allowed in _planted(shape[-1], held.host.size // shape[-1]):
            held.host[...] = rows.reshape(held.host.shape)
            logits.write(held)
            taker.take()
            if not all(token in some for token, some in zip(taker.all(), allowed, strict=True)):
                return None
        seconds, copy_seconds = _lowest(taker.take), _lowest(lambda: _on_host(logits, held))
    except (PartitaError, NativeFailureError):
        return None  # the host can do without
    return replace(chooser, seconds=seconds, copy_seconds=copy_seconds)


def _planted(vocab: int, count: int) -> Iterator[tuple[npt.NDArray[np.float32], list[set[int | None]]]]:
    """Rows [count, vocab] for which it is known what may be answered; None: that the host has to look."""
    cases = list(_cases(vocab))
    for begin in range(0, len(cases), count):
        some = (cases[begin : begin + count] + cases[:1] * count)[:count]
        yield np.stack([row for row, _ in some]), [allowed for _, allowed in some]


def _cases(vocab: int) -> Iterator[tuple[npt.NDArray[np.float32], set[int | None]]]:
    """One row [vocab] and what may be answered to it."""
    plain = np.random.default_rng(0).standard_normal(vocab).astype(np.float16).astype(np.float32)
    yield plain, {int(plain.argmax())}
    middle, last = vocab // 2, vocab - 1
    for first in (0, middle, last):
        yield _with(plain, {first: 9.0}), {first}
        yield _with(plain, {first: math.nan}), {None}
        yield _with(plain, {first: math.inf}), {None}
    for first, others in ((0, (last,)), (middle, (middle + 1, last)), (1, (2, 3, middle))):
        yield _with(plain, dict.fromkeys((first, *others), 9.0)), {first}
    yield np.zeros_like(plain), {0}
    below = -1000 - np.abs(plain)
    yield _with(below, {middle: -999.0}), {middle}
    # Tokens that a model rules out.
    yield _with(plain, {last: -math.inf, middle: 9.0}), {middle, None}
    yield np.full_like(plain, math.nan), {None}
    yield np.full_like(plain, -math.inf), {None}


def _with(row: npt.NDArray[np.float32], values: Mapping[int, float]) -> npt.NDArray[np.float32]:
    """The row with other values at some places."""
    changed = row.copy()
    changed[list(values)] = list(values.values())
    return changed


def _on_host(logits: Buffer, held: Buffer) -> None:
    """What a step does whose logits cross."""
    values = logits.copy(held)
    values.max()
    values.argmax()


def _lowest(work: Callable[[], object]) -> float:
    """Seconds of the quickest of some turns."""
    seconds = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def figure_dtype(form: str, dtype: str) -> str:
    """The dtype of a form's figure for logits of `dtype`."""
    return "float32" if form == SUMMED else dtype


def likeliest_model(form: str, dtype: str, rank: int) -> bytes:
    """A model that reads `logits` of a rank and gives `token` and `figure` along its last axis.

    A sum is one of float32: that of float16 would overflow.
    """
    import onnx
    from onnx import helper

    element, last = dtypes.named(dtype).number, rank - 1
    choose = helper.make_node("ArgMax", ["logits"], ["token"], axis=-1, keepdims=0)
    constants = []
    if form == "TopK":
        constants = [helper.make_tensor("one", onnx.TensorProto.INT64, [1], [1])]
        nodes = [helper.make_node("TopK", ["logits", "one"], ["figure", "token"])]
    elif form == "ArgMax, ReduceMax":
        nodes = [choose, helper.make_node("ReduceMax", ["logits"], ["figure"], axes=[-1], keepdims=0)]
    else:
        constants = [helper.make_tensor("last", onnx.TensorProto.INT64, [1], [-1])]
        nodes = [
            choose,
            helper.make_node("Cast", ["logits"], ["wide"], to=onnx.TensorProto.FLOAT),
            helper.make_node("ReduceSum", ["wide", "last"], ["figure"], keepdims=0),
        ]
    sizes: list[Any] = [f"d{axis}" for axis in range(last)]
    outer = [*sizes, 1] if form == "TopK" else sizes
    graph = helper.make_graph(
        nodes,
        "likeliest",
        [helper.make_tensor_value_info("logits", element, [*sizes, "vocab"])],
        [
            helper.make_tensor_value_info("token", onnx.TensorProto.INT64, outer),
            helper.make_tensor_value_info("figure", dtypes.named(figure_dtype(form, dtype)).number, outer),
        ],
        constants,
    )
    return bytes(
        helper.make_model(
            graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION
        ).SerializeToString()
    )
