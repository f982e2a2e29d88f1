"""Headline and document of one node of a report, or of the nodes that match part of a name, for every view."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from partita.diagnosis.reasons import describe_rank
from partita.diagnosis.records import Fallback, SkippedProvider
from partita.explain.node_explanation import Explanation, Matches, Place
from partita.observations.names import UNKNOWN
from partita.observations.text_format import (
    NOT_KNOWN,
    decimals,
    human_bytes,
    in_phases,
    listing,
    name_some,
    named_provider,
    percent,
    plural,
)
from partita.partition_reports.groups import grouped
from partita.partition_reports.records import Copy
from partita.partition_reports.render.show import Views
from partita.partition_reports.sections.model import (
    Block,
    Column,
    Document,
    Group,
    Head,
    Line,
    Section,
    Table,
    pairs,
    table,
)
from partita.partition_reports.sections.shared import REASONS_PAGE, copied_bytes, probe_table

MOST = 40
"""Maximum listed names; the JSON has all."""


def document(found: Explanation | Matches) -> Document:
    """The document."""
    if isinstance(found, Matches):
        return Document(
            kind="Nodes of a report",
            name=found.query,
            headline=(render_no_single(found),),
            opening=(_matches(found),) if found.matches else (),
            sections=(),
        )
    return Document(
        kind="Node of a report",
        name=found.node,
        headline=(headline(found),),
        opening=tuple(_opening(found)),
        sections=(
            *_copies_caused(found),
            *_reasons(found),
            *_kernels(found),
            *_remarks(found),
        ),
    )


VIEWS = Views(document)


def _matches(found: Matches) -> Table:
    """The nodes that match part of a name."""
    phases = list(dict.fromkeys(phase for entry in found.matches for phase in entry.providers))
    rows = []
    for entry in found.matches:
        where = " / ".join(dict.fromkeys(named_provider(entry.providers.get(phase)) for phase in phases))
        rows.append((entry.node, entry.op_type or NOT_KNOWN, where or NOT_KNOWN, entry.reason or ""))
    heads = ("node", "operator", "provider", "reason")
    return table("Matching nodes", heads, rows, rest=_more_nodes(len(rows)), most=MOST, obvious=True)


def _more_nodes(count: int) -> Callable[[int], str]:
    return lambda shown: f"and {plural(count - shown, 'more node')}; the JSON has all"


def _opening(explanation: Explanation) -> Iterator[Block]:
    """Identity, placement in each phase, fused nodes and copies."""
    yield pairs("The node", _identity(explanation))
    if any(place.kind != "border" for place in explanation.places):
        yield _places(explanation)
    lines: dict[str, list[str]] = {}
    for place in explanation.places:
        if place.replaces and place.replaces != (explanation.node,):
            head = f"{place.node} is fused from" if place.kind == "replaced" else "fused from"
            text = f"{head} {plural(len(place.replaces), 'node')} of the file: {name_some(place.replaces, MOST)}"
            lines.setdefault(text, []).append(place.phase)
    yield from (Line(f"{text}{in_phases(phases)}") for text, phases in lines.items())
    for place in explanation.places:
        if place.copy_performed is not None:
            yield Line(_render_copy(place.copy_performed), f"copy{in_phases([place.phase])}")


def _identity(explanation: Explanation) -> list[tuple[str, str | None]]:
    """Facts that do not depend on the phase."""
    replaced = any(place.kind == "replaced" for place in explanation.places)
    found = dict.fromkeys(place.op_type for place in explanation.places if place.op_type)
    return [
        ("runs as" if replaced else "operator", ", ".join(found) or explanation.op_type),
        ("module", explanation.module),
        ("layer", None if explanation.layer is None else str(explanation.layer)),
        ("source line", explanation.source_line),
        ("preferred provider", explanation.preferred_provider),
    ]


def _places(explanation: Explanation) -> Table:
    """One row per phase and node that executes it; columns without a value are omitted."""

    def text(value: int | None) -> str:
        return NOT_KNOWN if value is None else str(value)

    facts: tuple[tuple[Head, Callable[[Place], str]], ...] = (
        ("phase", lambda place: place.phase),
        ("node", lambda place: place.node if place.kind == "replaced" else NOT_KNOWN),
        ("operator", lambda place: place.op_type or NOT_KNOWN),
        ("provider", lambda place: named_provider(place.provider)),
        (Column("position"), lambda place: text(place.position)),
        (Column("host ms"), lambda place: decimals(place.host_us_per_run, 1e-3)),
        (Column("share"), lambda place: percent(place.time_share)),
        (Column("output"), lambda place: human_bytes(place.output_bytes)),
        ("reason", lambda place: found.reason if (found := reason_in(explanation, place)) is not None else NOT_KNOWN),
    )
    places = [place for place in explanation.places if place.kind != "border"]
    shown = []
    for head, render in facts:
        values = {render(place) for place in places}
        if values != {NOT_KNOWN} and (len(values) > 1 or head not in ("operator", "reason")):  # stated above
            shown.append((head, render))
    rows = [[render(place) for _, render in shown] for place in places]
    heads = [head for head, _ in shown]
    return table("In each phase", heads, rows, rest=_more_nodes(len(rows)), most=MOST, obvious=True)


def _copies_caused(explanation: Explanation) -> Iterator[Section]:
    """Copies caused by the node."""
    groups = []
    for place in explanation.places:
        if place.copies_caused:
            count = plural(len(place.copies_caused), "copy")
            head = f"{place.phase}: {count}, {copied_bytes(place.copies_caused)} per run"
            lines = (Line(f"{copy.name}: {_render_copy(copy)}") for copy in place.copies_caused[:MOST])
            groups.append(Group(head, tuple(lines)))
    if groups:
        yield Section("copies", "Copies caused by the node", tuple(groups))


def _render_copy(copy: Copy) -> str:
    """Tensor, direction, size and cause of a copy."""
    wait = f", {decimals(copy.host_us_per_run, 1e-3)} ms wait and copy" if copy.host_us_per_run is not None else ""
    size = "unknown size" if copy.bytes_per_run is None else human_bytes(copy.bytes_per_run)
    tensor = f"{copy.tensor}, " if copy.tensor else ""
    text = f"{tensor}{copy.direction.replace('_', ' ')}, {size} per run{wait}"
    if copy.kind != "memcpy_node":
        return f"{text}; its buffer is not in the memory that ONNX Runtime expects"
    cause = name_some(copy.caused_by, MOST) or f"unknown: {copy.cause_missing_reason}"
    return f"{text}; caused by {cause}"


def _reasons(explanation: Explanation) -> Iterator[Section]:
    """Each reason with evidence, remedy and cost; phases with equal reasons share a section."""

    def findings(entry: Fallback) -> object:
        return entry.node, tuple((each.provider, each.reason, each.evidence, each.variants) for each in entry.preferred)

    for number, entries in enumerate(grouped(explanation.fallbacks, findings).values()):
        phases = in_phases(entry.phase for entry in entries)
        for at, reason in enumerate(entries[0].preferred):
            title = f"Not on {reason.provider} either" if at else f"Not on {reason.provider}{phases}"
            rows = [(f"evidence ({reason.evidence_kind})", reason.evidence), ("remedy", reason.remedy)]
            rows += [] if at else [(f"cost{in_phases([entry.phase])}", _render_cost(entry)) for entry in entries]
            rows.append(("see", f"{REASONS_PAGE}#{reason.reason}"))
            blocks = (pairs("Reason", rows), *_probe_blocks(reason), *_lower_reasons(reason))
            yield Section(f"why{number}-{at}", f"{title}: {reason.reason}", blocks)


def _lower_reasons(why: SkippedProvider) -> Iterator[Block]:
    """The reasons of lower precedence, with their evidence and rank."""
    own = describe_rank(why.reason, why.basis)
    for entry in why.other_reasons:
        rank = describe_rank(entry.reason, entry.basis)
        rows = [(f"evidence ({entry.evidence_kind})", entry.evidence), ("precedence", f"{rank}; {why.reason}: {own}")]
        yield Group(f"{entry.reason}: lower precedence", (pairs("Reason of lower precedence", rows),))


def _kernels(explanation: Explanation) -> Iterator[Section]:
    """Its kernel paths with evidence, cause and remedy; equal ones of several phases share a section."""
    alike = grouped(explanation.kernel_paths, lambda entry: (entry.node, entry.path, entry.cause))
    for number, entries in enumerate(alike.values()):
        first, phases = entries[0], in_phases(entry.phase for entry in entries)
        rows = [(f"evidence ({first.evidence_kind})", first.evidence), ("cause", first.cause), ("remedy", first.remedy)]
        rows += [("unknown", first.unknown)]
        rows += [("share of node time", " / ".join(percent(entry.time_share) for entry in entries))] * first.is_slow
        slow = " (slow)" if first.is_slow else ""
        yield Section(f"kernel{number}", f"Kernel path{phases}: {first.path}{slow}", (pairs("Kernel path", rows),))


def _render_cost(entry: Fallback) -> str:
    """Cost of the fallback."""
    cost = entry.cost
    if cost is None:
        return "unknown (not executed, or inside control flow)"
    word = {True: "harmless", False: "not harmless", None: "may not be harmless"}[cost.harmless]
    copies = [plural(len(cost.copies), "copy"), human_bytes(cost.copy_bytes_per_run)] if cost.copies else ["no copies"]
    times = [(cost.copy_wait_us_per_run, "wait"), (cost.host_us_per_run, "execution")]
    parts = [*copies, *(f"{decimals(time, 1e-3)} ms {what}" for time, what in times if time)]
    return f"{', '.join(parts)}; {word}: {cost.harmless_reason}"


def _probe_blocks(why: SkippedProvider) -> Iterator[Block]:
    """Probes, and why some are missing."""
    if why.variants:
        new = sum(not trial.cached for trial in why.variants)
        done = f"({new} in this run, {len(why.variants) - new} from the cache)"
        count = plural(len(why.variants), "probe")
        yield from probe_table(f"{count} of this node on {why.provider} {done}", why.variants)
    if why.missing_probes:
        yield Line(why.missing_probes, "missing probes")


def _remarks(explanation: Explanation) -> Iterator[Section]:
    """Conflicting sources and caveats."""
    blocks = [
        Line(f"conflicting sources in {entry.phase}: {entry.detail} ({', '.join(entry.sources)})")
        for entry in explanation.conflicts
    ]
    if explanation.run_failure is not None:
        blocks.append(Line(f"{explanation.run_failure}; the node may not have run", "run failed"))
    blocks += (Line(note, "note", "quiet") for note in explanation.notes)
    if blocks:
        yield Section("notes", "Notes", tuple(blocks))


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
        return f"{explanation.node}: not in any phase; other parts of the report name it"
    parts: dict[str, list[str]] = {}
    for phase, places in grouped(explanation.places, lambda place: place.phase).items():
        text = _render_place(explanation, places[0]) if len(places) == 1 else _render_parts(explanation, places)
        parts.setdefault(text, []).append(phase)
    where = "; ".join(f"{text}{in_phases(phases)}".removesuffix(",") for text, phases in parts.items())
    return f"{explanation.node}: {where}{'; the run FAILED' if explanation.run_failure is not None else ''}"


def _render_parts(explanation: Explanation, places: Sequence[Place]) -> str:
    """Text for a node that several nodes replace."""
    on = Counter(named_provider(place.provider) for place in places)
    known = [entry for place in places if (entry := reason_in(explanation, place)) is not None]
    where = listing(f"{count} on {provider}" for provider, count in on.items())
    reason = ", ".join(dict.fromkeys(entry.reason for entry in known))
    reasons = f", not on {named_provider(known[0].preferred_provider)}: {reason}," if known else ""
    return f"not in the plan; executed as {plural(len(places), 'node')}: {where}{reasons}"


def _render_place(explanation: Explanation, place: Place) -> str:
    """Text for one place."""
    if (made := place.copy_performed) is not None:
        what = "copies" if place.kind == "copy" else f"{made.kind.replace('_', ' ')}, copied"
        return " ".join(filter(None, (what, made.tensor, made.direction.replace("_", " "))))
    if place.kind == "folded" and place.provider is None:
        return f"{place.op_type or 'unknown operator'} of the file, folded by ONNX Runtime at load time"
    where = f"{place.op_type or 'unknown operator'} on {named_provider(place.provider)}"
    if place.kind == "replaced":
        where = f"not in the plan; fused into {place.node}: {where}"
    if place.kind == "subgraph":
        where += " in a control-flow subgraph"
    reason = reason_in(explanation, place)
    if reason is not None:
        return f"{where}, not on {named_provider(reason.preferred_provider)}: {reason.reason} ({reason.evidence_kind})"
    return f"{where}, the preferred provider," if place.provider == explanation.preferred_provider else where


def reason_in(explanation: Explanation, place: Place) -> Fallback | None:
    """The fallback of a place, for the first available preferred provider."""
    at = (place.phase, place.node, place.provider or UNKNOWN)
    here = (entry for entry in explanation.fallbacks if (entry.phase, entry.node, entry.provider) == at)
    return next((entry.restricted_to(explanation.active_providers) for entry in here), None)
