"""Measures where the outputs of a graph on one side differ from those on the other.

Two errors per layer and node. `error` is of the whole graph, where errors of earlier parts add up. `own_error` is of
the part alone, on the reference's inputs; it decides which part is the first over tolerance, because a large error
upstream makes every later part differ.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from partita import __version__
from partita.drift.graphs import LOCAL, Part, PartedGraph, Values, array_bytes
from partita.drift.inputs import Step
from partita.drift.records import Basis, Drift, NotFinite, PartDrift, PinTrial
from partita.drift.sides import GraphRun, Side, run_graph
from partita.dtypes import EXACT, PRECISIONS
from partita.errors import GenerationError, PackageError, PartitaError, ProviderError, ResourceError
from partita.observations.names import CPU
from partita.observations.text_format import listing, name_some, plural, tally
from partita.providers.resolve import known_providers
from partita.runtime.contents.modules import UNPACKING
from partita.runtime.place.onnx_model import read_onnx
from partita.runtime.place.tensor_types import tensor_types
from partita.runtime.verify.comparison import OUTLIERS, RULED_OUT, difference

INFINITE = math.inf
ROUNDED_TO_INT8 = 4
"""`accuracy_level` of a MatMulNBits that rounds its input to 8 bits."""
USUAL_RANGE = 99.0
"""Percentile of magnitudes. A few activations of many models are a hundred times larger than all others."""
MEMORY_SHARE = 4
"""Part of the free memory that tensors of one chunk may take: both sides, and the copies of a run."""
FAILURES = (GenerationError, PackageError, ProviderError, ResourceError)
Run = Callable[..., GraphRun]


@dataclass(frozen=True, slots=True)
class Settings:
    """What is compared, and how."""

    by_node: bool = False
    free_running: bool = False
    tolerance: float | None = None
    """None: by the type and operator of each node."""
    memory_bytes: int | None = None
    """Bytes of tensors per chunk; None: a part of the free memory."""
    busy: Callable[[str], Any] | None = None


@dataclass
class Comparing:
    """Two sides of one graph in one step."""

    tested: Side
    reference: Side
    step: Step
    graph: PartedGraph
    settings: Settings
    run_reference: Run = run_graph
    own_feeds: Mapping[str, npt.NDArray[Any]] | None = None
    """Inputs of the tested side, if its states are its own."""
    notes: dict[str, None] = field(default_factory=dict)
    theirs: GraphRun = field(init=False)
    ours: GraphRun = field(init=False)

    def __post_init__(self) -> None:
        """Run both sides without taps."""
        step, model = self.step, self.graph.model.to_bytes()
        self.theirs = self.run_reference(self.reference, step.file, model, step.feeds, None, step.shared)
        self.ours = run_graph(self.tested, step.file, self._model_of(self.tested), self.feeds, None, step.shared)

    @property
    def feeds(self) -> Mapping[str, npt.NDArray[Any]]:
        """Inputs of the tested side."""
        return self.step.feeds if self.own_feeds is None else self.own_feeds

    @cached_property
    def _tested_graph(self) -> PartedGraph:
        """The graph of the tested side, which may be another file of the same structure."""
        if self.tested.folder == self.reference.folder:
            return self.graph
        return PartedGraph(read_onnx(self.tested.folder / self.step.file))

    def _model_of(self, side: Side) -> bytes | None:
        graph = self.graph if side is self.reference else self._tested_graph
        return graph.model.to_bytes()

    # --- outputs ------------------------------------------------------------------------------------------------------

    def outputs(self) -> PartDrift:
        """The output with the largest error."""
        part = Part("", tuple(self.graph.compared), (), tuple(self.theirs.values))
        found = self._compared(part, self.theirs.values, self.ours.values, ({}, {}), None)
        return found.model_copy(update={"name": found.tensor})

    # --- parts --------------------------------------------------------------------------------------------------------

    def compare(self, parts: Sequence[Part]) -> tuple[list[PartDrift], NotFinite | None]:
        """Errors of the parts, and the first node among them with NaN or infinity."""
        found: list[PartDrift] = []
        broken: NotFinite | None = None
        for chunk in self._chunks(parts):
            theirs, ours = self._tap(dict.fromkeys(name for part in chunk for name in (*part.reads, *part.gives)))
            local, places = self._alone(chunk, theirs)
            rest = [part for part in chunk if self._moved(part, places) or not set(part.gives) & local.keys()]
            mirrored = self._mirrored(rest, ours)
            for part in chunk:
                node = self.graph.nodes[part.nodes[0]] if len(part.nodes) == 1 else None
                pairs = (ours, mirrored) if part in rest else (local, theirs)
                found.append(self._compared(part, theirs, ours, pairs, node))
                if broken is None:
                    broken = self._not_finite(part, theirs, ours)
        return found, broken

    def _chunks(self, parts: Sequence[Part]) -> Iterable[list[Part]]:
        """The parts in groups whose tensors fit into memory. A tensor of unknown size counts as the mean of others."""
        import psutil

        most = self.settings.memory_bytes or psutil.virtual_memory().available // MEMORY_SHARE
        types = tensor_types(self.graph.proto, {name: array.shape for name, array in self.step.feeds.items()})
        sizes = {name: array_bytes(types.get(name)) for part in parts for name in (*part.reads, *part.gives)}
        known = [size for size in sizes.values() if size is not None]
        usual = sum(known) // len(known) if known else 0
        chunk: list[Part] = []
        tensors: set[str] = set()
        for part in parts:
            more = tensors.union(part.reads, part.gives)
            if chunk and 4 * sum(usual if sizes[name] is None else sizes[name] or 0 for name in more) > most:
                yield chunk
                chunk, more = [], {*part.reads, *part.gives}
            chunk, tensors = [*chunk, part], more
        if chunk:
            yield chunk

    def _tap(self, names: Iterable[str]) -> tuple[Values, Values]:
        """Tensors of both sides in runs of the whole graph."""
        step = self.step
        taps = [name for name in names if name not in step.feeds]
        theirs = self.run_reference(self.reference, step.file, self.graph.tapped(taps), step.feeds, taps, step.shared)
        if theirs.skipped:
            kinds = dict.fromkeys(theirs.skipped.values())
            self._note(
                f"not compared: {plural(len(theirs.skipped), 'tensor')} of type {listing(kinds)} "
                f"({name_some(list(theirs.skipped), 3)})"
            )
        taps = [name for name in taps if name in theirs.values]
        model = self._tested_graph.tapped(taps)
        ours = run_graph(self.tested, step.file, model, self.feeds, taps, step.shared)
        self._check_placement(ours)
        return {**step.feeds, **theirs.values}, {**self.feeds, **ours.values}

    def _check_placement(self, tapped: GraphRun) -> None:
        """Note nodes that run on another provider when tensors of the graph are outputs."""
        before = self.ours.placement
        moved = [name for name, provider in tapped.placement.items() if before.get(name, provider) != provider]
        if moved:
            self._note(
                f"{plural(len(moved), 'node')} run on another provider while intermediate tensors are read: "
                f"{name_some(moved, 3)}; errors of the whole graph may differ there from those of a run"
            )

    def _moved(self, part: Part, places: Mapping[str, str]) -> bool:
        """Whether a node of the part runs on another provider alone than in the graph."""
        names = [self.graph.nodes[at].name for at in part.nodes]
        usual = self.ours.placement
        return any(name in places and name in usual and places[name] != usual[name] for name in names)

    def _mirrored(self, parts: Sequence[Part], ours: Values) -> Values:
        """Tensors that the reference computes from the tested side's tensors, for parts that do not run alone on it."""
        parts = [part for part in parts if part.gives and all(name in ours for name in part.reads)]
        if not parts:
            return {}
        own = {name + LOCAL: past for name, past in self.step.shared.items()}
        outputs = [name + LOCAL for part in parts for name in part.gives if name in ours]
        model = self.graph.cut(parts, ours)
        try:
            ran = self.run_reference(self.reference, self.step.file, model, ours, outputs, own)
        except FAILURES as error:
            self._note(f"{name_some([part.name for part in parts], 3)}: no own error: {error}")
            return {}
        return {name.removesuffix(LOCAL): array for name, array in ran.values.items()}

    def _alone(self, parts: Sequence[Part], theirs: Values) -> tuple[Values, Mapping[str, str]]:
        """Tensors that each part computes from the reference's tensors, and the providers of the nodes.

        A part that the tested side does not run alone is missing.
        """
        parts = [part for part in parts if part.gives and all(name in theirs for name in part.reads)]
        if not parts:
            return {}, {}
        graph = self._tested_graph
        own = {name + LOCAL: past for name, past in self.step.shared.items()}
        outputs = [name + LOCAL for part in parts for name in part.gives if name in theirs]
        try:
            ran = run_graph(
                with_provider(self.tested, CPU), self.step.file, graph.cut(parts, theirs), theirs, outputs, own
            )
        except FAILURES:
            if len(parts) == 1:
                return {}, {}
            half = len(parts) // 2
            first, second = self._alone(parts[:half], theirs), self._alone(parts[half:], theirs)
            return {**first[0], **second[0]}, {**first[1], **second[1]}
        return {name.removesuffix(LOCAL): array for name, array in ran.values.items()}, ran.placement

    def within_layer(self, layer: Part, nodes: Sequence[Part]) -> list[PartDrift]:
        """Errors of a layer's nodes when the layer alone runs on the reference's tensors."""
        whole = self.graph.open_part(layer)
        theirs, ours = self._tap(dict.fromkeys((*whole.reads, *whole.gives)))
        local, _ = self._alone([whole], theirs)
        pairs = local, theirs
        return [self._compared(node, theirs, ours, pairs, self.graph.nodes[node.nodes[0]]) for node in nodes]

    def _compared(
        self, part: Part, theirs: Values, ours: Values, alone_on: tuple[Values, Values], node: Any
    ) -> PartDrift:
        """The errors of one part. `alone_on`: its tensors on the tested side and the reference, from equal inputs."""
        errors = {name: deviation(ours[name], theirs[name]) for name in part.gives if name in theirs and name in ours}
        local, wanted = alone_on
        own = {name: deviation(local[name], wanted[name]) for name in errors if name in local and name in wanted}
        tensor = max(own or errors, key=lambda name: (own or errors)[name], default="")
        error, alone = max(errors.values(), default=0.0), max(own.values(), default=None)
        # Without an own error, the errors of all parts before count.
        tolerance = self._tolerance(part.nodes if own else self.graph.compared, theirs)
        return PartDrift(
            name=part.name,
            op_type=None if node is None else node.op_type,
            module=None if node is None else self.graph.module(part.nodes[0]),
            provider=None if node is None else self.ours.placement.get(node.name),
            step=self.step.name,
            tensor=tensor,
            dtype=theirs[tensor].dtype.name if tensor else "",
            error=finite(error),
            own_error=None if alone is None else finite(alone),
            infinite=error == INFINITE or alone == INFINITE,
            tolerance=tolerance,
            over=(error if alone is None else alone) > tolerance,
            largest=largest(ours[name] for name in errors),
            largest_reference=largest(theirs[name] for name in errors),
        )

    def _tolerance(self, positions: Iterable[int], theirs: Values) -> float:
        """That of the least precise node: 8-bit inputs, 16-bit floats, or 32-bit floats."""
        if self.settings.tolerance is not None:
            return self.settings.tolerance
        nodes = [self.graph.nodes[at] for at in positions]
        names = {name for node in nodes for name in (*node.input, *node.output)} & theirs.keys()
        halves = any(theirs[name].dtype == np.float16 for name in names)
        limits = [_own_tolerance(node) for node in nodes]
        return max([*limits, PRECISIONS["fp16"].tolerance if halves else EXACT.tolerance])

    def _not_finite(self, part: Part, theirs: Values, ours: Values) -> NotFinite | None:
        """NaN or infinity in a node's output where the reference has a number; None for a layer."""
        if len(part.nodes) > 1:
            return None
        node = self.graph.nodes[part.nodes[0]]
        for name in part.gives:
            if name not in ours or ours[name].dtype.kind != "f" or ours[name].shape != theirs[name].shape:
                continue
            wrong = ~np.isfinite(ours[name]) & np.isfinite(theirs[name])
            if wrong.any():
                inputs = [ours[entry] for entry in part.reads if entry in ours and ours[entry].dtype.kind == "f"]
                numbers = [array[np.isfinite(array)] for array in inputs]
                ends = [float(end) for array in numbers if array.size for end in (array.min(), array.max())]
                return NotFinite(
                    node=part.name,
                    op_type=node.op_type,
                    module=self.graph.module(part.nodes[0]),
                    step=self.step.name,
                    value="NaN" if np.isnan(ours[name][wrong]).any() else "infinity",
                    dtype=ours[name].dtype.name,
                    input_range=(min(ends), max(ends)) if ends else None,
                )
        return None

    def _note(self, text: str) -> None:
        self.notes[text] = None

    # --- pins ---------------------------------------------------------------------------------------------------------

    def trials(self, layer: Part, node: Part | None, tolerance: float) -> list[PinTrial]:
        """Runs with the module of the node, then its layer, pinned to another provider, until one helps."""
        modules = [self.graph.module(node.nodes[0])] if node is not None else []
        paths = [self.graph.module(at) for at in layer.nodes]
        modules += [layer.name] if any(path and path.startswith(layer.name) for path in paths) else []
        named = dict.fromkeys(module for module in modules if module)
        if not named:
            self._note("no pin was tried: the graph has no module paths")
        others = [entry.name for entry in self.reference.chain if entry not in self.tested.chain[:1]]
        others = others or [name for name in ("cpu",) if self.tested.chain[0].name != name]
        if named and not others:
            self._note("no pin was tried: both sides run on the same provider")
        found: list[PinTrial] = []
        for other in others:
            for module in named:
                found.append(self._trial(layer, other, module, tolerance))
                if found[-1].within_tolerance:
                    return found
        return found

    def _trial(self, layer: Part, other: str, module: str, tolerance: float) -> PinTrial:
        side = with_provider(self.tested, known_providers()[other].ort_name)
        side = replace(side, pins=(*side.pins, f"{other}:{module}"))
        taps = [name for name in layer.gives if name in self.graph.outputs or name not in self.step.feeds]
        chain = ",".join(entry.name for entry in side.chain)
        try:
            step = self.step
            theirs = self.run_reference(
                self.reference, step.file, self.graph.tapped(taps), step.feeds, taps, step.shared
            )
            model = self._tested_graph.tapped(taps)
            ours = run_graph(side, step.file, model, self.feeds, taps, step.shared)
        except PartitaError as error:
            return PinTrial(pin=side.pins[-1], chain=chain, error=None, within_tolerance=False, failure=str(error))
        shared = [name for name in taps if name in theirs.values and name in ours.values]
        worst = max((deviation(ours.values[name], theirs.values[name]) for name in shared), default=INFINITE)
        return PinTrial(pin=side.pins[-1], chain=chain, error=finite(worst), within_tolerance=worst <= tolerance)


def _own_tolerance(node: Any) -> float:
    """Tolerance of an operator that rounds its input to 8 bits; 0 for others."""
    level = next((entry.i for entry in node.attribute if entry.name == "accuracy_level"), 0)
    quantised = node.op_type in UNPACKING and node.op_type not in ("DequantizeLinear", "GatherBlockQuantized")
    by_level = node.op_type != "MatMulNBits" or level == ROUNDED_TO_INT8
    return PRECISIONS["int4"].tolerance if quantised and by_level else 0.0


def with_provider(side: Side, ort_name: str) -> Side:
    """The side with a provider at the end of its chain, if it is missing."""
    if any(entry.ort_name == ort_name for entry in side.chain):
        return side
    other = next(entry for entry in known_providers().values() if entry.ort_name == ort_name)
    return replace(side, chain=(*side.chain, other))


def finite(error: float) -> float | None:
    """The error for a record; None if it is infinite."""
    return error if math.isfinite(error) else None


def largest(arrays: Iterable[npt.NDArray[Any]]) -> float | None:
    """Largest finite magnitude of the float arrays; None without one. Masks are left out."""
    found = [
        float(np.abs(kept).max())
        for array in arrays
        if array.dtype.kind == "f"
        if (kept := (wide := array.astype(np.float64))[np.isfinite(wide) & (wide > RULED_OUT)]).size
    ]
    return max(found, default=None)


def deviation(ours: npt.NDArray[Any], theirs: npt.NDArray[Any]) -> float:
    """Largest error relative to the reference's usual magnitudes, or to an element's own if that is larger.

    Infinite for another shape, and for NaN or infinity on one side only. Integers count as equal or 1.0; 8-bit integers
    may differ by one step.
    """
    if ours.shape != theirs.shape:
        return INFINITE
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
        return INFINITE
    numbers = np.isfinite(b)
    there = np.abs(b[numbers & (b >= RULED_OUT)])
    usual = float(np.percentile(there, USUAL_RANGE)) if there.size else 0.0
    most = float(there.max(initial=0.0))
    scale = min(OUTLIERS * usual, most) or most or 1.0
    return difference(a[numbers].astype(np.float32), b[numbers].astype(np.float32), scale) / scale


@dataclass(frozen=True, slots=True)
class _Finding:
    """The first layer over tolerance, and the first node in it."""

    at: Comparing
    layer: Part
    node: Part | None
    basis: Basis
    nodes: list[PartDrift]
    """Nodes of the layer."""
    broken: NotFinite | None = None


def measure(
    model: str,
    tested: Side,
    reference: Side,
    steps: Sequence[Step],
    compared: Sequence[Step],
    settings: Settings,
    run_reference: Run = run_graph,
) -> Drift:
    """Compare both sides in the `compared` ones of these `steps`.

    Raises PackageError, ProviderError, ResourceError, UsageError, GenerationError.
    """
    entries = list(_open(tested, reference, steps, compared, settings, run_reference))
    layers: list[PartDrift] = []
    nodes: list[PartDrift] = []
    found: _Finding | None = None
    broken: NotFinite | None = None
    for entry in entries:
        parts = entry.graph.layers()
        these, _ = entry.compare(parts)
        layers += these
        if settings.by_node:
            every, wrong = entry.compare(entry.graph.single(entry.graph.compared))
            nodes, broken = [*nodes, *every], broken or wrong
        over = next((at for at, layer in enumerate(these) if layer.over), None)
        if found is None and over is not None:
            found = _inside(entry, parts[over], these[over].tolerance)
            broken = broken or found.broken
        infinite = next((at for at, layer in enumerate(these) if layer.infinite), None)
        if infinite is not None and broken is None:
            _, broken = entry.compare(entry.graph.single(parts[infinite].nodes))
    outputs = max((entry.outputs() for entry in entries), key=_rank)
    if found is None and outputs.over:
        found = _anywhere(entries, layers)
    if found is not None and not settings.by_node:
        nodes = found.nodes
    trials: list[PinTrial] = []
    if found is not None:
        limit = next(layer.tolerance for layer in layers if layer.name == found.layer.name)
        trials = found.at.trials(found.layer, found.node, limit)
    return Drift(
        model=model,
        provider=tested.name,
        against=reference.name,
        versions=(entries[0].ours.version, entries[0].theirs.version),
        nodes_by_provider=dict(Counter(entries[0].ours.placement.values()).most_common()),
        unused=entries[0].ours.unused,
        free_running=settings.free_running,
        steps=tuple(step.name for step in compared),
        outputs=outputs,
        layers=tuple(_worst_of_steps(layers)),
        first_layer=None if found is None else found.layer.name,
        first_node=None if found is None or found.node is None else found.node.name,
        basis=None if found is None else found.basis,
        nodes=tuple(_worst_of_steps(nodes)),
        not_finite=broken,
        trials=tuple(trials),
        notes=tuple(_notes(entries)),
        partita_version=__version__,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _open(
    tested: Side,
    reference: Side,
    steps: Sequence[Step],
    compared: Sequence[Step],
    settings: Settings,
    run_reference: Run,
) -> Iterator[Comparing]:
    """Both sides of every compared step. Free running, all steps run, and the tested side reads its own states."""
    graphs: dict[str, PartedGraph] = {}
    states: dict[str, npt.NDArray[Any]] = {}
    for step in steps:
        if step not in compared and not settings.free_running:
            continue
        if step.file not in graphs:
            graphs[step.file] = PartedGraph(read_onnx(reference.folder / step.file))
        own = {**step.feeds, **states} if states else None
        entry = Comparing(tested, reference, step, graphs[step.file], settings, run_reference, own)
        if settings.free_running:
            states = {past: entry.ours.values[present] for present, past in step.states.items()}
        if step in compared:
            yield entry


def _inside(entry: Comparing, layer: Part, tolerance: float) -> _Finding:
    """The first node over tolerance in a layer: alone on the reference's tensors, else in the layer on its inputs."""
    singles = entry.graph.single(layer.nodes)
    nodes, broken = entry.compare(singles)
    first = next((at for at, node in enumerate(nodes) if node.over), None)
    if first is not None:
        basis: Basis = "whole_graph" if nodes[first].own_error is None and not nodes[first].infinite else "alone"
        return _Finding(entry, layer, singles[first], basis, nodes, broken)
    nodes = entry.within_layer(layer, singles)
    first = next((at for at, node in enumerate(nodes) if _rank(node) > tolerance), None)
    return _Finding(entry, layer, None if first is None else singles[first], "in_layer", nodes, broken)


def _anywhere(entries: Sequence[Comparing], layers: Sequence[PartDrift]) -> _Finding | None:
    """Outputs are over tolerance and no layer is: the first such node of all, else the layer where the sum of errors
    passes the tolerance.
    """
    for entry in entries:
        for layer in entry.graph.layers():
            nodes, broken = entry.compare(entry.graph.single(layer.nodes))
            first = next((at for at, node in enumerate(nodes) if node.over), None)
            if first is not None:
                node = entry.graph.single(layer.nodes)[first]
                return _Finding(entry, layer, node, "alone", nodes, broken)
    summed = next((layer for layer in layers if layer.infinite or (layer.error or 0.0) > layer.tolerance), None)
    for entry in entries:
        if summed is not None and entry.step.name == summed.step:
            layer = next(part for part in entry.graph.layers() if part.name == summed.name)
            return _Finding(entry, layer, None, "whole_graph", [])
    return None


def _rank(part: PartDrift) -> float:
    """The error that counts."""
    error = part.error if part.own_error is None else part.own_error
    return INFINITE if part.infinite or error is None else error


def _worst_of_steps(parts: Sequence[PartDrift]) -> list[PartDrift]:
    """Each part once, with the values of the step with the largest error."""
    found: dict[str, PartDrift] = {}
    for part in parts:
        if part.name not in found or (part.over, _rank(part)) > (found[part.name].over, _rank(found[part.name])):
            found[part.name] = part
    return list(found.values())


def _notes(entries: Sequence[Comparing]) -> Iterator[str]:
    """Limits of the comparison."""
    yield from dict.fromkeys(note for entry in entries for note in entry.notes)
    graph = entries[0].graph
    if graph.random:
        yield (
            f"{plural(len(graph.random), 'node')} with random outputs not compared ({name_some(graph.random, 3)}); "
            "errors of the whole graph after them have no meaning"
        )
    if graph.control_flow:
        yield f"control-flow nodes compared as a whole, not the nodes of their subgraphs: {tally(graph.control_flow)}"
