"""Shares of the host time of nodes: copies, fallback nodes, nodes on the preferred provider. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from partita.observations.names import UNKNOWN
from partita.partition_reports.copies import is_memcpy
from partita.partition_reports.file_nodes import report_rows
from partita.partition_reports.groups import provider_of, share_of, total_us
from partita.partition_reports.records import Phase


@dataclass(frozen=True, slots=True)
class TimeSplit:
    """Shares of the node time of one phase, 0 .. 1."""

    node_us: float
    copies: float
    """Memcpy nodes: wait for queued device work, and copy."""
    on_fallback: float
    """Fallback nodes."""
    provider_nodes: float
    """Nodes on the preferred provider: computation, or enqueueing on an asynchronous device."""
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
    rest = [node for node in phase.nodes if not is_memcpy(node)]
    fallbacks = [node for node in rest if node.provider != preferred]
    copies, on_fallback, own = (
        share_of(total_us(nodes) or 0.0, whole) or 0.0
        for nodes in (memcpy, fallbacks, [node for node in rest if node.provider == preferred])
    )
    providers = tuple(dict.fromkeys(node.provider or UNKNOWN for node in fallbacks))
    count = sum(provider_of(row) != preferred and row.name not in copied for row in report_rows(phase))
    return TimeSplit(whole, copies, on_fallback, own, count, providers)


def whole_percent(part: float) -> str:
    """`71 %`; only exact values give 0 % and 100 %."""
    if 0.995 <= part < 1:
        return "over 99 %"
    return "under 1 %" if 0 < part < 0.005 else f"{100 * part:.0f} %"
