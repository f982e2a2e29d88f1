"""Memory, machine and software of the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from partita.observations.cpu import AttentionChoice, CpuSession
from partita.observations.records import Environment, Memory
from partita.observations.text_format import decimals, human_bytes, plural
from partita.partition_reports.records import Report
from partita.partition_reports.sections.model import Pairs, Section
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
