"""Sizes of states, and N, the maximum tokens. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from partita import dtypes
from partita.errors import PackageError
from partita.foreign import GraphFacts, PortFact, Size
from partita.foreign.evidence import Evidence, Written, WrittenStates
from partita.foreign.states import ROWS_AXIS, Pair, appends, carried, growing_axis, rolls, shares_buffer, window_of
from partita.package.contract import State
from partita.remedies import Remedy

MOST_TOKENS = 4096
"""Default N: the length of a static cache unless requested."""
UNKNOWN_LENGTH = 2048
"""N where neither the user nor a configuration has a length."""
LONGEST = 1 << 24
"""The maximum of a requested length."""
WIDTH_AXIS = 3
"""Axis of the head size in keys and values [B, KV heads, N, head size]."""
SPECIFY_AXIS = Remedy("specify its growing axis or its shape in a file", options=("--contract", "FILE.toml"))
SPECIFY_WRITING = Remedy(
    "specify in a file that it is written at the cursor (grows = false), or that it is not a key or value (kind)",
    options=("--contract", "FILE.toml"),
)
OTHER_CACHE = Remedy("export it with a cache that grows or is written at a cursor")
OTHER_TYPE = Remedy("export it with a cache of 16- or 32-bit floats, or 8-bit integers")
CORRECT = Remedy("correct the contract file")


@dataclass(frozen=True, slots=True)
class ShorterLimit:
    """The length up to which outputs match the model, and why not beyond."""

    length: int
    reason: str


def length_of(
    where: str,
    pairs: Sequence[Pair],
    rows: Sequence[int | None],
    evidence: Evidence,
    written: Written,
    requested: int | None,
    notes: list[str],
    *,
    short: ShorterLimit | None = None,
) -> int:
    """N: as requested, within the limits of graph and configuration; else the configuration's default or limit, capped.

    `rows`: the axis of each pair with one entry per token; `short`: the length up to which outputs match the model,
    exceeded only on request. Appends decisions to `notes`. Raises PackageError for a request above the limit.
    """
    fixed = _fixed_length(pairs, rows)
    length_limit, most = requested or written.max_length, fixed or evidence.max_length
    if length_limit is not None and most and length_limit > most:
        source = "the graph" if fixed else evidence.source
        raise PackageError(f"{where}: `max_length={length_limit}`: {source} allows {most}")
    usual = min(filter(None, (evidence.usual_length, most)), default=0)
    if fixed and requested is not None and requested < fixed:
        notes.append(
            f"`max_length={requested}`: ignored, the cache of this graph has a fixed length of {fixed:,} tokens"
        )
    length = fixed or length_limit or min(usual or UNKNOWN_LENGTH, MOST_TOKENS)
    if short is not None and short.length < length:
        if fixed or length_limit:
            notes.append(f"{short.reason}: results for longer sequences may differ from the model")
            return length
        notes.append(
            f"{short.reason}: the maximum length is {short.length:,} tokens; results for longer sequences "
            "may differ from the model"
        )
        return short.length
    if not (fixed or length_limit or usual):
        notes.append(f"the maximum length is unknown: {UNKNOWN_LENGTH:,} tokens are used")
    elif length < (most or usual) and not (fixed or length_limit):
        notes.append(f"{evidence.source} supports {most or usual:,} tokens; {length:,} are used")
    return length


def longest_of(pairs: Sequence[Pair], rows: Sequence[int | None], evidence: Evidence) -> int | None:
    """The maximum value of N; None where the graph has it fixed."""
    return None if _fixed_length(pairs, rows) is not None else evidence.max_length or LONGEST


def _fixed_length(pairs: Sequence[Pair], rows: Sequence[int | None]) -> int | None:
    """The fixed length of all keys; None where one has none."""
    sizes = [
        (pair.past.shape or ())[axis]
        for pair, axis in zip(pairs, rows, strict=True)
        if pair.kind == "key" and axis is not None and axis < len(pair.past.shape or ())
    ]
    fixed = [size for size in sizes if isinstance(size, int)]
    return min(fixed) if fixed and len(fixed) == len(sizes) else None


def batch_axis(symbol: Size, port: PortFact) -> int | None:
    """The batch axis: named as that of the tokens, else the first, unless it is fixed."""
    shape = port.shape or ()
    if isinstance(symbol, str) and symbol in shape:
        return shape.index(symbol)
    return 0 if shape and not isinstance(shape[0], int) else None


@dataclass(frozen=True, slots=True)
class Shapes:
    """The facts that determine the sizes of a graph's states."""

    folder_path: str
    """The folder, for messages."""
    graph: GraphFacts
    evidence: Evidence
    written: Written
    batch_symbol: Size
    """The graph's name or number of the batch size."""
    batch: int
    length: int
    cursors: frozenset[str] = frozenset()
    """Inputs that define the valid rows, or the positions of new ones."""

    def state(self, pair: Pair) -> State:
        """One state. Raises PackageError where its shape or growing axis is unknown, and for an unsupported type."""
        element = dtypes.find(pair.past.dtype)
        if element is not None and element.storage is None:
            what = f"numpy has no type for {element.name}, so Partita cannot store it"
            raise self._state_error(pair, what, OTHER_TYPE)
        found = self.written.state(pair.past.name)
        declared = found[0] if found is not None else None
        shared = shares_buffer(pair, self.graph)
        in_place = shared if declared is None or declared.in_place is None else declared.in_place
        of_batch = batch_axis(self.batch_symbol, pair.past)
        axis = ROWS_AXIS if shared else growing_axis(pair, self.graph, of_batch)
        if in_place and not shared and appends(pair, self.graph):
            what = f"in_place is true in the contract, but the graph lengthens {pair.present.name!r} at every step"
            raise self._state_error(pair, what, CORRECT)
        if declared is not None and declared.grows is not None:
            axis = None if declared.grows is False else declared.grows
        if axis is not None and not 0 <= axis < len(pair.past.shape or ()):
            raise self._state_error(pair, f"it lacks axis {axis}")
        grows = None if in_place else axis
        if (
            grows is None
            and not in_place
            and (declared is None or (declared.grows is None and declared.in_place is None))
        ):
            self._check_placed(pair)
        return State(
            past=pair.past.name,
            present=pair.present.name,
            layer=pair.layer,
            kind=pair.kind,
            shape=self._shape(pair, declared, axis, of_batch),
            dtype=pair.past.dtype,
            window=(declared.window if declared is not None else None)
            or window_of(pair, self.graph)
            or self._window(pair),
            rolling=rolls(pair, self.graph),
            growing_axis=grows,
            in_place=in_place,
        )

    def _check_placed(self, pair: Pair) -> None:
        """Raise PackageError for a static cache whose rows may move in a step."""
        if pair.kind not in ("key", "value"):
            return
        _, axis_origin = carried(self.graph, pair.present.name, self.cursors)
        if axis_origin == "moved":
            raise self._state_error(
                pair,
                f"it has a fixed length, and {pair.present.name!r} is a part of it with appended rows, so "
                "each step moves all rows, which Partita does not support",
                OTHER_CACHE,
            )
        if axis_origin != "cursor":
            raise self._state_error(
                pair,
                f"it has a fixed length, and the position of new rows in {pair.present.name!r} is unknown",
                SPECIFY_WRITING,
            )

    def _window(self, pair: Pair) -> int | None:
        """The sliding window of a layer in genai_config.json."""
        layers = self.evidence.window_layers
        return self.evidence.window or None if layers is not None and pair.layer in layers else None

    def _shape(
        self, pair: Pair, in_contract: WrittenStates | None, axis: int | None, of_batch: int | None
    ) -> tuple[int, ...]:
        """The sizes of a state, with N along the growing axis. Raises PackageError for an unknown size."""
        if in_contract is not None and in_contract.shape is not None:
            return self._written_shape(pair, in_contract.shape)
        declared = pair.past.shape
        if declared is None:
            raise self._state_error(pair, "its rank is not declared")
        sizes = []
        for place, size in enumerate(declared):
            found: int | None = size if isinstance(size, int) else None
            if found is None and place == axis:
                found = window_of(pair, self.graph) if rolls(pair, self.graph) else self.length
            if found is None and place == of_batch:
                found = self.batch
            if found is None:
                found = self._by_configuration(pair, place, declared)
            if found is None:
                called = f" ({size})" if isinstance(size, str) else ""
                raise self._state_error(pair, f"the size of axis {place}{called} is symbolic and unknown")
            sizes.append(found)
        return tuple(sizes)

    def _written_shape(self, pair: Pair, shape: Sequence[int | str]) -> tuple[int, ...]:
        """A shape of the contract file."""
        known = {"B": self.batch, "N": self.length}
        odd = [size for size in shape if isinstance(size, str) and size not in known]
        if odd:
            raise self._state_error(pair, f"the contract gives it a size {odd[0]!r}; sizes are numbers, B and N")
        found = tuple(known[size] if isinstance(size, str) else size for size in shape)
        shown, declared = f"[{', '.join(map(str, shape))}]", pair.past.shape
        if any(size < 1 for size in found):
            raise self._state_error(pair, f"the contract gives it the shape {shown}; sizes are 1 or more", CORRECT)
        if declared is not None and len(declared) != len(found):
            raise self._state_error(
                pair, f"the contract gives it the shape {shown}, which has a different rank", CORRECT
            )
        for axis, (size, fixed) in enumerate(zip(found, declared or found, strict=True)):
            if isinstance(fixed, int) and size != fixed:
                raise self._state_error(
                    pair, f"the contract gives it the shape {shown}, and axis {axis} is {fixed}", CORRECT
                )
        return found

    def _by_configuration(self, pair: Pair, place: int, declared: Sequence[Size]) -> int | None:
        """A size of keys and values [B, KV heads, T, head size] that the graph leaves open."""
        if pair.kind not in ("key", "value") or len(declared) != WIDTH_AXIS + 1:
            return None
        if place == WIDTH_AXIS and self.evidence.head_size:
            packed = pair.past.dtype == "uint8"  # two 4-bit numbers per byte
            return self.evidence.head_size // 2 if packed else self.evidence.head_size
        return self.evidence.kv_heads or None if place == 1 else None

    def _state_error(self, pair: Pair, what: str, remedy: Remedy = SPECIFY_AXIS) -> PackageError:
        """The error for a state."""
        return PackageError(f"{self.folder_path}: the cache input {pair.past.declared}: {what}", remedy=remedy)
