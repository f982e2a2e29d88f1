"""Sizes: of each state, and N, the most tokens of a text. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from partita import dtypes
from partita.errors import PackageError
from partita.foreign.carrying import carried
from partita.foreign.evidence import Evidence
from partita.foreign.facts import GraphFacts, PortFact, Size
from partita.foreign.states import ROWS_AXIS, Pair, appends, growing_axis, rolls, shares_buffer, window_of
from partita.foreign.written import Written, WrittenStates
from partita.package.contract import State
from partita.remedies import Remedy

MOST_TOKENS = 4096
"""N where nobody says: buffers of a cache that is not told to be longer take no more."""
UNKNOWN_LENGTH = 2048
"""N where neither the user nor a configuration says how long a text may be."""
LONGEST = 1 << 24
"""The most tokens of a text that can be asked for."""
WIDTH_AXIS = 3
"""Of keys and values [B, KV heads, N, head size]."""
SAY_AXIS = Remedy("say along which axis it grows, or its shape, in a file", options=("--contract", "FILE.toml"))
SAY_HOW = Remedy(
    "say in a file that it is written at the cursor (grows = false), or that it is no key or value (kind)",
    options=("--contract", "FILE.toml"),
)
OTHER_CACHE = Remedy("export it with a cache that grows, or that is written at a cursor")
OTHER_TYPE = Remedy("export it with a cache of floats of 16 or 32 bits, or of whole numbers of 8")
CORRECT = Remedy("correct the contract file")


@dataclass(frozen=True, slots=True)
class Short:
    """Up to which length a text has the tokens of the model, and why not beyond."""

    length: int
    why: str


def length_of(
    where: str,
    pairs: Sequence[Pair],
    rows: Sequence[int | None],
    evidence: Evidence,
    written: Written,
    asked: int | None,
    notes: list[str],
    *,
    short: Short | None = None,
) -> int:
    """N: as the user wants it, as far as graph and configuration allow; else what the configuration says is usual, or
    what it allows, up to a limit.

    `rows`: the axis of each pair that has an entry for every token; `short`: up to where texts are the model's, so that
    longer ones are only taken where they are asked for. Raises PackageError for more than is allowed. `notes`
    gets what was decided.
    """
    fixed = _fixed_length(pairs, rows)
    wanted, most = asked or written.max_length, fixed or evidence.max_length
    if wanted is not None and most and wanted > most:
        source = "the graph" if fixed else evidence.source
        raise PackageError(f"{where}: `max_length={wanted}`: {source} allows {most}")
    usual = min(filter(None, (evidence.usual_length, most)), default=0)
    if fixed and asked is not None and asked < fixed:
        notes.append(f"`max_length={asked}`: the cache of this graph holds {fixed:,} tokens, whatever is asked")
    length = fixed or wanted or min(usual or UNKNOWN_LENGTH, MOST_TOKENS)
    if short is not None and short.length < length:
        if fixed or wanted:
            notes.append(f"{short.why}: longer texts may have other tokens than the model")
            return length
        notes.append(
            f"{short.why}: texts of {short.length:,} tokens were taken; longer ones may have other tokens than the "
            "model"
        )
        return short.length
    if not (fixed or wanted or usual):
        notes.append(f"nothing says how long a text may be: {UNKNOWN_LENGTH:,} tokens were taken")
    elif length < (most or usual) and not (fixed or wanted):
        notes.append(f"{evidence.source} allows texts of {most or usual:,} tokens; {length:,} were taken")
    return length


def longest_of(pairs: Sequence[Pair], rows: Sequence[int | None], evidence: Evidence) -> int | None:
    """What N can be set to; None where the graph has it fixed."""
    return None if _fixed_length(pairs, rows) is not None else evidence.max_length or LONGEST


def _fixed_length(pairs: Sequence[Pair], rows: Sequence[int | None]) -> int | None:
    """Rows of keys that have a fixed length; None where those of a layer have not."""
    sizes = [
        (pair.past.shape or ())[axis]
        for pair, axis in zip(pairs, rows, strict=True)
        if pair.kind == "key" and axis is not None and axis < len(pair.past.shape or ())
    ]
    fixed = [size for size in sizes if isinstance(size, int)]
    return min(fixed) if fixed and len(fixed) == len(sizes) else None


def batch_axis(symbol: Size, port: PortFact) -> int | None:
    """The axis that is the batch: the one that is called as that of the tokens, else the first, unless it is fixed."""
    shape = port.shape or ()
    if isinstance(symbol, str) and symbol in shape:
        return shape.index(symbol)
    return 0 if shape and not isinstance(shape[0], int) else None


def cache_bytes(states: Sequence[State]) -> int:
    """All states together, at their longest."""
    return sum(dtypes.size_bytes(state.dtype, state.shape) for state in states)


@dataclass(frozen=True, slots=True)
class Shapes:
    """What the sizes of a graph's states follow from."""

    where: str
    """The folder, for messages."""
    graph: GraphFacts
    evidence: Evidence
    written: Written
    batch_symbol: Size
    """What the graph calls the batch."""
    batch: int
    length: int
    cursors: frozenset[str] = frozenset()
    """Inputs that say which rows are valid, or where new ones go."""

    def state(self, pair: Pair) -> State:
        """One state. Raises PackageError where its shape or the axis along which it grows cannot be told, and for a
        type that there is no memory for.
        """
        element = dtypes.find(pair.past.dtype)
        if element is not None and element.storage is None:
            what = f"numpy has no type for {element.name}, so Partita has no memory that it could be kept in"
            raise self._wrong(pair, what, OTHER_TYPE)
        found = self.written.state(pair.past.name)
        said = found[0] if found is not None else None
        shared = shares_buffer(pair, self.graph)
        in_place = shared if said is None or said.in_place is None else said.in_place
        of_batch = batch_axis(self.batch_symbol, pair.past)
        axis = ROWS_AXIS if shared else growing_axis(pair, self.graph, of_batch)
        if in_place and not shared and appends(pair, self.graph):
            what = f"the contract says in_place, and the graph makes {pair.present.name!r} longer than it at every step"
            raise self._wrong(pair, what, CORRECT)
        if said is not None and said.grows is not None:
            axis = None if said.grows is False else said.grows
        if axis is not None and not 0 <= axis < len(pair.past.shape or ()):
            raise self._wrong(pair, f"it has no axis {axis}")
        grows = None if in_place else axis
        if grows is None and not in_place and (said is None or (said.grows is None and said.in_place is None)):
            self._check_placed(pair)
        return State(
            past=pair.past.name,
            present=pair.present.name,
            layer=pair.layer,
            kind=pair.kind,
            shape=self._shape(pair, said, axis, of_batch),
            dtype=pair.past.dtype,
            window=(said.window if said is not None else None) or window_of(pair, self.graph) or self._window(pair),
            rolls=rolls(pair, self.graph),
            grows=grows,
            in_place=in_place,
        )

    def _check_placed(self, pair: Pair) -> None:
        """Raise PackageError for keys or values of fixed length whose rows may be in other places after a step: the
        rows that are told to be valid would be others than those that are.
        """
        if pair.kind not in ("key", "value"):
            return
        _, way = carried(self.graph, pair.present.name, self.cursors)
        if way == "moved":
            raise self._wrong(
                pair,
                f"it has a fixed length, and {pair.present.name!r} is a part of it with new rows appended, so every "
                "step moves all rows, which Partita does not follow",
                OTHER_CACHE,
            )
        if way != "cursor":
            raise self._wrong(
                pair,
                f"it has a fixed length, and the graph does not tell where {pair.present.name!r} gets its new rows",
                SAY_HOW,
            )

    def _window(self, pair: Pair) -> int | None:
        """The sliding window that the configuration of onnxruntime-genai gives a layer."""
        layers = self.evidence.window_layers
        return self.evidence.window or None if layers is not None and pair.layer in layers else None

    def _shape(self, pair: Pair, said: WrittenStates | None, axis: int | None, of_batch: int | None) -> tuple[int, ...]:
        """The sizes of a state, N along the axis that grows. Raises PackageError for one that cannot be told."""
        if said is not None and said.shape is not None:
            return self._written_shape(pair, said.shape)
        declared = pair.past.shape
        if declared is None:
            raise self._wrong(pair, "its rank is not declared")
        sizes = []
        for place, size in enumerate(declared):
            found: int | None = size if isinstance(size, int) else None
            if found is None and place == axis:
                found = window_of(pair, self.graph) if rolls(pair, self.graph) else self.length
            if found is None and place == of_batch:
                found = self.batch * self._folded_heads(size)
            if found is None:
                found = self._by_configuration(pair, place, declared)
            if found is None:
                called = f" ({size})" if isinstance(size, str) else ""
                raise self._wrong(pair, f"the size of axis {place}{called} is open, and nothing says what it is")
            sizes.append(found)
        return tuple(sizes)

    def _written_shape(self, pair: Pair, shape: Sequence[int | str]) -> tuple[int, ...]:
        """A shape that the user wrote down. Raises PackageError for a letter that stands for nothing, and for one that
        the graph contradicts.
        """
        known = {"B": self.batch, "N": self.length}
        odd = [size for size in shape if isinstance(size, str) and size not in known]
        if odd:
            raise self._wrong(pair, f"the contract gives it a size {odd[0]!r}; sizes are numbers, B and N")
        found = tuple(known[size] if isinstance(size, str) else size for size in shape)
        shown, declared = f"[{', '.join(map(str, shape))}]", pair.past.shape
        if any(size < 1 for size in found):
            raise self._wrong(pair, f"the contract gives it the shape {shown}; sizes are 1 or more", CORRECT)
        if declared is not None and len(declared) != len(found):
            raise self._wrong(pair, f"the contract gives it the shape {shown}, which has another rank", CORRECT)
        for axis, (size, fixed) in enumerate(zip(found, declared or found, strict=True)):
            if isinstance(fixed, int) and size != fixed:
                raise self._wrong(pair, f"the contract gives it the shape {shown}, and axis {axis} is {fixed}", CORRECT)
        return found

    def _folded_heads(self, size: Size) -> int:
        """Rows of the batch's axis per row of the batch: some old exports have batch x heads there."""
        folded = isinstance(size, str) and "head" in size.lower()
        return self.evidence.heads or 1 if folded else 1

    def _by_configuration(self, pair: Pair, place: int, declared: Sequence[Size]) -> int | None:
        """A size of keys and values [B, KV heads, T, head size] that the graph leaves open."""
        if pair.kind not in ("key", "value") or len(declared) != WIDTH_AXIS + 1:
            return None
        if place == WIDTH_AXIS and self.evidence.head_size:
            packed = pair.past.dtype == "uint8"  # two numbers of 4 bits to a byte
            return self.evidence.head_size // 2 if packed else self.evidence.head_size
        return self.evidence.kv_heads or None if place == 1 else None

    def _wrong(self, pair: Pair, what: str, remedy: Remedy = SAY_AXIS) -> PackageError:
        """The error for a state."""
        return PackageError(f"{self.where}: the cache input {pair.past.declared}: {what}", remedy=remedy)
