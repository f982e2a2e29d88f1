"""Fallbacks by reason and evidence, with cost, remedy and probes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from partita.diagnosis.reasons import REASONS, steps_of
from partita.diagnosis.records import Fallback, FallbackCost, VariantRecord
from partita.diagnosis.steps import Action, steps_for
from partita.observations.records import Probing
from partita.observations.text_format import (
    NOT_KNOWN,
    decimals,
    human_bytes,
    in_phases,
    listing,
    name_some,
    percent,
    plural,
    short_provider,
    tally,
)
from partita.partition_reports.cost import waiting_us
from partita.partition_reports.groups import grouped, provider_of, ran_by, share_of, total_us
from partita.partition_reports.outcome import counted_rows, fallbacks_of, is_folded, key_of, preferred_of, used_phases
from partita.partition_reports.records import Phase, Report
from partita.partition_reports.sections.model import (
    Block,
    Cell,
    Column,
    Command,
    Fold,
    Group,
    Head,
    Line,
    Link,
    Section,
    Table,
    numbers,
    table,
)
from partita.partition_reports.sections.shared import (
    REASONS_PAGE,
    copied_bytes,
    finding_key,
    first_of,
    for_reason,
    node_anchors,
    probe_table,
    reason_anchor,
    situation_of,
)

NAMED = 8
"""Maximum families of nodes, or nodes of a cell, that are named."""
NAMED_WORDS = 3
HELPED = frozenset({"supported", "placed"})
HARMLESS: dict[bool | None, str] = {True: "yes", False: "no", None: "unknown"}
GroupKey = tuple[str, str]


def section(report: Report) -> Section:
    """Unavailable providers, rejected parts, then fallback nodes by reason."""
    blocks: list[Block] = [*unavailable(report), *_rejected(report)]
    blocks += (Writer(report).group(*entry) for entry in enumerate(by_reason(report)))
    if not report.fallbacks:
        blocks.append(Line(_render_none(report)))
    if report.fallbacks or any(entry.status == "unavailable" for entry in report.chain):
        blocks.append(Line(REASONS_PAGE, "reason codes", "quiet"))
    if report.probing is not None:
        blocks.append(Line(_render_probing(report.probing), "probes", "quiet"))
    about = f"{count_text(report, report.fallbacks)} not on {preferred_of(report)}" if report.fallbacks else ""
    return Section("fallbacks", "Fallbacks", tuple(blocks), about)


def _render_none(report: Report) -> str:
    """Text for a report without fallbacks."""
    if used_phases(report):
        return f"None: every node is on {preferred_of(report)}, the first provider of the chain."
    return "None: ONNX Runtime folded the whole graph at load time." if is_folded(report) else "No nodes are known."


def count_text(report: Report, entries: Iterable[Fallback]) -> str:
    """`4 nodes and 2 added nodes`: file nodes of some fallbacks, and nodes that ONNX Runtime added."""
    rows, own, added, parts = counted_rows(report), set[str](), set[str](), set[str]()
    runs = {phase.name: ran_by(phase) for phase in report.phases}
    for entry in entries:
        own.update(rows[key_of(entry)])
        ran = runs[entry.phase].get(entry.node, ())
        parts.update(row.name for row in ran)
        added |= {entry.node} if not ran and not rows[key_of(entry)] else set()
    counts = [(len(own), "node"), (len(added), "added node")]
    if not own and not added:
        counts = [(len(parts), "node")]
    text = listing(plural(count, noun) for count, noun in counts if count)
    return text if own or added else f"part of {text}"


def _count_in_phases(report: Report, entries: Sequence[Fallback]) -> str:
    """`4 nodes in prefill and decode`; phases with different counts separately."""
    phases: dict[str, list[str]] = {}
    for phase in dict.fromkeys(entry.phase for entry in entries):
        text = count_text(report, [entry for entry in entries if entry.phase == phase])
        phases.setdefault(text, []).append(phase)
    return listing(f"{text}{in_phases(names)}" for text, names in phases.items())


def by_reason(report: Report) -> list[tuple[GroupKey, list[Fallback]]]:
    """Fallbacks by reason and provider: the highest cost first, unexplained ones after others, harmless ones last."""
    groups = grouped(fallbacks_of(report), lambda entry: (entry.reason, entry.provider))
    return sorted(
        groups.items(),
        key=lambda item: (
            all(entry.cost is not None and entry.cost.harmless is True for entry in item[1]),
            item[0][0] == "unexplained",
            *_weight(item[1]),
            item[0],
        ),
    )


def _weight(entries: Sequence[Fallback]) -> tuple[float, int, int]:
    """Sort key of groups: time of copies and nodes in their last phase, then copies, then nodes, descending."""
    costs = [entry.cost for entry in entries if entry.cost is not None and entry.phase == entries[-1].phase]
    time = sum((cost.copy_wait_us_per_run or 0.0) + (cost.host_us_per_run or 0.0) for cost in costs)
    return -time, -len({name for cost in costs for name in cost.copies}), -len(entries)


def reason_title(code: str) -> str:
    """`No kernel found (no_kernel_op)`, or the code if it is unknown in this version."""
    return f"{REASONS[code].title} ({code})" if code in REASONS else code


def reason_text(code: str, entries: Sequence[Fallback]) -> str:
    """`CUDA has no int64 kernel for MatMul; float32 and float16 work`, or the title without suitable probes."""
    reason = REASONS.get(code)
    if reason is None:
        return code
    replacements = [
        {each.after: each.before for each in entry.variants if each.outcome in HELPED and each.factor in reason.factors}
        for entry in entries
    ]
    befores = {before for changes in replacements for before in changes.values()}
    if not reason.sentence or (reason.names_change and (len(befores) != 1 or "" in befores)):
        return reason.title
    operators = list(dict.fromkeys(entry.op_type or "unknown nodes" for entry in entries))
    text = reason.sentence.format(
        provider=short_provider(entries[0].preferred_provider), op=first_names(operators), before="".join(befores)
    )
    works = [now for now in replacements[0] if all(now in each for each in replacements)]
    common = works[0].rpartition(" ")[0] if works else ""
    if common and all(each.rpartition(" ")[0] == common for each in works):  # "MaxPool of opset 12, 11 and 10"
        works = [works[0], *(each.rpartition(" ")[2] for each in works[1:])]
    if not reason.names_change or not works:
        return text
    return f"{text}; {first_names(works)} {'works' if len(works) == 1 else 'work'}"


def first_names(names: Sequence[str]) -> str:
    """`a, b and c`, `a, b, c and 2 more`."""
    more = [f"{len(names) - NAMED_WORDS} more"] if len(names) > NAMED_WORDS else []
    return listing([*names[:NAMED_WORDS], *more])


def unavailable(report: Report) -> Iterator[Group]:
    """Unavailable providers of the chain."""
    for entry in report.chain:
        if entry.status == "unavailable":
            blocks: list[Block] = [Line(entry.evidence or "none", "evidence")]
            blocks += [Line(entry.remedy, "remedy")] if entry.remedy else []
            blocks += commands(steps_for(situation_of(report), steps_of(entry.reason), entry.provider))
            yield Group(f"{entry.provider} is unavailable: {entry.reason or 'no reason known'}", tuple(blocks))


def _rejected(report: Report) -> Iterator[Table]:
    """Rejected parts of the graph."""
    rows = [
        (
            part.file,
            part.provider,
            name_some(part.nodes, NAMED),
            part.evidence,
            "yes" if part.minimal else "unknown: time ran out",
            f"{part.attempts:,}",
        )
        for part in report.rejected_parts
    ]
    heads = ("file", "provider", "smallest rejected part", "evidence", "minimal", Column("parts tried"))
    if rows:
        yield table("Rejected parts of the graph, found by bisection", heads, rows)


def _render_probing(probing: Probing) -> str:
    """Number and time of the probes."""
    text = (
        f"{probing.experiments + probing.cached:,}: {probing.experiments:,} run in {decimals(probing.seconds)} s "
        f"(budget {decimals(probing.budget_seconds)} s), {probing.cached:,} from the cache; "
        f"{plural(probing.crashes, 'crash')}"
    )
    missing = len(probing.missing_probes)
    return f"{text}; incomplete for {plural(missing, 'node')}" if missing else text


def commands(actions: Iterable[Action]) -> list[Block]:
    """Actions as commands."""
    return [Command(action.remedy.command, action.remedy.text) for action in actions]


class Writer:
    """Renders the groups of one report."""

    def __init__(self, report: Report) -> None:
        self.report, self.fallbacks = report, fallbacks_of(report)
        self.phases: dict[str, Phase] = {phase.name: phase for phase in report.phases}
        positions = node_anchors(report)
        self.rows = {
            (phase.name, node.name, provider_of(node)): positions[phase.name, node.position]
            for phase in report.phases
            for node in phase.nodes
        }
        self.key = finding_key(report)

    def group(self, number: int, group: tuple[GroupKey, Sequence[Fallback]]) -> Group:
        """One reason with its nodes on one provider."""
        (reason, provider), entries = group
        findings = grouped(entries, self.key)
        remedies = {entry.remedy for entry in entries}
        last = [entry for entry in entries if entry.phase == entries[-1].phase]
        phase, costs = self.phases.get(last[0].phase), [entry.cost for entry in last if entry.cost is not None]
        text = reason_text(reason, entries)
        blocks: list[Block] = [] if reason in REASONS and text == REASONS[reason].title else [Line(text, "reason")]
        blocks += [
            Line("unknown: no phase measured these nodes", "cost")
            if phase is None or not costs
            else Line(cost_text(costs, phase), f"cost{in_phases([phase.name])}"),
            Line(tally(dict(Counter(entry.op_type or "unknown" for entry in last))), "operators"),
        ]
        blocks += [self.finding(members, alone=len(findings) == 1) for members in findings.values()]
        blocks += [Line(entries[0].remedy, "remedy", "good")] if len(remedies) == 1 else []
        blocks += commands(for_reason(self.report, reason, entries))
        title = f"{reason_title(reason)}: {_count_in_phases(self.report, entries)}, on {short_provider(provider)}"
        return Group(title, tuple(blocks), reason_anchor(number))

    def finding(self, members: Sequence[Fallback], *, alone: bool) -> Group:
        """Evidence with its nodes."""
        by_node = grouped(members, lambda entry: entry.node)
        first = members[0]
        evidence = first_of(entry.evidence for entry in members)
        blocks: list[Block] = [Line(text, "nodes") for text in _render_nodes(by_node)]
        blocks.append(Line(evidence, f"evidence ({first.evidence_kind})"))
        if not alone and len({entry.remedy for entry in self.fallbacks if entry.reason == first.reason}) > 1:
            blocks.append(Line(first.remedy, "remedy", "good"))
        if first.missing_probes:
            blocks.append(Line(first.missing_probes, "missing probes"))
        blocks += _other_providers(members)
        heads: tuple[Head, ...] = (
            *("node", "operator", "phases", "source line"),
            *numbers("host ms", "copies", "copied bytes"),
            *("harmless", "why"),
        )
        costs = [self.row(entries) for entries in by_node.values()]
        blocks.append(
            Fold(
                f"{plural(len(by_node), 'node')} with cost",
                (table(f"Affected nodes; cost{in_phases([members[-1].phase])}", heads, costs),),
            )
        )
        blocks += _experiments(members)
        return Group("", tuple(blocks))

    def row(self, entries: Sequence[Fallback]) -> tuple[Cell, ...]:
        """One node with its cost in the last phase."""
        last = entries[-1]
        target = self.rows.get((last.phase, last.node, last.provider))
        name: Cell = Link(last.node, target) if target else last.node
        phases = listing(dict.fromkeys(entry.phase for entry in entries))
        return name, last.op_type or "unknown", phases, last.source_line or NOT_KNOWN, *_cost_cells(last.cost)


def _render_nodes(by_node: Mapping[str, Sequence[Fallback]]) -> Iterator[str]:
    """Names of the nodes, grouped by source line."""
    for line, names in grouped(by_node, lambda name: by_node[name][-1].source_line or "").items():
        yield name_some(names, NAMED) + (f" ({line})" if line else "")


def cost_text(costs: Sequence[FallbackCost], phase: Phase) -> str:
    """Cost of fallbacks in one run of their phase; a copy with several causes counts once."""
    names = {name for cost in costs for name in cost.copies}
    caused = [copy for copy in phase.copies if copy.kind == "memcpy_node" and copy.name in names]
    parts = [plural(len(caused), "copy") if caused else "no copies"]
    if caused:
        wait = waiting_us(caused)
        part = share_of(wait, total_us(phase.nodes))
        waited = f", {decimals(wait, 1e-3)} ms wait" if wait is not None else ""
        waited += f", {percent(part)} of the node time" if part is not None else ""
        parts = [f"{parts[0]} ({copied_bytes(caused)}{waited})"]
    shares = [cost.time_share for cost in costs if cost.time_share is not None]
    if shares:
        parts.append(f"{'the nodes themselves: ' if caused else ''}{percent(sum(shares))} of the node time")
    return f"{', '.join(parts)}; {harm_text(costs)}"


def harm_text(costs: Sequence[FallbackCost]) -> str:
    """Number of nodes that cause copies, take significant time, are harmless, or may not be."""
    copying = sum(cost.harmless is False and bool(cost.copies) for cost in costs)
    slow = sum(cost.harmless is False and not cost.copies for cost in costs)
    fine = sum(cost.harmless is True for cost in costs)
    open_ = sum(cost.harmless is None for cost in costs)
    parts = [
        (copying, f"{plural(copying, 'node')} {'causes' if copying == 1 else 'cause'} copies"),
        (slow, f"{plural(slow, 'node')} {'takes' if slow == 1 else 'take'} significant time"),
        (fine, f"{plural(fine, 'node')} {'is' if fine == 1 else 'are'} harmless"),
        (open_, f"{plural(open_, 'node')} may not be harmless"),
    ]
    return listing(text for count, text in parts if count)


def _other_providers(members: Sequence[Fallback]) -> Iterator[Line]:
    """Reasons for other skipped preferred providers."""
    for each in members[0].skipped:
        name, reason = short_provider(each.provider), f"{reason_title(each.reason)}, {each.evidence_kind}"
        evidence = first_of(found.evidence for entry in members if (found := entry.about(each.provider)) is not None)
        yield Line(f"{reason}: {evidence}", f"not on {name} either")
        yield Line(each.remedy, f"remedy for {name}", "good")


def _cost_cells(cost: FallbackCost | None) -> tuple[str, str, str, str, str]:
    """Time, copies, bytes, and whether it is harmless."""
    if cost is None:
        return (NOT_KNOWN, NOT_KNOWN, NOT_KNOWN, NOT_KNOWN, "no phase measured it")
    size = human_bytes(cost.copy_bytes_per_run) if cost.copies else NOT_KNOWN
    return (
        decimals(cost.host_us_per_run, 1e-3),
        str(len(cost.copies)),
        size,
        HARMLESS[cost.harmless],
        cost.harmless_reason,
    )


def _experiments(members: Sequence[Fallback]) -> Iterator[Fold]:
    """The probes of each node; equal probes are shown once."""
    same_probes: dict[tuple[VariantRecord, ...], dict[str, None]] = {}
    for entry in members:
        for each in entry.preferred:
            if each.variants:
                same_probes.setdefault(each.variants, {})[entry.node] = None
    for trials, nodes in same_probes.items():
        title = f"{plural(len(trials), 'probe')} of {name_some(nodes, NAMED)}"
        yield Fold(title, tuple(probe_table(title, trials)))
