"""Comparison of two reports: nodes, reasons, copies, figures, versions and request. Pure."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from partita.compare.document import report_headline
from partita.compare.rows import Comparison, Row, Side, Value, compare_rows, field_rows
from partita.diagnosis.records import Fallback, SkippedProvider
from partita.observations.text_format import decimals, listing, plural, short_provider
from partita.partition_reports.groups import is_memcpy, provider_of
from partita.partition_reports.outcome import cache_text
from partita.partition_reports.phase_records import TOO_FEW, FileNode, NodePlacement, Phase
from partita.partition_reports.records import Report

RELATED = 0.5
"""Minimum share of common node names, relative to the larger report, for reports of one model."""
SAME_ROWS = 1.1
"""Maximum ratio of active rows for comparing times per token: rows share the weights that a step reads."""
COUNTER = re.compile(r"_\d+$")
DIGITS = re.compile(r"\d+")
COUNTED = ("phases", "outcome", "nodes", "reasons", "copies", "copy_count")
"""Sections that make two reports differ."""
Pair = tuple[Phase, Phase]
"""A phase that both reports have."""


def compare(before: Report, after: Report, *, names: tuple[str, str] = ("A", "B")) -> Comparison:
    """Differences of `after` from `before`. `names`: names of the two reports."""
    reports, later = (before, after), {phase.name: phase for phase in after.phases}
    phases = [(phase, later[phase.name]) for phase in before.phases if phase.name in later]
    rows = [list(_rows(reports, phases, at)) for at in (0, 1)]
    sides = [_side(report, name) for report, name in zip(reports, names, strict=True)]
    found = compare_rows("report", sides, rows, counted=COUNTED)
    unrelated, notes = _unrelated_reason(reports, phases, rows, names), tuple(_notes(before, after, phases))
    found = found.model_copy(update={"unrelated_reason": unrelated, "notes": notes})
    return found.model_copy(update={"headline": report_headline(found)})


def _rows(reports: tuple[Report, Report], phases: Sequence[Pair], at: int) -> Iterator[Row]:
    """Every row of one report."""
    report, chains = reports[at], [[entry.provider for entry in each.chain] for each in reports]
    order = max(chains[1], chains[0], key=len)

    def rank(provider: str | None) -> float:
        """Position of a provider in the longer chain, or in its own; an unknown one is the least preferred."""
        chain = order if provider in order else chains[at]
        return math.inf if provider is None else chain.index(provider) if provider in chain else len(chain)

    preferred = report.preferred
    first = float(preferred != reports[0].preferred)
    yield Row("preferred_provider", "request", "preferred provider", preferred, rank=first)
    names = [phase.name for phase in report.phases]
    yield Row("phases", "request", "phases", ", ".join(names), rank=-len(names))
    yield Row("outcome", "outcome", "run", "completed" if report.failure_text is None else "failed")
    for group, values in _context(report):
        yield from field_rows("context", group, values)
    cache, in_place = report.cache, report.cache_in_place is True
    text = "no cache" if cache is None or cache.status == "no_cache" else cache_text(cache)
    yield Row("cache", "cache", "cache", text, rank=-in_place)
    both, active = {*reports[0].active, *reports[1].active}.intersection(*chains), report.active
    for pair in phases:
        phase, placed = pair[at], placed_rows(report, pair[at])
        for row in placed:
            node, where = row.node, row.node.provider
            facts = {"operator": node.op_type, "module": node.module, "part_of": row.part_of}
            yield Row("nodes", phase.name, node.name, where, row.keys(), rank(where), None, facts, row.causes(active))
        yield from _reason_rows(report, phase, placed, both)
        yield from _copy_rows(phase, compare_sizes=not _tokens_differ(pair))
        yield from _figure_rows(pair, at)


# Nodes and reasons


@dataclass(frozen=True, slots=True)
class PlacedRow:
    """A file node that was not folded, or a node that ONNX Runtime added, with the executed nodes that ran it."""

    node: FileNode | NodePlacement
    executed: tuple[NodePlacement, ...]
    fallbacks: tuple[Fallback, ...]

    @property
    def is_added(self) -> bool:
        """Whether ONNX Runtime added it."""
        return isinstance(self.node, NodePlacement)

    @property
    def part_of(self) -> str | None:
        """The compiled or fused node, or the nodes of its function; None if it runs under its own name."""
        names = [node.name for node in self.executed]
        return None if self.node.name in names else ", ".join(names) or None

    @property
    def skipped(self) -> dict[str, SkippedProvider]:
        """Skipped provider -> why the node is not on it."""
        return {entry.provider: entry for fallback in self.fallbacks for entry in fallback.preferred}

    def keys(self) -> tuple[Hashable, ...]:
        """Keys of the same node in another report: its name, then its name without the exporter's number.

        Names of added nodes have counters that differ between runs: operator, name without numbers and provider.
        """
        name = self.node.name
        if not self.is_added:
            return (name, COUNTER.sub("", name))
        kind = (self.node.op_type, DIGITS.sub("#", name))
        return ((*kind, self.node.provider), kind)

    def causes(self, active: Sequence[str]) -> Mapping[Value, Mapping[str, str]]:
        """Skipped provider -> why the node is not on it; None: the first available one."""
        found: dict[Value, Mapping[str, str]] = {name: _evidence(why) for name, why in self.skipped.items()}
        return found | (
            {None: _evidence(self.fallbacks[-1].restricted_to(active).preferred[0])} if self.fallbacks else {}
        )


def placed_rows(report: Report, phase: Phase, *, memcpy: bool = False) -> list[PlacedRow]:
    """The rows of a phase: file nodes that were not folded, then added nodes; Memcpy nodes only with `memcpy`."""
    executed = {node.name: node for node in phase.nodes}
    fallbacks = {(entry.node, entry.provider): entry for entry in report.fallbacks if entry.phase == phase.name}
    rows = []
    for node in phase.rows:
        if isinstance(node, NodePlacement) and is_memcpy(node) and not memcpy:
            continue
        names = node.ran_as if isinstance(node, FileNode) else (node.name,)
        homes = [(name, provider_of(executed.get(name, node))) for name in names]
        ran = tuple(executed[name] for name in names if name in executed)
        rows.append(PlacedRow(node, ran, tuple(fallbacks[home] for home in homes if home in fallbacks)))
    return rows


def _evidence(why: SkippedProvider) -> dict[str, str]:
    return {"reason": why.reason, "evidence": why.evidence, "evidence_kind": why.evidence_kind, "remedy": why.remedy}


def _reason_rows(report: Report, phase: Phase, rows: Sequence[PlacedRow], providers: set[str]) -> Iterator[Row]:
    """The reasons of each node that is not on one of `providers`; nodes in control-flow subgraphs follow."""
    placed = {id(entry) for row in rows for entry in row.fallbacks}
    named = [(row.node.name, row.keys(), row.skipped, row.fallbacks[-1]) for row in rows if row.fallbacks]
    memcpy = {node.name for node in phase.nodes if is_memcpy(node)}
    for entry in report.fallbacks:
        if entry.phase == phase.name and id(entry) not in placed and entry.node not in memcpy:
            skipped = {each.provider: each for each in entry.preferred}
            named.append((entry.node, (("subgraph", entry.node),), skipped, entry))
    for name, keys, skipped, fallback in named:
        found = [reason for provider, reason in skipped.items() if provider in providers]
        if found:
            codes, facts = ", ".join(reason.reason for reason in found), _evidence(found[0])
            del facts["reason"]
            causes: dict[Value, Mapping[str, str]] = {None: {"remedy": facts.pop("remedy")}}
            facts["provider"] = fallback.provider
            yield Row("reasons", phase.name, name, codes, keys, 1, 0, facts, causes)


# Copies and figures


def _tokens_differ(phases: Pair) -> bool:
    """Whether the numbers of tokens per run differ, so that sizes per run are not comparable."""
    counts = [phase.cost.tokens_per_run if phase.cost else None for phase in phases]
    return None not in counts and counts[0] != counts[1]


def _copy_rows(phase: Phase, *, compare_sizes: bool) -> Iterator[Row]:
    """A row for each copy. Key: the session input or output; the tensor, cause or size of a Memcpy node."""
    behind = {name: frozenset(row.name for row in rows) for name, rows in phase.ran_by.items()}
    for copy in phase.copies:
        causes = frozenset(name for cause in copy.caused_by for name in behind.get(cause, {cause}))
        size = copy.bytes_per_run if compare_sizes else None
        keys: list[Hashable] = [(copy.kind, copy.name)]
        facts = {"direction": copy.direction, "border": copy.kind, "caused_by": ", ".join(copy.caused_by)}
        if copy.kind == "memcpy_node":
            keys = [(copy.direction, key) for key in (copy.tensor, causes) if key] or [(copy.direction, size)]
            del facts["border"]
        yield Row("copies", phase.name, copy.tensor or copy.name, size, tuple(keys), details=facts)


def _figure_rows(phases: Pair, at: int) -> Iterator[Row]:
    """Counts, sizes and times. Copied bytes: known sizes in the main graph, per token or per run."""
    phase, per_token = phases[at], all(each.cost is not None and each.cost.tokens_per_run for each in phases)
    inside, cost = phase.subgraph_copies, phase.cost
    size: float | None = cost.copy_bytes_at_least if cost is not None else None
    if per_token and size is not None and cost is not None and cost.tokens_per_run:
        size /= cost.tokens_per_run
    unsized = sum(copy.bytes_per_run is None for copy in phase.copies)
    wait = cost.host_wait_us_per_token if cost is not None else None
    for section, name, value in (
        ("copy_count", "copies", None if inside is None else len(phase.copies) + inside),
        ("copy_bytes", "copies of unknown size", None if inside is None else unsized + inside),
        ("copy_bytes", f"bytes copied per {'token' if per_token else 'run'}", size),
        ("figures", "nodes", phase.file_counts.total()),
        ("figures", "nodes added by ONNX Runtime", phase.added_count),
        ("figures", "partitions", len(phase.partitions)),
        ("times", "ms waited per token", None if wait is None else wait / 1e3),
        ("times", "tokens/s", phase.tokens_per_second),
        ("times", "p50 ms per step", phase.step_p50_ms),
    ):
        # An unknown number may be the smallest in the first report, and the largest in the second.
        rank = value if value is not None else math.inf if at else -math.inf
        ranked = rank if section in ("copy_count", "copy_bytes") else None
        spread = {"spread": _spread(phases)} if name in ("tokens/s", "p50 ms per step") else {}
        yield Row(section, phase.name, name, value, rank=ranked, details=spread)


def _spread(phases: Pair) -> str:
    """Whether each run's median step is within the other run's p95; variation between runs is not covered."""
    medians, high = ([getattr(phase, name) for phase in phases] for name in ("step_p50_ms", "step_p95_ms"))
    if min(phase.steps for phase in phases) < 2 or None in (*medians, *high):
        return ""
    return "within" if medians[1] <= high[0] and medians[0] <= high[1] else "beyond"


# Versions, model, request


def _context(report: Report) -> Iterator[tuple[str, Mapping[str, object]]]:
    """Subject, and the values of the run by name, without figures and values that differ in every run."""
    env, request, model = report.environment, report.request, report.model
    own = {"memory_bytes", "onnxruntime_wheels", "onnxruntime_version", "packages"}
    wheels = ", ".join(wheel.name for wheel in env.onnxruntime_wheels)
    versions = {"onnxruntime": env.onnxruntime_version, "onnxruntime_package": wheels}
    yield "environment", {**versions, "partita": report.partita_version, **env.packages, **env.model_dump(exclude=own)}
    chain, other = ",".join(map(short_provider, request.chain)), {"path", "chain", "chain_source", "options", "limits"}
    yield "request", {"chain": chain, "option": request.options, **request.model_dump(exclude=other)}
    yield "chain", {entry.provider: ": ".join(filter(None, (entry.status, entry.reason))) for entry in report.chain}
    yield (
        "checks",
        {
            "checks_failed": "; ".join(check.name for check in report.checks if not check.passed),
            "limits_exceeded": len(report.exceeded_limits) or None,
            "conflicting_sources": len({entry.node for entry in report.conflicts}) or None,
            "rejected": "; ".join(f"{', '.join(part.nodes)} ({part.file})" for part in report.rejected_parts),
        },
    )
    for subject, record, hidden in (
        ("package", report.package, {"verification_detail", "quality"}),
        ("model", model, {"inputs"}),
        ("dry run", report.dry_run, {"stub_build", "not_real"}),
    ):
        values = {} if record is None else record.model_dump(exclude=hidden)
        yield subject, {name: value[:12] if name.endswith("sha256") else value for name, value in values.items()}
    yield "model", {"input": {port.name: port.declared for port in (model.inputs if model is not None else ())}}


def _side(report: Report, name: str) -> Side:
    """Summary of one report."""
    dry = " (dry run)" if report.dry_run is not None else ""
    version = report.environment.onnxruntime_version
    return Side(
        name=name,
        description=f"{report.model_name}, {report.request.verb}{dry}, ONNX Runtime {version}",
        created=report.created,
        failure=report.failure_text,
    )


def _unrelated_reason(
    reports: tuple[Report, Report], phases: Sequence[Pair], rows: Sequence[Sequence[Row]], names: tuple[str, str]
) -> str:
    """Why the reports are not comparable; empty if they are."""
    for name, report in zip(names, reports, strict=True):
        if not report.known_phases:
            return f"{name} has no node in any phase"
    if not phases:
        ours, theirs = (listing(phase.name for phase in report.phases) for report in reports)
        return f"they have no phase in common: {ours} in {names[0]}, {theirs} in {names[1]}"
    first, second = (Counter((row.group, row.keys[0]) for row in side if row.section == "nodes") for side in rows)
    common, largest = (first & second).total(), max(first.total(), second.total())
    files = [each.package.manifest_sha256 if each.package else each.model and each.model.sha256 for each in reports]
    if common >= RELATED * largest or (files[0] is not None and files[0] == files[1]):
        return ""
    share = f"{common} of {plural(largest, 'node')}"
    return f"only {share} have the same name in both reports, so they are of different models"


def _notes(before: Report, after: Report, phases: Sequence[Pair]) -> Iterator[str]:
    """Caveats about the figures."""
    for letter, report in (("A", before), ("B", after)):
        if (reason := report.failure_text) is not None:
            yield f"the run of {letter} failed, so it does not show that its nodes run: {reason}"
    for was, now in phases:
        if was.has_few_steps or now.has_few_steps:
            yield f"{now.name}: {plural(was.steps, 'step')} in A and {now.steps:,} in B: {TOO_FEW}"
        if _tokens_differ((was, now)):
            yield f"{now.name}: the number of new tokens per run differs, so sizes per run are not compared"
    if before.dry_run is not None or after.dry_run is not None:
        yield "times are not compared, because a dry run has none"
        return
    if before.environment.cpu != after.environment.cpu:
        yield "times are not comparable, because the runs were on different processors"
    yield (
        "times are from one run each and vary by some percent, more on a busy machine; repeat both runs before you "
        "rely on a ratio"
    )


def slowdown(before: Report, after: Report) -> tuple[float | None, str]:
    """Relative increase of the time per token (0.1: 10 % more) with its text; None with why it is unknown."""
    was, now = before.main_phase, after.main_phase
    assert was is not None and now is not None
    speeds, rows = (was.tokens_per_second, now.tokens_per_second), (_active_rows(before), _active_rows(after))
    unknown = ""
    if before.environment.cpu != after.environment.cpu:
        unknown = "the runs were on different processors"
    elif was.name != now.name:
        unknown = f"{now.name} here, {was.name} in the baseline"
    elif None not in (was.profiled, now.profiled) and was.profiled is not now.profiled:
        which = "here" if now.profiled else "in the baseline"
        unknown = f"every step of {now.name} was profiled {which}, which slows it down; generate more tokens there"
    elif rows[0] and rows[1] and max(rows) > SAME_ROWS * min(rows):
        unknown = f"{decimals(rows[1])} active rows per step here, {decimals(rows[0])} in the baseline"
    if unknown or not speeds[0] or not speeds[1]:
        return None, unknown or "one of the reports has no speed"
    ratio = speeds[0] / speeds[1]
    speed_text = f"{decimals(speeds[1])} tokens/s, {decimals(speeds[0])} in the baseline"
    return round(ratio - 1, 12), f"{speed_text}: {decimals(ratio)} times the time per token"


def _active_rows(report: Report) -> float:
    """Mean number of active rows in timed decode steps, without accepted draft tokens; 0 without timed steps."""
    phase, drafts = report.main_phase, report.speculation
    if phase is None or phase.name != "decode":
        return 0.0
    tokens, steps = (phase.tokens, phase.steps) if drafts is None else (drafts.tokens - drafts.accepted, drafts.steps)
    return tokens / steps if tokens and steps else 0.0
