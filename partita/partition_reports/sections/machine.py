"""The request, memory, machine and software of the run; the simulated device of a dry run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from partita.observations.records import ChainEntry, CpuSession, Environment, Memory, PackageFacts
from partita.observations.text_format import decimals, families, human_bytes, listing, name_some, nats, plural, tally
from partita.partition_reports.groups import grouped
from partita.partition_reports.records import Report
from partita.partition_reports.request_records import (
    DryRunFacts,
    GraphCapture,
    ModelFacts,
    ModelInput,
    Request,
)
from partita.partition_reports.sections.model import Block, Fold, Group, Line, Pairs, Section, table
from partita.partition_reports.sections.shared import runtime_name

Pair = tuple[str, tuple[str, ...]]


def section(report: Report) -> Section:
    """Memory and environment."""
    memory = _render_memory(report.memory, of_package=report.cache is not None)
    rows = (*memory, *_render_cpu(report.cpu), *_render_environment(report.environment, report))
    return Section("machine", "Machine", (Pairs("Memory and machine", rows),))


def _render_memory(memory: Memory, *, of_package: bool) -> tuple[Pair, ...]:
    """Memory of the weights, the cache and the process."""
    sizes = f"weights {human_bytes(memory.weight_bytes)}"
    if of_package:
        sizes += f", cache {human_bytes(memory.cache_bytes)}"
    lines = [sizes]
    if memory.peak_rss_bytes is not None:
        resident = (memory.rss_before_load_bytes, memory.rss_after_load_bytes, memory.peak_rss_bytes)
        before, after, peak = map(human_bytes, resident)
        lines.append(f"process {before} before load, {after} after load, peak {peak} (resident)")
    if memory.anonymous_growth_bytes is not None:
        grown = human_bytes(memory.anonymous_growth_bytes)
        lines.append(f"loading allocated {grown}; other resident weights are mapped files")
    return (("memory", tuple(lines)),)


def _render_cpu(sessions: Sequence[CpuSession]) -> tuple[Pair, ...]:
    """Threads and attention algorithm of the CPU provider, per file if they differ."""
    threads = {entry.file: _threads(entry) for entry in sessions}
    paths = {
        entry.file: f"{entry.attention.path} path: {entry.attention.detail}"
        for entry in sessions
        if entry.attention is not None
    }
    huge = {}
    for entry in sessions:
        if entry.huge_page_bytes:
            took = "" if entry.huge_page_seconds is None else f", in {decimals(entry.huge_page_seconds)} s"
            huge[entry.file] = f"{human_bytes(entry.huge_page_bytes)}{took}"
    rows = (("huge pages", huge), ("threads", threads), ("attention", paths))
    return tuple((name, _by_file(texts)) for name, texts in rows if texts)


def _by_file(texts: Mapping[str, str]) -> tuple[str, ...]:
    """One text if all files have the same."""
    if len(set(texts.values())) == 1:
        return (next(iter(texts.values())),)
    return tuple(f"{file}: {text}" for file, text in texts.items())


def _threads(entry: CpuSession) -> str:
    """Number of threads, its reason, and how they wait."""
    reason = {
        "option": "set by the user",
        "cores": "one per core",
        "affinity": "one per core of the CPU affinity",
        "quota": f"cgroup limit of {entry.quota:g} CPUs" if entry.quota is not None else "cgroup limit",
    }[entry.threads_reason]
    waits = "spin" if entry.spinning else "sleep"
    because = {"option": ", set by the user", "default": "", "crowded": ", because threads exceed cores"}
    return f"{entry.threads}, {reason}; they {waits} while they wait{because[entry.spinning_reason]}"


def _render_environment(env: Environment, report: Report) -> tuple[Pair, ...]:
    """Machine and software."""
    cores = plural(env.logical_cores, "logical core")
    return (
        ("machine", (f"{env.cpu}, {cores}, {human_bytes(env.memory_bytes)}",)),
        ("system", (f"{env.operating_system}, Python {env.python}",)),
        ("runtime", (f"{runtime_name(env)} ({env.onnxruntime_build})",)),
        ("packages", (", ".join(f"{name} {version}" for name, version in env.packages.items()),)),
        ("partita", (f"{report.partita_version}, report of {report.created}",)),
    )


NAMED_BLOCKING = 6
"""Maximum families of blocking nodes named in a sentence."""


def dry_run_section(report: Report) -> Section | None:
    """The simulated device and nodes that block CUDA graph capture; None for a real device."""
    device = report.dry_run
    if device is None:
        return None
    captures = [_capture(verdict) for verdict in device.graph_capture or ()]
    return Section("dry_run", "Dry run", (Pairs("The device", _render_device(device)), *captures))


def _render_device(device: DryRunFacts) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """The simulated device, and parts that are not real."""
    about = (
        f"{device.device_name} ({device.device}): compute capability {device.compute_capability}, "
        f"{human_bytes(device.memory_bytes)}, {plural(device.multiprocessors, 'multiprocessor')}"
    )
    return (
        ("device", (about,)),
        ("provider", (f"{device.provider_library} of ONNX Runtime {device.onnxruntime_version}, the real library",)),
        ("stubs", (f"CUDA {device.cuda_version}, build {device.stub_build[:12]}",)),
        ("not real", device.not_real),
    )


def _capture(verdict: GraphCapture) -> Group:
    """Whether a session can be captured, and nodes that block it."""
    outcome = "would be accepted" if verdict.is_accepted else "REFUSED"
    blocks: list[Block] = [Line(verdict.evidence, "evidence")]
    for cause, nodes in grouped(verdict.blocking, lambda node: node.cause_text).items():
        counts = Counter(node.op_type or "unknown" for node in nodes)
        on = listing(dict.fromkeys(node.provider for node in nodes))
        blocks.append(Line(f"{plural(len(nodes), 'node')} on {on} ({tally(counts)}): {cause}", "blocks capture"))
        blocks.append(Line(name_some((node.node for node in nodes), NAMED_BLOCKING), "nodes"))
    if verdict.blocking:
        rows = [(node.node, node.op_type or "unknown", node.provider, node.cause_text) for node in verdict.blocking]
        heads = ("node", "operator", "provider", "reason")
        title = f"{plural(len(rows), 'node')} that block the CUDA graph of {verdict.file}"
        blocks.append(Fold(title, (table(title, heads, rows),)))
    return Group(f"CUDA graph capture of {verdict.file}: {outcome}", tuple(blocks))


def request_section(report: Report) -> Section:
    """The request."""
    return Section("request", "Request", (Pairs("Request", tuple(_pairs(report))),))


def _pairs(report: Report) -> Iterator[Pair]:
    """Package or model, request and chain."""
    request = report.request
    if report.package is not None:
        yield from _describe_package(report.package)
    if report.model is not None:
        yield from _describe_model(report.model)
    if request.path is not None:
        yield "path", (request.path,)
    yield "command", (_describe_command(request),)
    chain = f"{', '.join(request.chain) or 'none'} ({request.chain_source})"
    yield "chain", (chain, *(text for entry in report.chain for text in _describe_entry(entry)))
    yield "threads", ("one per usable core" if request.threads is None else str(request.threads),)
    if request.prefill_chunk_tokens is not None:
        yield "prefill", (f"in chunks of {plural(request.prefill_chunk_tokens, 'token')}",)
    if request.options:
        yield "options", (", ".join(f"{name}={value}" for name, value in request.options.items()),)
    if request.limits:
        yield "limits", (", ".join(f"{name} {value:,}" for name, value in request.limits.items()),)


def _describe_package(package: PackageFacts) -> Iterator[Pair]:
    """The package that was run."""
    yield (
        "package",
        (
            f"{package.name}: {package.model_type}, {package.precision}, attention {package.attention}",
            f"batch {package.batch_size}, max length {package.max_length}, manifest {package.manifest_sha256[:12]}",
        ),
    )
    yield "verification", (f"{package.verification}: {package.verification_detail}",)
    if package.omitted:
        yield "omitted", (package.omitted,)
    if (found := package.quality) is not None:
        yield (
            "quality",
            (
                f"perplexity {found.perplexity_ratio:.4f} times that of the source model; same best token "
                f"{found.top1_agreement:.1%}; KL divergence {nats(found.kl_mean)}, 99th percentile "
                f"{nats(found.kl_p99, 3)}",
                f"at export: {plural(found.tokens, 'token')} of {found.text}, on {found.provider}",
                *([found.converted_copy] if found.converted_copy is not None else []),
            ),
        )


def _describe_model(model: ModelFacts) -> Iterator[Pair]:
    """The ONNX file and its inputs."""
    opsets = ", ".join(f"{domain or 'ai.onnx'} {version}" for domain, version in model.opsets.items())
    about = f"{model.file}: {plural(model.nodes, 'node')}, opset {opsets}, sha256 {model.sha256[:12]}"
    yield "model", (about, *([f"weights in {', '.join(model.data_files)}"] if model.data_files else []))
    yield "inputs", tuple(_describe_inputs(model.inputs)) or ("none",)


def _describe_inputs(ports: tuple[ModelInput, ...]) -> Iterator[str]:
    """Inputs with type and shape; names that differ only in numbers share a line."""
    found = {
        members[0]: f"{name} {kind}" + (f" ({plural(len(members), 'input')})" if len(members) > 1 else "")
        for kind, members_of_kind in grouped(ports, lambda port: port.declared).items()
        for name, members in families(port.name for port in members_of_kind).items()
    }
    yield from (found[port.name] for port in ports if port.name in found)


def _describe_command(request: Request) -> str:
    """The command and the requested amount of work."""
    parts = [request.verb]
    if request.prompt_tokens is not None:
        parts.append(plural(request.prompt_tokens, "prompt token"))
    if request.max_new_tokens is not None:
        parts.append(f"up to {request.max_new_tokens} new tokens")
    if request.runs is not None:
        parts.append(f"{plural(request.runs, 'run')} per phase on generated inputs")
    return ", ".join(parts)


def _describe_entry(entry: ChainEntry) -> Iterator[str]:
    """Availability of a provider, with the remedy if it is unavailable."""
    if entry.status == "active":
        yield f"{entry.provider} active"
        return
    reason, evidence = entry.reason or "no reason known", entry.evidence or "no evidence"
    yield f"{entry.provider} {entry.status}: {reason}; {evidence}"
    if entry.remedy:
        yield f"remedy: {entry.remedy}"
