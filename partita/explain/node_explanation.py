"""Collects the facts of a report about one node. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from partita.diagnosis.records import Fallback, KernelPath
from partita.messages import nearest
from partita.observations.names import CPU, UNKNOWN
from partita.observations.records import PhaseName, Record
from partita.observations.text_format import clean
from partita.partition_reports.groups import provider_of, ran_by, share_of, total_us
from partita.partition_reports.outcome import active_of, failure_of, fallbacks_of
from partita.partition_reports.records import Copy, FileNode, NodePlacement, Phase, Report, SourceConflict

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


class Match(Record):
    """One of several nodes that match part of a name."""

    node: str
    op_type: str | None
    providers: dict[str, str]
    """Phase -> provider, `unknown`, or `folded` for a file node that ONNX Runtime folded."""
    reason: str | None


class Matches(Record):
    """Result for a name that matches no node, or several."""

    schema_id: Literal["partita.matches/1"] = Field(default="partita.matches/1", alias="schema")
    query: str
    matches: tuple[Match, ...]
    suggestions: tuple[str, ...]
    """Similar names, if no node matches."""


def find(report: Report, query: str) -> Explanation | Matches:
    """The node that `query` identifies by its name or a unique part of it; else matches and suggestions."""
    known = list(dict.fromkeys(_names(report)))
    fitting = _fits(known, query)
    if len(fitting) == 1:
        return explain(report, fitting[0])
    return Matches(
        query=query,
        matches=tuple(matches(report, fitting)),
        suggestions=() if fitting else tuple(_near(known, query)),
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
    for fitting in ways:
        found = [name for name in known if fitting(name)]
        if found:
            return found
    return []


def _near(known: list[str], query: str) -> list[str]:
    """Names that are similar as a whole, else in their last part."""
    tails = {name.rpartition("/")[2]: name for name in reversed(known)}
    whole = nearest(query, known, 0.8)
    return list(whole or (tails[tail] for tail in nearest(query.rpartition("/")[2], tails, 0.7)))


def _names(report: Report) -> Iterator[str]:
    """Every node name of the report, plan nodes first."""
    for phase in report.phases:
        yield from (node.name for node in phase.nodes)
    for phase in report.phases:
        yield from (row.name for row in phase.file_nodes)
        yield from (copy.name for copy in phase.copies)
        yield from (node.name for node in (phase.subgraphs.on_cpu if phase.subgraphs else ()))
    yield from (entry.node for entry in report.fallbacks)
    yield from (entry.node for entry in report.conflicts)


def matches(report: Report, fitting: list[str]) -> Iterator[Match]:
    """Summaries of several nodes, in one pass, because a query such as `/` may match all nodes."""
    runs_in: dict[str, dict[str, FileNode | NodePlacement]] = {}
    for phase in report.phases:
        every: list[FileNode | NodePlacement] = [*phase.nodes, *phase.file_nodes]
        for node in every:
            runs_in.setdefault(node.name, {})[phase.name] = node
    entries: dict[str, list[Fallback]] = {}
    for entry in fallbacks_of(report):
        entries.setdefault(entry.node, []).append(entry)
    for name in fitting:
        nodes = runs_in.get(name, {})
        executed = {name, *(each for node in nodes.values() if isinstance(node, FileNode) for each in node.ran_as)}
        found = [entry for known in sorted(executed) for entry in entries.get(known, [])]
        ops = [node.op_type for node in nodes.values()] + [entry.op_type for entry in found]
        yield Match(
            node=name,
            op_type=next((op for op in ops if op), None),
            providers={phase: _where(node) for phase, node in nodes.items()},
            reason=", ".join(dict.fromkeys(entry.reason for entry in found)) or None,
        )


def _where(node: FileNode | NodePlacement) -> str:
    """The provider of a node, `unknown` or `folded`."""
    return "folded" if isinstance(node, FileNode) and node.state == "folded" else provider_of(node)


def explain(report: Report, name: str) -> Explanation:
    """All facts about a node."""
    places = tuple(place for phase in report.phases for place in _places_in(report, phase, name))
    runs_in = {place.node for place in places} | {name}
    # A fused node may contain this node in some phases only.
    here = {(place.phase, place.node, place.provider or UNKNOWN) for place in places}
    fallbacks = tuple(
        entry for entry in report.fallbacks if entry.node == name or (entry.phase, entry.node, entry.provider) in here
    )
    nodes = [node for phase in report.phases for node in phase.nodes if node.name in runs_in]
    modules = [node.module for node in nodes] + [entry.module for entry in fallbacks]
    ops = [place.op_type for place in places] + [entry.op_type for entry in fallbacks]
    return Explanation(
        node=name,
        op_type=next((op for op in ops if op), None),
        module=next((module for module in modules if module), None),
        layer=next((node.layer for node in nodes if node.layer is not None), None),
        source_line=next((entry.source_line for entry in fallbacks if entry.source_line), None),
        preferred_provider=report.chain[0].provider if report.chain else None,
        active_providers=active_of(report),
        places=places,
        fallbacks=fallbacks,
        kernel_paths=tuple(entry for entry in report.kernel_paths if (entry.phase, entry.node, entry.provider) in here),
        conflicts=tuple(entry for entry in report.conflicts if entry.node in runs_in),
        notes=tuple(notes(report, name, runs_in)),
        run_failure=failure_of(report),
    )


def notes(report: Report, name: str, runs_in: set[str]) -> Iterator[str]:
    """Caveats about the node called `name`, which runs in the nodes `runs_in`."""
    for phase in report.phases:
        if any(row.name == name and row.state == "ambiguous" for row in phase.file_nodes):
            yield f"{phase.name}: no source names the node that executes {name}; the table lists the candidates"
        inner = {each.name for each in (phase.subgraphs.on_cpu if phase.subgraphs else ())}
        for same in dict.fromkeys(node.name for node in phase.nodes if node.name in inner and node.name in runs_in):
            yield f"another node named {same} is in a control-flow subgraph of {phase.name}, on {CPU}"
    if report.probing is not None and runs_in & set(report.probing.missing_probes):
        budget = f"{report.probing.budget_seconds:g} seconds"
        yield f"probes are missing; the time budget was {budget} (option `probe_seconds`)"
    if report.dry_run is not None:
        yield f"dry run as {report.dry_run.device_name}: no times"


def _places_in(report: Report, phase: Phase, name: str) -> Iterator[Place]:
    """The places of a node in one phase: in the plan, in a fused node, or in other parts of the report only."""
    row = next((row for row in phase.file_nodes if row.name == name), None)
    names = {name} if row is None else {name, *row.ran_as}

    def outside(kind: PlaceKind, node: str, op_type: str | None, provider: str | None) -> Place:
        return Place(phase=phase.name, file=phase.file, kind=kind, node=node, op_type=op_type, provider=provider)

    executed = [node for node in phase.nodes if node.name in names]
    if executed:
        yield from (_in_plan(phase, node, name) for node in executed)
        for part in phase.subgraphs.function_nodes if phase.subgraphs else ():
            if part.name in names:
                yield outside("subgraph", part.name, part.op_type, part.provider)
        return
    if row is not None:
        yield outside("folded", name, row.op_type, row.provider)
        return
    copy = next((copy for copy in phase.copies if copy.name == name), None)
    inner = next((node for node in (phase.subgraphs.on_cpu if phase.subgraphs else ()) if node.name == name), None)
    listed = next((entry for entry in report.fallbacks if (entry.phase, entry.node) == (phase.name, name)), None)
    if copy is not None:
        yield outside("border", name, None, None).model_copy(update={"copy_performed": copy})
    elif inner is not None:
        yield outside("subgraph", name, inner.op_type, CPU)
    elif listed is not None:
        yield outside("listed", name, listed.op_type, listed.provider)


def _in_plan(phase: Phase, node: NodePlacement, name: str) -> Place:
    """The place of a plan node that is, or contains, the node called `name`."""
    made = next((copy for copy in phase.copies if copy.kind == "memcpy_node" and copy.name == node.name), None)
    return Place.copy_of(
        node,
        phase=phase.name,
        file=phase.file,
        kind="replaced" if node.name != name else "copy" if made else "runs",
        node=node.name,
        replaces=tuple(row.name for row in ran_by(phase).get(node.name, ()) if row.name != node.name),
        time_share=share_of(node.host_us_per_run, total_us(phase.nodes)),
        copy=made,
        copies_caused=tuple(copy for copy in phase.copies if node.name in copy.caused_by),
    )
