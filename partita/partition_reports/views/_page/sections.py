"""The rest of the page, as tables: request, chain, cache, memory, environment, checks, sources, refused parts."""

from __future__ import annotations

from collections.abc import Sequence

from partita.partition_reports.records import Report
from partita.partition_reports.views._page.tables import Table, table
from partita.partition_reports.views.text import describe_package, describe_verb
from partita.partition_reports.wording import decimals, human_bytes, plural

MOST_NAMES = 8
"""Nodes that a cell names."""


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
