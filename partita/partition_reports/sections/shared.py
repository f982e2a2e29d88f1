"""Words and choices that several sections have in common."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from partita.observations.records import Environment
from partita.observations.text_format import decimals, human_bytes, plural, short_provider
from partita.partition_reports.copies import copies_inside
from partita.partition_reports.cost import total_bytes
from partita.partition_reports.outcome import TOO_FEW, too_few_steps, used_phases
from partita.partition_reports.records import Copy, NodePlacement, Phase, PhaseCost, Report
from partita.partition_reports.verdict import merge_phases

COPY_OPERATORS = {"MemcpyFromHost": "↓", "MemcpyToHost": "↑"}
"""Memcpy nodes, and the arrow that stands for each: down to the device, up to the host."""


def is_copy(node: NodePlacement) -> bool:
    """True for a Memcpy node."""
    return node.op_type in COPY_OPERATORS


def placements(report: Report) -> list[list[Phase]]:
    """Those phases, the ones that share a placement together."""
    return merge_phases(used_phases(report))


def say_speed(phase: Phase) -> tuple[str, ...]:
    """The speed of a phase, then the figures that it is of, by name; an empty text where none is known."""
    if phase.tokens_per_second is None and phase.step_p50_ms is None:
        return ("",)
    few = f"; {TOO_FEW}" if too_few_steps(phase) else ""
    of = plural(phase.steps, "run" if phase.name == "run" else f"{phase.name} step")
    if phase.tokens_per_second is None:
        return f"{decimals(phase.step_p50_ms)} ms a run", f"{'median of ' if phase.steps > 1 else ''}{of}{few}"
    speed = f"{decimals(phase.tokens_per_second)} tokens/s"
    if phase.steps < 2 or phase.step_p50_ms is None:
        return speed, f"{of}{few}"
    return speed, f"mean of {of}; median step {decimals(phase.step_p50_ms)} ms{few}"


def best_observed(phases: Sequence[Phase]) -> Phase:
    """The last of phases that share a placement; one that was profiled, when there is any, for it knows sizes."""
    return max(enumerate(phases), key=lambda entry: (entry[1].observed_runs > 0, entry[0]))[1]


def on_providers(counts: dict[str, int]) -> str:
    """Nodes per provider, by short names."""
    return ", ".join(f"{short_provider(provider)} {count:,}" for provider, count in counts.items())


def count_and_bytes(count: int, size: int | None, at_least: int = 0) -> str:
    """How many, and their bytes when there are any."""
    return f"{count:,}{in_bytes(size, at_least)}" if count else "0"


def in_bytes(size: int | None, at_least: int = 0) -> str:
    """The size in brackets, or what is known of it."""
    if size is not None:
        return f" ({human_bytes(size)})"
    return f" ({human_bytes(at_least)} or more)" if at_least else " (size not known)"


def said_inside(phase: Phase) -> str:
    """What is known of copies in the bodies of control flow, to stand behind the number of the others."""
    if phase.bodies is None:
        return ""
    if copies_inside(phase) is None:
        return " (in control-flow subgraphs not all are seen)"
    return f" and {phase.bodies.copies:,} in control-flow subgraphs" if phase.bodies.copies else ""


def copied_bytes(copies: Sequence[Copy]) -> str:
    """Sum of the sizes of copies, marked when some are not known."""
    whole = total_bytes(copies)
    known = sum(copy.bytes_per_run or 0 for copy in copies)
    return human_bytes(known) if whole is not None else f"{human_bytes(known)} or more" if known else "size not known"


def bytes_per_token(cost: PhaseCost) -> str:
    """Bytes copied for one new token; None when a size is not known."""
    return human_bytes(None if cost.copy_bytes_per_token is None else round(cost.copy_bytes_per_token))


def runtime_name(machine: Environment) -> str:
    """What ONNX Runtime came in, with the version that was imported."""
    imported = machine.onnxruntime_version
    named = [f"{wheel.name} {wheel.version or imported}" for wheel in machine.onnxruntime_wheels]
    if any(wheel.version in ("", imported) for wheel in machine.onnxruntime_wheels):
        return ", ".join(named)
    return " ".join([*([", ".join(named)] if named else ["onnxruntime"]), imported])


def span(first: int, count: int) -> str:
    """`3` or `3-7`."""
    return str(first) if count == 1 else f"{first}-{first + count - 1}"


def some(names: Iterable[str], most: int) -> str:
    """The first names, and how many there are in all when that is more."""
    listed = list(names)
    more = f", … ({plural(len(listed), 'node')})" if len(listed) > most else ""
    return ", ".join(listed[:most]) + more
