"""The top of a report: placement on the preferred provider, fallbacks, reasons, cost and actions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from partita.observations.native_text import cut
from partita.observations.records import ChainEntry
from partita.observations.text_format import decimals, in_phases, listing, percent, plural, short_provider, tally
from partita.partition_reports.cost import split_time, whole_percent
from partita.partition_reports.groups import file_counts, op_type_of, provider_of
from partita.partition_reports.outcome import (
    StateName,
    active_of,
    failure_of,
    fallback_nodes,
    has_run,
    is_default_without_first,
    is_folded,
    is_timed,
    main_phase,
    placement_text,
    preferred_of,
    state_name,
    used_phases,
    verdict_of,
    was_interrupted,
)
from partita.partition_reports.records import FileNode, Phase, Report
from partita.partition_reports.sections.fallbacks import by_reason, count_text, harm_text, reason_text, reason_title
from partita.partition_reports.sections.kernels import slow_groups
from partita.partition_reports.sections.model import Cell, Command, Link, Tone
from partita.partition_reports.sections.shared import (
    COPY_OPERATORS,
    first_clause,
    in_bytes,
    placements,
    reason_anchor,
    runtime_name,
    speed_text,
    subgraph_suffix,
    top_actions,
)
from partita.remedies import shell

SIGNS: dict[StateName, tuple[str, Tone]] = {
    "all": ("✓", "good"),
    "nearly": ("◕", "mild"),
    "partly": ("◐", "warn"),
    "none": ("✕", "bad"),
    "refused": ("⊘", "bad"),
    "empty": ("○", "good"),
    "nothing": ("–", "bad"),
    "failed": ("✕", "bad"),
}
"""A symbol for each state, and its tone."""
HEADLINE_SHARE = 0.1
"""The headline names copies or fallback nodes with at least this share of the node time."""
LONGEST = 240
"""Maximum characters of a headline's reason."""
WHERE, FALLBACKS = "Did it run on the preferred provider?", "What fell back?"
NAMED_CHECKS = 3
"""Maximum failed checks named at the top."""


@dataclass(frozen=True, slots=True)
class State:
    """The outcome as a headline."""

    name: StateName
    tone: Tone
    sign: str
    headline: str


@dataclass(frozen=True, slots=True)
class Question:
    """A common question with its answer."""

    question: str
    figure: str
    """The answer as a word or number."""
    lines: tuple[Cell | Command, ...]
    details_section: str
    """Key of the section with details."""


@dataclass(frozen=True, slots=True)
class Flag:
    """A warning."""

    label: str
    text: str
    short: str = ""
    """Short form of the text."""
    in_verdict: bool = False
    """The verdict includes it."""


@dataclass(frozen=True, slots=True)
class Overview:
    """The top of a report."""

    name: str
    """Name of the package or file."""
    state: State
    verdict: str
    request: str
    """Command, chain, runtime and time."""
    flags: tuple[Flag, ...]
    questions: tuple[Question, ...]


def glance(report: Report) -> Overview:
    """The top of a report."""
    return Overview(
        name=_name_of(report),
        state=find_state(report),
        verdict=verdict_of(report),
        request=_render_request(report),
        flags=tuple(find_flags(report)),
        questions=_questions(report),
    )


def _name_of(report: Report) -> str:
    """Name of the package or file."""
    if report.package is not None:
        return report.package.name
    return report.model.file if report.model is not None else "unknown model"


def _render_request(report: Report) -> str:
    """`generate on WebGpu, then CPU (command line); onnxruntime-webgpu 1.27.0; 2026-11-22T10:14:55+00:00`."""
    request = report.request
    chain = ", then ".join(map(short_provider, request.chain)) or "no provider"
    return f"{request.verb} on {chain} ({request.chain_source}); {runtime_name(report.environment)}; {report.created}"


def find_state(report: Report) -> State:
    """The outcome of the report."""
    name = state_name(report)
    shown = "partly" if name == "none" and is_default_without_first(report) else name
    sign, tone = SIGNS[shown]
    return State(name, tone, sign, _render_headline(report, name))


def _render_headline(report: Report, name: StateName) -> str:
    """The headline, with shares of time if known."""
    preferred = short_provider(preferred_of(report))
    ran = "ran" if has_run(report) else "would run"
    if (failed := failure_of(report)) is not None:
        placed = f"Placed on {_used(report)}; its" if used_phases(report) else "The"
        return f"{placed} run failed: {cut(failed, LONGEST)}"
    if name == "empty":
        return "ONNX Runtime folded the whole graph at load time; nothing executes"
    if name == "nothing":
        return "No executed nodes are known"
    if name == "refused":
        some_ran = any(file_counts(phase)[preferred_of(report)] for phase in used_phases(report))
        return (
            f"{preferred} rejected part of the graph; {f'the rest {ran} on it' if some_ran else f'nothing {ran} on it'}"
        )
    if name == "all":
        return f"All nodes {ran} on {preferred}"
    if name == "none" and is_default_without_first(report):
        reason = "; ".join(filter(None, (report.chain[0].reason, report.chain[0].remedy)))
        return f"{ran.capitalize()} on {_used(report)}; {preferred} is installed but could not start: {reason}"
    if name == "none":
        missing = next((entry for entry in report.chain if entry.status == "unavailable"), None)
        reason = f": {missing.reason or 'unavailable'}" if missing is not None and missing is report.chain[0] else ""
        return f"Nothing {ran} on {preferred}{reason}"
    away, noun = _fallback_names(report)
    fallbacks = plural(len(away), noun.replace("node", "fallback node", 1)) if away else "fallbacks in control flow"
    if name == "nearly":
        harmless = "harmless node" if is_timed(report) else "node"
        copies = "" if is_timed(report) else "; they cause no copies"
        return (
            f"All but {plural(len(away), harmless)} {ran} on {preferred}{copies}"
            if away
            else f"On {preferred}; {fallbacks}"
        )
    return (
        _render_time(report)
        or f"Partly on {preferred}: {fallbacks}{_render_copying(report, 'causes' if len(away) == 1 else 'cause')}"
    )


def _fallback_names(report: Report) -> tuple[set[str], str]:
    """File nodes that are not on the preferred provider; without any, nodes that ONNX Runtime added. With a noun."""
    rows = [node for phase in report.phases for node in fallback_nodes(report, phase)]
    own = {node.name for node in rows if isinstance(node, FileNode)}
    return (own, "node") if own else ({node.name for node in rows}, "added node")


def _used(report: Report) -> str:
    """Providers with nodes: `WebGpu and CPU`."""
    return listing(dict.fromkeys(short_provider(each.provider) for phase in report.phases for each in phase.providers))


def _render_copying(report: Report, cause: str) -> str:
    """Copies that fallbacks cause in a run of the main phase; empty for none."""
    main = main_phase(report)
    entries = [entry for entry in report.fallbacks if main is not None and entry.phase == main.name]
    copies = {name for entry in entries if entry.cost is not None for name in entry.cost.copies}
    if main is None or not copies:
        return ""
    return f" {cause} {plural(len(copies), 'copy')} in every {'run' if main.name == 'run' else f'{main.name} run'}"


def _render_time(report: Report) -> str:
    """Share of the time in copies or fallback nodes; empty if unknown."""
    phase = main_phase(report)
    split = split_time(phase, preferred_of(report)) if phase is not None and is_timed(report) else None
    if phase is None or split is None or not (split.fallback_nodes or split.copies):
        return ""  # the fallbacks are in another phase or in control flow
    of_phase = "of the node time" if phase.name == "run" else f"of {phase.name}'s node time"
    on = listing(short_provider(name) for name in split.fallback_providers)
    if split.copies >= max(split.on_fallback, HEADLINE_SHARE):
        return f"{whole_percent(split.copies)} {of_phase} is in copies, which wait for the device"
    if split.on_fallback >= HEADLINE_SHARE:
        return f"{whole_percent(split.on_fallback)} {of_phase} is in {plural(split.fallback_nodes, 'node')} on {on}"
    share = whole_percent(split.copies + split.on_fallback)
    nodes = f"{plural(split.fallback_nodes, 'node')} on {on}" if split.fallback_nodes else "copies"
    both = " and copies" if split.fallback_nodes and split.copies else ""
    take = "takes" if split.fallback_nodes == 1 and not both else "take"
    return f"Partly on {short_provider(preferred_of(report))}: {nodes}{both} {take} {share} {of_phase}"


def find_flags(report: Report) -> Iterator[Flag]:
    """Warnings about the report."""
    device = report.dry_run
    if device is not None:
        text = f"no {device.device_name} was used. Placement, copies and sizes are from {device.provider_library}"
        text += f" of ONNX Runtime {device.onnxruntime_version} with stub CUDA libraries; there are no times."
        yield Flag("Dry run", text, f"as {device.device_name}")
    if report.package is not None and report.package.verification != "verified":
        yield Flag("Unverified package", report.package.verification_detail)
    for sentence in report.exceeded_limits:
        yield Flag("Limit exceeded", sentence)
    failed = [check.name for check in report.checks if not check.passed]
    if failed:
        more = [f"{len(failed) - NAMED_CHECKS} more"] if len(failed) > NAMED_CHECKS else []
        yield Flag(
            f"{plural(len(failed), 'check')} of this report failed",
            listing([*failed[:NAMED_CHECKS], *more]),
            in_verdict=True,
        )
    if report.conflicts:
        nodes = len({entry.node for entry in report.conflicts})
        yield Flag("Conflicting sources", f"for {plural(nodes, 'node')}", in_verdict=True)
    if was_interrupted(report):
        yield Flag("The run ended early", "interrupted", in_verdict=True)


def _questions(report: Report) -> tuple[Question, ...]:
    return (
        _placement_question(report),
        _fallback_question(report),
        _reason_question(report),
        _cost_question(report),
        _action_question(report),
    )


def _placement_question(report: Report) -> Question:
    """Nodes on the preferred provider, per placement."""
    preferred, phase = preferred_of(report), main_phase(report)
    lines = [placement_text(phases, preferred, short_provider) for phases in placements(report)]
    if phase is None or not phase.nodes:
        return _no_node(report, WHERE, "layers")
    counts = file_counts(phase)
    share = counts[preferred] / (counts.total() or 1)
    figure = {1.0: "all nodes", 0.0: "no nodes"}.get(share, percent(share))
    if failure_of(report) is not None:
        figure = "no, the run failed"
    elif is_default_without_first(report):
        figure = f"not on {short_provider(preferred)}"
    elif share == 1 and fallback_nodes(report, phase):
        figure = "all but nodes added by ONNX Runtime"
    elif share == 1 and any(fallback_nodes(report, each) for each in used_phases(report)):
        figure = f"all nodes{in_phases([phase.name])} only"
    elif share == 1 and report.fallbacks:
        figure = "all but nodes in control flow"
    return Question(WHERE, figure, tuple(lines), "layers")


def _no_node(report: Report, question: str, more: str) -> Question:
    """The answer if no node runs, or none is known."""
    if is_folded(report):
        return Question(question, "no nodes", ("ONNX Runtime folded the whole graph at load time.",), more)
    return Question(question, "unknown", ("No nodes are known.",), more)


def _fallback_question(report: Report) -> Question:
    """Fallback nodes by provider and operator, including control flow."""
    lines = []
    for phases in placements(report):
        where = in_phases(phase.name for phase in phases)
        groups: dict[tuple[str, str], Counter[str]] = {}
        for node in fallback_nodes(report, phases[0]):
            noun = "node" if isinstance(node, FileNode) else "added node"
            groups.setdefault((provider_of(node), noun), Counter())[op_type_of(node)] += 1
        lines += [
            f"{plural(counts.total(), noun)} on {short_provider(provider)}{where}: {tally(dict(counts))}"
            for (provider, noun), counts in groups.items()
        ]
        if phases[0].subgraphs is not None and phases[0].subgraphs.on_cpu:
            lines.append(f"In control-flow subgraphs: {plural(len(phases[0].subgraphs.on_cpu), 'node')} on CPU")
    names, noun = _fallback_names(report)
    main = main_phase(report)
    costs = [e.cost for e in report.fallbacks if e.cost is not None and main is not None and e.phase == main.name]
    if costs and main is not None and report.chain and report.chain[0].status == "active":
        harm = harm_text(costs)
        lines.append(f"{harm[0].upper()}{harm[1:]}{in_phases([main.name])}")
    if not used_phases(report):
        return _no_node(report, FALLBACKS, "layers")
    figure = plural(len(names), noun) if names else "nodes in control flow" if lines else "none"
    return Question(
        FALLBACKS, figure, tuple(lines) or (f"Every node is on {short_provider(preferred_of(report))}.",), "layers"
    )


def _reason_question(report: Report) -> Question:
    """Unavailable providers, and reasons sorted by cost."""
    lines: list[Cell] = [
        f"{short_provider(entry.provider)} is unavailable ({entry.reason or 'no reason known'}): "
        f"{entry.evidence or 'no evidence'}"
        for entry in report.chain
        if entry.status == "unavailable"
    ]
    if (failed := failure_of(report)) is not None:
        lines.insert(0, f"The run failed: {failed}")
    groups = by_reason(report)
    for number, ((reason, _), entries) in enumerate(groups):
        kinds = listing(sorted({entry.evidence_kind for entry in entries}))
        nodes = count_text(report, entries)
        lines.append(
            Link(f"{reason_text(reason, entries)} ({reason}): {nodes}, evidence {kinds}", reason_anchor(number))
        )
    if not lines:
        return Question("Why?", "-", ("No fallbacks.",), "fallbacks")
    reasons = list(dict.fromkeys(reason for (reason, _), _ in groups))
    figure = (
        reason_title(reasons[0]) if len(reasons) == 1 else plural(len(reasons), "reason") if reasons else "unavailable"
    )
    if failed is not None:
        figure = "a run failed"
    return Question("Why?", figure, tuple(lines), "fallbacks")


def _cost_question(report: Report) -> Question:
    """Speed, waits, copies and partitions of decode or the only phase."""
    phase = main_phase(report)
    if phase is None or not phase.nodes:
        return _no_node(report, "What does it cost?", "phases")
    lines = [*_render_waits(phase), _render_moves(phase)]
    figure, *basis = speed_text(phase)
    if state_name(report) == "none":  # the speed is that of another provider
        figure, basis = (
            "unknown",
            [f"Nothing ran on {short_provider(preferred_of(report))}, so there is no speed to compare."],
        )
    elif not figure:
        figure = plural(len(phase.copies), "copy") if phase.copies else "no copies"
    return Question("What does it cost?", figure, (*basis, *lines), "phases")


def _render_waits(phase: Phase) -> Iterator[str]:
    """Host time in Memcpy nodes."""
    cost = phase.cost
    if cost is None or not cost.host_wait_us_per_run:
        return
    shares = [entry.time_share for entry in phase.by_op_type if entry.name in COPY_OPERATORS]
    known = [share for share in shares if share is not None]
    part = f", {percent(sum(known))} of the node time" if known else ""
    token = cost.host_wait_us_per_token
    wait, per = (cost.host_wait_us_per_run, "run") if token is None else (token, "token")
    yield f"{decimals(wait, 1e-3)} ms host wait in copies per {per}{part}"


def _render_moves(phase: Phase) -> str:
    """Copies and partitions."""
    cost, run = phase.cost, "run" if phase.name == "run" else f"{phase.name} run"
    parts = plural(len(phase.partitions), "partition")
    count, inside = len(phase.copies) if cost is None else cost.copies, subgraph_suffix(phase)
    if not count:
        return f"{f'No copies outside control flow{inside}' if inside else 'No copies between devices'}; {parts}"
    size = "" if cost is None else in_bytes(cost.copy_bytes_per_run, cost.copy_bytes_at_least)
    border = sum(copy.kind != "memcpy_node" for copy in phase.copies)
    of_session = f", {border} of session inputs or outputs" if border and border != count else ""
    return f"{plural(count, 'copy')} per {run}{size}{of_session}{inside}; {parts}"


def _remedy_lines(entry: ChainEntry) -> Iterator[Cell | Command]:
    """Remedies for an unavailable provider, as commands if possible."""
    for remedy in entry.remedies:
        words = shell(remedy.options)
        yield Command(remedy.command, remedy.text) if remedy.command else f"{remedy.text}{words and ': '}{words}"
    if entry.remedy and not entry.remedies:
        yield entry.remedy


def _action_question(report: Report) -> Question:
    """The first remedy, and the command for it."""
    question, more = "What can I do?", "fallbacks"
    if (failed := failure_of(report)) is not None:  # an error message ends with its remedy
        return Question(question, "Fix the run", (failed.rpartition("; ")[2],), more)
    state, groups = state_name(report), by_reason(report)
    missing = [entry for entry in report.chain if entry.status == "unavailable"]
    if not missing and state in ("all", "nearly") and (slow := slow_groups(report)):
        _, (first, *_) = slow[0]
        return Question(question, "Use a faster kernel", (f"{first.cause}: {first.remedy}",), "kernels")
    if not missing and state == "all":
        return Question(question, "nothing", ("Every node is on the preferred provider.",), more)
    if not missing and state == "empty":
        return Question(question, "nothing", ("ONNX Runtime folded the whole graph at load time.",), more)
    if not missing and state == "nearly":
        return Question(question, "nothing", ("All fallbacks are harmless.",), more)
    action = next(top_actions(report, groups), None)
    remedies: list[Cell | Command] = [line for entry in missing for line in _remedy_lines(entry)]
    # With an unavailable provider, also show the remedy for an available one.
    available = [entries[0] for _, entries in groups if entries[0].preferred_provider in active_of(report)]
    if action is None or missing:
        remedies += [entry.remedy for entry in available[:1]]
    commands = [Command(action.words, action.does)] if action is not None else []
    figure = first_clause(available[0].remedy) if available else "unknown"
    if missing:
        figure = f"Make {short_provider(missing[0].provider)} available"
    elif action is not None:
        figure = action.title
    return Question(question, figure, (*remedies, *commands) or ("No remedy is known.",), more)
