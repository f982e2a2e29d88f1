"""Time of a phase from measured rates or a data sheet, and what bounds it. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from partita.capacity.costs import GraphCosts, Product, symbols
from partita.capacity.memory import CHUNK_TOKENS, Requirements, cache_bytes
from partita.capacity.records import Bound, Estimate, FormRates, MachineRates, PhasePlan
from partita.package.contract import GraphFile, PhaseName
from partita.providers.cuda_dry_run.devices import Device

HERE_SPREAD = 0.2
"""Relative half-width of the interval with measured rates."""
SHARES = {"memory": (0.3, 0.6, 0.9), "compute": (0.2, 0.4, 0.7)}
"""Assumed lowest, usual and highest share of a data sheet's rate."""
LAUNCH_SECONDS = 4e-6
"""Assumed time to launch a kernel on a GPU."""


@dataclass(frozen=True, slots=True)
class Work:
    """The work of one run."""

    weight_bytes: int
    cache_bytes: int
    flops: int
    attention_flops: int
    activation_bytes: int
    nodes: int

    @property
    def read_bytes(self) -> int:
        """Weights, and cached keys and values."""
        return self.weight_bytes + self.cache_bytes

    @property
    def all_flops(self) -> int:
        """Of products and attention."""
        return self.flops + self.attention_flops


def graph_of(model: Requirements, phase: PhaseName) -> tuple[GraphFile, GraphCosts]:
    """The graph that runs a phase."""
    return next(entry for entry in model.graphs if entry[0].phase in (phase, "any"))


def work_of(model: Requirements, phase: PhaseName, batch: int, tokens: int, past: float) -> Work:
    """The work of a run of `tokens` new tokens in each row, after `past` cached ones."""
    file, costs = graph_of(model, phase)
    blocks = costs.blocks(symbols(model.contract, file, batch, tokens))
    seen = past + (tokens + 1) / 2
    return Work(
        weight_bytes=sum(each.packed_bytes if model.on_cpu else each.stored_bytes for each in costs.products),
        cache_bytes=cache_bytes(model.contract.states, model.contract, math.ceil(seen), batch),
        flops=batch * sum(each.flops * (1 if each.of_head else tokens) for each in costs.products),
        attention_flops=int(costs.attention_flops * batch * tokens * seen),
        activation_bytes=2 * sum(block.size for block in blocks),
        nodes=costs.nodes,
    )


def product_seconds(products: Sequence[Product], rates: MachineRates, batch: int, tokens: int) -> tuple[float, float]:
    """Seconds that the products of a run take to read weights, and to compute."""
    total = sum(product.packed_bytes for product in products)
    reading = computing = 0.0
    for product in products:
        form = rates.forms.get(product.form, rates.forms["float32"])
        rows = batch * (1 if product.of_head else tokens)
        read = product.packed_bytes / gemv_rate(form, total)
        compute = product.flops * rows / form.gemm_flops
        reading += form.product_seconds + (read if read >= compute or rows == 1 else 0.0)
        computing += compute if rows > 1 and compute > read else product.flops * (rows - 1) / form.gemm_flops
    return reading, computing


def gemv_rate(form: FormRates, total: int) -> float:
    """Bytes per second for weights of `total` bytes, between the measured sizes on a logarithmic scale."""
    points = sorted(form.gemv_bytes_per_second.items())
    if total <= points[0][0]:
        return points[0][1]
    for (small, fast), (large, slow) in zip(points, points[1:], strict=False):
        if total <= large:
            share = math.log(total / small) / math.log(large / small)
            return 1 / ((1 - share) / fast + share / slow)
    return points[-1][1]


def parts_here(
    model: Requirements, rates: MachineRates, phase: PhaseName, batch: int, tokens: int, past: float
) -> dict[Bound, float]:
    """Seconds of a run on this machine's CPU by what bounds them."""
    work = work_of(model, phase, batch, tokens, past)
    _, costs = graph_of(model, phase)
    reading, computing = product_seconds(costs.products, rates, batch, tokens)
    attention = rates.attention_decode_flops if tokens == 1 else rates.attention_prefill_flops
    return {
        "memory": reading,
        "compute": computing + work.attention_flops / attention,
        "launches": work.nodes * rates.node_seconds + work.activation_bytes / rates.elementwise_bytes_per_second,
    }


def parts_on(
    model: Requirements, device: Device, phase: PhaseName, batch: int, tokens: int, past: float
) -> dict[Bound, float]:
    """Seconds of a run on a device by what bounds them, at the rates of its data sheet."""
    work = work_of(model, phase, batch, tokens, past)
    memory = (work.read_bytes + work.activation_bytes) / device.bytes_per_second
    compute = work.all_flops / device.flops(model.contract.states[0].dtype if model.contract.states else "float32")
    return {
        "memory": memory if memory >= compute else 0.0,
        "compute": compute if compute > memory else 0.0,
        "launches": LAUNCH_SECONDS * work.nodes,
    }


def phase_plans(
    model: Requirements, rates: MachineRates | Device, batch: int, prompt: int
) -> tuple[PhasePlan, PhasePlan]:
    """Prefill of a prompt in every row, and one decode step after it."""
    file, _ = graph_of(model, "prefill")
    chunk = min(file.sequence_length or CHUNK_TOKENS, prompt)
    chunks = [(start, min(chunk, prompt - start)) for start in range(0, prompt, chunk)]
    runs: dict[PhaseName, list[tuple[int, int]]] = {"prefill": chunks, "decode": [(prompt, 1)]}
    found = []
    for phase, listed in runs.items():
        sums: dict[Bound, float] = {}
        works = [work_of(model, phase, batch, tokens, past) for past, tokens in listed]
        for past, tokens in listed:
            if isinstance(rates, MachineRates):
                parts = parts_here(model, rates, phase, batch, tokens, past)
            else:
                parts = parts_on(model, rates, phase, batch, tokens, past)
            sums = {name: sums.get(name, 0.0) + seconds for name, seconds in parts.items()}
        found.append(
            PhasePlan(
                phase=phase,
                read_bytes=sum(work.read_bytes for work in works),
                flops=sum(work.all_flops for work in works),
                seconds=_interval(sums, measured=isinstance(rates, MachineRates)),
                bound_by=max(sums, key=lambda name: sums[name]),
            )
        )
    return found[0], found[1]


def _interval(parts: dict[Bound, float], *, measured: bool) -> Estimate:
    """The time, and an interval."""
    if measured:
        total = sum(parts.values())
        return Estimate(value=total, low=total * (1 - HERE_SPREAD), high=total * (1 + HERE_SPREAD))
    launches = parts["launches"]
    low, usual, high = (sum(parts[name] / SHARES[name][place] for name in ("memory", "compute")) for place in (2, 1, 0))
    return Estimate(value=max(usual, launches), low=low, high=high + launches)
