"""Two sides of one graph in one step: their tensors, and the errors of parts of the graph."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import onnx

from partita import dtypes
from partita.drift.graphs import LOCAL, Part, PartedGraph, Values
from partita.drift.records import NotFinite, PartDrift
from partita.drift.sides import GraphRun, Side, Step, with_provider
from partita.dtypes import EXACT, PRECISIONS
from partita.errors import GenerationError, PackageError, PartitaError, ProviderError, ResourceError
from partita.observations.names import CPU
from partita.observations.text_format import listing, name_some, plural
from partita.process import free_bytes
from partita.runtime.contents.modules import QUANTISED
from partita.runtime.place.onnx_model import read_onnx
from partita.runtime.place.tensor_types import sizes_of, tensor_types
from partita.runtime.time_limit import LateError
from partita.runtime.verify.comparison import OUTLIERS, RULED_OUT, difference

MEMORY_SHARE = 4
"""Part of the free memory that tensors of one chunk may take: both sides, and the copies of a run."""
MOST_UNREAD = 8
"""Unreadable tensors of a side from which a failed run is not tried again in halves. Own errors do not need them."""
ROUNDED_TO_INT8 = 4
"""`accuracy_level` of a MatMulNBits that rounds its input to 8 bits."""
ROUNDED_IF_FUSED = {"DequantizeLinear", "MatMul"}
"""ONNX Runtime may run both as a MatMulNBits that rounds its input to 8 bits."""
ROUNDING_STEPS = 16
"""Error that rounded weights may cause, in steps of their numbers. Layers of random weights in int4 have 4 to 8."""
USUAL_RANGE = 99.0
"""Percentile of magnitudes. A few activations of many models are a hundred times larger than all others."""
Item = TypeVar("Item")
FAILURES = (GenerationError, PackageError, ProviderError, ResourceError)
Errors = dict[Part, PartDrift]
"""The errors of parts that have any tensor to compare."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What is compared, and how."""

    by_node: bool = False
    free_running: bool = False
    tolerance: float | None = None
    """None: by the type and operator of each node."""
    deadline: float | None = None
    """Time of the monotonic clock from which no run begins; LateError is raised."""


@dataclass
class StepComparison:
    """Two sides of one graph in one step."""

    tested: Side
    reference: Side
    step: Step
    graph: PartedGraph
    settings: Settings
    states: Values = field(default_factory=dict)
    """States that the tested side reads in place of the step's."""
    notes: dict[str, None] = field(default_factory=dict)
    not_finite: dict[int, NotFinite] = field(default_factory=dict)
    """By its position, each compared node with NaN or infinity where the reference has a number."""
    tested_step: Step = field(init=False)
    tested_run: GraphRun = field(init=False)
    reference_run: GraphRun = field(init=False)

    def __post_init__(self) -> None:
        """Run both sides without taps."""
        self.tested_step = replace(self.step, feeds={**self.step.feeds, **self.states})
        self.tested_run = self.tested.run(self.tested_step, self._tested_graph.model.to_bytes())
        self.reference_run = self.reference.run(self.step, self.graph.model.to_bytes(), ours=self.tested_run.values)

    @cached_property
    def _tested_graph(self) -> PartedGraph:
        """The graph of the tested side, which may be another file of the same structure."""
        if self.tested.folder == self.reference.folder:
            return self.graph
        return PartedGraph(read_onnx(self.tested.folder / self.step.file))

    def note(self, text: str) -> None:
        """Add a limit of the comparison to the notes, once."""
        self.notes[text] = None

    def outputs(self) -> PartDrift:
        """The output with the largest error."""
        part = Part("", tuple(self.graph.compared), (), tuple(self.reference_run.values))
        found = self._compared(part, self.reference_run.values, self.tested_run.values, ({}, {}))
        return found.model_copy(update={"name": found.tensor})

    def nodes_of(self, layers: Sequence[Part]) -> list[Part]:
        """The nodes of layers; nodes between tensors that the reference has, if it lacks some, are one part."""
        found: list[Part] = []
        for layer in layers:
            known = None
            if not self.reference.runs_graphs:
                theirs, _ = self.tap((*layer.inputs, *self.graph.open_part(layer).outputs))
                known = theirs.keys() - self.step.feeds.keys()
            found += self.graph.single_nodes(layer.nodes, known)
        return found

    # --- errors -------------------------------------------------------------------------------------------------------

    def compare(self, parts: Sequence[Part]) -> Errors:
        """Errors of the parts."""
        found: Errors = {}
        for chunk in self._chunks(parts):
            theirs, ours = self.tap(name for part in chunk for name in (*part.inputs, *part.outputs))
            local = self._alone(chunk, {**ours, **theirs})
            rest = [part for part in chunk if self._moved(part, local) or not set(part.outputs) & local.values.keys()]
            # The reference computes from the tested side's tensors what does not run alone on the tested side.
            mirrored = self._alone(rest, ours, on_reference=True).values
            for part in chunk:
                alone_on = (ours, mirrored) if part in rest else (local.values, theirs)
                compared = self._compared(part, theirs, ours, alone_on)
                found |= {part: compared} if compared.tensor else {}
                self._find_not_finite(part, theirs, ours)
        return found

    def within_layer(self, layer: Part) -> Errors:
        """Errors of a layer's nodes when the layer alone runs on the reference's tensors."""
        whole = self.graph.open_part(layer)
        theirs, ours = self.tap((*whole.inputs, *whole.outputs))
        local = self._alone([whole], {**ours, **theirs}).values
        return {node: self._compared(node, theirs, ours, (local, theirs)) for node in self.nodes_of([layer])}

    @cached_property
    def _types(self) -> Mapping[str, onnx.TypeProto]:
        return tensor_types(self.graph.proto, {name: array.shape for name, array in self.step.feeds.items()})

    @cached_property
    def _least_tolerance(self) -> float:
        """Of the floats: QNN computes the float32 nodes of a graph with float16 tensors in float16, too."""
        half = any(kind.tensor_type.elem_type == onnx.TensorProto.FLOAT16 for kind in self._types.values())
        return PRECISIONS["fp16"].tolerance if half else EXACT.tolerance

    def _chunks(self, parts: Sequence[Part]) -> Iterator[list[Part]]:
        """The parts in groups whose tensors fit into memory. A tensor of unknown size counts as the mean of others."""
        most = free_bytes() // MEMORY_SHARE
        known = {name: size for name, kind in self._types.items() if (size := _bytes(kind)) is not None}
        usual = sum(known.values()) // max(1, len(known))
        chunk: list[Part] = []
        tensors: set[str] = set()
        for part in parts:
            tensors.update(part.inputs, part.outputs)
            if chunk and 4 * sum(known.get(name, usual) for name in tensors) > most:
                yield chunk
                chunk, tensors = [], {*part.inputs, *part.outputs}
            chunk.append(part)
        if chunk:
            yield chunk

    def _compared(self, part: Part, theirs: Values, ours: Values, alone_on: tuple[Values, Values]) -> PartDrift:
        """The errors of one part. `alone_on`: its tensors on the tested side and the reference, from equal inputs."""
        local, wanted = alone_on
        known = [name for name in part.outputs if name in theirs]
        errors = {name: deviation(ours[name], theirs[name]) for name in known if name in ours}
        own = {name: deviation(local[name], wanted[name]) for name in known if name in local and name in wanted}
        tensor = max(own or errors, key=lambda name: (own or errors)[name], default="")
        error, alone = max(errors.values(), default=None), max(own.values(), default=None)
        # Without an own error, the errors of all parts before count.
        tolerance = self.tolerance(part.nodes if own else self.graph.compared, theirs)
        node = self.graph.nodes[part.nodes[-1]]
        is_node = len(part.nodes) == 1
        return PartDrift(
            name=part.name,
            op_type=node.op_type if is_node else None,
            module=self.graph.module(part.nodes[-1]) if is_node else None,
            provider=self.tested_run.placement.get(node.name) if is_node else None,
            step=self.step.name,
            tensor=tensor,
            dtype=theirs[tensor].dtype.name if tensor else "",
            error=finite(error),
            own_error=finite(alone),
            infinite=float("inf") in (error, alone),
            tolerance=tolerance,
            exceeds_tolerance=((error or 0.0) if alone is None else alone) > tolerance,
            largest=largest(ours[name] for name in errors),
            largest_reference=largest(theirs[name] for name in errors),
        )

    def tolerance(self, positions: Sequence[int], theirs: Values) -> float:
        """The tolerance of nodes: that of the least precise one. `theirs`: the tensors that the reference has."""
        if self.settings.tolerance is not None:
            return self.settings.tolerance
        least, bits = self._least_tolerance, self.reference.weight_bits
        if bits is None:
            nodes = [self.graph.nodes[at] for at in positions]
            rounds = {node.op_type for node in nodes} >= ROUNDED_IF_FUSED or any(map(_rounds_input, nodes))
            return max(least, PRECISIONS["int4"].tolerance) if rounds else least
        positions = self.graph.with_sources(positions, theirs)
        read = {name for at in positions for name in self.graph.nodes[at].input}
        if any(self.step.feeds[name].any() for name in read.intersection(self.step.states.values())):
            positions = self.graph.compared  # these states are of a run with the rounded weights
        rounded = [node for node in (self.graph.nodes[at] for at in positions) if node.op_type in QUANTISED]
        steps = [ROUNDING_STEPS * 0.5 ** (_attribute(node, "bits") or bits) for node in rounded]
        return max(least, PRECISIONS["int4"].tolerance, *steps) if rounded else least

    def _find_not_finite(self, part: Part, theirs: Values, ours: Values) -> None:
        """Record NaN or infinity in the output of a part of one node, where the reference has a number."""
        for name in part.outputs if len(part.nodes) == 1 else ():
            array, other = ours.get(name), theirs.get(name)
            if array is None or other is None or array.dtype.kind != "f" or array.shape != other.shape:
                continue
            wrong = array[~np.isfinite(array) & np.isfinite(other)]
            if not wrong.size:
                continue
            node = self.graph.nodes[part.nodes[0]]
            inputs = [ours[each] for each in part.inputs if each in ours and ours[each].dtype.kind == "f"]
            numbers = np.concatenate([np.zeros(0), *(each[np.isfinite(each)].ravel() for each in inputs)])
            self.not_finite[part.nodes[0]] = NotFinite(
                node=node.name,
                op_type=node.op_type,
                module=self.graph.module(part.nodes[0]),
                step=self.step.name,
                value="NaN" if np.isnan(wrong).any() else "infinity",
                dtype=array.dtype.name,
                input_range=(float(numbers.min()), float(numbers.max())) if numbers.size else None,
            )

    # --- runs ---------------------------------------------------------------------------------------------------------

    def tap(self, names: Iterable[str], pinned: Side | None = None) -> tuple[Values, Values]:
        """Tensors of the reference and of the tested side (or `pinned`) in runs of the whole graph.

        A tensor that cannot be read is missing. Raises the error of a pinned side.
        """
        taps = [name for name in dict.fromkeys(names) if name not in self.step.feeds]
        if pinned is None:
            ours = self._read(self.tested, self.tested_step, self._tested_graph, taps)
        else:
            ours = pinned.run(self.tested_step, self._tested_graph.with_outputs(taps), taps)
        if ours.skipped:
            count, kinds = len(ours.skipped), listing(dict.fromkeys(ours.skipped.values()))
            self.note(f"not compared: {plural(count, 'tensor')} of type {kinds} ({name_some(list(ours.skipped), 3)})")
        if pinned is None:
            self._check_placement(ours)
        taps = [name for name in taps if name not in ours.skipped]
        theirs = self._read(self.reference, self.step, self.graph, taps, ours.values)
        return {**self.step.feeds, **theirs.values}, {**self.tested_step.feeds, **ours.values}

    def _read(
        self, side: Side, step: Step, graph: PartedGraph, taps: Sequence[str], ours: Values | None = None
    ) -> GraphRun:
        """A run of the whole graph with these tensors as outputs; one that cannot be read is missing."""

        def run(some: Sequence[str]) -> GraphRun:
            self._check_time()
            return side.run(step, graph.with_outputs(some), some, ours)

        return _in_halves(run, [name for name in taps if name not in side.unread], side.unread, MOST_UNREAD)

    def _check_time(self) -> None:
        if self.settings.deadline is not None and time.monotonic() > self.settings.deadline:
            raise LateError(still_running=False)

    def _check_placement(self, tapped: GraphRun) -> None:
        """Note nodes that run on another provider when tensors of the graph are outputs."""
        before = self.tested_run.placement
        moved = [name for name, provider in tapped.placement.items() if before.get(name, provider) != provider]
        first = self.tested.chain[0]
        if first.ort_name not in before.values() and first.name not in self.tested_run.unused:
            self.note(f"placement not checked: ONNX Runtime {tapped.version} does not list the nodes on {first.name}")
        if moved:
            self.note(
                f"{plural(len(moved), 'node')} run on another provider while intermediate tensors are read: "
                f"{name_some(moved, 3)}; errors of the whole graph may differ there from those of a run"
            )

    def _moved(self, part: Part, local: GraphRun) -> bool:
        """Whether a node of the part runs on another provider alone than in the graph."""
        names = [self.graph.nodes[at].name for at in part.nodes]
        usual, places = self.tested_run.placement, local.placement
        return any(name in places and name in usual and places[name] != usual[name] for name in names)

    def _alone(self, parts: Sequence[Part], inputs: Values, *, on_reference: bool = False) -> GraphRun:
        """A run of each part alone, on the tested side or the reference.

        A part that reads other tensors or does not run alone is missing.
        """
        side, graph = self.reference, self.graph
        if not on_reference:
            side, graph = with_provider(self.tested, CPU), self._tested_graph
        shared = {name + LOCAL: past for name, past in self.step.shared.items()}

        def run(some: Sequence[Part]) -> GraphRun:
            self._check_time()
            outputs = [name + LOCAL for part in some for name in part.outputs if name in inputs]
            if not outputs or not side.runs_graphs:
                return GraphRun()
            return side.run(replace(self.step, feeds=inputs, shared=shared), graph.submodel(some, inputs), outputs)

        parts = [part for part in parts if part.outputs and all(name in inputs for name in part.inputs)]
        failed: dict[Part, PartitaError] = {}
        found = _in_halves(run, parts, failed, len(parts))
        if on_reference and failed:
            names = name_some([part.name for part in failed], 3)
            self.note(f"{names}: no own error: {next(iter(failed.values()))}")
        return replace(found, values={name.removesuffix(LOCAL): array for name, array in found.values.items()})


def _bytes(kind: onnx.TypeProto) -> int | None:
    """Bytes of a tensor; None if a size or the type is unknown."""
    sizes, name = sizes_of(kind), dtypes.name_of(kind.tensor_type.elem_type)
    return None if sizes is None or dtypes.bits_of(name) is None else dtypes.size_bytes(name, sizes)


def _in_halves(
    run: Callable[[Sequence[Item]], GraphRun], items: Sequence[Item], failed: dict[Item, PartitaError], most: int
) -> GraphRun:
    """One run for all items; where it fails, runs for half of them each.

    `failed` gets the error of each item that fails alone, and once it has `most`, of all items of a run that fails.
    """
    try:
        return run(items)
    except FAILURES as error:
        if len(items) < 2 or len(failed) >= most:
            failed |= dict.fromkeys(items, error)
            return GraphRun()
    half = len(items) // 2
    one, two = (_in_halves(run, some, failed, most) for some in (items[:half], items[half:]))
    values, skipped, placement = one.values | two.values, one.skipped | two.skipped, one.placement | two.placement
    return GraphRun(values, skipped, placement, version=one.version or two.version)


# Errors and tolerances


def deviation(ours: npt.NDArray[Any], theirs: npt.NDArray[Any]) -> float:
    """Largest error relative to the reference's usual magnitudes, or to an element's own if that is larger.

    Infinite for another shape, and for NaN or infinity on one side only. Integers count as equal or 1.0; 8-bit integers
    may differ by one step.
    """
    if ours.shape != theirs.shape:
        return math.inf
    if theirs.dtype.kind != "f":
        steps = np.abs(ours.astype(np.int64) - theirs.astype(np.int64)).max(initial=0) if ours.dtype.kind in "iu" else 2
        equal = np.array_equal(ours, theirs) or (ours.dtype.itemsize == 1 and ours.dtype.kind in "iu" and steps <= 1)
        return 0.0 if equal else 1.0
    a, b = ours.astype(np.float64).ravel(), theirs.astype(np.float64).ravel()
    unlike = (a != b) & ~(np.isnan(a) & np.isnan(b))
    if not unlike.any():
        return 0.0
    masked = b < RULED_OUT
    if not np.isfinite(a[unlike & ~masked]).all() or not np.isfinite(b[unlike & ~masked]).all():
        return math.inf
    numbers = np.isfinite(b)
    there = np.abs(b[numbers & (b >= RULED_OUT)])
    usual = float(np.percentile(there, USUAL_RANGE)) if there.size else 0.0
    most = float(there.max(initial=0.0))
    scale = min(OUTLIERS * usual, most) or most or 1.0
    return difference(a[numbers].astype(np.float32), b[numbers].astype(np.float32), scale) / scale


def _rounds_input(node: onnx.NodeProto) -> bool:
    """Whether an operator rounds its input to 8 bits."""
    if node.op_type == "MatMulNBits":
        return _attribute(node, "accuracy_level") == ROUNDED_TO_INT8
    return node.op_type in QUANTISED and node.op_type not in ("DequantizeLinear", "GatherBlockQuantized")


def _attribute(node: onnx.NodeProto, name: str) -> int:
    """An integer attribute; 0 without it."""
    return next((entry.i for entry in node.attribute if entry.name == name), 0)


def finite(error: float | None) -> float | None:
    """The error for a record; None if it is infinite or not measured."""
    return error if error is not None and math.isfinite(error) else None


def largest(arrays: Iterable[npt.NDArray[Any]]) -> float | None:
    """Largest finite magnitude of the float arrays; None without one. Masks are left out."""
    found = [
        float(np.abs(kept).max())
        for array in arrays
        if array.dtype.kind == "f"
        if (kept := (wide := array.astype(np.float64))[np.isfinite(wide) & (wide > RULED_OUT)]).size
    ]
    return max(found, default=None)
