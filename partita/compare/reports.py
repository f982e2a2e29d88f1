"""Comparison of two reports: nodes, reasons, copies, figures, versions and request. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from partita.compare.document import report_headline
from partita.compare.rows import Comparison, Row, Rule, Side, compare_rows, is_more
from partita.diagnosis.records import Fallback, SkippedProvider
from partita.observations.text_format import listing, plural, short_provider
from partita.partition_reports.groups import added_nodes, file_counts, is_memcpy, provider_of, ran_by, report_rows
from partita.partition_reports.outcome import (
    TOO_FEW,
    active_of,
    cache_text,
    failure_of,
    is_in_place,
    is_known,
    preferred_of,
    status_of,
    too_few_steps,
)
from partita.partition_reports.placement import subgraph_copies
from partita.partition_reports.records import Copy, FileNode, NodePlacement, Phase, Report

RELATED = 0.5
"""Minimum share of common node names, relative to the larger report, for reports of one model."""
COUNTER = re.compile(r"_\d+$")
DIGITS = re.compile(r"\d+")
Phases = Sequence[tuple[Phase, Phase]]


def compare(before: Report, after: Report, *, names: tuple[str, str] = ("A", "B")) -> Comparison:
    """Differences of `after` from `before`. `names`: names of the two reports."""
    later = {phase.name: phase for phase in after.phases}
    phases = [(phase, later[phase.name]) for phase in before.phases if phase.name in later]
    changes, equal = compare_rows(
        _rows(before, after, [was for was, _ in phases], phases),
        _rows(after, before, [now for _, now in phases], phases),
        _rules(before, after),
    )
    found = Comparison(
        kind="report",
        headline="",
        before=_side(before, names[0]),
        after=_side(after, names[1]),
        unrelated_reason=_unrelated_reason(before, after, phases, names),
        same=not any(change.section in COUNTED for change in changes),
        changes=changes,
        equal_rows=equal,
        notes=tuple(_notes(before, after, phases)),
    )
    nodes: dict[str, int] = {now.name: file_counts(now).total() for _, now in phases}
    return found.model_copy(update={"headline": report_headline(found, nodes)})


COUNTED = ("phases", "outcome", "nodes", "reasons", "copies", "copy_count")
"""Sections that make two reports differ."""


def _rules(before: Report, after: Report) -> Mapping[str, Rule]:
    """Comparison rule of each section, in the order of the document."""
    same_preferred = preferred_of(before) == preferred_of(after)
    active = active_of(after)

    def is_lower(was: Row | None, now: Row | None) -> bool:
        if was is None or now is None or not same_preferred:
            return False
        return is_less_preferred(before, after, was.source.node.provider, now.source.node.provider)

    def explain(was: Row | None, now: Row | None) -> Mapping[str, str | None]:
        shown = now or was
        assert shown is not None
        node, reason = shown.source.node, None if now is None else now.source.reason(was, active)
        return {
            "operator": node.op_type or (was.source.node.op_type if was is not None else None),
            "module": node.module,
            "part_of": shown.source.part_of,
            "former_name": was.name if was and now and was.name != now.name and not shown.source.is_added else None,
            **_reason_details(reason),
        }

    return {
        "preferred_provider": Rule(is_worse=lambda was, now: not same_preferred),
        "phases": Rule(is_worse=lambda was, now: bool(was and now and set(was.source) - set(now.source))),
        "outcome": Rule(),
        "context": Rule(),
        "cache": Rule(is_worse=_is_cache_lost),
        "nodes": Rule(is_worse=is_lower, details=explain),
        "reasons": Rule(is_worse=lambda was, now: was is None, details=_explain_reason),
        "copies": Rule(details=_describe_copy),
        "copy_count": Rule(is_worse=is_more),
        "copy_bytes": Rule(is_worse=is_more),
        "figures": Rule(),
        "times": Rule(details=_spread),
    }


def is_less_preferred(before: Report, after: Report, was: str | None, now: str | None) -> bool:
    """Whether provider `now` is less preferred than `was`: by a chain with both, else by their positions in their own
    chains. An unknown provider (None) is less preferred than any other.
    """
    if was is None or now is None:
        return was is not None
    first, second = ([entry.provider for entry in report.chain] for report in (before, after))
    for chain in (second, first):
        if was in chain and now in chain:
            return chain.index(now) > chain.index(was)
    ranks = (chain.index(name) if name in chain else len(chain) for chain, name in ((second, now), (first, was)))
    return next(ranks) > next(ranks)


def _is_cache_lost(was: Row | None, now: Row | None) -> bool:
    """Whether the cache was in place and is not known to be any more."""
    return was is not None and was.source is True and (now is None or now.source is not True)


def _rows(report: Report, other: Report, own: Sequence[Phase], phases: Phases) -> Iterator[Row]:
    """Every row of one report. `other`: the other report; `own`: common phases of this report; `phases`: of both."""
    yield Row("preferred_provider", "request", "preferred_provider", preferred_of(report))
    names = [phase.name for phase in report.phases]
    yield Row("phases", "request", "phases", ", ".join(names), source=names)
    yield Row("outcome", "outcome", "run", "completed" if failure_of(report) is None else "failed")
    for group, values in _context(report).items():
        yield from (Row("context", group, name, str(text)) for name, text in values.items() if text is not None)
    if report.cache is not None:
        text = "no cache" if status_of(report.cache) == "no_cache" else cache_text(report.cache)
        yield Row("cache", "cache", "cache", text, source=is_in_place(report.cache))
    pairs = compared_providers(report, other)
    for phase, (was, now) in zip(own, phases, strict=True):
        rows = placed_rows(report, phase)
        for row in rows:
            yield Row("nodes", phase.name, row.node.name, row.node.provider, row.keys(), row)
        yield from _reason_rows(report, phase, rows, pairs)
        yield from _copy_rows(phase, compare_sizes=not _tokens_differ(was, now))
        per_token = all(each.cost is not None and each.cost.tokens_per_run for each in (was, now))
        yield from _figure_rows(phase, per_token=per_token)


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

    def reason(self, was: Row | None, active: Sequence[str]) -> SkippedProvider | None:
        """Why it is not on its former provider, or else on the first available preferred provider."""
        left = self.skipped.get(str(was.value)) if was is not None else None
        return left or (self.fallbacks[-1].first_active(active) if self.fallbacks else None)


def placed_rows(report: Report, phase: Phase, *, memcpy: bool = False) -> list[PlacedRow]:
    """The rows of a phase: file nodes that were not folded, then added nodes; Memcpy nodes only with `memcpy`."""
    executed = {node.name: node for node in phase.nodes}
    fallbacks = {(entry.node, entry.provider): entry for entry in report.fallbacks if entry.phase == phase.name}
    rows = []
    for node in report_rows(phase):
        if isinstance(node, NodePlacement) and is_memcpy(node) and not memcpy:
            continue
        names = node.ran_as if isinstance(node, FileNode) else (node.name,)
        homes = [(name, provider_of(executed.get(name, node))) for name in names]
        rows.append(
            PlacedRow(
                node=node,
                executed=tuple(executed[name] for name in names if name in executed),
                fallbacks=tuple(fallbacks[home] for home in homes if home in fallbacks),
            )
        )
    return rows


def compared_providers(report: Report, other: Report) -> Mapping[str, str]:
    """Provider -> its key, for reasons: providers in both chains, and the two preferred ones if neither is in both."""
    ours, theirs = ([entry.provider for entry in each.chain] for each in (report, other))
    found = {name: name for name in ours if name in theirs}
    if ours and theirs and ours[0] not in theirs and theirs[0] not in ours:
        found[ours[0]] = ""
    return found


def _reason_rows(
    report: Report, phase: Phase, rows: Sequence[PlacedRow], providers: Mapping[str, str]
) -> Iterator[Row]:
    """A row for each node and skipped provider; nodes in control-flow subgraphs follow."""
    placed = {id(entry) for row in rows for entry in row.fallbacks}
    named = [(row.node.name, row.keys(), row.skipped, row.fallbacks[-1]) for row in rows if row.fallbacks]
    memcpy = {node.name for node in phase.nodes if is_memcpy(node)}
    for entry in report.fallbacks:
        if entry.phase == phase.name and id(entry) not in placed and entry.node not in memcpy:
            skipped = {each.provider: each for each in entry.preferred}
            named.append((entry.node, (("subgraph", entry.node),), skipped, entry))
    for name, keys, skipped, fallback in named:
        for provider, reason in skipped.items():
            if provider in providers:
                own = tuple((key, providers[provider]) for key in keys)
                yield Row("reasons", phase.name, name, reason.reason, own, (fallback, reason))


def _explain_reason(was: Row | None, now: Row | None) -> Mapping[str, str | None]:
    shown = now or was
    assert shown is not None
    fallback, reason = shown.source
    skipped = "" if reason.provider == fallback.preferred_provider else reason.provider
    details = {"provider": fallback.provider, "skipped": skipped, **_reason_details(reason)}
    return {**details, "reason": None, "remedy": details["remedy"] if now is not None else None}


def _reason_details(why: SkippedProvider | None) -> Mapping[str, str | None]:
    if why is None:
        return {}
    return {"reason": why.reason, "evidence": why.evidence, "evidence_kind": why.evidence_kind, "remedy": why.remedy}


# Copies and figures


def _tokens_differ(was: Phase, now: Phase) -> bool:
    """Whether the numbers of tokens per run differ, so that sizes per run are not comparable."""
    counts = [phase.cost.tokens_per_run if phase.cost else None for phase in (was, now)]
    return None not in counts and counts[0] != counts[1]


def _copy_rows(phase: Phase, *, compare_sizes: bool) -> Iterator[Row]:
    """A row for each copy. Key: the session input or output; the tensor, cause or size of a Memcpy node."""
    behind = {name: frozenset(row.name for row in rows) for name, rows in ran_by(phase).items()}
    for copy in phase.copies:
        causes = frozenset(name for cause in copy.caused_by for name in behind.get(cause, {cause}))
        keys: list[Hashable] = [(copy.kind, copy.name)]
        if copy.kind == "memcpy_node":
            keys = [(copy.direction, key) for key in (copy.tensor, causes) if key]
        size = copy.bytes_per_run if compare_sizes else None
        yield Row("copies", phase.name, copy.tensor or copy.name, size, tuple(keys) or ((copy.direction, size),), copy)


def _describe_copy(was: Row | None, now: Row | None) -> Mapping[str, str | None]:
    copy: Copy = (now or was).source  # type: ignore[union-attr]
    return {
        "direction": copy.direction,
        "border": None if copy.kind == "memcpy_node" else copy.kind,
        "caused_by": ", ".join(copy.caused_by),
    }


def _figure_rows(phase: Phase, *, per_token: bool) -> Iterator[Row]:
    """Counts, sizes and times. Copied bytes: known sizes in the main graph, per token or per run."""
    inside, cost = subgraph_copies(phase), phase.cost
    known: float | None = cost.copy_bytes_at_least if cost is not None else None
    if per_token and known is not None and cost is not None and cost.tokens_per_run:
        known /= cost.tokens_per_run
    unsized = sum(copy.bytes_per_run is None for copy in phase.copies)
    figures: dict[str, Mapping[str, float | None]] = {
        "copy_count": {"copies": None if inside is None else len(phase.copies) + inside},
        "copy_bytes": {
            "copies_of_unknown_size": None if inside is None else unsized + inside,
            "copy_bytes_per_token" if per_token else "copy_bytes_per_run": known,
        },
        "figures": {
            "nodes": file_counts(phase).total(),
            "added": added_nodes(phase),
            "partitions": len(phase.partitions),
        },
        "times": {
            "host_wait_us_per_token": cost.host_wait_us_per_token if cost is not None else None,
            "tokens_per_second": phase.tokens_per_second,
            "step_p50_ms": phase.step_p50_ms,
        },
    }
    for section, values in figures.items():
        yield from (Row(section, phase.name, name, value, source=phase) for name, value in values.items())


def _spread(was: Row | None, now: Row | None) -> Mapping[str, str | None]:
    """Whether each run's median step is within the other run's p95; variation between runs is not covered."""
    if was is None or now is None or now.name == "host_wait_us_per_token":
        return {}
    ours, theirs = was.source, now.source
    steps = (ours.step_p50_ms, theirs.step_p50_ms, ours.step_p95_ms, theirs.step_p95_ms)
    if min(ours.steps, theirs.steps) < 2 or None in steps:
        return {}
    return {"spread": "within" if steps[1] <= steps[2] and steps[0] <= steps[3] else "beyond"}


# Versions, model, request


def _context(report: Report) -> Mapping[str, Mapping[str, object]]:
    """Subject -> name -> value of the run, without figures and values that differ in every run."""
    env, request = report.environment, report.request
    found: dict[str, Mapping[str, object]] = {
        "environment": {
            "onnxruntime": env.onnxruntime_version,
            "onnxruntime_package": ", ".join(wheel.name for wheel in env.onnxruntime_wheels),
            "onnxruntime_build": env.onnxruntime_build,
            **env.packages,
            "partita": report.partita_version,
            "python": env.python,
            "operating_system": env.operating_system,
            "processor": env.cpu,
            "logical_cores": env.logical_cores,
        }
    }
    if (package := report.package) is not None:
        names = {"name", "model_type", "attention", "precision", "batch_size", "max_length", "verification"}
        found["package"] = {"manifest_sha256": package.manifest_sha256[:12], **package.model_dump(include=names)}
    if (model := report.model) is not None:
        found["model"] = {
            "file": model.file,
            "sha256": model.sha256[:12],
            "ir_version": model.ir_version,
            **{f"opset {domain or 'ai.onnx'}": version for domain, version in model.opsets.items()},
            "nodes": model.nodes,
            **{f"input {port.name}": port.declared for port in model.inputs},
        }
    found["request"] = {
        "chain": ",".join(short_provider(name) for name in request.chain),
        **{f"option {name}": value for name, value in request.options.items()},
        **request.model_dump(
            include={"verb", "threads", "prompt_tokens", "max_new_tokens", "prefill_chunk_tokens", "runs"}
        ),
    }
    found["chain"] = {
        entry.provider: f"{entry.status}{f': {entry.reason}' if entry.reason else ''}" for entry in report.chain
    }
    if (dry_run := report.dry_run) is not None:
        found["dry_run"] = {
            "device": dry_run.device,
            "provider_library": f"{dry_run.provider_library} of ONNX Runtime {dry_run.onnxruntime_version}",
            "cuda_version": dry_run.cuda_version,
        }
    failed = [check.name for check in report.checks if not check.passed]
    rejected = [f"{', '.join(part.nodes)} ({part.file})" for part in report.rejected_parts]
    found["checks"] = {
        "checks_failed": "; ".join(failed) or None,
        "limits_exceeded": len(report.exceeded_limits) or None,
        "conflicting_sources": len({entry.node for entry in report.conflicts}) or None,
        "rejected": "; ".join(rejected) or None,
    }
    return found


def _side(report: Report, name: str) -> Side:
    """Summary of one report."""
    package, model = report.package, report.model
    what = package.name if package is not None else model.file if model is not None else "unknown"
    dry = " (dry run)" if report.dry_run is not None else ""
    version = report.environment.onnxruntime_version
    return Side(
        name=name,
        description=f"{what}, {report.request.verb}{dry}, ONNX Runtime {version}",
        created=report.created,
        failure=failure_of(report),
    )


def _unrelated_reason(before: Report, after: Report, phases: Phases, names: tuple[str, str]) -> str:
    """Why the reports are not comparable; empty if they are."""
    for name, report in zip(names, (before, after), strict=True):
        if not any(map(is_known, report.phases)):
            return f"{name} has no node in any phase"
    if not phases:
        ours, theirs = (listing(phase.name for phase in report.phases) for report in (before, after))
        return f"they have no phase in common: {ours} in {names[0]}, {theirs} in {names[1]}"
    shared = []
    for was, now in phases:
        first, second = (Counter(row.keys()[0] for row in placed_rows(*each)) for each in ((before, was), (after, now)))
        shared.append(((first & second).total(), max(first.total(), second.total()), now.name))
    common, largest, phase = max(shared, key=lambda entry: entry[0] / max(entry[1], 1))
    if common >= RELATED * largest or _is_same_file(before, after):
        return ""
    share = f"{common} of {plural(largest, 'node')} in {phase}"
    return f"only {share} have the same name in both reports, so they are of different models"


def _is_same_file(before: Report, after: Report) -> bool:
    """Whether both ran the same package or ONNX file."""
    if before.package is not None and after.package is not None:
        return before.package.manifest_sha256 == after.package.manifest_sha256
    return before.model is not None and after.model is not None and before.model.sha256 == after.model.sha256


def _notes(before: Report, after: Report, phases: Phases) -> Iterator[str]:
    """Caveats about the figures."""
    for letter, report in (("A", before), ("B", after)):
        if (reason := failure_of(report)) is not None:
            yield f"the run of {letter} failed, so it does not show that its nodes run: {reason}"
    for was, now in phases:
        if too_few_steps(was) or too_few_steps(now):
            yield f"{now.name}: {plural(was.steps, 'step')} in A and {now.steps:,} in B: {TOO_FEW}"
        if _tokens_differ(was, now):
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
