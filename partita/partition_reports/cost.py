"""Cost of fallbacks and copies: per phase and token, and per fallback; shares of the node time. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from partita.diagnosis.graphs import COMPILED
from partita.diagnosis.records import Fallback, FallbackCost
from partita.diagnosis.session_index import SessionIndex
from partita.observations.names import UNKNOWN
from partita.observations.records import ChainEntry, PhaseName
from partita.observations.text_format import percent, plural
from partita.partition_reports.copies import is_memcpy
from partita.partition_reports.groups import is_about, provider_of, report_rows, share_of, total_us
from partita.partition_reports.records import Copy, NodePlacement, Partition, Phase, PhaseCost

HARMLESS_SHARE = 0.01
"""A harmless fallback takes a smaller share of its phase's node time."""


def tokens_per_run(index: SessionIndex, phase: PhaseName, rows: int) -> int | None:
    """New tokens in all rows of the last observed run of a phase, from which sizes are taken; None if there are none.
    `rows`: batch size.
    """
    windows = [window for window in index.facts.runs if window.phase == phase]
    last = max(windows, key=lambda window: window.run, default=None)
    return last.tokens * (last.rows or rows) or None if last is not None else None


def phase_cost(
    partitions: Sequence[Partition], copies: Sequence[Copy], tokens: int | None, *, timed: bool
) -> PhaseCost:
    """Cost of one run of a phase. `tokens`: new tokens per run. `timed`: False for a dry run."""
    moved = total_bytes(copies)
    wait = waiting_us(copies) if timed else None
    return PhaseCost(
        partitions=len(partitions),
        copies=len(copies),
        copy_bytes_per_run=moved,
        copy_bytes_at_least=sum(copy.bytes_per_run or 0 for copy in copies),
        host_wait_us_per_run=wait,
        tokens_per_run=tokens,
        copy_bytes_per_token=per(moved, tokens),
        host_wait_us_per_token=per(wait, tokens),
    )


def total_bytes(copies: Iterable[Copy]) -> int | None:
    """Bytes copied in one run; None if the size of a copy is unknown."""
    sizes = [copy.bytes_per_run for copy in copies]
    known = [size for size in sizes if size is not None]
    return sum(known) if len(known) == len(sizes) else None


def waiting_us(copies: Iterable[Copy]) -> float | None:
    """Host time of Memcpy nodes; None if one is unknown. Copies of session inputs and outputs have no profile."""
    times = [copy.host_us_per_run for copy in copies if copy.kind == "memcpy_node"]
    known = [time for time in times if time is not None]
    return float(sum(known)) if len(known) == len(times) else None


def per(amount: float | None, tokens: int | None) -> float | None:
    """`amount` per token."""
    return amount / tokens if amount is not None and tokens else None


def with_costs(
    fallbacks: Iterable[Fallback], phase: Phase, preferred: ChainEntry, *, timed: bool
) -> tuple[Fallback, ...]:
    """The fallbacks of a phase with their cost per run; nodes in control-flow subgraphs have no cost."""
    nodes = {node.name: node for node in phase.nodes}
    whole = total_us(phase.nodes)
    copies: dict[str, list[Copy]] = {}
    for copy in phase.copies:
        for name in copy.caused_by:
            copies.setdefault(name, []).append(copy)
    found = []
    for entry in fallbacks:
        node = nodes.get(entry.node)
        if node is None or not is_about(entry, node):
            found.append(entry)
            continue
        cost = _cost_of(node, copies.get(entry.node, []), whole, phase, preferred, timed=timed)
        found.append(entry.model_copy(update={"cost": cost}))
    return tuple(found)


def _cost_of(
    node: NodePlacement,
    caused: Sequence[Copy],
    whole: float | None,
    phase: Phase,
    preferred: ChainEntry,
    *,
    timed: bool,
) -> FallbackCost:
    """Cost of one fallback node. `caused`: copies that it requires; `whole`: node time of the phase."""
    part = share_of(node.host_us_per_run, whole)
    harmless, reason = _judge(caused, part, phase, preferred)
    return FallbackCost(
        copies=tuple(copy.name for copy in caused),
        copy_bytes_per_run=total_bytes(caused),
        copy_wait_us_per_run=waiting_us(caused) if timed else None,
        host_us_per_run=node.host_us_per_run,
        time_share=part,
        harmless=harmless,
        harmless_reason=reason,
    )


def _judge(caused: Sequence[Copy], part: float | None, phase: Phase, preferred: ChainEntry) -> tuple[bool | None, str]:
    """Whether a fallback is harmless, with the reason; unknown without a time, as in a dry run."""
    if caused:
        return False, f"it causes {plural(len(caused), 'copy')}"
    if preferred.status != "active":
        return None, f"{preferred.provider} runs no nodes, so the cost of one node is unknown"
    unexplained = sum(bool(copy.cause_missing_reason) for copy in phase.copies)
    if unexplained:
        return None, f"it may cause {plural(unexplained, 'Memcpy node')} whose cause is unknown"
    if part is None:
        return None, "it causes no copy; its time is unknown"
    taken = f"{percent(part)} of the node time of {phase.name}"
    if part >= HARMLESS_SHARE:
        return False, f"it causes no copy, but takes {taken}"
    if any(node.op_type == COMPILED for node in phase.nodes):
        return None, f"it takes {taken}; ONNX Runtime does not report the copies of compiled nodes"
    if phase.subgraphs is not None and phase.subgraphs.may_have_more_copies:
        return None, f"it takes {taken}; ONNX Runtime does not report the copies for control-flow subgraphs"
    return True, f"it causes no copy and takes {taken}"


@dataclass(frozen=True, slots=True)
class TimeSplit:
    """Shares of the node time of one phase, 0 .. 1."""

    copies: float
    """Memcpy nodes: wait for queued device work, and copy."""
    on_fallback: float
    """Fallback nodes."""
    fallback_nodes: int
    fallback_providers: tuple[str, ...]
    """Providers of the fallback nodes."""


def split_time(phase: Phase, preferred: str) -> TimeSplit | None:
    """The shares; None if no node of the phase has a time."""
    whole = total_us(phase.nodes)
    if not whole:
        return None
    memcpy = [node for node in phase.nodes if is_memcpy(node)]
    copied = {node.name for node in memcpy}
    fallbacks = [node for node in phase.nodes if node.provider != preferred and not is_memcpy(node)]
    copies, on_fallback = (share_of(total_us(nodes) or 0.0, whole) or 0.0 for nodes in (memcpy, fallbacks))
    providers = tuple(dict.fromkeys(node.provider or UNKNOWN for node in fallbacks))
    count = sum(provider_of(row) != preferred and row.name not in copied for row in report_rows(phase))
    return TimeSplit(copies, on_fallback, count, providers)


def whole_percent(part: float) -> str:
    """`71 %`; only exact values give 0 % and 100 %."""
    if 0.995 <= part < 1:
        return "over 99 %"
    return "under 1 %" if 0 < part < 0.005 else f"{100 * part:.0f} %"
