"""Memory, machine and software of the run; the simulated device of a dry run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from partita.observations.cpu import AttentionChoice, CpuSession
from partita.observations.records import Environment, Memory
from partita.observations.text_format import decimals, human_bytes, listing, name_some, plural, tally
from partita.partition_reports.records import Report
from partita.partition_reports.request_records import BlockingNode, DryRunFacts, GraphCapture
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
    paths = {entry.file: _path(entry.attention) for entry in sessions if entry.attention is not None}
    huge = {entry.file: text for entry in sessions if (text := _huge(entry))}
    rows = (("huge pages", huge), ("threads", threads), ("attention", paths))
    return tuple((name, _by_file(texts)) for name, texts in rows if texts)


def _huge(entry: CpuSession) -> str:
    """Memory in huge pages, and time to move it; empty for none."""
    if not entry.huge_page_bytes:
        return ""
    took = "" if entry.huge_page_seconds is None else f", in {decimals(entry.huge_page_seconds)} s"
    return f"{human_bytes(entry.huge_page_bytes)}{took}"


def _by_file(texts: Mapping[str, str]) -> tuple[str, ...]:
    """One text if all files have the same."""
    if len(set(texts.values())) == 1:
        return (next(iter(texts.values())),)
    return tuple(f"{file}: {text}" for file, text in texts.items())


def _threads(entry: CpuSession) -> str:
    """Number of threads, its reason, and how they wait."""
    why = {
        "option": "set by the user",
        "cores": "one per core",
        "affinity": "one per core of the CPU affinity",
        "quota": f"cgroup limit of {entry.quota:g} CPUs" if entry.quota is not None else "cgroup limit",
    }[entry.threads_reason]
    waits = "spin" if entry.spinning else "sleep"
    because = {"option": ", set by the user", "default": "", "crowded": ", because threads exceed cores"}
    return f"{entry.threads}, {why}; they {waits} while they wait{because[entry.spinning_reason]}"


def _path(choice: AttentionChoice) -> str:
    """The algorithm of GroupQueryAttention, with its reason."""
    return f"{choice.path} path: {choice.detail}"


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
    reasons: dict[str, list[BlockingNode]] = {}
    for node in verdict.blocking:
        reasons.setdefault(node.cause_text, []).append(node)
    for why, nodes in reasons.items():
        counts: dict[str, int] = {}
        for node in nodes:
            counts[node.op_type or "unknown"] = counts.get(node.op_type or "unknown", 0) + 1
        on = listing(dict.fromkeys(node.provider for node in nodes))
        blocks.append(Line(f"{plural(len(nodes), 'node')} on {on} ({tally(counts)}): {why}", "blocks capture"))
        blocks.append(Line(name_some((node.node for node in nodes), NAMED_BLOCKING), "nodes"))
    if verdict.blocking:
        rows = [(node.node, node.op_type or "unknown", node.provider, node.cause_text) for node in verdict.blocking]
        heads = ("node", "operator", "provider", "reason")
        title = f"{plural(len(rows), 'node')} that block the CUDA graph of {verdict.file}"
        blocks.append(Fold(title, (table(title, heads, rows),)))
    return Group(f"CUDA graph capture of {verdict.file}: {outcome}", tuple(blocks))
