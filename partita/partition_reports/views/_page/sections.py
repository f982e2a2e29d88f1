"""The rest of the page, as tables: partitions, copies, nodes, request, cache, memory, checks, sources, environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from partita.partition_reports.fusion import COMPILED
from partita.partition_reports.groups import op_type_of, provider_of
from partita.partition_reports.records import BoundaryTensor, Copy, GroupShare, Phase, Report
from partita.partition_reports.verdict import merge_phases, phase_names
from partita.partition_reports.views._page.marks import find_marks, label_of, node_anchors
from partita.partition_reports.views._page.overview import last_observed
from partita.partition_reports.views._page.reasons import stray_anchor
from partita.partition_reports.views._page.tables import Cell, Link, Row, Table, table
from partita.partition_reports.views._placement import describe_border, say_bodies
from partita.partition_reports.views.text import describe_package, describe_verb
from partita.partition_reports.wording import NOT_KNOWN, decimals, human_bytes, percent, plural

MOST_NAMES = 8
"""Nodes that a cell names."""


def partition_tables(report: Report) -> list[tuple[Table, Table]]:
    """Per placement: the partitions, and which tensors one hands to another."""
    marks = find_marks(report)
    tables = []
    for phases, phase in zip(placements(report), last_observed(report), strict=True):
        where = phase_names(phases)
        rows = [
            (
                str(part.index),
                label_of(marks, part.provider),
                f"{part.nodes:,}",
                span(part.first_position, part.nodes),
                *(describe_border([tensor for tensor in part.boundary if tensor.direction == way])
                  for way in ("in", "out")),
            )
            for part in phase.partitions
        ]  # fmt: skip
        heads = ("#partition", "on", "#nodes", "#positions", "tensors in", "tensors out")
        parts = table(f"Partitions of {where}, in execution order; bytes per run of {phase.name}", heads, rows)
        tables.append((parts, crossing_table(phase, where, report)))
    return tables


def span(first: int, count: int) -> str:
    """`3` or `3-7`."""
    return str(first) if count == 1 else f"{first}-{first + count - 1}"


def placements(report: Report) -> list[list[Phase]]:
    """Phases with nodes, those that share a placement together."""
    return merge_phases(tuple(phase for phase in report.phases if phase.nodes))


def crossing_table(phase: Phase, where: str, report: Report) -> Table:
    """Tensors that one partition hands to another, largest first."""
    marks = find_marks(report)
    names = {str(part.index): f"{part.index} ({label_of(marks, part.provider)})" for part in phase.partitions}
    found: list[tuple[BoundaryTensor, str]] = [
        (tensor, str(part.index))
        for part in phase.partitions
        for tensor in part.boundary
        if tensor.direction == "out" and tensor.other_side != "session"
    ]
    found.sort(key=lambda entry: -(entry[0].size_bytes or 0))
    rows = [
        (tensor.name, names[origin], names.get(tensor.other_side, tensor.other_side), human_bytes(tensor.size_bytes))
        for tensor, origin in found
    ]
    caption = f"Tensors between partitions of {where}; bytes per run of {phase.name}"
    return table(caption, ("tensor", "from partition", "to partition", "#bytes"), rows)


def copy_tables(report: Report) -> list[Table]:
    """Per placement: Memcpy nodes, and inputs and outputs on the wrong side."""
    anchors = node_anchors(report)
    tables = []
    for phases, phase in zip(placements(report), last_observed(report), strict=True):
        if phase.copies:
            targets = {node.name: anchors[phase.name, node.position] for node in phase.nodes}
            rows = [copy_row(copy, targets) for copy in phase.copies]
            heads = ("copy", "tensor", "direction", "#bytes", "#wait and copy, ms", "made necessary by")
            tables.append(table(f"Copies of {phase_names(phases)}; per run of {phase.name}", heads, rows))
    return tables


def copy_row(copy: Copy, targets: Mapping[str, str]) -> tuple[Cell, ...]:
    """One copy. `targets`: ids of the rows of nodes."""
    causes: Cell = copy.cause_unknown and f"not known: {copy.cause_unknown}"
    if copy.caused_by:
        more = f" and {plural(len(copy.caused_by) - 1, 'more node')}" if len(copy.caused_by) > 1 else ""
        said = f"{copy.caused_by[0]}{more}"
        causes = Link(said, targets[copy.caused_by[0]]) if copy.caused_by[0] in targets else said
    kind = "" if copy.kind == "memcpy_node" else f"{copy.kind.replace('_', ' ')}, "
    return (
        copy.name,
        copy.tensor or (NOT_KNOWN if not kind else copy.name),
        f"{kind}{copy.direction.replace('_', ' ')}",
        human_bytes(copy.bytes_per_run),
        decimals(copy.host_us_per_run, 1e-3),
        causes or "the session's border",
    )


def node_tables(report: Report) -> list[Table]:
    """Every node, one table per placement. The map and the timeline lead here."""
    marks = find_marks(report)
    anchors = node_anchors(report)
    strays = stray_anchor(report)
    reasons = {(entry.phase, entry.node): entry.reason for entry in report.fallbacks}
    tables = []
    for phases in placements(report):
        timed = [phase for phase in phases if any(node.host_us_per_run is not None for node in phase.nodes)]
        times = {phase.name: {node.name: node.host_us_per_run for node in phase.nodes} for phase in timed}
        last = phases[-1]
        rows = []
        for node in last.nodes:
            key = (last.name, node.name)
            why: Cell = Link(reasons[key], strays[key]) if key in strays else ""
            rows.append(
                Row(
                    (
                        str(node.position),
                        node.name,
                        op_type_of(node),
                        label_of(marks, provider_of(node)),
                        "" if node.layer is None else str(node.layer),
                        node.module or "",
                        *(decimals(times[phase.name].get(node.name), 1e-3) for phase in timed),
                        human_bytes(node.output_bytes),
                        why,
                        say_replaced(node.op_type, node.replaces),
                    ),
                    anchors[last.name, node.position],
                )
            )
        heads = ["#position", "node", "operator", "on", "#layer", "module"]
        heads += [f"#{phase.name} host ms" for phase in timed]
        caption = f"Nodes of {phase_names(phases)}, in execution order; output bytes of the last run of {last.name}"
        tables.append(table(caption, [*heads, "#output", "reason", "in place of"], rows, name=1))
    return tables


def say_replaced(op_type: str | None, names: Sequence[str]) -> str:
    """The exported nodes that one took the place of."""
    if not names:
        return ""
    more = f", … ({plural(len(names), 'node')})" if len(names) > MOST_NAMES else ""
    made = "compiled from " if op_type == COMPILED else ""
    return made + ", ".join(names[:MOST_NAMES]) + more


def by_operator(phase: Phase) -> tuple[GroupShare, ...]:
    """Shares of the operators."""
    return phase.by_op_type


def by_module(phase: Phase) -> tuple[GroupShare, ...]:
    """Shares of the modules."""
    return phase.by_module


def group_tables(report: Report) -> list[Table]:
    """Nodes and time by operator and by module, phases side by side."""
    phases = [phase for phase in report.phases if phase.nodes]
    marks = find_marks(report)
    tables = []
    for title, pick in (("operator", by_operator), ("module", by_module)):
        by_phase = [{entry.name: entry for entry in pick(phase)} for phase in phases]
        names = dict.fromkeys(name for groups in reversed(by_phase) for name in groups)
        rows = []
        for name in names:
            entries = [groups.get(name) for groups in by_phase]
            counts = " / ".join(dict.fromkeys(str(entry.nodes) if entry else "0" for entry in entries))
            first = next(entry for entry in entries if entry)
            where = ", ".join(f"{label_of(marks, key)} {count}" for key, count in first.nodes_by_provider.items())
            cells = [name, counts, where]
            for entry in entries if report.dry_run is None else ():
                cells.append(decimals(entry.host_us_per_run, 1e-3) if entry else NOT_KNOWN)
                cells.append(percent(entry.time_share) if entry else NOT_KNOWN)
            rows.append(tuple(cells))
        heads = [title, "#nodes", "on"]
        for phase in phases if report.dry_run is None else ():
            heads += [f"#{phase.name} ms", "#share"]
        tables.append(table(f"By {title}; host time per run", heads, rows))
    return tables


def request_table(report: Report) -> Table:
    """What was asked for."""
    request = report.request
    rows: list[tuple[str, str]] = [*describe_package(report), ("verb", describe_verb(request))]
    rows.append(("chain", f"{', '.join(request.chain) or 'none'} ({request.chain_source})"))
    rows.append(("threads", "ONNX Runtime's choice" if request.threads is None else str(request.threads)))
    if request.prefill_chunk_tokens is not None:
        rows.append(("prefill", f"in chunks of {request.prefill_chunk_tokens} tokens"))
    if request.options:
        rows.append(("options", ", ".join(f"{name}={value}" for name, value in request.options.items())))
    if request.limits:
        rows.append(("limits", ", ".join(f"{name} {value:,}" for name, value in request.limits.items())))
    return table("Request", ("what", "value"), joined(rows))


def joined(rows: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Rows without a name added to the one before, so that every row of a table has a heading."""
    whole: list[tuple[str, str]] = []
    for name, value in rows:
        if name or not whole:
            whole.append((name, value))
        else:
            whole[-1] = (whole[-1][0], f"{whole[-1][1]}; {value}")
    return whole


def chain_table(report: Report) -> Table:
    """What became of each provider of the chain."""
    rows = [
        (entry.provider, entry.status, entry.reason or "", entry.evidence or "", entry.remedy or "")
        for entry in report.chain
    ]
    return table("Provider chain", ("provider", "status", "reason", "evidence", "remedy"), rows)


def cache_table(report: Report) -> Table | None:
    """Every state buffer."""
    if report.cache is None or not report.cache.states:
        return None
    rows = [
        (
            entry.name,
            entry.kind,
            entry.memory,
            human_bytes(entry.size_bytes),
            "yes" if entry.in_place else "NO",
        )
        for entry in report.cache.entries
    ]
    return table("States of the KV cache", ("state", "kind", "memory", "#size", "in place"), rows)


def memory_table(report: Report) -> Table:
    """Memory of model and process."""
    memory = report.memory
    rows = [("weights", human_bytes(memory.weight_bytes))]
    if report.cache is not None:
        rows.append(("KV cache", human_bytes(memory.cache_bytes)))
    for name, size in (
        ("process before loading", memory.rss_before_load_bytes),
        ("process after loading", memory.rss_after_load_bytes),
        ("process at its peak", memory.peak_rss_bytes),
    ):
        rows.append((name, human_bytes(size)))
    return table("Memory; that of the process is resident memory", ("what", "#size"), rows)


def totals_table(report: Report) -> Table | None:
    """Loading, first token, and how it ended."""
    totals = report.totals
    if totals is None:
        return None
    first = "no token came" if totals.first_token_seconds is None else f"{decimals(totals.first_token_seconds)} s"
    ended = totals.finish_reason + (f" ({totals.finish_detail})" if totals.finish_detail else "")
    rows = [
        ("session load", f"{decimals(totals.session_load_seconds)} s"),
        ("tokenizer load", f"{decimals(totals.tokenizer_load_seconds)} s"),
        ("first token, after prefill began", first),
        ("tokens", f"{totals.prompt_tokens:,} prompt, {totals.new_tokens:,} new"),
        ("finish", ended),
    ]
    return table("The whole run", ("what", "value"), rows)


def environment_table(report: Report) -> Table:
    """Machine and software."""
    env = report.environment
    rows = [
        ("machine", f"{env.cpu}, {plural(env.logical_cores, 'logical core')}, {human_bytes(env.memory_bytes)}"),
        ("system", f"{env.operating_system}, Python {env.python}"),
        ("ONNX Runtime", f"{env.onnxruntime_package} {env.onnxruntime_version} ({env.onnxruntime_build})"),
        ("packages", ", ".join(f"{name} {version}" for name, version in env.packages.items())),
        ("Partita", f"{report.partita_version}, report of {report.created}"),
    ]
    return table("Environment", ("what", "value"), rows)


def dry_run_table(report: Report) -> Table | None:
    """The device that was played, and what is therefore not real."""
    played = report.dry_run
    if played is None:
        return None
    rows = [
        (
            "device",
            f"{played.device_name} ({played.device}): compute capability {played.compute_capability}, "
            f"{human_bytes(played.memory_bytes)}, {plural(played.multiprocessors, 'multiprocessor')}",
        ),
        ("provider", f"{played.provider_library} of ONNX Runtime {played.onnxruntime_version}, the real one"),
        ("stand-ins", f"CUDA {played.cuda_version}, build {played.stand_ins[:12]}"),
        *(("not real", text) for text in played.not_real),
    ]
    for verdict in played.graph_capture or ():
        answer = "would be accepted" if verdict.accepted else "REFUSED"
        rows.append((f"CUDA graph of {verdict.file}", f"{answer} ({verdict.evidence})"))
        rows += [
            (f"in its way: {node.node}", f"{node.op_type or 'unknown'} on {node.provider}: {node.why}")
            for node in verdict.blocking
        ]
    return table("Dry run", ("what", "value"), rows)


def check_table(report: Report) -> Table:
    """What has to add up, failed checks first."""
    ranked = sorted(report.checks, key=lambda check: check.passed)
    rows = [(check.name, "passed" if check.passed else "FAILED", check.detail) for check in ranked]
    return table("Checks", ("check", "result", "detail"), rows)


def source_table(report: Report) -> Table:
    """What each source saw."""
    rows = [
        (entry.source.replace("_", " "), "yes" if entry.available else "NO", entry.covers, entry.limits)
        for entry in report.sources
    ]
    return table("Sources", ("source", "available", "what it saw", "what it cannot see"), rows)


def disagreement_table(report: Report) -> Table | None:
    """Nodes on which sources differ."""
    if not report.disagreements:
        return None
    rows = [
        (entry.node, entry.phase, entry.detail, ", ".join(source.replace("_", " ") for source in entry.sources))
        for entry in report.disagreements
    ]
    return table("Disagreements between sources", ("node", "phase", "detail", "sources"), rows)


def rejected_table(report: Report) -> Table | None:
    """Parts of the graph that a provider does not open."""
    if not report.rejected:
        return None
    rows = [
        (
            part.file,
            part.provider,
            ", ".join(part.nodes[:MOST_NAMES]) + (f", … ({plural(len(part.nodes), 'node')})" if len(part.nodes) >
            MOST_NAMES else ""),
            part.evidence,
            "yes" if part.minimal else "not shown: the time was up",
            f"{part.tries:,}",
        )
        for part in report.rejected
    ]  # fmt: skip
    heads = ("file", "provider", "smallest part that it does not open", "evidence", "minimal", "#tries")
    return table("Parts that were refused, found by bisection", heads, rows)


def body_lines(report: Report) -> list[str]:
    """What is in the bodies of If, Loop and Scan."""
    return [
        f"Bodies of control flow in {phase_names(phases)}, in no other figure: {say_bodies(phases[0].bodies)}"
        for phases in placements(report)
        if phases[0].bodies is not None
    ]


def probing_line(report: Report) -> str:
    """What the experiments took."""
    taken = report.probing
    if taken is None:
        return ""
    said = f"{plural(taken.experiments, 'experiment')} in {decimals(taken.seconds)} s of at most "
    said += f"{decimals(taken.budget_seconds)} s, {taken.cached} known from before, crashes: {taken.crashes}"
    if taken.unprobed:
        said += f"; incomplete for {plural(len(taken.unprobed), 'node')}"
    return f"{said}."
