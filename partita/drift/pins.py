"""Tries whether pinning the module or the layer with the first difference to another provider helps."""

from __future__ import annotations

import math
from dataclasses import replace

from partita.drift.deviation import deviation, finite
from partita.drift.graphs import Part
from partita.drift.records import PinTrial
from partita.drift.sides import with_provider
from partita.drift.step_comparison import StepComparison
from partita.errors import PartitaError
from partita.providers.resolve import known_providers


def pin_trials(at: StepComparison, layer: Part, node: Part | None, tolerance: float) -> list[PinTrial]:
    """Runs with the module of the node, then its layer, pinned to another provider, until one helps."""
    modules = [at.graph.module(node.nodes[0])] if node is not None else []
    paths = [at.graph.module(position) for position in layer.nodes]
    modules += [layer.name] if any(path and path.startswith(layer.name) for path in paths) else []
    named = dict.fromkeys(module for module in modules if module)
    if not named:
        at.note("no pin was tried: the graph has no module paths")
    others = [entry.name for entry in at.reference.chain if entry not in at.tested_side.chain[:1]]
    others = others or [name for name in ("cpu",) if at.tested_side.chain[0].name != name]
    if named and not others:
        at.note("no pin was tried: both sides run on the same provider")
    found: list[PinTrial] = []
    for other in others:
        for module in named:
            found.append(_trial(at, layer, other, module, tolerance))
            if found[-1].within_tolerance:
                return found
    return found


def _trial(at: StepComparison, layer: Part, other: str, module: str, tolerance: float) -> PinTrial:
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
