"""Time of a phase from measured rates or a data sheet, and what bounds it. Pure."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from partita.capacity.costs import Product, symbols
from partita.capacity.memory import CHUNK_TOKENS, Requirements
from partita.capacity.records import Estimate, FormRates, MachineRates, PhasePlan
from partita.observations.grouping import grouped
from partita.observations.names import CPU
from partita.observations.text_format import decimals, human_bytes, listing, percent
from partita.package.contract import PhaseName
from partita.partition_reports.groups import layer_key, module_name, op_type_of
from partita.partition_reports.phase_records import Bound, GroupShare, Phase, PhaseBound
from partita.partition_reports.records import Report, Totals
from partita.providers.cuda_dry_run.devices import Device

HERE_SPREAD = 0.2
"""Relative half-width of the interval with measured rates."""
SHARES = {"memory": (0.3, 0.6, 0.9), "compute": (0.2, 0.4, 0.7)}
"""Assumed lowest, usual and highest share of a data sheet's rate."""
LAUNCH_SECONDS = 4e-6
"""Assumed time to launch a kernel on a GPU."""
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


@dataclass(slots=True)
class Work:
    """The work of some runs of a phase, and the seconds that each kind of work takes."""

    read: Counter[str] = field(default_factory=Counter)
    """Node -> bytes of weights, and of cached keys and values."""
    arithmetic: Counter[str] = field(default_factory=Counter)
    """Node -> operations of products and attention."""
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Node -> seconds of its products and attention at the measured rates of this machine."""
    parts: dict[Bound, float] = field(default_factory=dict)

    @property
    def read_bytes(self) -> int:
        """Bytes of all nodes."""
        return self.read.total()

    @property
    def flops(self) -> int:
        """Operations of all nodes."""
        return self.arithmetic.total()

    def add(
        self, model: Requirements, rates: MachineRates | Device | None, batch: int, phase: PhaseName, run: Run
    ) -> None:
        """Add a run of all rows. `rates`: None adds no times."""
        tokens, past = run
        file, costs = next(entry for entry in model.graphs if entry[0].phase in (phase, "any"))
        seen = past + (tokens + 1) / 2
        read, flops = Counter[str](), Counter[str]()
        for each in costs.products:
            read[each.node] += each.packed_bytes if model.on_cpu else each.stored_bytes
            flops[each.node] += batch * each.flops * (1 if each.of_head else tokens)
        attention = {node: int(each * batch * tokens * seen) for node, each in costs.attention_flops.items()}
        flops.update(attention)
        for state, size in model.state_bytes(math.ceil(seen), batch).items():
            read[costs.state_readers.get(state, "")] += size
        self.read += read
        self.arithmetic += flops
        if rates is None:
            return
        moved = 2 * costs.written_bytes(symbols(model.contract, file, batch, tokens))  # read once
        if isinstance(rates, MachineRates):
            times = product_seconds(costs.products, rates, batch, tokens)
            rate = rates.attention_decode_flops if tokens == 1 else rates.attention_prefill_flops
            times += [(node, 0.0, each / rate) for node, each in attention.items()]
            for node, reading, computing in times:
                self.seconds[node] += reading + computing
            memory, compute = sum(each[1] for each in times), sum(each[2] for each in times)
            launches = costs.nodes * rates.node_seconds + moved / rates.elementwise_bytes_per_second
        else:
            dtype = model.contract.states[0].dtype if model.contract.states else "float32"
            memory, compute = (read.total() + moved) / rates.bytes_per_second, flops.total() / rates.flops(dtype)
            memory, compute = (memory, 0.0) if memory >= compute else (0.0, compute)  # they overlap
            launches = LAUNCH_SECONDS * costs.nodes
        parts: dict[Bound, float] = {"memory": memory, "compute": compute, "launches": launches}
        self.parts = {name: self.parts.get(name, 0.0) + seconds for name, seconds in parts.items()}

    @property
    def bound_by(self) -> Bound:
        """The kind of work with most of the time."""
        return max(self.parts, key=lambda name: self.parts[name])


Run = tuple[int, float]
"""New tokens of each row, and cached tokens before them."""


def product_seconds(
    products: Sequence[Product], rates: MachineRates, batch: int, tokens: int
) -> list[tuple[str, float, float]]:
    """The node of each product in a run, and its seconds of reading weights and of computing: the longer of the two."""
    total = sum(product.packed_bytes for product in products)
    found = []
    for product in products:
        form = rates.forms.get(product.form, rates.forms["float32"])
        rows = batch * (1 if product.of_head else tokens)
        read = product.packed_bytes / gemv_rate(form, total, product.packed_bytes)
        compute = product.flops * rows / form.gemm_flops
        reading = form.product_seconds + (read if rows == 1 or read >= compute else 0.0)
        computing = compute if rows > 1 and compute > read else product.flops * (rows - 1) / form.gemm_flops
        found.append((product.node, reading, computing))
    return found


def gemv_rate(form: FormRates, total: int, product: int) -> float:
    """Bytes per second of a product with `product` of `total` bytes of weights, between the measured sizes."""
    *points, (most, slowest) = sorted(form.gemv_bytes_per_second.items())
    streamed = _between(product, form.product_bytes, (slowest, form.large_gemv_bytes_per_second))
    sizes, rates = zip(*points, (most, max(slowest, streamed)), strict=True)
    return _between(total, sizes, rates)


def _between(size: int, sizes: Sequence[int], rates: Sequence[float]) -> float:
    """The rate of a size between measured ones: seconds per byte are linear in the logarithm of the size."""
    return float(1 / np.interp(math.log(max(size, 1)), np.log(sizes), 1 / np.asarray(rates)))


def phase_plans(model: Requirements, rates: MachineRates | Device, batch: int, prompt: int) -> tuple[PhasePlan, ...]:
    """Prefill of a prompt in every row, and one decode step after it."""
    file = next(file for file, _ in model.graphs if file.phase in ("prefill", "any"))
    chunk = min(file.sequence_length or CHUNK_TOKENS, prompt)
    chunks: list[Run] = [(min(chunk, prompt - start), start) for start in range(0, prompt, chunk)]
    phases: dict[PhaseName, list[Run]] = {"prefill": chunks, "decode": [(1, prompt)]}
    found = []
    for phase, runs in phases.items():
        work = Work()
        for run in runs:
            work.add(model, rates, batch, phase, run)
        seconds = _interval(work.parts, measured=isinstance(rates, MachineRates))
        found.append(PhasePlan.copy_of(work, phase=phase, seconds=seconds))
    return tuple(found)


def _interval(parts: dict[Bound, float], *, measured: bool) -> Estimate:
    """The time, and an interval."""
    if measured:
        total = sum(parts.values())
        return Estimate(value=total, low=total * (1 - HERE_SPREAD), high=total * (1 + HERE_SPREAD))
    low, usual, high = (sum(parts[name] / SHARES[name][place] for name in ("memory", "compute")) for place in (2, 1, 0))
    return Estimate(value=max(usual, parts["launches"]), low=low, high=high + parts["launches"])


# Bounds of the measured phases of a report


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
    text = f"bound by {bound}: {percent(shares[most], 0)} of a step is {EXPLAINED.get(bound)}"
    if bound == "indeterminate":
        accounted = percent(min(1.0, sum(shares.values())), 0)
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
    rows = phase.placed
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
