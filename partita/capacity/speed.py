"""Time of a phase from measured rates or a data sheet, and what bounds it. Pure."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from partita.capacity.costs import Product, symbols
from partita.capacity.memory import CHUNK_TOKENS, Requirements
from partita.capacity.records import Estimate, FormRates, MachineRates, PhasePlan
from partita.package.contract import PhaseName
from partita.partition_reports.records import Bound
from partita.providers.cuda_dry_run.devices import Device

HERE_SPREAD = 0.2
"""Relative half-width of the interval with measured rates."""
SHARES = {"memory": (0.3, 0.6, 0.9), "compute": (0.2, 0.4, 0.7)}
"""Assumed lowest, usual and highest share of a data sheet's rate."""
LAUNCH_SECONDS = 4e-6
"""Assumed time to launch a kernel on a GPU."""


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
    points.append((most, max(slowest, streamed)))
    for (small, fast), (large, slow) in zip(points, points[1:], strict=False):
        if total <= large:
            return _between(total, (small, large), (fast, slow))
    return points[-1][1]


def _between(size: int, sizes: tuple[int, int], rates: tuple[float, float]) -> float:
    """The rate of a size between two measured ones, on a logarithmic scale of sizes."""
    share = math.log(max(size, 1) / sizes[0]) / math.log(sizes[1] / sizes[0])
    share = min(1.0, max(0.0, share))
    return 1 / ((1 - share) / rates[0] + share / rates[1])


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
