"""The report for a terminal: the verdict first, then what stands behind it. No figure is made here, only arranged."""

from __future__ import annotations

from rich.console import Console

from partita.partition_reports.records import DryRunFacts, ModelInput, Report, Request, Totals
from partita.partition_reports.verdict import give_verdict
from partita.partition_reports.views._placement import show_copies, show_fallbacks, show_partitions, show_placement
from partita.partition_reports.views._tables import ALARM, BOLD, ROWS, Column, Page, to_plain_text
from partita.partition_reports.views.base import View
from partita.partition_reports.wording import decimals, human_bytes, listing, plural


def render(report: Report, console: Console) -> None:
    """Print the report to `console`, at its width; readable at 80 columns and without colour."""
    page = Page(console)
    show_verdict(page, report)
    show_request(page, report)
    show_phases(page, report)
    show_placement(page, report)
    show_partitions(page, report)
    show_copies(page, report)
    show_fallbacks(page, report)
    show_cache(page, report)
    show_memory(page, report)
    show_environment(page, report)
    show_checks(page, report)
    show_sources(page, report)
    show_notes(page, report)


def to_text(report: Report) -> str:
    """The same without colour, for a file."""
    return to_plain_text(lambda console: render(report, console))


def show_verdict(page: Page, report: Report) -> None:
    """What ran, whether it is verified, and the verdict."""
    package = report.package
    if report.dry_run is not None:
        page.line(banner(report.dry_run), indent=0, style=ALARM)
    if package is not None and package.verification != "verified":
        page.line(f"UNVERIFIED PACKAGE: {package.verification_detail}", indent=0, style=ALARM)
    page.line(give_verdict(report), indent=0, style=BOLD)
    for sentence in report.exceeded:
        page.line(f"EXCEEDED {sentence}", indent=0, style=ALARM)


def banner(played: DryRunFacts) -> str:
    """What no reader of a dry run may overlook."""
    return (
        f"DRY RUN: no {played.device_name} was used. Placement, copies and sizes are those of "
        f"{played.provider_library} of ONNX Runtime {played.onnxruntime_version} over stand-in CUDA libraries; "
        "there are no times."
    )


def show_request(page: Page, report: Report) -> None:
    """Package, request and what became of each provider of the chain."""
    request = report.request
    page.heading("Request")
    rows = [*describe_package(report), ("verb", describe_verb(request))]
    rows.append(("chain", f"{', '.join(request.chain) or 'none'} ({request.chain_source})"))
    for entry in report.chain:
        why = (
            f": {entry.reason or 'no reason known'}; {entry.evidence or 'no evidence'}"
            if entry.status != "active"
            else ""
        )
        rows.append(("", f"{entry.provider} {entry.status}{why}"))
        if entry.remedy:
            rows.append(("", f"remedy: {entry.remedy}"))
    threads = "ONNX Runtime's choice" if request.threads is None else str(request.threads)
    chunks = request.prefill_chunk_tokens
    rows.append(("threads", threads if chunks is None else f"{threads}; prefill in chunks of {chunks} tokens"))
    if request.options:
        rows.append(("options", ", ".join(f"{name}={value}" for name, value in request.options.items())))
    if request.limits:
        rows.append(("limits", ", ".join(f"{name} {value:,}" for name, value in request.limits.items())))
    page.pairs(rows)


def describe_package(report: Report) -> list[tuple[str, str]]:
    """What was run: the package, or the ONNX file and its inputs."""
    package, model = report.package, report.model
    rows: list[tuple[str, str]] = []
    if package is not None:
        rows += [
            ("package", f"{package.name}: {package.model_type}, {package.precision}, attention {package.attention}"),
            (
                "",
                f"batch {package.batch_size}, max length {package.max_length}, manifest {package.manifest_sha256[:12]}",
            ),
            ("package is", f"{package.verification}: {package.verification_detail}"),
        ]
    if model is not None:
        opsets = ", ".join(f"{domain or 'ai.onnx'} {version}" for domain, version in model.opsets.items())
        data = f", weights in {', '.join(model.data_files)}" if model.data_files else ""
        rows += [
            ("model", f"{model.file}: {plural(model.nodes, 'node')}, opset {opsets}, sha256 {model.sha256[:12]}{data}"),
            ("inputs", ", ".join(describe_input(port) for port in model.inputs) or "none"),
        ]
    return rows


def describe_input(port: ModelInput) -> str:
    """An input as it was given."""
    return f"{port.name} {port.dtype}[{','.join(map(str, port.shape))}]"


def describe_verb(request: Request) -> str:
    """The verb, and how much it was asked to do."""
    parts = [request.verb]
    if request.prompt_tokens is not None:
        parts.append(plural(request.prompt_tokens, "prompt token"))
    if request.max_new_tokens is not None:
        parts.append(f"up to {request.max_new_tokens} new ones")
    if request.runs is not None:
        parts.append(f"{plural(request.runs, 'run')} per phase on generated inputs")
    return ", ".join(parts)


def show_phases(page: Page, report: Report) -> None:
    """Speed per phase, and the times around it."""
    page.heading("Phases")
    if report.dry_run is not None:
        for phase in report.phases:
            page.line(f"{phase.name}: {plural(phase.observed_runs, 'run')}; {phase.timing_note}.")
        show_dry_run(page, report.dry_run)
        return
    rows = [
        (
            phase.name,
            f"{phase.steps:,}",
            f"{phase.tokens:,}",
            decimals(phase.seconds),
            decimals(phase.tokens_per_second),
            decimals(phase.step_p50_ms),
            decimals(phase.step_p95_ms),
            decimals(phase.step_p99_ms),
            decimals(phase.overhead_p50_ms),
        )
        for phase in report.phases
    ]
    titles = ("steps", "tokens", "seconds", "tok/s", "p50 ms", "p95 ms", "p99 ms", "outside ms")
    page.table((Column("phase", False), *(Column(title) for title in titles)), rows)
    page.line("Milliseconds are per step, percentiles linear between ranks; outside: median outside the session run.")
    for phase in report.phases:
        page.line(f"{phase.name}: {phase.timing_note}.")
    if report.totals is not None:
        show_totals(page, report.totals)


def show_dry_run(page: Page, played: DryRunFacts) -> None:
    """The device that was played, what is not real, and whether CUDA graphs would be captured."""
    page.heading("Dry run")
    page.pairs(
        [
            (
                "device",
                f"{played.device_name} ({played.device}): compute capability {played.compute_capability}, "
                f"{human_bytes(played.memory_bytes)}, {played.multiprocessors} multiprocessors",
            ),
            ("provider", f"{played.provider_library} of ONNX Runtime {played.onnxruntime_version}, the real one"),
            ("stand-ins", f"CUDA {played.cuda_version}, build {played.stand_ins[:12]}"),
            *(("not real" if number == 0 else "", text) for number, text in enumerate(played.not_real)),
        ]
    )
    for verdict in played.graph_capture or ():
        answer = "would be accepted" if verdict.accepted else "REFUSED"
        page.line(f"CUDA graph capture of {verdict.file}: {answer} ({verdict.evidence})", style=BOLD)
        for node in verdict.blocking[:ROWS]:
            page.line(f"{node.node} ({node.op_type or 'unknown'}) on {node.provider}: {node.why}", indent=4)
        if len(verdict.blocking) > ROWS:
            page.line(f"and {plural(len(verdict.blocking) - ROWS, 'more node')}", indent=4)


def show_totals(page: Page, totals: Totals) -> None:
    """Loading, first token, and how a generation ended."""
    first = "no token came" if totals.first_token_seconds is None else f"{decimals(totals.first_token_seconds)} s"
    session, tokenizer = decimals(totals.session_load_seconds), decimals(totals.tokenizer_load_seconds)
    ended = totals.finish_reason + (f" ({totals.finish_detail})" if totals.finish_detail else "")
    page.pairs(
        [
            ("load", f"session {session} s, tokenizer {tokenizer} s"),
            ("first token", f"{first} after prefill began"),
            ("tokens", f"{totals.prompt_tokens:,} prompt, {totals.new_tokens:,} new; finish: {ended}"),
        ]
    )


def show_cache(page: Page, report: Report) -> None:
    """Where the cache lived, and which states did not stay in place."""
    cache = report.cache
    if cache is None or not cache.states:
        return
    page.heading("KV cache")
    where = ", ".join(f"{human_bytes(size)} on {memory}" for memory, size in cache.memories.items())
    page.line(f"{plural(cache.states, 'state')}, {where}")
    if cache.checked_steps == 0:
        page.line("No step was observed, so nothing shows whether it stayed in place.")
        return
    steps = (
        "every observed step"
        if cache.checked_steps is None
        else f"each of {plural(cache.checked_steps, 'observed step')}"
    )
    page.line(
        f"{cache.in_place_states} of {cache.states} in place (past and present at one address "
        f"at {steps}), {plural(cache.address_changes, 'address change')}"
    )
    moved = [entry.name for entry in cache.entries if not entry.in_place]
    if moved:
        more = f" and {len(moved) - ROWS} more" if len(moved) > ROWS else ""
        page.line(f"NOT in place: {', '.join(moved[:ROWS])}{more}", style=ALARM)


def show_memory(page: Page, report: Report) -> None:
    """Memory of package and process."""
    memory = report.memory
    page.heading("Memory")
    sizes = (memory.rss_before_load_bytes, memory.rss_after_load_bytes, memory.peak_rss_bytes)
    before, after, peak = (human_bytes(size) for size in sizes)
    held = f"weights {human_bytes(memory.weight_bytes)}"
    if report.cache is not None:
        held += f", cache {human_bytes(memory.cache_bytes)}"
    if memory.peak_rss_bytes is None:
        page.pairs([("model", held)])
        return
    page.pairs(
        [
            ("package" if report.package else "model", held),
            ("process", f"{before} before load, {after} after load, {peak} at its peak (resident)"),
        ]
    )


def show_environment(page: Page, report: Report) -> None:
    """Machine and software."""
    env = report.environment
    page.heading("Environment")
    page.pairs(
        [
            ("machine", f"{env.cpu}, {plural(env.logical_cores, 'logical core')}, {human_bytes(env.memory_bytes)}"),
            ("system", f"{env.operating_system}, Python {env.python}"),
            ("runtime", f"{env.onnxruntime_package} {env.onnxruntime_version} ({env.onnxruntime_build})"),
            ("packages", ", ".join(f"{name} {version}" for name, version in env.packages.items())),
            ("partita", f"{report.partita_version}, report of {report.created}"),
        ]
    )


def show_checks(page: Page, report: Report) -> None:
    """Failed checks one by one, passed ones as a count; then the nodes on which sources disagree."""
    failed = [check for check in report.checks if not check.passed]
    passed = len(report.checks) - len(failed)
    page.heading("Checks")
    page.line(f"{passed} of {plural(len(report.checks), 'check')} passed")
    for check in failed:
        page.line(f"FAILED {check.name}: {check.detail}", style=ALARM)
    phases: dict[tuple[str, str], list[str]] = {}
    for entry in report.disagreements:
        phases.setdefault((entry.node, entry.detail), []).append(entry.phase)
    for (node, detail), names in list(phases.items())[:ROWS]:
        page.line(f"sources disagree in {listing(names)} on {node}: {detail}")
    if len(phases) > ROWS:
        page.line(f"and on {plural(len(phases) - ROWS, 'more node')}")


def show_sources(page: Page, report: Report) -> None:
    """What each source saw, and what it cannot see."""
    page.heading("Sources")
    rows: list[tuple[str, str]] = []
    for entry in report.sources:
        rows.append((entry.source, entry.covers if entry.available else f"NOT AVAILABLE: {entry.covers}"))
        rows.append(("", f"limit: {entry.limits}"))
    page.pairs(rows)


def show_notes(page: Page, report: Report) -> None:
    """Whatever else has to be said."""
    if report.notes:
        page.heading("Notes")
        for note in report.notes:
            page.line(f"- {note}")


VIEW = View("text", ".txt", "the report as tables for a terminal", to_text)
