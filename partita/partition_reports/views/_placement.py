"""Sections of the text view about nodes: by provider, op type, layer and module, partitions, copies and fallbacks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from partita.partition_reports.cost import total_bytes as total_bytes_moved
from partita.partition_reports.cost import waiting_us
from partita.partition_reports.fusion import COMPILED
from partita.partition_reports.groups import OUTSIDE_LAYERS
from partita.partition_reports.records import (
    Bodies,
    BoundaryTensor,
    Copy,
    Fallback,
    FallbackCost,
    GroupShare,
    NodePlacement,
    Partition,
    Phase,
    PhaseCost,
    ProviderShare,
    Report,
)
from partita.partition_reports.verdict import merge_phases, phase_names
from partita.partition_reports.views._tables import NAME, ROWS, Column, Page
from partita.partition_reports.wording import (
    decimals,
    human_bytes,
    listing,
    percent,
    plural,
    short_provider,
    tally,
)

Group = Callable[[Phase], Sequence[GroupShare]]
TIME = "host ms"


def show_placement(page: Page, report: Report) -> None:
    """Nodes and time by provider, op type, module and layer, all phases side by side."""
    phases = [phase for phase in report.phases if phase.nodes]
    if not phases:
        return
    page.heading("Placement")
    timed = report.dry_run is None
    show_providers(page, phases, timed=timed)
    mixed = len({entry.provider for phase in phases for entry in phase.providers}) > 1
    groups: tuple[tuple[str, Group], ...] = (
        ("op type", lambda phase: phase.by_op_type),
        ("module", lambda phase: phase.by_module),
        ("layer", layers_outside_first),
    )
    for title, pick in groups:
        page.console.print()
        show_groups(page, title, phases, pick, mixed=mixed, timed=timed)
    if timed:
        page.line("Milliseconds are host time per session run; share: part of the phase's node time.")


def show_providers(page: Page, phases: Sequence[Phase], *, timed: bool) -> None:
    """What each provider does, and with which operators once there are several."""
    show_groups(page, "provider", phases, provider_groups, mixed=False, timed=timed)
    for same in merge_phases(tuple(phases)):
        if len(same[0].providers) > 1 or any(node.replaces for node in same[0].nodes):
            for entry in same[0].providers:
                behind = say_behind(entry)
                page.line(f"{short_provider(entry.provider)} in {phase_names(same)}: {behind}{tally(entry.op_types)}")
        for line in stand_ins(same[0]):
            page.line(line, indent=4)
        if same[0].bodies is not None:
            told = say_bodies(same[0].bodies)
            page.line(f"Bodies of control flow, in no other figure of {phase_names(same)}: {told}")


def say_behind(entry: ProviderShare) -> str:
    """How many nodes of the file stand behind a provider's, where it is another number."""
    if entry.exported_nodes is None or entry.exported_nodes == entry.nodes:
        return ""
    return f"{plural(entry.nodes, 'node')} for {entry.exported_nodes:,} of the file: "


def stand_ins(phase: Phase) -> list[str]:
    """What compiled and fused nodes stand for; those that run alike nodes in every layer share a line."""
    alike: dict[tuple[str, tuple[str, ...]], list[NodePlacement]] = {}
    for node in phase.nodes:
        if node.replaces and node.op_type != COMPILED:
            kinds = tuple(name.rpartition("/")[2].partition("_")[0] for name in node.replaces)
            alike.setdefault((node.op_type or "unknown", kinds), []).append(node)
    lines = [
        f"{node.name}: compiled from {plural(len(node.replaces), 'node')} of {node.module or 'several modules'}"
        for node in phase.nodes
        if node.op_type == COMPILED
    ]
    lines += [
        f"{op}: {plural(len(nodes), 'node')} in place of {' + '.join(kinds)}, e.g. {nodes[0].replaces[-1]}"
        for (op, kinds), nodes in alike.items()
    ]
    left = len(lines) - ROWS
    return [*lines[:ROWS], *([f"and {left} more"] if left > 0 else [])]


def say_bodies(bodies: Bodies) -> str:
    """What is in the bodies of If, Loop and Scan."""
    on_cpu = plural(len(bodies.cpu_nodes), "node") + " on CPU"
    names = f" ({', '.join(bodies.cpu_nodes)})" if bodies.cpu_nodes else ""
    copies = "an unknown number of Memcpy nodes" if bodies.copies is None else plural(bodies.copies, "Memcpy node")
    return f"{plural(bodies.nodes, 'node')} listed, {on_cpu}{names}, {copies}."


def provider_groups(phase: Phase) -> tuple[GroupShare, ...]:
    """Providers as groups, so that they share the groups' table."""
    return tuple(
        GroupShare(
            name=entry.provider,
            nodes=entry.nodes,
            nodes_by_provider={entry.provider: entry.nodes},
            host_us_per_run=entry.host_us_per_run,
            time_share=entry.time_share,
        )
        for entry in phase.providers
    )


def layers_outside_first(phase: Phase) -> list[GroupShare]:
    """Layers in order after what is outside them, so that a long model does not push the latter off the table."""
    return sorted(phase.by_layer, key=lambda entry: entry.name != OUTSIDE_LAYERS)


def show_groups(page: Page, title: str, phases: Sequence[Phase], pick: Group, *, mixed: bool, timed: bool) -> None:
    """One row per group; `timed` adds time and share per phase, `mixed` a column that tells the providers."""
    by_phase = [{entry.name: entry for entry in pick(phase)} for phase in phases]
    names = list(dict.fromkeys(entry.name for phase in reversed(phases) for entry in pick(phase)))
    rows = [
        group_row(name, [groups.get(name) for groups in by_phase], mixed=mixed, timed=timed) for name in names[:ROWS]
    ]
    columns = [Column(title, False), Column("nodes")]
    if mixed:
        columns.append(Column("on", False))
    for phase in phases if timed else ():
        columns += [Column(f"{phase.name} ms"), Column("share")]
    left = names[ROWS:]
    page.table(columns, rows, sum_up(title, left, phases, by_phase) if left else "")


def group_row(name: str, entries: Sequence[GroupShare | None], *, mixed: bool, timed: bool) -> tuple[str, ...]:
    """One group in every phase."""
    counts = dict.fromkeys(str(entry.nodes) if entry else "0" for entry in entries)
    cells = [name, " / ".join(counts)]
    if mixed:
        cells.append(on_providers(next(entry for entry in entries if entry).nodes_by_provider))
    for entry in entries if timed else ():
        cells += [decimals(entry.host_us_per_run, 1e-3) if entry else "-", percent(entry.time_share) if entry else "-"]
    return tuple(cells)


def on_providers(counts: dict[str, int]) -> str:
    """Nodes per provider, by short names."""
    return tally({short_provider(provider): count for provider, count in counts.items()})


def sum_up(title: str, names: Sequence[str], phases: Sequence[Phase], by_phase: Sequence[dict[str, GroupShare]]) -> str:
    """One line on the groups that have no row."""
    parts = []
    for phase, groups in zip(phases, by_phase, strict=True):
        entries = [groups[name] for name in names if name in groups]
        known = [entry.time_share for entry in entries if entry.time_share is not None]
        time = f", {percent(sum(known))} of the time" if known else ""
        counts: Counter[str] = Counter()
        for entry in entries:
            counts.update(entry.nodes_by_provider)
        where = f" ({on_providers(counts)})" if len(counts) > 1 else ""
        parts.append(f"{plural(sum(entry.nodes for entry in entries), 'node')}{where}{time} in {phase.name}")
    return f"and {plural(len(names), f'more {title}')}: {'; '.join(dict.fromkeys(parts))}"


def show_partitions(page: Page, report: Report) -> None:
    """Partitions in execution order with what crosses their borders, then the largest crossings between them."""
    for phases in merge_phases(tuple(phase for phase in report.phases if phase.nodes)):
        phase = best_observed(phases)
        page.heading(f"Partitions in {phase_names(phases)}: {len(phase.partitions)}, in execution order")
        rows = [partition_row(part) for part in phase.partitions[:ROWS]]
        columns = (Column("#"), Column("provider", False), Column("nodes"), Column("positions"))
        left = phase.partitions[ROWS:]
        rest = (
            f"and {plural(len(left), 'more partition')}: {plural(sum(p.nodes for p in left), 'node')}" if left else ""
        )
        page.table((*columns, Column("tensors in", False), Column("tensors out", False)), rows, rest)
        show_crossings(page, phase)
        runs = "per run" if phase.name == "run" else f"per run of {phase.name}"
        page.line(f"Bytes are {runs}; other: other partitions.")
        if phase.cost is not None and (phase.cost.partitions > 1 or phase.cost.copies):
            page.line(say_cost(phase.cost))


def say_cost(cost: PhaseCost) -> str:
    """What the partitions cost in one run, and per token."""
    whole = cost.copy_bytes_per_run is not None
    moved = human_bytes(cost.copy_bytes_at_least) + ("" if whole else " or more")
    parts = [
        f"{plural(cost.crossings, 'tensor')} between partitions"
        + (
            " of unknown size"
            if cost.crossing_bytes_per_run is None
            else f" ({human_bytes(cost.crossing_bytes_per_run)})"
        ),
        f"{plural(cost.copies, 'copy')} ({moved})" if cost.copies else "no copy",
    ]
    if cost.host_wait_us_per_run:
        parts.append(f"{decimals(cost.host_wait_us_per_run, 1e-3)} ms host wait")
    line = f"Cost per run: {', '.join(parts)}"
    if cost.copies and cost.tokens_per_run:
        size = "-" if cost.copy_bytes_per_token is None else human_bytes(round(cost.copy_bytes_per_token))
        line += f"; per new token ({cost.tokens_per_run} a run): {size} copied"
        if cost.host_wait_us_per_token:
            line += f", {decimals(cost.host_wait_us_per_token, 1e-3)} ms wait"
    return f"{line}."


def best_observed(phases: Sequence[Phase]) -> Phase:
    """The last of phases that share a placement; one that was profiled, when there is any, for it knows sizes."""
    return max(enumerate(phases), key=lambda entry: (entry[1].observed_runs > 0, entry[0]))[1]


def partition_row(part: Partition) -> tuple[str, ...]:
    """One partition."""
    span = f"{part.first_position}-{part.first_position + part.nodes - 1}"
    ways = ("in", "out")
    borders = [describe_border([tensor for tensor in part.boundary if tensor.direction == way]) for way in ways]
    return (str(part.index), short_provider(part.provider), str(part.nodes), span, *borders)


def describe_border(tensors: Sequence[BoundaryTensor]) -> str:
    """How many tensors cross, from or to the session or other partitions, and their bytes."""
    if not tensors:
        return "none"
    session = sum(tensor.other_side == "session" for tensor in tensors)
    sides = [(session, "session"), (len(tensors) - session, "other")]
    return ", ".join(f"{count} {side}" for count, side in sides if count) + f", {total_bytes(tensors)}"


def total_bytes(tensors: Iterable[BoundaryTensor]) -> str:
    """Sum of the known sizes, marked when some are not known."""
    sizes = [tensor.size_bytes for tensor in tensors]
    known = [size for size in sizes if size is not None]
    if not known:
        return "size unknown"
    return human_bytes(sum(known)) + (" or more" if len(known) < len(sizes) else "")


def show_crossings(page: Page, phase: Phase) -> None:
    """Tensors between partitions, largest first."""
    crossing = [
        (tensor, part.index)
        for part in phase.partitions
        for tensor in part.boundary
        if tensor.direction == "out" and tensor.other_side != "session"
    ]
    if not crossing:
        return
    crossing.sort(key=lambda entry: -(entry[0].size_bytes or 0))
    rows = [
        (f"{origin} -> {tensor.other_side}", human_bytes(tensor.size_bytes), tensor.name) for tensor, origin in crossing
    ]
    left = crossing[ROWS:]
    rest = f"and {plural(len(left), 'more tensor')}: {total_bytes(tensor for tensor, _ in left)}" if left else ""
    page.console.print()
    page.table((Column("between"), Column("bytes"), Column("tensor", False)), rows[:ROWS], rest)


def show_copies(page: Page, report: Report) -> None:
    """Memcpy nodes and session inputs and outputs that are bound on the wrong side."""
    phases = [phase for phase in report.phases if phase.nodes]
    if not phases:
        return
    page.heading("Copies between devices")
    if not any(phase.copies for phase in phases):
        known = any(entry.source == "memory_info" and entry.available for entry in report.sources)
        bound = "every session input and output is bound where ONNX Runtime wants it"
        page.line(f"None: no Memcpy node, and {bound if known else 'nothing is known of session inputs and outputs'}.")
        return
    for phases_alike in merge_phases(tuple(phase for phase in phases if phase.copies)):
        phase = best_observed(phases_alike)
        timed = report.dry_run is None
        rows = [copy_row(copy, timed=timed) for copy in phase.copies[:ROWS]]
        columns = [Column(phase_names(phases_alike), False), Column("bytes")]
        if timed:
            columns.append(Column(TIME))
        left = phase.copies[ROWS:]
        page.table((*columns, NAME), rows, sum_up_copies(left) if left else "")
    if report.dry_run is not None:
        page.line("Bytes are per run; - where they depend on values.")
        return
    page.line(
        "Bytes and time are per run. The time of a copy is wait and copy together; the host cannot tell them apart."
    )


def copy_row(copy: Copy, *, timed: bool) -> tuple[str, ...]:
    """One copy."""
    way = copy.direction.replace("_", " ")
    if copy.kind != "memcpy_node":
        way = f"{copy.kind.replace('_', ' ')}, {way}"
    name = f"{copy.name}: {copy.tensor}" if copy.tensor else copy.name
    time = (decimals(copy.host_us_per_run, 1e-3),) if timed else ()
    cause = say_cause(copy)
    return (way, human_bytes(copy.bytes_per_run), *time, f"{name}, {cause}" if cause else name)


def say_cause(copy: Copy) -> str:
    """The nodes that make a Memcpy node necessary, or why none is named; empty for copies at the session border."""
    if not copy.caused_by:
        return f"cause not known: {copy.cause_unknown}" if copy.cause_unknown else ""
    first, *others = copy.caused_by
    return f"for {first}" + (f" and {len(others)} more" if others else "")


def sum_up_copies(copies: Sequence[Copy]) -> str:
    """One line on the copies that have no row."""
    known = [copy.bytes_per_run for copy in copies if copy.bytes_per_run is not None]
    return f"and {plural(len(copies), 'more copy')}: {human_bytes(sum(known) if known else None)} per run"


def show_fallbacks(page: Page, report: Report) -> None:
    """Nodes that are not on the wanted provider, by reason."""
    wanted = report.chain[0].provider if report.chain else "a provider"
    if not report.fallbacks:
        if any(phase.nodes for phase in report.phases):
            page.heading("Fallbacks")
            page.line(f"None: every node is on {wanted}, the first provider of the chain.")
        return
    nodes = len({entry.node for entry in report.fallbacks})
    page.heading(f"Fallbacks: {plural(nodes, 'node')} not on {wanted}")
    groups: dict[tuple[str, str], list[Fallback]] = {}
    for entry in report.fallbacks:
        groups.setdefault((entry.reason, entry.provider), []).append(entry)
    ranked = sorted(groups.items(), key=lambda item: (item[0][0] == "unexplained", -len(item[1]), item[0]))
    for (reason, provider), entries in ranked:
        show_reason(page, reason, provider, entries, report.phases)


def say_fallback_cost(costs: Sequence[FallbackCost], phase: Phase) -> str:
    """What a group of fallbacks costs in one run of its phase; a copy that several of them cause counts once."""
    names = {name for cost in costs for name in cost.copies}
    caused = [copy for copy in phase.copies if copy.kind == "memcpy_node" and copy.name in names]
    parts = ["no copy"]
    if caused:
        wait = waiting_us(caused)
        waited = f", {decimals(wait, 1e-3)} ms wait" if wait is not None else ""
        parts = [f"{plural(len(caused), 'copy')} ({total_bytes_of(caused)}{waited})"]
    shares = [cost.time_share for cost in costs if cost.time_share is not None]
    if shares:
        parts.append(f"{percent(sum(shares))} of the node time")
    verdicts = Counter(cost.harmless for cost in costs)
    words = ((True, "harmless"), (False, "not harmless"), (None, "not known to be harmless"))
    told = listing(f"{verdicts[key]} {word}" for key, word in words if verdicts[key])
    grounds = {cost.why: None for key in (False, None, True) for cost in costs if cost.harmless is key}
    return f"{', '.join(parts)}; {told} ({next(iter(grounds))}{'; …' if len(grounds) > 1 else ''})"


def total_bytes_of(copies: Sequence[Copy]) -> str:
    """Sum of the known sizes of copies, marked when some are not known."""
    whole = total_bytes_moved(copies)
    known = sum(copy.bytes_per_run or 0 for copy in copies)
    return human_bytes(known) if whole is not None else f"{human_bytes(known)} or more"


def show_reason(page: Page, reason: str, provider: str, entries: Sequence[Fallback], phases: Sequence[Phase]) -> None:
    """All nodes that one reason sent to one provider."""
    per_phase = Counter(entry.phase for entry in entries)
    phases_by_count: dict[int, list[str]] = {}
    for phase, count in per_phase.items():
        phases_by_count.setdefault(count, []).append(phase)
    counts = listing(f"{plural(count, 'node')} in {listing(phases)}" for count, phases in phases_by_count.items())
    kinds = listing(sorted({entry.evidence_kind for entry in entries}))
    page.line(f"{reason}: {counts}, on {provider} (evidence: {kinds})")
    one_phase = [entry for entry in entries if entry.phase == entries[-1].phase]
    costs = [entry.cost for entry in one_phase if entry.cost is not None]
    if costs:
        same = next(phase for phase in phases if phase.name == one_phase[0].phase)
        page.line(f"cost in {same.name}: {say_fallback_cost(costs, same)}", indent=4)
    page.line(f"operators: {tally(dict(Counter(entry.op_type or 'unknown' for entry in one_phase)))}", indent=4)
    named = [f"{entry.node} ({entry.source_line})" if entry.source_line else entry.node for entry in one_phase[:ROWS]]
    more = f" and {len(one_phase) - ROWS} more" if len(one_phase) > ROWS else ""
    page.line(f"nodes: {', '.join(named)}{more}", indent=4)
    for label, texts in (("evidence", [e.evidence for e in one_phase]), ("remedy", [e.remedy for e in one_phase])):
        different = list(dict.fromkeys(texts))
        more = f" (and {len(different) - 1} more like it)" if len(different) > 1 else ""
        page.line(f"{label}: {different[0]}{more}", indent=4)
