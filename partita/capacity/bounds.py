"""What bounds a measured phase: its work at the measured rates of this machine, copies and waits."""

from __future__ import annotations

from partita.capacity.memory import Requirements
from partita.capacity.records import MachineRates
from partita.capacity.speed import Work
from partita.observations.names import CPU
from partita.observations.text_format import decimals, human_bytes, listing
from partita.partition_reports.cost import whole_percent
from partita.partition_reports.groups import grouped, layer_key, module_name, op_type_of, placed
from partita.partition_reports.records import Bound, GroupShare, Phase, PhaseBound, Report, Totals

LEAST_SHARE = 0.5
"""Share of a step from which a part bounds it."""
EXPLAINED: dict[Bound, str] = {
    "memory": "reading weights; fewer bits per weight, or more rows per step, help",
    "compute": "arithmetic; a processor with faster products, or fewer tokens, help",
    "launches": "starting nodes and moving activations; fewer and larger operators help",
    "copies": "waiting in copies between devices; see the fallbacks",
    "waiting": "work outside the session: inputs, sampling and the caller",
}
UNMEASURED = "the rates of this machine are not measured; `partita plan` and `partita providers` can measure them"


def with_bounds(report: Report, model: Requirements | None, rates: MachineRates | None, batch: int) -> Report:
    """The report with the work of each timed phase, and what bounds it.

    `model`: None if it is not known; `rates`: as measured, None if they were not.
    """
    if report.dry_run is not None or report.totals is None:
        return report
    used = {entry.provider for entry in report.chain if entry.status == "active"}
    reason = "" if rates is not None else UNMEASURED
    if used != {CPU}:
        reason = f"the rates of {listing(sorted(used - {CPU}) or ['the provider'])} are not measured"
    elif rates is not None and {entry.threads for entry in report.cpu} != {rates.threads}:
        reason = f"the rates are of {rates.threads} threads"
    rates = None if reason else rates
    reason = reason or ("its graph is not known" if model is None else "")
    phases = [_with_bound(phase, report.totals, model, rates, reason, batch) for phase in report.phases]
    return report.model_copy(update={"phases": tuple(phases)})


def _with_bound(
    phase: Phase, totals: Totals, model: Requirements | None, rates: MachineRates | None, reason: str, batch: int
) -> Phase:
    """The phase with its work and what bounds it; unchanged without times. `reason`: why its rates are not known."""
    if not phase.step_p50_ms or not phase.tokens:
        return phase
    if phase.subgraphs is not None:
        model, reason = None, "nodes in control flow are not counted"
    work, groups, amount = Work(), {}, ""
    if model is not None:
        tokens = max(1, round(phase.tokens / phase.steps / batch))
        past = (totals.prompt_tokens - tokens) / 2 if phase.name == "prefill" else totals.prompt_tokens
        past += totals.new_tokens / batch / 2 if phase.name == "decode" else 0
        work.add(model, rates, batch, "prefill" if phase.name == "prefill" else "decode", (tokens, max(0.0, past)))
        groups = _group_work(phase, work)
        amount = f" ({human_bytes(work.read_bytes)} read, {decimals(work.flops, 1e-9)} GFLOP a step)"
    parts: dict[Bound, float] = {"waiting": (phase.overhead_p50_ms or 0.0) / 1e3, **work.parts}
    if phase.cost is not None and phase.cost.host_wait_us_per_run:
        parts["copies"] = phase.cost.host_wait_us_per_run / 1e6
    shares = {name: min(1.0, part / (phase.step_p50_ms / 1e3)) for name, part in parts.items()}
    most = max(shares, key=lambda name: shares[name])
    bound: Bound = most if shares[most] >= LEAST_SHARE else "indeterminate"
    text = f"bound by {bound}: {whole_percent(shares[most])} of a step is {EXPLAINED.get(bound)}"
    if bound == "indeterminate":
        accounted = whole_percent(min(1.0, sum(shares.values())))
        text = f"indeterminate: {reason or f'the measured rates account for {accounted} of a step'}"
    found = PhaseBound(
        bound_by=bound,
        read_bytes=None if model is None else work.read_bytes,
        flops=None if model is None else work.flops,
        shares=dict(shares),
        sentence=f"{phase.name} is {text}{amount}",
    )
    return phase.model_copy(update={"bound": found, **groups})


def _group_work(phase: Phase, work: Work) -> dict[str, tuple[GroupShare, ...]]:
    """The groups of a phase with their work; none if a node with work is not in the report under its name."""
    rows = placed(phase)
    if not {*work.read, *work.arithmetic} <= {row.name for row in rows}:
        return {}
    found = {}
    for name, key in (("by_op_type", op_type_of), ("by_layer", layer_key(phase)), ("by_module", module_name)):
        of_group = grouped(rows, key)
        groups = []
        for entry in getattr(phase, name):
            nodes = [row.name for row in of_group.get(entry.name, ())]
            seconds = sum(work.seconds.get(node, 0.0) for node in nodes)
            groups.append(
                entry.model_copy(
                    update={
                        "read_bytes": sum(work.read[node] for node in nodes),
                        "flops": sum(work.arithmetic[node] for node in nodes),
                        "ceiling_share": min(1.0, seconds * 1e6 / entry.host_us_per_run)
                        if work.seconds and entry.host_us_per_run
                        else None,
                    }
                )
            )
        found[name] = tuple(groups)
    return found
