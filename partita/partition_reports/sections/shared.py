"""Texts and helpers shared by several sections."""

from __future__ import annotations

import re
from collections.abc import Sequence

from partita.observations.records import Environment
from partita.observations.text_format import decimals, human_bytes, plural, short_provider
from partita.partition_reports.copies import subgraph_copies
from partita.partition_reports.cost import total_bytes
from partita.partition_reports.groups import Node
from partita.partition_reports.outcome import TOO_FEW, too_few_steps, used_phases
from partita.partition_reports.records import Copy, Phase, PhaseCost, Report
from partita.partition_reports.verdict import merge_phases

REASONS_PAGE = "docs/reasons.md"
"""Documentation of the reason codes, with an anchor for each."""
COPY_OPERATORS = {"MemcpyFromHost": "↓", "MemcpyToHost": "↑"}
"""Memcpy operator -> its arrow: down to the device, up to the host."""


def is_copy(node: Node) -> bool:
    """Whether it is a Memcpy node."""
    return node.op_type in COPY_OPERATORS


def placements(report: Report) -> list[list[Phase]]:
    """Phases with nodes, grouped by equal placement."""
    return merge_phases(used_phases(report))


def speed_text(phase: Phase) -> tuple[str, ...]:
    """The speed of a phase and its basis; the speed is empty if unknown."""
    if phase.tokens_per_second is None and phase.step_p50_ms is None:
        return ("",)
    few = f"; {TOO_FEW}" if too_few_steps(phase) else ""
    of = plural(phase.steps, "run" if phase.name == "run" else f"{phase.name} step")
    if phase.tokens_per_second is None:
        return f"{decimals(phase.step_p50_ms)} ms per run", f"{'median of ' if phase.steps > 1 else ''}{of}{few}"
    speed = f"{decimals(phase.tokens_per_second)} tokens/s"
    if phase.steps < 2 or phase.step_p50_ms is None:
        return speed, f"{of}{few}"
    return speed, f"mean of {of}; median step {decimals(phase.step_p50_ms)} ms{few}"


def best_observed(phases: Sequence[Phase]) -> Phase:
    """The last profiled phase, which has sizes, of phases with equal placement; else the last phase."""
    return max(enumerate(phases), key=lambda entry: (entry[1].observed_runs > 0, entry[0]))[1]


def on_providers(counts: dict[str, int]) -> str:
    """Nodes per provider, by short names."""
    return ", ".join(f"{short_provider(provider)} {count:,}" for provider, count in counts.items())


def count_and_bytes(count: int, size: int | None, at_least: int = 0) -> str:
    """Number of copies, with their bytes if there are any."""
    return f"{count:,}{in_bytes(size, at_least)}" if count else "0"


def in_bytes(size: int | None, at_least: int = 0) -> str:
    """The size in parentheses, or its lower bound."""
    if size is not None:
        return f" ({human_bytes(size)})"
    return f" ({human_bytes(at_least)} or more)" if at_least else " (size unknown)"


def subgraph_suffix(phase: Phase) -> str:
    """Suffix with the number of copies in control-flow subgraphs."""
    if phase.subgraphs is None:
        return ""
    if subgraph_copies(phase) is None:
        return " (some in control-flow subgraphs may be missing)"
    return f" and {phase.subgraphs.copies:,} in control-flow subgraphs" if phase.subgraphs.copies else ""


def copied_bytes(copies: Sequence[Copy]) -> str:
    """Sum of the sizes of copies, marked if some are unknown."""
    whole = total_bytes(copies)
    known = sum(copy.bytes_per_run or 0 for copy in copies)
    return human_bytes(known) if whole is not None else f"{human_bytes(known)} or more" if known else "size unknown"


def bytes_per_token(cost: PhaseCost) -> str:
    """Bytes copied per new token; `-` if a size is unknown."""
    return human_bytes(None if cost.copy_bytes_per_token is None else round(cost.copy_bytes_per_token))


def runtime_name(machine: Environment) -> str:
    """Wheels of ONNX Runtime with their versions."""
    imported = machine.onnxruntime_version
    named = [f"{wheel.name} {wheel.version or imported}" for wheel in machine.onnxruntime_wheels]
    if any(wheel.version in ("", imported) for wheel in machine.onnxruntime_wheels):
        return ", ".join(named)
    return " ".join([*([", ".join(named)] if named else ["onnxruntime"]), imported])


def span(first: int, count: int) -> str:
    """`3` or `3-7`."""
    return str(first) if count == 1 else f"{first}-{first + count - 1}"


def first_clause(text: str) -> str:
    """`Put a provider that supports the operator first in --provider`: a text up to its first comma or bracket."""
    words = re.split(r"[;:,]\s|\s\(", text, maxsplit=1)[0]
    return words[:1].upper() + words[1:]
