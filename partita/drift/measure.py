"""Finds where the outputs of a graph on one side differ from those on the other.

Two errors per layer and node. `error` is of the whole graph, where errors of earlier parts add up. `own_error` is of
the part alone, on the reference's inputs; it decides which part is the first over tolerance, because a large error
upstream makes every later part differ.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import product

from partita import __version__
from partita.drift.comparison import Settings, StepComparison, deviation, finite
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
    nodes: list[PartDrift]
    """Nodes of the layer."""


def measure(model: str, tested: Side, reference: Side, steps: Sequence[Step], settings: Settings) -> Drift:
    """Compare both sides in the first and the last of these steps.

    Raises PackageError, ProviderError, ResourceError, UsageError, GenerationError; LateError after `settings.deadline`.
    """
    entries = list(_open(tested, reference, steps, settings))
    layers: list[PartDrift] = []
    nodes: list[PartDrift] = []
    found: _Difference | None = None
    outputs = max((entry.outputs() for entry in entries), key=lambda part: part.compared_error)
    for entry in entries:
        parts = {part.name: part for part in entry.graph.layers()}
        these = entry.compare([*parts.values()])
        if not reference.runs_graphs and not outputs.exceeds_tolerance:
            these = _comparable(entry, these)
        layers += these
        if settings.by_node:
            nodes += entry.compare([node for part in parts.values() for node in entry.nodes_of(part)])
        over = next((layer for layer in these if layer.exceeds_tolerance), None)
        if found is None and over is not None:
            found = _first_in_layer(entry, parts[over.name], over.tolerance)
        infinite = next((layer for layer in these if layer.infinite), None)
        if infinite is not None and not settings.by_node:
            entry.compare(entry.nodes_of(parts[infinite.name]))  # records the first node with NaN or infinity
    if found is None and outputs.exceeds_tolerance:
        found = _anywhere(entries, layers)
    trials = []
    if found is not None:
        nodes = nodes if settings.by_node else found.nodes
        limit = next(layer.tolerance for layer in layers if layer.name == found.layer.name)
        trials = _pin_trials(found.comparison, found.layer, found.node, limit)
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
        layers=tuple(_worst_of_steps(layers)),
        first_layer=None if found is None else found.layer.name,
        first_node=None if found is None or found.node is None else found.node.name,
        basis=None if found is None else found.basis,
        nodes=tuple(_worst_of_steps(nodes)),
        not_finite=next((entry.not_finite[min(entry.not_finite)] for entry in entries if entry.not_finite), None),
        pin_trials=tuple(trials),
        notes=tuple(_notes(entries)),
        partita_version=__version__,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _open(tested: Side, reference: Side, steps: Sequence[Step], settings: Settings) -> Iterator[StepComparison]:
    """Both sides of the first and the last step. Free running, all steps run, with the tested side's own states."""
    graphs: dict[str, PartedGraph] = {}
    states: Values = {}
    unread: tuple[dict[str, PartitaError], dict[str, PartitaError]] = ({}, {})
    compared = (0, len(steps) - 1)
    for at, step in enumerate(steps):
        if at not in compared and not settings.free_running:
            continue
        if step.file not in graphs:
            graphs[step.file] = PartedGraph(read_onnx(reference.folder / step.file))
        entry = StepComparison(tested, reference, step, graphs[step.file], settings, unread, states)
        if settings.free_running:
            states = {past: entry.tested_run.values[present] for present, past in step.states.items()}
        if at in compared:
            yield entry


def _comparable(entry: StepComparison, layers: Sequence[PartDrift]) -> list[PartDrift]:
    """The layers without layers that the graph computes in another way than the model; outputs are within tolerance."""
    others = [layer.name for layer in layers if layer.tolerance < OTHER_WAY < layer.compared_error]
    if others:
        entry.note(
            f"{plural(len(others), 'layer')} not compared: the graph computes other values there than the model "
            f"({name_some(others, 3)}), and its outputs are within tolerance"
        )
    return [layer for layer in layers if layer.name not in others]


def _first_node(entry: StepComparison, layer: Part) -> _Difference | None:
    """The first node of a layer that is over tolerance alone on the reference's tensors."""
    parts = {part.name: part for part in entry.nodes_of(layer)}
    nodes = entry.compare([*parts.values()])
    first = next((node for node in nodes if node.exceeds_tolerance), None)
    if first is None:
        return None
    basis: Basis = "whole_graph" if first.own_error is None and not first.infinite else "alone"
    return _Difference(entry, layer, parts[first.name], basis, nodes)


def _first_in_layer(entry: StepComparison, layer: Part, tolerance: float) -> _Difference:
    """The first node over tolerance in a layer: alone on the reference's tensors, else in the layer on its inputs."""
    found = _first_node(entry, layer)
    if found is not None:
        return found
    parts = {part.name: part for part in entry.nodes_of(layer)}
    nodes = entry.within_layer(layer, [*parts.values()])
    first = next((parts[node.name] for node in nodes if node.compared_error > tolerance), None)
    return _Difference(entry, layer, first, "in_layer", nodes)


def _anywhere(entries: Sequence[StepComparison], layers: Sequence[PartDrift]) -> _Difference | None:
    """Outputs are over tolerance and no layer is: the first such node of all, else the layer where the sum of errors
    passes the tolerance.
    """
    every = [(entry, layer) for entry in entries for layer in entry.graph.layers()]
    found = next(filter(None, (_first_node(entry, layer) for entry, layer in every)), None)
    if found is not None:
        return found
    sums = {(part.step, part.name) for part in layers if part.infinite or (part.error or 0.0) > part.tolerance}
    return next(
        (
            _Difference(entry, layer, None, "whole_graph", [])
            for entry, layer in every
            if (entry.step.name, layer.name) in sums
        ),
        None,
    )


def _pin_trials(at: StepComparison, layer: Part, node: Part | None, tolerance: float) -> list[PinTrial]:
    """Runs with the module of the node, then its layer, pinned to another provider, until one helps."""
    modules = [at.graph.module(node.nodes[0])] if node is not None else []
    paths = [at.graph.module(position) for position in layer.nodes]
    modules += [layer.name] if any(path and path.startswith(layer.name) for path in paths) else []
    others = [entry.name for entry in at.reference.chain if entry not in at.tested_side.chain[:1]]
    others = others or [name for name in ("cpu",) if at.tested_side.chain[0].name != name]
    found: list[PinTrial] = []
    for other, module in product(others, dict.fromkeys(filter(None, modules))):
        found.append(_pin_trial(at, layer, other, module, tolerance))
        if found[-1].within_tolerance:
            break
    return found


def _pin_trial(at: StepComparison, layer: Part, other: str, module: str, tolerance: float) -> PinTrial:
    side = with_provider(at.tested_side, known_providers()[other].ort_name)
    side = replace(side, pins=(*side.pins, f"{other}:{module}"))
    chain = ",".join(entry.name for entry in side.chain)
    try:
        theirs, ours = at.tap(layer.outputs, side)
    except PartitaError as error:
        return PinTrial(pin=side.pins[-1], chain=chain, error=None, within_tolerance=False, failure=str(error))
    shared = [name for name in layer.outputs if name in theirs and name in ours]
    worst = max((deviation(ours[name], theirs[name]) for name in shared), default=math.inf)
    return PinTrial(pin=side.pins[-1], chain=chain, error=finite(worst), within_tolerance=worst <= tolerance)


def _worst_of_steps(parts: Sequence[PartDrift]) -> list[PartDrift]:
    """Each part once, with the values of the step with the largest error."""
    found: dict[str, PartDrift] = {}
    for part in parts:
        other = found.setdefault(part.name, part)
        if (part.exceeds_tolerance, part.compared_error) > (other.exceeds_tolerance, other.compared_error):
            found[part.name] = part
    return list(found.values())


def _notes(entries: Sequence[StepComparison]) -> Iterator[str]:
    """Limits of the comparison."""
    yield from dict.fromkeys(note for entry in entries for note in entry.notes)
    for side, unread in zip((entries[0].tested_side, entries[0].reference), entries[0].unread, strict=True):
        for error in [*unread.values()][:1]:
            names = name_some([*unread], 3)
            yield f"{plural(len(unread), 'tensor')} not read on {side.name} ({names}): {error.message}"
    nodes = entries[0].graph.nodes
    if entries[0].reference.weight_bits is not None and any(node.op_type in QUANTISED for node in nodes):
        yield "the package's weights are rounded, the source model's are not: errors include the rounding"
    random = [node.name for node in nodes if node.op_type in RANDOM]
    if random:
        yield (
            f"{plural(len(random), 'node')} with random outputs not compared ({name_some(random, 3)}); "
            "errors of the whole graph after them have no meaning"
        )
    control_flow = Counter(node.op_type for node in nodes if node.op_type in CONTROL_FLOW)
    if control_flow:
        yield f"control-flow nodes compared as a whole, not the nodes of their subgraphs: {tally(control_flow)}"
