"""The figures of each phase: nodes, partitions, crossings, copies, waits, speed, cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from partita.partition_reports.records import Phase, PhaseCost, Report
from partita.partition_reports.views._page.marks import Mark
from partita.partition_reports.views._page.tables import Table, table
from partita.partition_reports.wording import NOT_KNOWN, decimals, human_bytes, percent


def phase_table(report: Report, marks: dict[str, Mark]) -> Table:
    """The figures of each phase, one column per phase."""
    phases = [phase for phase in report.phases if phase.nodes or phase.steps]
    rows = [*node_rows(phases, marks), *cost_rows(phases)]
    if report.dry_run is None:
        rows += speed_rows(phases)
    rows.append(("KV cache in place", *(say_cache(report) for _ in phases)))
    heads = ("", *(f"#{phase.name}" for phase in phases))
    return table("The phases in figures", heads, rows)


def node_rows(phases: Sequence[Phase], marks: dict[str, Mark]) -> list[tuple[str, ...]]:
    """Nodes and time per provider."""
    rows = []
    for provider, mark in marks.items():
        shares = [next((entry for entry in phase.providers if entry.provider == provider), None) for phase in phases]
        timed = any(share is not None and share.time_share is not None for share in shares)
        cells = [f"{share.nodes:,}{time_part(share.time_share)}" if share else "0" for share in shares]
        rows.append((f"nodes on {mark.label}" + (" (node time)" if timed else ""), *cells))
    return rows


def time_part(share: float | None) -> str:
    """The part of the node time, where it is known."""
    return "" if share is None else f" ({percent(share)})"


def cost_rows(phases: Sequence[Phase]) -> list[tuple[str, ...]]:
    """Partitions, crossings, copies, bytes and waits. Figures per token only where there are tokens."""
    rows: list[tuple[str, ...]] = [("partitions", *(f"{len(phase.partitions):,}" for phase in phases))]
    costs = [phase.cost for phase in phases]
    rows.append(("tensors between partitions, per run", *each(costs, say_crossings)))
    rows.append(("copies between devices, per run", *each(costs, say_copies)))
    rows.append(("host wait in copies, per run, ms", *each(costs, lambda cost: ms(cost.host_wait_us_per_run))))
    if any(cost is not None and cost.tokens_per_run for cost in costs):
        rows.append(("bytes copied per token", *each(costs, say_bytes_per_token)))
        rows.append(("host wait in copies per token, ms", *each(costs, lambda cost: ms(cost.host_wait_us_per_token))))
    return rows


def each(costs: Sequence[PhaseCost | None], say: Callable[[PhaseCost], str]) -> list[str]:
    """What `say` makes of the cost of each phase; `-` where there is none."""
    return [NOT_KNOWN if cost is None else say(cost) for cost in costs]


def say_crossings(cost: PhaseCost) -> str:
    """Tensors that partitions hand over."""
    return counted(cost.crossings, cost.crossing_bytes_per_run)


def say_copies(cost: PhaseCost) -> str:
    """Copies and their bytes."""
    return counted(cost.copies, cost.copy_bytes_per_run, cost.copy_bytes_at_least)


def say_bytes_per_token(cost: PhaseCost) -> str:
    """Bytes for one token."""
    return human_bytes(None if cost.copy_bytes_per_token is None else round(cost.copy_bytes_per_token))


def ms(microseconds: float | None) -> str:
    """Milliseconds."""
    return decimals(microseconds, 1e-3)


def counted(count: int, size: int | None, at_least: int = 0) -> str:
    """How many, and their bytes when there are any."""
    return f"{count:,}{in_bytes(size, at_least)}" if count else "0"


def in_bytes(size: int | None, at_least: int = 0) -> str:
    """The size in brackets, or what is known of it."""
    if size is not None:
        return f" ({human_bytes(size)})"
    return f" ({human_bytes(at_least)} or more)" if at_least else " (size not known)"


def speed_rows(phases: Sequence[Phase]) -> list[tuple[str, ...]]:
    """Tokens and steps."""
    rows = []
    if any(phase.tokens for phase in phases):
        rows.append(("tokens per second", *(decimals(phase.tokens_per_second) for phase in phases)))
    rows.append(("step, median, ms", *(decimals(phase.step_p50_ms) for phase in phases)))
    rows.append(("step, 95th percentile, ms", *(decimals(phase.step_p95_ms) for phase in phases)))
    rows.append(("of a step outside the session, median, ms", *(decimals(phase.overhead_p50_ms) for phase in phases)))
    return rows


def say_cache(report: Report) -> str:
    """Whether the cache stays in place."""
    cache = report.cache
    if cache is None or not cache.states:
        return "no cache"
    if cache.checked_steps == 0:
        return "not checked"
    if cache.in_place_states < cache.states or cache.address_changes:
        return f"NO: {cache.states - cache.in_place_states} of {cache.states} copied"
    return "yes"
