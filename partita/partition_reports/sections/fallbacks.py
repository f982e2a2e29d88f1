"""Fallbacks by reason and evidence, with cost, remedy and probes, and slow kernel paths."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from partita.diagnosis.probe_conclusions import CAUSES
from partita.diagnosis.reasons import REASONS, steps_of
from partita.diagnosis.records import Fallback, FallbackCost, KernelPath, SkippedProvider, VariantRecord
from partita.diagnosis.steps import Action, Situation, each, steps_for
from partita.observations.codes import PROVIDER_CODES
from partita.observations.facts import AS_IS
from partita.observations.grouping import grouped
from partita.observations.names import UNKNOWN
from partita.observations.records import ChainEntry
from partita.observations.text_format import (
    decimals,
    in_phases,
    listing,
    name_some,
    percent,
    plural,
    short_provider,
    tally,
)
from partita.partition_reports.cost import waiting_us
from partita.partition_reports.groups import share_of, total_us
from partita.partition_reports.outcome import counted_rows, key_of
from partita.partition_reports.records import Report
from partita.partition_reports.sections.model import (
    Block,
    Column,
    Command,
    Group,
    Line,
    Table,
    fields_of,
    pairs,
    table,
    table_of,
)
from partita.partition_reports.sections.phases import copied_bytes
from partita.remedies import split

REASONS_PAGE = "docs/reasons.md"
"""Documentation of the reason codes, with an anchor for each."""
ANCHOR = "r"
"""Prefix of the anchor of a reason's group, before its number in display order."""
NAMED = 8
"""Maximum families of nodes that are named."""
NAMED_WORDS = 3
HELPED = frozenset({"supported", "placed"})
OPERATOR_EVIDENCE = ("logged", "probed")
"""Kinds of evidence that apply to the operator of a node."""
REJECTED = ("file", "provider", "nodes", "evidence", "minimal", "attempts")
"""Shown fields of a rejected part."""
NO_COST = "unknown: no phase measured these nodes"
OF_FOLDER, OF_INPUTS = ("variant", "contract", "max-length"), ("shape", "input")
"""Options of a request other than provider options, by command-line name; those of `OF_INPUTS` are repeatable."""


def fallback_blocks(report: Report) -> Iterator[Block]:
    """Unavailable providers, rejected parts, then fallback nodes by reason."""
    groups = [_unavailable(report, entry) for entry in report.unavailable]
    yield from groups
    yield table_of("Rejected parts of the graph, found by bisection", report.rejected_parts, *REJECTED, obvious=False)
    reasons = [_reason_group(report, number, entries) for number, entries in enumerate(by_reason(report))]
    yield from reasons
    if not reasons:
        text = f"None: every node is on {report.preferred}, the first provider of the chain."
        if not report.used_phases:
            text = "None: ONNX Runtime folded the whole graph." if report.is_folded else "No nodes are known."
        yield Line(text)
    yield from [Line(REASONS_PAGE, "reason codes", "quiet")] if groups or reasons else []
    yield pairs("Probes", fields_of(report.probing, prefix="probes: "))


def fallback_count(report: Report) -> str:
    """`4 nodes not on CUDAExecutionProvider`; empty without fallbacks."""
    return f"{count_text(report, report.fallbacks)} not on {report.preferred}" if report.fallbacks else ""


def _unavailable(report: Report, entry: ChainEntry) -> Group:
    """An unavailable provider of the chain."""
    lines = (Line(entry.evidence or "none", "evidence"), Line(entry.remedy or "", "remedy"))
    commands = _commands(actions_for(report, entry.reason, entry.provider))
    return Group(f"{entry.provider} is unavailable: {entry.reason or 'no reason known'}", (*lines, *commands))


def _commands(actions: Iterable[Action]) -> list[Command]:
    """Actions as commands."""
    return [Command(action.remedy.command, action.remedy.text) for action in actions]


# Groups of fallbacks of one reason and provider each


def by_reason(report: Report) -> list[list[Fallback]]:
    """Fallbacks by reason and provider: the highest cost first, unexplained ones after others, harmless ones last."""
    return sorted(grouped(report.active_fallbacks, lambda entry: (entry.reason, entry.provider)).values(), key=_rank)


def _rank(entries: Sequence[Fallback]) -> tuple[bool, bool, float, int, int, str, str]:
    """Sort key of groups, by time of copies and nodes, then copies."""
    first, costs = entries[0], _costs(entries)
    harmless = all(entry.cost is not None and entry.cost.harmless is True for entry in entries)
    time = sum((cost.copy_wait_us_per_run or 0.0) + (cost.host_us_per_run or 0.0) for cost in costs)
    copies = len({name for cost in costs for name in cost.copies})
    return harmless, first.reason == "unexplained", -time, -copies, -len(entries), first.reason, first.provider


def _costs(entries: Sequence[Fallback]) -> list[FallbackCost]:
    """Known costs in the last phase."""
    return [entry.cost for entry in entries if entry.cost is not None and entry.phase == entries[-1].phase]


def _reason_group(report: Report, number: int, entries: Sequence[Fallback]) -> Group:
    """One reason with its nodes on one provider."""
    first, findings = entries[0], grouped(entries, finding_key(report))
    remedies, text = {entry.remedy for entry in entries}, reason_text(entries)
    operators = Counter(entry.op_type or UNKNOWN for entry in entries if entry.phase == entries[-1].phase)
    has_title = first.reason in REASONS and text == REASONS[first.reason].title
    blocks: list[Block] = [] if has_title else [Line(text, "reason")]
    blocks += [cost_line(report, entries) or Line(NO_COST, "cost"), Line(tally(operators), "operators")]
    shows_remedy = len(findings) > 1 and len(remedies) > 1
    blocks += [_finding(members, shows_remedy) for members in findings.values()]
    blocks += [Line(first.remedy, "remedy", "good")] if len(remedies) == 1 else []
    blocks += _commands(actions_for(report, first.reason, first.preferred_provider, entries))
    title = f"{reason_title(first.reason)}: {_count_in_phases(report, entries)}, on {short_provider(first.provider)}"
    return Group(title, tuple(blocks), f"{ANCHOR}{number}")


def reason_title(code: str) -> str:
    """`No kernel found (no_kernel_op)`, or the code if it is unknown in this version."""
    return f"{REASONS[code].title} ({code})" if code in REASONS else code


def reason_text(entries: Sequence[Fallback]) -> str:
    """`CUDA has no int64 kernel for MatMul; float32 and float16 work`, or the title without suitable probes."""
    reason = REASONS.get(entries[0].reason)
    if reason is None:
        return entries[0].reason
    helped = [
        {
            each.after: each.before
            for each in entry.variants
            if each.outcome in HELPED and CAUSES.get(each.factor) == entry.reason
        }
        for entry in entries
    ]
    befores = {before for changes in helped for before in changes.values()}
    names_change = "{before}" in reason.sentence
    if not reason.sentence or (names_change and (len(befores) != 1 or "" in befores)):
        return reason.title
    operators = list(dict.fromkeys(entry.op_type or "unknown nodes" for entry in entries))
    provider = short_provider(entries[0].preferred_provider)
    text = reason.sentence.format(provider=provider, op=first_names(operators), before="".join(befores))
    works = [now for now in helped[0] if all(now in changes for changes in helped)] if names_change else []
    if len({now.rpartition(" ")[0] for now in works} - {""}) == 1:  # "MaxPool of opset 12, 11 and 10"
        works = [works[0], *(now.rpartition(" ")[2] for now in works[1:])]
    return f"{text}; {first_names(works)} {'works' if len(works) == 1 else 'work'}" if works else text


def first_names(names: Sequence[str]) -> str:
    """`a, b and c`, `a, b, c and 2 more`."""
    more = [f"{len(names) - NAMED_WORDS} more"] if len(names) > NAMED_WORDS else []
    return listing([*names[:NAMED_WORDS], *more])


def count_text(report: Report, entries: Iterable[Fallback]) -> str:
    """`4 nodes and 2 added nodes`: file nodes of some fallbacks, and nodes that ONNX Runtime added."""
    rows, own, added, parts = counted_rows(report), set[str](), set[str](), set[str]()
    runs = {phase.name: phase.ran_by for phase in report.phases}
    for entry in entries:
        own.update(rows[key_of(entry)])
        ran = runs.get(entry.phase, {}).get(entry.node, ())
        parts.update(row.name for row in ran)
        added |= {entry.node} if not ran and not rows[key_of(entry)] else set()
    counts = [(len(own), "node"), (len(added), "added node")]
    if not own and not added:
        return f"part of {plural(len(parts), 'node')}"
    return listing(plural(count, noun) for count, noun in counts if count)


def _count_in_phases(report: Report, entries: Sequence[Fallback]) -> str:
    """`4 nodes in prefill and decode`; phases with different counts separately."""
    counts = {name: count_text(report, found) for name, found in grouped(entries, lambda entry: entry.phase).items()}
    return listing(f"{text}{in_phases(names)}" for text, names in grouped(counts, counts.__getitem__).items())


def cost_line(report: Report, entries: Sequence[Fallback]) -> Line | None:
    """Copies, node time and harm of fallbacks in one run of their last phase; None if unknown.

    A copy with several causes counts once.
    """
    phase = next((phase for phase in report.phases if phase.name == entries[-1].phase), None)
    costs = _costs(entries)
    if phase is None or not costs:
        return None
    names = {name for cost in costs for name in cost.copies}
    caused = [copy for copy in phase.copies if copy.kind == "memcpy_node" and copy.name in names]
    parts = ["no copies"]
    if caused:
        wait = waiting_us(caused)
        part = share_of(wait, total_us(phase.nodes))
        figures = [copied_bytes(caused), *([f"{decimals(wait, 1e-3)} ms wait"] if wait is not None else [])]
        figures += [f"{percent(part)} of the node time"] if part is not None else []
        parts = [f"{plural(len(caused), 'copy')} ({', '.join(figures)})"]
    shares = [cost.time_share for cost in costs if cost.time_share is not None]
    if shares:
        parts.append(f"{'the nodes themselves: ' if caused else ''}{percent(sum(shares))} of the node time")
    return Line(f"{', '.join(parts)}; {_harm_text(costs)}", f"cost{in_phases([phase.name])}")


def _harm_text(costs: Sequence[FallbackCost]) -> str:
    """Number of nodes that cause copies, take significant time, are harmless, or may not be."""
    harmful = [cost for cost in costs if cost.harmless is False]
    copying = sum(bool(cost.copies) for cost in harmful)
    kinds = (
        (copying, "causes copies", "cause copies"),
        (len(harmful) - copying, "takes significant time", "take significant time"),
        (sum(cost.harmless is True for cost in costs), "is harmless", "are harmless"),
        (sum(cost.harmless is None for cost in costs), "may not be harmless", "may not be harmless"),
    )
    return listing(f"{plural(count, 'node')} {one if count == 1 else many}" for count, one, many in kinds if count)


# Findings: fallbacks with the same evidence


def finding_key(report: Report) -> Callable[[Fallback], object]:
    """A function that returns the finding of a node for every preferred provider, for grouping."""
    parts = {name: number for number, part in enumerate(report.rejected_parts) for name in part.nodes}

    def known(why: SkippedProvider) -> object:
        trials = tuple((trial.factor, trial.after, trial.outcome, trial.neg_added) for trial in why.variants)
        return why.provider, why.reason, why.evidence_kind, trials, bool(why.missing_probes)

    def key(entry: Fallback) -> object:
        part = parts.get(entry.node)
        about_operator = part is None and any(
            each.evidence_kind in OPERATOR_EVIDENCE and each.reason not in PROVIDER_CODES for each in entry.preferred
        )
        return tuple(map(known, entry.preferred)), part, entry.op_type if about_operator else None

    return key


def _finding(members: Sequence[Fallback], shows_remedy: bool) -> Group:
    """Evidence with its nodes."""
    by_node, first = grouped(members, lambda entry: entry.node), members[0]
    by_line = grouped(by_node, lambda name: by_node[name][-1].source_line)
    blocks: list[Block] = [
        Line(f"{name_some(names, NAMED)}{f' ({line})' if line else ''}", "nodes") for line, names in by_line.items()
    ]
    blocks.append(Line(_first_of(entry.evidence for entry in members), f"evidence ({first.evidence_kind})"))
    blocks += [Line(first.remedy if shows_remedy else "", "remedy", "good")]
    blocks += [Line(first.missing_probes, "missing probes")]
    for other in first.skipped:
        name, reason = short_provider(other.provider), f"{reason_title(other.reason)}, {other.evidence_kind}"
        found = (each for entry in members for each in entry.preferred if each.provider == other.provider)
        evidence = _first_of(each.evidence for each in found)
        blocks += [Line(f"{reason}: {evidence}", f"not on {name} either")]
        blocks += [Line(other.remedy, f"remedy for {name}", "good")]
    probed = [(why.variants, entry.node) for entry in members for why in entry.preferred if why.variants]
    for variants, tried in grouped(probed, lambda pair: pair[0]).items():
        nodes = dict.fromkeys(node for _, node in tried)
        title = f"{plural(len(variants), 'probe')} of {name_some(nodes, NAMED)}"
        blocks.append(Group(title, tuple(probe_table(title, variants)), folded=True))
    return Group("", tuple(blocks))


def probe_table(title: str, variants: Sequence[VariantRecord]) -> Iterator[Block]:
    """Probes as a table of changes and outcomes, with the messages below it."""
    quoted = list(dict.fromkeys(trial.message for trial in variants if trial.message))
    rows = [
        (
            "unchanged" if trial.factor == AS_IS else trial.factor.replace("_", " "),
            trial.change,
            trial.outcome.replace("_", " "),
            f"[{quoted.index(trial.message) + 1}]" if trial.message else "",
        )
        for trial in variants
    ]
    yield table(title, ("property", "change", "outcome", Column("message")), rows)
    yield from (Line(f"[{number}] {text}") for number, text in enumerate(quoted, 1))


def _first_of(texts: Iterable[str]) -> str:
    """The first of several texts, with the number of different texts if there are several."""
    different = list(dict.fromkeys(texts))
    return different[0] + (f" (one of {len(different)})" if len(different) > 1 else "")


# Actions


def situation_of(report: Report) -> Situation:
    """Context of a report, for the placeholders of an action."""
    options = report.request.options
    # Provider options have the form PROVIDER.OPTION.
    provider_options = {name: value for name, value in options.items() if "." in name}
    several = {name: split(options.get(name, "")) for name in (*OF_INPUTS, "pin", "provider-library")}
    if report.model is None:  # --input of a generation is a prompt
        opened = [word for name in OF_FOLDER if name in options for word in each(f"--{name}", (options[name],))]
    else:
        opened = [word for name in OF_INPUTS for word in each(f"--{name}", several[name])]
    dry = ("--dry-run", "--device", report.dry_run.device) if report.dry_run is not None else ()
    return Situation(
        report.package,
        report.request.path,
        report.request.chain,
        provider_options,
        several["pin"],
        several["provider-library"],
        (*dry, *each("--provider-library", several["provider-library"]), *opened),
    )


def actions_for(report: Report, reason: str | None, provider: str, entries: Sequence[Fallback] = ()) -> list[Action]:
    """The actions for a reason that apply to this report. `entries`: its nodes; none for an unavailable provider."""
    return steps_for(
        situation_of(report),
        steps_of(reason),
        provider,
        unprobed=any(entry.missing_probes for entry in entries),
        trials=[entry.variants for entry in entries],
    )


def top_actions(report: Report) -> Iterator[Action]:
    """The actions for unavailable providers, and for the first reason with actions."""
    for entry in report.unavailable:
        yield from actions_for(report, entry.reason, entry.provider)
    for entries in by_reason(report):
        if found := actions_for(report, entries[0].reason, entries[0].preferred_provider, entries):
            yield from found
            return


# Kernel paths


def kernel_blocks(report: Report) -> Iterator[Block]:
    """Kernel paths, slow ones first; nothing if no executed node has an operator with several kernels."""
    if not report.kernel_paths:
        return
    groups: list[Block] = [_kernel_group(entries) for entries in slow_groups(report)]
    yield from groups or [Line("No node is known to take a slow path.")]
    unknown = grouped((entry for entry in report.kernel_paths if entry.unknown), lambda e: (e.op_type, e.unknown))
    for (operator, text), entries in unknown.items():
        yield Line(f"{plural(len({entry.node for entry in entries}), f'{operator} node')}: {text}", "unknown")
    yield _kernel_table(report.kernel_paths)


def slow_count(report: Report) -> str:
    """`6 nodes slow`; empty without nodes on slow paths."""
    nodes = {entry.node for entry in report.kernel_paths if entry.is_slow}
    return f"{plural(len(nodes), 'node')} slow" if nodes else ""


def slow_groups(report: Report) -> list[list[KernelPath]]:
    """Nodes on slow paths by path, cause and provider; the longest time of the last phase first."""
    slow = (entry for entry in report.kernel_paths if entry.is_slow)
    groups = grouped(slow, lambda entry: (entry.path, entry.cause, entry.provider))
    ranked = sorted(groups.items(), key=lambda item: (-(_last_share(item[1]) or 0.0), -len(item[1]), item[0]))
    return [found for _, found in ranked]


def _last_share(entries: Sequence[KernelPath]) -> float | None:
    """Share of the node time of their last phase; None if no time is known."""
    known = [entry.time_share for entry in entries if entry.phase == entries[-1].phase and entry.time_share is not None]
    return sum(known) if known else None


def slow_text(entries: Sequence[KernelPath]) -> str:
    """`6 Attention nodes: whole cache (43.2 % of the node time in decode)`."""
    last = [entry for entry in entries if entry.phase == entries[-1].phase]
    operators = listing(dict.fromkeys(entry.op_type or UNKNOWN for entry in last))
    cost = _kernel_cost(entries)
    return f"{plural(len(last), f'{operators} node')}: {last[0].path}{f' ({cost})' if cost else ''}"


def _kernel_cost(entries: Sequence[KernelPath]) -> str:
    """Their share of the node time; empty if unknown."""
    share = _last_share(entries)
    return "" if share is None else f"{percent(share)} of the node time{in_phases([entries[-1].phase])}"


def _kernel_group(entries: Sequence[KernelPath]) -> Group:
    """One slow path with its nodes."""
    first, nodes = entries[0], dict.fromkeys(entry.node for entry in entries)
    lines = (
        Line(first.cause, "cause"),
        Line(_kernel_cost(entries) or NO_COST, "cost"),
        Line(name_some(nodes, NAMED), "nodes"),
        Line(_first_of(entry.evidence for entry in entries), f"evidence ({first.evidence_kind})"),
        Line(first.remedy, "remedy", "good"),
    )
    phases = in_phases(dict.fromkeys(entry.phase for entry in entries))
    return Group(f"{first.path}: {plural(len(nodes), 'node')}{phases}, on {short_provider(first.provider)}", lines)


def _kernel_table(paths: Sequence[KernelPath]) -> Table:
    """Number of nodes of each operator and path, by phase; slow paths first."""
    phases = dict.fromkeys(entry.phase for entry in paths)

    def slow(entry: KernelPath) -> str:
        return "yes" if entry.is_slow else UNKNOWN if entry.evidence_kind == "none" else "no"

    kinds = grouped(paths, lambda e: (e.op_type or UNKNOWN, e.path, e.provider, slow(e), e.evidence_kind))
    rows = [
        {
            **dict(zip(("operator", "path", "provider", "slow", "evidence"), kind, strict=True)),
            **{f"{phase}_nodes": sum(entry.phase == phase for entry in entries) for phase in phases},
        }
        for kind, entries in sorted(kinds.items(), key=lambda item: (item[0][3] != "yes", item[0]))
    ]
    return table_of("Kernel paths", rows)
