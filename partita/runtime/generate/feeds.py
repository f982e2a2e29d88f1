"""Buffers of a graph's inputs and logits by role, functions that fill its cursor inputs, and values of its adapters.

A port may declare the sizes of its role with more or fewer dimensions: [B] as [B, 1], or [] for one row.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from partita.errors import PackageError
from partita.package.contract import AdapterInput, Dimension, GraphFile, Port
from partita.package.folder import Manifest, path_inside
from partita.remedies import FROM_CHECKPOINT, Remedy
from partita.runtime.generate.cache import Span
from partita.runtime.generate.checks import check_adapter
from partita.runtime.ort.buffers import Buffer, host_buffer, read_adapter

Starts = npt.NDArray[np.int64]
"""[B]: cache positions of the rows' next tokens."""
Cursor = Callable[[Starts, npt.NDArray[Any]], object]
"""Writes a cursor input for these starts."""
LogitPositions = Literal["chosen", "kept", "last", "all"]
"""Positions that a graph computes logits for: `indices` as requested, `count` of the last, only the last, or all."""


@dataclass(frozen=True, slots=True)
class BoundInput:
    """The buffer of a port."""

    buffer: Buffer
    array: npt.NDArray[Any]
    """The same memory in the role's shape."""


def cursor_writer(role: str, new_tokens: int) -> Cursor | None:
    """The function that writes an input of `role` when S = `new_tokens`; None if the role is no cursor."""
    steps, last = np.arange(new_tokens), new_tokens - 1
    writers: dict[str, Cursor] = {
        "positions": lambda starts, out: np.add(starts[:, None], steps, out=out, casting="unsafe"),
        "last_index": lambda starts, out: np.add(starts, last, out=out, casting="unsafe"),
        "total_length": lambda starts, out: out.fill(starts.max() + new_tokens),
        "write_start": lambda starts, out: np.copyto(out, starts, casting="unsafe"),
        "valid_length": lambda starts, out: np.add(starts, new_tokens, out=out, casting="unsafe"),
        "mask": lambda starts, out: np.less(  # 1 for cached and new tokens
            np.arange(out.shape[1]), starts[:, None] + new_tokens, out=out, casting="unsafe"
        ),
        "cache_branch": lambda starts, out: out.fill(bool(starts.max() > 0)),
    }
    return writers.get(role)


def port_shapes(batch: int, new_tokens: int, rows: int, vocab_size: int, length: int) -> dict[str, tuple[int, ...]]:
    """Shape of a buffer by role, for B = `batch`, S = `new_tokens`, K = `rows`, N = `length`."""
    return {
        **dict.fromkeys(("tokens", "positions"), (batch, new_tokens)),
        **dict.fromkeys(("last_index", "write_start", "valid_length"), (batch,)),
        **dict.fromkeys(("total_length", "rope_length", "logits_count"), ()),
        "logits_rows": (rows,),
        "mask": (batch, length),
        "cache_branch": (1,),
        "logits": (batch, rows, vocab_size),
    }


def bound(
    ports: Sequence[Port], shapes: dict[str, tuple[int, ...]], bind: Callable[[str, Buffer], None]
) -> dict[str, BoundInput]:
    """Allocate and bind a buffer for each port; by role."""
    feeds: dict[str, BoundInput] = {}
    for port in ports:
        shape = shapes[port.role]
        if port.role == "positions" and len(port.shape) == 3 and isinstance(port.shape[0], int):
            shape = (port.shape[0], *shape)  # [3, B, S]: time, row and column of an image, equal for text
        buffer = host_buffer(as_declared(port.shape, shape), port.dtype)
        feeds[port.role] = BoundInput(buffer, buffer.host.reshape(shape))
    for port in ports:
        bind(port.name, feeds[port.role].buffer)
    return feeds


def as_declared(declared: Sequence[Dimension], shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a role in the port's number of dimensions: sizes of 1 are added or removed."""
    missing = len(declared) - len(shape)
    if missing >= 0:
        behind = next((count for count in range(missing) if declared[len(declared) - 1 - count] != 1), missing)
        return (*(1,) * (missing - behind), *shape, *(1,) * behind)
    return shape[-missing:] if all(size == 1 for size in shape[:-missing]) else shape


def port_by_role(graph: GraphFile, role: str) -> Port | None:
    """The input with `role`, if the graph has one."""
    return next((port for port in graph.inputs if port.role == role), None)


def logits_port(graph: GraphFile) -> Port:
    """The output with logits. Raises StopIteration if the graph has none."""
    return next(port for port in graph.outputs if port.role == "logits")


def logit_positions(graph: GraphFile) -> LogitPositions:
    """The positions that a graph computes logits for."""
    if port_by_role(graph, "logits_rows") is not None:
        return "chosen"
    if port_by_role(graph, "logits_count") is not None:
        return "kept"
    logits = logits_port(graph)
    if graph.sequence_length == 1:
        return "all"
    if len(logits.shape) == 3:
        return "last" if logits.shape[1] == 1 else "all"
    tokens = next(port for port in graph.inputs if port.role == "tokens")
    one_each = (1, tokens.shape[0]) if len(tokens.shape) > 1 else (1,)  # [B, vocab]; [S, vocab] has the size of [S]
    return "last" if logits.shape[:1] and logits.shape[0] in one_each else "all"


# --- adapters ---------------------------------------------------------------------------------------------------------

SHOWN = 5
OTHER_ADAPTER = Remedy("use an adapter that was exported for this model")
InputValues = Mapping[str, Buffer]
"""Values of adapter inputs, by input name."""
NOTHING: InputValues = {}
"""Values without an adapter."""


class Adapters:
    """The adapters of a package, each loaded at its first use, and those of the rows of the batch."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder, self._manifest = folder, manifest
        self.names: Sequence[str | None] = [None] * manifest.graph.batch_size
        """[B]: the adapter of each row."""
        self._loaded: dict[str, InputValues] = {}
        self._rows: list[InputValues] = [NOTHING] * manifest.graph.batch_size
        self._stacked: dict[Span, InputValues] = {}
        self._zeros: dict[tuple[Any, ...], Buffer] = {}

    def use(self, names: Sequence[str | None]) -> list[bool]:
        """Use these adapters [B]; return for each row whether its values have changed.

        Raises UsageError for an unknown name, PackageError for a file that is damaged or for other graphs.
        """
        given = [self._named(name) for name in names]
        changed = [new is not old for new, old in zip(given, self._rows, strict=True)]
        self.names = names
        if any(changed):
            self._rows, self._stacked = given, {}
        return changed

    def inputs(self, graph: GraphFile, required: Collection[str], span: Span) -> InputValues:
        """Values of a graph's adapter inputs for the rows in `span`.

        Without an adapter: the input's default, or zeros for the inputs in `required`.
        """
        if span not in self._stacked:
            rows = self._rows[slice(*span or (None,))]
            self._stacked[span] = _stacked(rows, every=self._manifest.graph.adapters_of_every_row)
        values = self._stacked[span]
        lacking = [port for port in graph.adapter_inputs if port.name in required and port.name not in values]
        return {**values, **{port.name: self._zero(port) for port in lacking}}

    def _zero(self, port: AdapterInput) -> Buffer:
        """Zeros for an input; all graphs share them."""
        shape = tuple(size if isinstance(size, int) else 0 for size in port.shape)
        if (shape, port.dtype) not in self._zeros:
            self._zeros[shape, port.dtype] = host_buffer(shape, port.dtype)
        return self._zeros[shape, port.dtype]

    def _named(self, name: str | None) -> InputValues:
        """Input values of an adapter; empty for None."""
        check_adapter(self._folder, self._manifest, name)
        if name is None:
            return NOTHING
        if name not in self._loaded:
            record = next(record for record in self._manifest.switchable if record.name == name)
            if record.file is None:
                raise PackageError(
                    f"{self._folder}: the manifest lists no file for adapter {name}", remedy=FROM_CHECKPOINT
                )
            remedy = FROM_CHECKPOINT if self._manifest.foreign is None else OTHER_ADAPTER
            self._loaded[name] = _checked(path_inside(self._folder, record.file), self._manifest.graph.files, remedy)
        return self._loaded[name]


def _stacked(rows: Sequence[InputValues], *, every: bool) -> InputValues:
    """One value per input with the values of all rows on the first axis, padded with zeros to the largest rank.

    `rows`: values with a first axis of 1. Without `every`, an input whose value is the same in all rows keeps axis 1.
    """
    if all(each is rows[0] for each in rows) and (not every or not rows[0]):
        return rows[0]
    made: dict[str, Buffer] = {}
    for name in sorted({name for each in rows for name in each}):
        values = {row: each[name].host[0] for row, each in enumerate(rows) if name in each}
        sizes = np.max([value.shape for value in values.values()], axis=0)
        made[name] = host_buffer((len(rows), *map(int, sizes)), rows[next(iter(values))][name].dtype)
        for row, value in values.items():
            made[name].host[row][tuple(map(slice, value.shape))] = value
    return made


def _checked(path: Path, graphs: Sequence[GraphFile], remedy: Remedy) -> InputValues:
    """The values of an adapter file, validated against the inputs of the graphs."""
    ports = {port.name: port for graph in graphs for port in graph.adapter_inputs}
    found: dict[str, Buffer] = {}
    ranks: dict[str, int] = {}
    wrong: list[str] = []
    for name, (buffer, shape) in read_adapter(path, remedy).items():
        port = ports.get(name)
        if port is None or buffer.dtype != port.dtype or not _fits(shape, port, ranks):
            requested = "no graph uses it" if port is None else f"the graphs expect {port.dtype} {list(port.shape)}"
            wrong.append(f"{name[:120]} is {buffer.dtype} {list(shape)}, {requested}")
        found[name] = buffer
    if wrong or not found:
        more = f" ({len(wrong):,} in all)" if len(wrong) > SHOWN else ""
        reason = f"{'; '.join(wrong[:SHOWN])}{more}" if wrong else "it contains no values"
        raise PackageError(f"{path}: not an adapter of this package: {reason}", remedy=remedy)
    return found


def _fits(shape: tuple[int, ...], port: AdapterInput, ranks: dict[str, int]) -> bool:
    """Whether a shape matches an input, for one row; equal symbolic sizes must have equal values."""
    wanted = (1, *port.shape[1:]) if port.by_row else port.shape
    return len(shape) == len(wanted) and all(
        size == (each if isinstance(each, int) else ranks.setdefault(each, size))
        for size, each in zip(shape, wanted, strict=True)
    )
