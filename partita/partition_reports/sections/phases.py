"""Figures of each phase (nodes, copies, waits, speed), load times, speculative decoding and the KV cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from partita.observations.text_format import (
    NOT_KNOWN,
    decimals,
    human_bytes,
    name_some,
    percent,
    plural,
    short_provider,
)
from partita.partition_reports.groups import added_nodes, file_counts, folded_nodes
from partita.partition_reports.outcome import TOO_FEW, cache_text, is_timed, status_of, too_few_steps
from partita.partition_reports.records import GroupShare, Phase, PhaseCost, ProviderShare, Report, Totals
from partita.partition_reports.request_records import Speculation
from partita.partition_reports.sections.model import Block, Column, Line, Pairs, Section, Table, table
from partita.partition_reports.sections.shared import bytes_per_token, count_and_bytes

Figure = tuple[str, ...]
WORK = ("reads", "GFLOP", "of ceiling")
WORK_NOTE = (
    "One step. reads: weights, and cached keys and values. GFLOP: products and attention. of ceiling: the time of "
    "this work at the measured rates of the machine, as a share of its host time."
)
TAILS = {95: 20, 99: 100}
"""Percentile -> minimum number of steps; with fewer steps it equals the slowest step."""


def section(report: Report) -> Section:
    """The figures of all phases, and the steps that they cover."""
    blocks: list[Block] = [figures(report)] if report.phases else [Line("No phase was run.")]
    blocks += [Line(phase.bound.sentence, "bound") for phase in report.phases if phase.bound is not None]
    blocks += [Line(f"{phase.name}: {note(report, phase)}.", tone="quiet") for phase in report.phases]
    if report.totals is not None:
        blocks.append(Pairs("The whole run", tuple(_totals(report.totals))))
    return Section("phases", "Phases", tuple(blocks))


def work_section(report: Report) -> Section | None:
    """Bytes and arithmetic per operator and layer, and their share of the measured ceilings; None if unknown."""
    phases = [phase for phase in report.phases if any(entry.read_bytes is not None for entry in phase.by_op_type)]
    if not phases:
        return None
    blocks: list[Block] = []
    for title, field in (("operator", "by_op_type"), ("layer", "by_layer")):
        groups = [{entry.name: entry for entry in getattr(phase, field)} for phase in phases]
        names = dict.fromkeys(name for found in groups for name, entry in found.items() if entry.read_bytes)
        rows = [(name, *(cell for found in groups for cell in _work_cells(found.get(name)))) for name in names]
        heads = [Column(f"{phase.name} {each}", group=phase.name) for phase in phases for each in WORK]
        blocks.append(table(f"Work by {title}", [title, *heads], rows))
    blocks.append(Line(WORK_NOTE, tone="quiet"))
    return Section("work", "Work", tuple(blocks))


def _work_cells(entry: GroupShare | None) -> tuple[str, str, str]:
    """Bytes read, arithmetic, and share of the measured ceilings of one group."""
    if entry is None or entry.read_bytes is None:
        return NOT_KNOWN, NOT_KNOWN, NOT_KNOWN
    share = NOT_KNOWN if entry.ceiling_share is None else percent(entry.ceiling_share)
    return human_bytes(entry.read_bytes), decimals(entry.flops, 1e-9), share


def note(report: Report, phase: Phase) -> str:
    """The steps that the figures of a phase cover."""
    if not is_timed(report):
        return f"{plural(phase.observed_runs, 'run')}; {phase.timing_note}"
    few = f"; {plural(phase.steps, 'step')}: {TOO_FEW}" if too_few_steps(phase) else ""
    return f"{phase.timing_note}{few}"


def figures(report: Report) -> Table:
    """One column per phase."""
    phases = report.phases
    rows = [*_node_figures(phases), *_cost_figures(phases, timed=is_timed(report))]
    if is_timed(report):
        rows += speed_figures(phases)
    return table("The phases in figures", ["figure", *(Column(phase.name) for phase in phases)], rows, obvious=True)


def _node_figures(phases: Sequence[Phase]) -> Iterator[Figure]:
    """Nodes per provider, with their share of the node time."""
    counts = [file_counts(phase) for phase in phases]
    for provider in dict.fromkeys(entry.provider for phase in phases for entry in phase.providers):
        shares = [next((entry for entry in phase.providers if entry.provider == provider), None) for phase in phases]
        timed = any(entry is not None and entry.time_share is not None for entry in shares)
        yield (
            f"nodes on {short_provider(provider)}{' (node time)' if timed else ''}",
            *(_render_nodes(each[provider], entry) for each, entry in zip(counts, shares, strict=True)),
        )
    for name, count in (("added", added_nodes), ("folded", folded_nodes)):
        found = [count(phase) for phase in phases]
        if any(found):
            yield f"nodes {name} by ONNX Runtime", *(f"{number:,}" for number in found)


def _render_nodes(count: int, entry: ProviderShare | None) -> str:
    """A count, with the provider's share of the node time."""
    return f"{count:,}" + ("" if entry is None or entry.time_share is None else f" ({percent(entry.time_share)})")


def _cost_figures(phases: Sequence[Phase], *, timed: bool) -> Iterator[Figure]:
    """Partitions, copies, bytes and waits of one run, and per token if there are tokens."""
    costs = [phase.cost for phase in phases]
    yield "partitions", *(f"{len(phase.partitions):,}" for phase in phases)
    yield (
        "copies between devices",
        *_each(costs, lambda cost: count_and_bytes(cost.copies, cost.copy_bytes_per_run, cost.copy_bytes_at_least)),
    )
    if timed:
        yield "wait in copies, ms", *_each(costs, lambda cost: decimals(cost.host_wait_us_per_run, 1e-3))
    if any(cost is not None and cost.tokens_per_run for cost in costs):
        yield "bytes copied per token", *_each(costs, bytes_per_token)
        if timed:
            yield "wait per token, ms", *_each(costs, lambda cost: decimals(cost.host_wait_us_per_token, 1e-3))


def _each(costs: Sequence[PhaseCost | None], text: Callable[[PhaseCost], str]) -> list[str]:
    """The text for the cost of each phase; `-` without a cost."""
    return [NOT_KNOWN if cost is None else text(cost) for cost in costs]


def speed_figures(phases: Sequence[Phase]) -> Iterator[Figure]:
    """Steps, tokens and times."""
    yield "steps", *(f"{phase.steps:,}" for phase in phases)
    if any(phase.tokens for phase in phases):
        yield "tokens", *(f"{phase.tokens:,}" for phase in phases)
    yield "seconds", *(decimals(phase.seconds) for phase in phases)
    if any(phase.tokens for phase in phases):
        yield "tokens per second (mean)", *(decimals(phase.tokens_per_second) for phase in phases)
    yield "step p50, ms", *(decimals(phase.step_p50_ms) for phase in phases)
    for share, least in TAILS.items():
        if any(phase.steps >= least for phase in phases):
            values = [phase.step_p95_ms if share == 95 else phase.step_p99_ms for phase in phases]
            shown = (value if phase.steps >= least else None for phase, value in zip(phases, values, strict=True))
            yield f"step p{share}, ms", *(decimals(value) for value in shown)
    yield "outside the session p50, ms", *(decimals(phase.overhead_p50_ms) for phase in phases)


def _totals(found: Totals) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Load times, first token, and end of a generation."""
    session, tokenizer = decimals(found.session_load_seconds), decimals(found.tokenizer_load_seconds)
    yield "load", (f"session {session} s, tokenizer {tokenizer} s",)
    first = found.first_token_seconds
    yield (
        "first token",
        ("no token was generated" if first is None else f"{decimals(first)} s after the start of prefill",),
    )
    ended = found.finish_reason + (f" ({found.finish_detail})" if found.finish_detail else "")
    yield (
        "generated",
        (f"{plural(found.new_tokens, 'token')} after a prompt of {found.prompt_tokens:,}; finish reason: {ended}",),
    )


NAMED_STATES = 12


def cache_section(report: Report) -> Section | None:
    """None without a cache."""
    cache, status = report.cache, status_of(report.cache)
    if cache is None or status == "no_cache":
        return None
    steps = f", {plural(cache.checked_steps, 'observed step')}" if cache.checked_steps else ""
    blocks: list[Block] = [Line(f"{plural(cache.states, 'state')}: {cache_text(cache)}{steps}")]
    moved = [entry.name for entry in cache.entries if not entry.in_place and status != "not_checked"]
    blocks += [Line(name_some(moved, NAMED_STATES), "NOT in place", "bad")] if moved else []
    return Section("cache", "KV cache", tuple(blocks))


def speculation_section(report: Report) -> Section | None:
    """None without speculative decoding."""
    found = report.speculation
    if found is None:
        return None
    lines = [speedup_text(found)] if found.drafted else []
    lines += [_acceptance_text(found)]
    lines += [f"Drafting took {decimals(found.draft_seconds)} of {decimals(found.seconds)} s."]
    return Section("speculation", "Speculative decoding", tuple(map(Line, lines)))


def speedup_text(found: Speculation) -> str:
    """The speedup in a sentence."""
    if found.speedup is None:
        return "Speedup unknown: no decode step ran without draft tokens."
    basis = f"{decimals(found.plain_token_ms)} ms per token in steps without draft tokens"
    return f"Decode was {found.speedup:.2f} times as fast as without draft tokens ({basis})."


def _acceptance_text(found: Speculation) -> str:
    source = "n-gram lookup" if found.draft is None else f"the draft package {found.draft}"
    if found.acceptance_rate is None:
        return f"No draft tokens from {source} in {plural(found.steps, 'step')}."
    return (
        f"Draft tokens from {source}: {found.accepted:,} of {found.drafted:,} accepted "
        f"({percent(found.acceptance_rate)}), in {found.drafting_steps:,} of {plural(found.steps, 'step')}; "
        f"{decimals(found.tokens_per_step)} tokens per step."
    )
