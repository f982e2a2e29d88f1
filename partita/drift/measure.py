"""Finds where the outputs of a graph on one side differ from those on the other.

Two errors per layer and node. `error` is of the whole graph, where errors of earlier parts add up. `own_error` is of
the part alone, on the reference's inputs; it decides which part is the first over tolerance, because a large error
upstream makes every later part differ.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import product

from partita import __version__
from partita.drift.comparison import Errors, Settings, StepComparison, deviation, finite
from partita.drift.graphs import RANDOM, Part, PartedGraph, Values
from partita.drift.records import Basis, Drift, PartDrift, PinTrial
from partita.drift.sides import Side, Step, with_provider
from partita.errors import PartitaError
from partita.observations.text_format import name_some, plural, tally
from partita.providers.resolve import known_providers
from partita.runtime.contents.modules import QUANTISED
from partita.runtime.place.onnx_model import CONTROL_FLOW, read_onnx

OTHER_WAY = 0.3
"""Error of a layer that no fault has without an effect on the outputs; an embedding without its scale has it. Rounded
weights may cause larger ones."""


@dataclass(frozen=True, slots=True)
class _Difference:
    """The first layer over tolerance, and the first node in it."""

    comparison: StepComparison
    layer: Part
    node: Part | None
    basis: Basis
    nodes: Errors
    """Nodes of the layer."""


def measure(model: str, tested: Side, reference: Side, steps: Sequence[Step], settings: Settings) -> Drift:
    """Compare both sides in the first and the last of these steps.

    Raises PackageError, ProviderError, ResourceError, UsageError, GenerationError; LateError after `settings.deadline`.
    """
    entries = list(_open(tested, reference, steps, settings))
    outputs = max((entry.outputs() for entry in entries), key=lambda part: part.compared_error)
    layers = [entry.compare(entry.graph.layers()) for entry in entries]
    if not reference.runs_graphs and not outputs.exceeds_tolerance:
        layers = [_comparable(*each) for each in zip(entries, layers, strict=True)]
    every = [(entry, *each) for entry, found in zip(entries, layers, strict=True) for each in found.items()]
    over = next((each for each in every if each[-1].exceeds_tolerance), None)
    difference: _Difference | None = None
    if over is not None:
        difference = _first_in_layer(*over)
    elif outputs.exceeds_tolerance:
        difference = _anywhere(entries, every)
    nodes = [] if difference is None else [difference.nodes]
    if settings.by_node:
        nodes = [entry.compare(entry.nodes_of(entry.graph.layers())) for entry in entries]
    else:
        for entry, found in zip(entries, layers, strict=True):  # records the first node with NaN or infinity
            entry.compare(entry.nodes_of([layer for layer, drift in found.items() if drift.infinite][:1]))
    ours = entries[0].tested_run
    return Drift(
        model=model,
        provider=tested.name,
        against=reference.name,
        versions=(ours.version, entries[0].reference_run.version),
        nodes_by_provider=dict(Counter(ours.placement.values()).most_common()),
        unused=ours.unused,
        free_running=settings.free_running,
        steps=tuple(entry.step.name for entry in entries),
        outputs=outputs,
        layers=_worst_of_steps(layers),
        first_layer=None if difference is None else difference.layer.name,
        first_node=None if difference is None or difference.node is None else difference.node.name,
        basis=None if difference is None else difference.basis,
        nodes=_worst_of_steps(nodes),
        not_finite=next((entry.not_finite[min(entry.not_finite)] for entry in entries if entry.not_finite), None),
        pin_trials=() if difference is None else tuple(_pin_trials(difference)),
        notes=tuple(_notes(entries)),
        partita_version=__version__,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _open(tested: Side, reference: Side, steps: Sequence[Step], settings: Settings) -> Iterator[StepComparison]:
    """Both sides of the first and the last step. Free running, all steps run, with the tested side's own states."""
    graphs: dict[str, PartedGraph] = {}
    states: Values = {}
    compared = (0, len(steps) - 1)
    for at, step in enumerate(steps):
        if at not in compared and not settings.free_running:
            continue
        if step.file not in graphs:
            graphs[step.file] = PartedGraph(read_onnx(reference.folder / step.file))
        entry = StepComparison(tested, reference, step, graphs[step.file], settings, states)
        if settings.free_running:
            states = {past: entry.tested_run.values[present] for present, past in step.states.items()}
        if at in compared:
            yield entry


def _comparable(entry: StepComparison, layers: Errors) -> Errors:
    """The layers without layers that the graph computes in another way than the model; outputs are within tolerance."""
    others = [drift.name for drift in layers.values() if drift.tolerance < OTHER_WAY < drift.compared_error]
    if others:
        entry.note(
            f"{plural(len(others), 'layer')} not compared: the graph computes other values there than the model "
            f"({name_some(others, 3)}), and its outputs are within tolerance"
        )
    return {layer: drift for layer, drift in layers.items() if drift.name not in others}


def _first_node(entry: StepComparison, layer: Part) -> _Difference | None:
    """The first node of a layer that is over tolerance alone on the reference's tensors."""
    nodes = entry.compare(entry.nodes_of([layer]))
    for node, drift in nodes.items():
        if drift.exceeds_tolerance:
            basis: Basis = "whole_graph" if drift.own_error is None and not drift.infinite else "alone"
            return _Difference(entry, layer, node, basis, nodes)
    return None


def _first_in_layer(entry: StepComparison, layer: Part, of_layer: PartDrift) -> _Difference:
    """The first node over tolerance in a layer: alone on the reference's tensors, else in the layer on its inputs."""
    found = _first_node(entry, layer)
    if found is not None:
        return found
    nodes = entry.within_layer(layer)
    first = next((node for node, drift in nodes.items() if drift.compared_error > of_layer.tolerance), None)
    return _Difference(entry, layer, first, "in_layer", nodes)


def _anywhere(
    entries: Sequence[StepComparison], layers: Sequence[tuple[StepComparison, Part, PartDrift]]
) -> _Difference | None:
    """Outputs are over tolerance and no layer is: the first such node of all, else the layer where the sum of errors
    passes the tolerance.
    """
    nodes = (_first_node(entry, layer) for entry in entries for layer in entry.graph.layers())
    sums = (
        _Difference(entry, layer, None, "whole_graph", {})
        for entry, layer, drift in layers
        if drift.infinite or (drift.error or 0.0) > drift.tolerance
    )
    return next(filter(None, nodes), None) or next(sums, None)


def _pin_trials(found: _Difference) -> Iterator[PinTrial]:
    """Runs with the module of the node, then its layer, pinned to another provider, until one helps."""
    at, layer = found.comparison, found.layer
    modules = [at.graph.module(found.node.nodes[0])] if found.node is not None else []
    paths = [at.graph.module(position) for position in layer.nodes]
    modules += [layer.name] if any(path and path.startswith(layer.name) for path in paths) else []
    first = at.tested.chain[0]
    others = [entry.name for entry in at.reference.chain if entry != first]
    others = others or [name for name in ("cpu",) if first.name != name]
    for other, module in product(others, dict.fromkeys(filter(None, modules))):
        trial = _pin_trial(at, layer, other, module)
        yield trial
        if trial.within_tolerance:
            break


def _pin_trial(at: StepComparison, layer: Part, other: str, module: str) -> PinTrial:
    side = with_provider(at.tested, known_providers()[other].ort_name)
    side = replace(side, pins=(*side.pins, f"{other}:{module}"))
    chain = ",".join(entry.name for entry in side.chain)
    try:
        theirs, ours = at.tap(layer.outputs, side)
    except PartitaError as error:
        return PinTrial(pin=side.pins[-1], chain=chain, error=None, within_tolerance=False, failure=str(error))
    shared = [name for name in layer.outputs if name in theirs and name in ours]
    worst = max((deviation(ours[name], theirs[name]) for name in shared), default=math.inf)
    within = worst <= at.tolerance(layer.nodes, theirs)
    return PinTrial(pin=side.pins[-1], chain=chain, error=finite(worst), within_tolerance=within)


def _worst_of_steps(steps: Iterable[Errors]) -> tuple[PartDrift, ...]:
    """Each part once, with the values of the step with the largest error."""
    found: dict[str, PartDrift] = {}
    for part in (part for step in steps for part in step.values()):
        same = (found.get(part.name, part), part)
        found[part.name] = max(same, key=lambda each: (each.exceeds_tolerance, each.compared_error))
    return tuple(found.values())


def _notes(entries: Sequence[StepComparison]) -> Iterator[str]:
    """Limits of the comparison."""
    yield from dict.fromkeys(note for entry in entries for note in entry.notes)
    reference, graph = entries[0].reference, entries[0].graph
    for side in (entries[0].tested, reference):
        for error in [*side.unread.values()][:1]:
            names = name_some([*side.unread], 3)
            yield f"{plural(len(side.unread), 'tensor')} not read on {side.name} ({names}): {error.message}"
    if reference.weight_bits is not None and any(node.op_type in QUANTISED for node in graph.nodes):
        yield "the package's weights are rounded, the source model's are not: errors include the rounding"
    random = [node.name for node in graph.nodes if node.op_type in RANDOM]
    if random:
        yield (
            f"{plural(len(random), 'node')} with random outputs not compared ({name_some(random, 3)}); "
            "errors of the whole graph after them have no meaning"
        )
    control_flow = Counter(node.op_type for node in graph.nodes if node.op_type in CONTROL_FLOW)
    if control_flow:
        yield f"control-flow nodes compared as a whole, not the nodes of their subgraphs: {tally(control_flow)}"
