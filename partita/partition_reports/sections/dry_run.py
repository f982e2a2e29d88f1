"""The simulated device of a dry run, parts that are not real, and CUDA graph capture."""

from __future__ import annotations

from partita.observations.text_format import human_bytes, listing, name_some, plural, tally
from partita.partition_reports.records import Report
from partita.partition_reports.request_records import BlockingNode, DryRunFacts, GraphCapture
from partita.partition_reports.sections.model import Block, Fold, Group, Line, Pairs, Section, table, text_column

NAMED = 6
"""Maximum families of blocking nodes named in a sentence."""


def section(report: Report) -> Section | None:
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
        blocks.append(Line(name_some((node.node for node in nodes), NAMED), "nodes"))
    if verdict.blocking:
        rows = [(node.node, node.op_type or "unknown", node.provider, node.cause_text) for node in verdict.blocking]
        heads = [text_column(title) for title in ("node", "operator", "provider", "reason")]
        title = f"{plural(len(rows), 'node')} that block the CUDA graph of {verdict.file}"
        blocks.append(Fold(title, (table(title, heads, rows),)))
    return Group(f"CUDA graph capture of {verdict.file}: {outcome}", tuple(blocks))
