"""One node of a report, found by its name or a part of it: all facts, and their document. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from partita.diagnosis.reasons import describe_rank
from partita.diagnosis.records import Fallback, KernelPath, SkippedProvider
from partita.messages import nearest
from partita.observations.grouping import grouped
from partita.observations.names import CPU, UNKNOWN
from partita.observations.records import PhaseName, Record
from partita.observations.text_format import clean, in_phases, listing, name_some, named_provider, plural
from partita.partition_reports.groups import share_of, total_us
from partita.partition_reports.outcome import key_of
from partita.partition_reports.phase_records import Copy, NodePlacement, Phase, Subgraphs
from partita.partition_reports.records import Report, SourceConflict
from partita.partition_reports.render.show import Views
from partita.partition_reports.sections.fallbacks import REASONS_PAGE, probe_table
from partita.partition_reports.sections.model import (
    Block,
    Document,
    Group,
    Line,
    Section,
    fields_of,
    label_of,
    pairs,
    table_of,
    value_text,
)

PlaceKind = Literal["runs", "replaced", "copy", "border", "subgraph", "folded", "listed"]
"""`runs`: a node of the plan. `replaced`: run by a fused node, or as the nodes of a function. `copy`: a Memcpy node.
`border`: a copied session input or output. `subgraph`: in a control-flow subgraph. `folded`: a file node that ONNX
Runtime folded, or whose executed node is unknown. `listed`: only in a reason."""


class Place(Record):
    """The node in one phase. null: unknown, or not applicable to the kind."""

    phase: PhaseName
    file: str
    kind: PlaceKind
    node: str
    """Plan node that executes it: itself, or the fused node that contains it."""
    position: int | None = None
    op_type: str | None
    provider: str | None
    replaces: tuple[str, ...] = ()
    """File nodes that the plan node runs, without one of its own name."""
    host_us_per_run: float | None = None
    time_share: float | None = None
    output_bytes: int | None = None
    copy_performed: Copy | None = Field(default=None, alias="copy")
    """The copy that it performs."""
    copies_caused: tuple[Copy, ...] = ()


class Explanation(Record):
    """One node in all phases."""

    schema_id: Literal["partita.explanation/1"] = Field(default="partita.explanation/1", alias="schema")
    node: str
    op_type: str | None
    """Operator of the plan node."""
    module: str | None
    layer: int | None
    source_line: str | None
    """Known for fallback nodes only."""
    preferred_provider: str | None
    """First provider of the chain."""
    active_providers: tuple[str, ...] = ()
    """Available providers of the chain."""
    places: tuple[Place, ...]
    fallbacks: tuple[Fallback, ...]
    """Why it, or the fused node that contains it, is not on the preferred provider, with all probes."""
    kernel_paths: tuple[KernelPath, ...] = ()
    """The kernels that ran it, or the fused node that contains it."""
    conflicts: tuple[SourceConflict, ...]
    notes: tuple[str, ...]
    run_failure: str | None = None
    """Why the run failed, so that the node may not run; null if it did not."""

    def without_lost(self) -> Explanation:
        """The explanation with the deciding reasons only."""
        none: dict[str, object] = {"other_reasons": ()}
        fallbacks = []
        for entry in self.fallbacks:
            skipped = tuple(each.model_copy(update=none) for each in entry.skipped)
            fallbacks.append(entry.model_copy(update=none | {"skipped": skipped}))
        return self.model_copy(update={"fallbacks": tuple(fallbacks)})


class Matches(Record):
    """Result for a name that matches no node, or several."""

    schema_id: Literal["partita.matches/1"] = Field(default="partita.matches/1", alias="schema")
    query: str
    matches: tuple[str, ...]
    """Names of the nodes that match."""
    headlines: tuple[str, ...]
    """One line about each of the first nodes: its provider, and the reason."""
    suggestions: tuple[str, ...]
    """Similar names, if no node matches."""


MOST = 40
"""Maximum listed names; the JSON has all."""
Occurrence = tuple[Phase, PlaceKind, Any]
"""Phase, kind of place, and the record of the report that names the node."""


def find(report: Report, query: str) -> Explanation | Matches:
    """The node that `query` identifies by its name or a unique part of it; else matches and suggestions."""
    index = occurrences(report)
    fitting = _fits(list(index), query)
    found = [explain(report, name, index) for name in fitting[:MOST]]
    if len(found) == 1:
        return found[0]
    return Matches(
        query=query,
        matches=tuple(fitting),
        headlines=tuple(map(headline, found)),
        suggestions=() if fitting else tuple(_near(list(index), query)),
    )


def _fits(known: list[str], query: str) -> list[str]:
    """Names equal to `query`; else names that contain it; else names that contain it ignoring case.

    Names with control characters also match in sanitised form.
    """
    if not query:
        return []
    ways = (
        lambda name: name == query,
        lambda name: clean(name) == query,
        lambda name: query in name,
        lambda name: query.casefold() in clean(name).casefold(),
    )
    found = ([name for name in known if fits(name)] for fits in ways)
    return next(filter(None, found), [])


def _near(known: list[str], query: str) -> list[str]:
    """Names that are similar as a whole, else in their last part."""
    tails = {name.rpartition("/")[2]: name for name in reversed(known)}
    whole = nearest(query, known, 0.8)
    return list(whole or (tails[tail] for tail in nearest(query.rpartition("/")[2], tails, 0.7)))


def occurrences(report: Report) -> dict[str, list[Occurrence]]:
    """Node name -> its places: in the plan, in fused nodes, or in other parts of the report only."""
    found: dict[str, list[Occurrence]] = {}
    for phase in report.phases:
        bodies = phase.subgraphs or Subgraphs(nodes=0, copies=None)
        executed = {node.name: node for node in phase.nodes}
        inner = grouped(bodies.function_nodes, lambda part: part.name)
        copies = {copy.name for copy in phase.copies if copy.kind == "memcpy_node"}
        here: dict[str, list[Occurrence]] = {
            name: [(phase, "copy" if name in copies else "runs", node)] for name, node in executed.items()
        }
        for row in phase.file_nodes:
            places = here.setdefault(row.name, [])
            others = [executed[name] for name in row.ran_as if name in executed and name != row.name]
            places += [(phase, "replaced", node) for node in others]
            places += [(phase, "subgraph", part) for name in row.ran_as for part in inner.get(name, ())]
            places += [] if places else [(phase, "folded", row)]
        for copy in phase.copies:
            here.setdefault(copy.name, [(phase, "border", copy)])
        for node in bodies.on_cpu:
            here.setdefault(node.name, [(phase, "subgraph", node)])
        for entry in report.fallbacks:
            if entry.phase == phase.name:
                here.setdefault(entry.node, [(phase, "listed", entry)])
        for name, places in here.items():
            found.setdefault(name, []).extend(places)
    for conflict in report.conflicts:
        found.setdefault(conflict.node, [])
    return found


def _first(records: Iterable[object], field: str) -> Any:
    """The first known value of a field of several records."""
    values = (getattr(record, field, None) for record in records)
    return next((value for value in values if value not in (None, "")), None)


def explain(report: Report, name: str, index: Mapping[str, Sequence[Occurrence]] | None = None) -> Explanation:
    """All facts about a node. `index`: from `occurrences`, if known."""
    at = (occurrences(report) if index is None else index).get(name, ())
    places = tuple(_place(name, *each) for each in at)
    runs_in = {place.node for place in places} | {name}
    # A fused node may contain this node in some phases only.
    here = {(place.phase, place.node, place.provider or UNKNOWN) for place in places}
    fallbacks = tuple(entry for entry in report.fallbacks if entry.node == name or key_of(entry) in here)
    known = [*(node for *_, node in at), *fallbacks]
    return Explanation(
        node=name,
        op_type=_first(known, "op_type"),
        module=_first(known, "module"),
        layer=_first(known, "layer"),
        source_line=_first(known, "source_line"),
        preferred_provider=report.chain[0].provider if report.chain else None,
        active_providers=report.active,
        places=places,
        fallbacks=fallbacks,
        kernel_paths=tuple(entry for entry in report.kernel_paths if (entry.phase, entry.node, entry.provider) in here),
        conflicts=tuple(entry for entry in report.conflicts if entry.node in runs_in),
        notes=tuple(_notes(report, name, runs_in)),
        run_failure=report.failure_text,
    )


def _place(name: str, phase: Phase, kind: PlaceKind, node: Any) -> Place:
    """The record of one occurrence."""
    own: dict[str, Any] = {"phase": phase.name, "file": phase.file, "kind": kind, "node": getattr(node, "name", name)}
    if isinstance(node, NodePlacement):
        return Place.copy_of(
            node,
            **own,
            replaces=tuple(row.name for row in phase.ran_by.get(node.name, ()) if row.name != node.name),
            time_share=share_of(node.host_us_per_run, total_us(phase.nodes)),
            copy=next((copy for copy in phase.copies if kind == "copy" and copy.name == node.name), None),
            copies_caused=tuple(copy for copy in phase.copies if node.name in copy.caused_by),
        )
    copied = node if isinstance(node, Copy) else None
    provider = getattr(node, "provider", None) or (CPU if kind == "subgraph" else None)  # CPU nodes have no entry
    return Place(**own, op_type=getattr(node, "op_type", None), provider=provider, copy=copied)


def _notes(report: Report, name: str, runs_in: set[str]) -> Iterator[str]:
    """Caveats about the node called `name`, which runs in the nodes `runs_in`."""
    for phase in report.phases:
        if any(row.name == name and row.state == "ambiguous" for row in phase.file_nodes):
            yield f"{phase.name}: no source names the node that executes {name}; the table lists the candidates"
        inner = {each.name for each in (phase.subgraphs.on_cpu if phase.subgraphs else ())}
        for same in sorted(inner & runs_in & {node.name for node in phase.nodes}):
            yield f"another node named {same} is in a control-flow subgraph of {phase.name}, on {CPU}"
    if report.probing is not None and runs_in & set(report.probing.missing_probes):
        budget = f"{report.probing.budget_seconds:g} seconds"
        yield f"probes are missing; the time budget was {budget} (option `probe_seconds`)"
    if report.dry_run is not None:
        yield f"dry run as {report.dry_run.device_name}: no times"


# Document


NO_COST = "unknown (not executed, or inside control flow)"
COPY_FIELDS = ("name", "tensor", "direction", "bytes_per_run", "host_us_per_run", "caused_by", "cause_missing_reason")
IDENTITY = ("op_type", "module", "layer", "source_line", "preferred_provider")
PLACE_FIELDS = ("phase", "node", "op_type", "provider", "position", "host_us_per_run", "time_share", "output_bytes")


def document(found: Explanation | Matches) -> Document:
    """The document."""
    if isinstance(found, Matches):
        lines = [*found.headlines, *([name_some(found.matches[MOST:], MOST)] if found.matches[MOST:] else [])]
        return Document("Nodes of a report", found.query, (render_no_single(found),), (), tuple(map(Line, lines)))
    sections = (_copies(found), *_reasons(found), *_kernels(found), _remarks(found))
    return Document("Node of a report", found.node, (headline(found),), sections, tuple(_opening(found)))


VIEWS = Views(document)


def _opening(explanation: Explanation) -> Iterator[Block]:
    """Identity, placement in each phase, and fused nodes."""
    facts = [(name, getattr(explanation, name)) for name in IDENTITY]
    shown = ((label_of(name), value_text(name, value)) for name, value in facts if value not in (None, ""))
    yield pairs("The node", shown)
    places = [place for place in explanation.places if place.kind != "border"]
    known = {"node": explanation.node, "op_type": explanation.op_type}
    names = [name for name in PLACE_FIELDS if any(getattr(place, name) != known.get(name) for place in places)]
    yield table_of("In each phase", places, *names, most=MOST)
    fused = ((place.node, place.replaces) for place in places if place.replaces not in ((), (explanation.node,)))
    for node, replaces in dict.fromkeys(fused):
        count = plural(len(replaces), "node")
        yield Line(f"{node} is fused from {count} of the file: {name_some(replaces, MOST)}")


def _copies(explanation: Explanation) -> Section:
    """The copy that it is, and copies caused by it."""
    blocks = []
    for place in explanation.places:
        made = () if place.copy_performed is None else (place.copy_performed,)
        for title, copies in (("Copy", made), ("Copies caused by the node", place.copies_caused)):
            caption = f"{title}{in_phases([place.phase])}"
            blocks.append(table_of(caption, copies, *COPY_FIELDS, most=MOST, obvious=False))
    return Section("copies", "Copies", tuple(blocks))


def _reasons(explanation: Explanation) -> Iterator[Section]:
    """Each reason with evidence, remedy and cost; phases with equal reasons share a section."""

    def findings(entry: Fallback) -> object:
        return entry.node, tuple((each.provider, each.reason, each.evidence, each.variants) for each in entry.preferred)

    for number, entries in enumerate(grouped(explanation.fallbacks, findings).values()):
        phases = in_phases(entry.phase for entry in entries)
        costs = []
        for entry in entries:
            cost = "; ".join(map(" ".join, fields_of(entry.cost))) if entry.cost else NO_COST
            costs.append((f"cost{in_phases([entry.phase])}", cost))
        for at, reason in enumerate(entries[0].preferred):
            title = f"Not on {reason.provider} either" if at else f"Not on {reason.provider}{phases}"
            rows = [(f"evidence ({reason.evidence_kind})", reason.evidence), ("remedy", reason.remedy)]
            rows += [*([] if at else costs), ("see", f"{REASONS_PAGE}#{reason.reason}")]
            yield Section(f"why{number}-{at}", f"{title}: {reason.reason}", (pairs("Reason", rows), *_details(reason)))


def _details(why: SkippedProvider) -> Iterator[Block]:
    """Probes, and reasons of lower precedence with their evidence and rank."""
    if why.variants:
        new = sum(not trial.cached for trial in why.variants)
        done = f"({new} in this run, {len(why.variants) - new} from the cache)"
        count = plural(len(why.variants), "probe")
        yield from probe_table(f"{count} of this node on {why.provider} {done}", why.variants)
    yield Line(why.missing_probes, "missing probes")
    own = f"{why.reason}: {describe_rank(why.reason, why.basis)}"
    for entry in why.other_reasons:
        rank = f"{describe_rank(entry.reason, entry.basis)}; {own}"
        shown = pairs("Reason", [(f"evidence ({entry.evidence_kind})", entry.evidence), ("precedence", rank)])
        yield Group(f"{entry.reason}: lower precedence", (shown,))


def _kernels(explanation: Explanation) -> Iterator[Section]:
    """Its kernel paths with evidence, cause and remedy; equal ones of several phases share a section."""
    alike = grouped(explanation.kernel_paths, lambda entry: (entry.node, entry.path, entry.cause))
    for number, entries in enumerate(alike.values()):
        slow, phases = " (slow)" if entries[0].is_slow else "", in_phases(entry.phase for entry in entries)
        shown = pairs("Kernel path", fields_of(entries[0], *PLACE_FIELDS, "module", "path", "is_slow"))
        yield Section(f"kernel{number}", f"Kernel path{phases}: {entries[0].path}{slow}", (shown,))


def _remarks(explanation: Explanation) -> Section:
    """Conflicting sources and caveats."""
    conflicts = (
        Line(f"conflicting sources in {entry.phase}: {entry.detail} ({', '.join(entry.sources)})")
        for entry in explanation.conflicts
    )
    failed = explanation.run_failure and f"{explanation.run_failure}; the node may not have run"
    notes = (Line(note, "note", "quiet") for note in explanation.notes)
    return Section("notes", "Notes", (*conflicts, Line(failed or "", "run failed"), *notes))


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
    places = grouped(explanation.places, lambda place: place.phase)
    parts = grouped(places, lambda phase: _places_text(explanation, places[phase]))
    where = "; ".join(f"{text}{in_phases(phases)}".removesuffix(",") for text, phases in parts.items())
    return f"{explanation.node}: {where}{'; the run FAILED' if explanation.run_failure is not None else ''}"


def _places_text(explanation: Explanation, places: Sequence[Place]) -> str:
    """Text for the places in one phase; several nodes run a node that ONNX Runtime replaced."""
    place, operator = places[0], places[0].op_type or "unknown operator"
    if (made := place.copy_performed) is not None:
        what = "copies" if place.kind == "copy" else f"{made.kind.replace('_', ' ')}, copied"
        return " ".join(filter(None, (what, made.tensor, made.direction.replace("_", " "))))
    if place.kind == "folded" and place.provider is None:
        return f"{operator} of the file, folded by ONNX Runtime at load time"
    where = f"{operator} on {named_provider(place.provider)}"
    if len(places) > 1:
        on = Counter(named_provider(each.provider) for each in places)
        counts = listing(f"{count} on {provider}" for provider, count in on.items())
        where = f"not in the plan; executed as {plural(len(places), 'node')}: {counts}"
    elif place.kind == "replaced":
        where = f"not in the plan; fused into {place.node}: {where}"
    elif place.kind == "subgraph":
        where += " in a control-flow subgraph"
    at = {(place.phase, place.node, place.provider or UNKNOWN) for place in places}
    reasons = [
        entry.restricted_to(explanation.active_providers) for entry in explanation.fallbacks if key_of(entry) in at
    ]
    if reasons:
        codes = ", ".join(dict.fromkeys(entry.reason for entry in reasons))
        return f"{where}, not on {named_provider(reasons[0].preferred_provider)}: {codes} ({reasons[0].evidence_kind})"
    on_preferred = {each.provider for each in places} == {explanation.preferred_provider}
    return f"{where}, the preferred provider," if on_preferred else where
