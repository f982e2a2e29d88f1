"""Sentences about one node, and about a name that matches none or several."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from partita.diagnosis.records import Fallback
from partita.explain.node_explanation import Explanation, Matches, Place
from partita.observations.names import UNKNOWN
from partita.observations.text_format import in_phases, listing, named_provider, plural


def render_no_single(found: Matches) -> str:
    """One line about a name that matches no node or several."""
    if found.matches:
        return f"{found.query!r} matches {plural(len(found.matches), 'node')}; give a full name or a unique part of it"
    if not found.query:
        return "the node name is empty; give a name or a part of it"
    near = f"; did you mean {' or '.join(found.suggestions)}?" if found.suggestions else ""
    return f"no node matches {found.query!r} (fused nodes included); it does not exist, or ONNX Runtime folded it{near}"


def headline(explanation: Explanation) -> str:
    """Provider and reason in each phase."""
    if not explanation.places:
        why = "rejected by its provider" if explanation.rejected_parts else "other parts of the report name it"
        return f"{explanation.node}: not in any phase; {why}"
    parts: dict[str, list[str]] = {}
    for phase, places in places_by_phase(explanation).items():
        text = _render_place(explanation, places[0]) if len(places) == 1 else _render_parts(explanation, places)
        parts.setdefault(text, []).append(phase)
    where = "; ".join(f"{text}{in_phases(phases)}".removesuffix(",") for text, phases in parts.items())
    return f"{explanation.node}: {where}{'; the run FAILED' if explanation.run_failure is not None else ''}"


def places_by_phase(explanation: Explanation) -> dict[str, list[Place]]:
    """Phase -> places; several if ONNX Runtime replaced the node by several nodes."""
    found: dict[str, list[Place]] = {}
    for place in explanation.places:
        found.setdefault(place.phase, []).append(place)
    return found


def _render_parts(explanation: Explanation, places: Sequence[Place]) -> str:
    """Text for a node that several nodes replace."""
    on = Counter(named_provider(place.provider) for place in places)
    known = [entry for place in places if (entry := reason_in(explanation, place)) is not None]
    where = listing(f"{count} on {provider}" for provider, count in on.items())
    why = ", ".join(dict.fromkeys(entry.reason for entry in known))
    reasons = f", not on {named_provider(known[0].preferred_provider)}: {why}," if known else ""
    return f"not in the plan; executed as {plural(len(places), 'node')}: {where}{reasons}"


def _render_place(explanation: Explanation, place: Place) -> str:
    """Text for one place."""
    if place.kind == "border" and place.copy_performed is not None:
        made = place.copy_performed
        return f"{made.kind.replace('_', ' ')}, copied {made.direction.replace('_', ' ')}"
    if place.kind == "copy" and place.copy_performed is not None:
        made = place.copy_performed
        return f"copies {made.tensor or 'an unknown tensor'} {made.direction.replace('_', ' ')}"
    if place.kind == "folded" and place.provider is None:
        return f"{place.op_type or 'unknown operator'} of the file, folded by ONNX Runtime at load time"
    where = f"{place.op_type or 'unknown operator'} on {named_provider(place.provider)}"
    if place.kind == "replaced":
        where = f"not in the plan; fused into {place.node}: {where}"
    if place.kind == "subgraph":
        where += " in a control-flow subgraph"
    why = reason_in(explanation, place)
    if why is not None:
        return f"{where}, not on {named_provider(why.preferred_provider)}: {why.reason} ({why.evidence_kind})"
    return f"{where}, the preferred provider," if place.provider == explanation.preferred_provider else where


def reason_in(explanation: Explanation, place: Place) -> Fallback | None:
    """The fallback of a place, for the first available preferred provider."""
    at = (place.phase, place.node, place.provider or UNKNOWN)
    here = (entry for entry in explanation.fallbacks if (entry.phase, entry.node, entry.provider) == at)
    return next((entry.restricted_to(explanation.active_providers) for entry in here), None)
