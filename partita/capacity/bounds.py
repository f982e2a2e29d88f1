"""What bounds a measured phase: its work at the measured rates of this machine, copies and waits."""

from __future__ import annotations

from partita.capacity.memory import Requirements
from partita.capacity.records import MachineRates
from partita.capacity.speed import Work
from partita.observations.names import CPU
from partita.observations.text_format import decimals, human_bytes, listing
from partita.partition_reports.cost import whole_percent
from partita.partition_reports.records import Bound, Phase, PhaseBound, Report

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
    """The report with what bounds each timed phase. `model`: None if it is not known; `rates`: as measured."""
    used = {entry.provider for entry in report.chain if entry.status == "active"}
    threads = {entry.threads for entry in report.cpu}
    reason = UNMEASURED if rates is None else ""
    if used != {CPU}:
        reason = f"the rates of {listing(sorted(used - {CPU}) or ['the provider'])} are not measured"
    elif rates is not None and threads != {rates.threads}:
        reason = f"the rates are of {rates.threads} threads"
    known = None if reason or rates is None or model is None else (model, rates)
    if report.dry_run is not None or report.totals is None:
        return report
    phases = [_with_bound(phase, report, known, reason or "its graph is not known", batch) for phase in report.phases]
    return report.model_copy(update={"phases": tuple(phases)})


def _with_bound(
    phase: Phase, report: Report, known: tuple[Requirements, MachineRates] | None, reason: str, batch: int
) -> Phase:
    """The phase with what bounds it; as it is without times."""
    if not phase.step_p50_ms or not phase.tokens or report.totals is None:
        return phase
    seconds, totals, work = phase.step_p50_ms / 1e3, report.totals, Work()
    parts: dict[Bound, float] = {"waiting": (phase.overhead_p50_ms or 0.0) / 1e3}
    if phase.cost is not None and phase.cost.host_wait_us_per_run:
        parts["copies"] = phase.cost.host_wait_us_per_run / 1e6
    if known is not None:
        tokens = max(1, round(phase.tokens / phase.steps / batch))
        past = (totals.prompt_tokens - tokens) / 2 if phase.name == "prefill" else totals.prompt_tokens
        past += totals.new_tokens / batch / 2 if phase.name == "decode" else 0
        work.add(*known, batch, "prefill" if phase.name == "prefill" else "decode", (tokens, max(0.0, past)))
        parts |= work.parts
    shares = {name: min(1.0, part / seconds) for name, part in parts.items()}
    most = max(shares, key=lambda name: shares[name])
    bound: Bound = most if shares[most] >= LEAST_SHARE else "indeterminate"
    if bound == "indeterminate" and known is not None:
        reason = f"the measured rates account for {whole_percent(min(1.0, sum(shares.values())))} of a step"
    because = f"{whole_percent(shares[most])} of a step is {EXPLAINED[most]}" if bound == most else reason
    amount = f" ({human_bytes(work.read_bytes)} read, {decimals(work.flops, 1e-9)} GFLOP a step)" if work.flops else ""
    found = PhaseBound(
        bound_by=bound,
        read_bytes=work.read_bytes if known else None,
        flops=work.flops if known else None,
        shares=dict(shares),
        sentence=f"{phase.name} is {'bound by ' if bound == most else ''}{bound}: {because}{amount}",
    )
    return phase.model_copy(update={"bound": found})
