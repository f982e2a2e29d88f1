"""Limits that a placement has to meet: nodes on the CPU, copies, bytes copied per token. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from partita.errors import UsageError
from partita.observations.names import CPU
from partita.observations.text_format import name_some, plural
from partita.partition_reports.records import Phase

NODES, COPIES, BYTES = "--max-cpu-nodes", "--max-copies", "--max-copy-bytes-per-token"


@dataclass(frozen=True, slots=True)
class Limits:
    """None: no limit."""

    max_cpu_nodes: int | None = None
    """Nodes on the CPU provider in one phase."""
    max_copies: int | None = None
    """Memcpy nodes in one decode step, or in one run of a model that is no package."""
    max_copy_bytes_per_token: int | None = None
    """Bytes of all copies in one decode step or run, those of session inputs and outputs included."""

    def given(self) -> dict[str, int]:
        """The limits that there are, by option name."""
        pairs = {NODES: self.max_cpu_nodes, COPIES: self.max_copies, BYTES: self.max_copy_bytes_per_token}
        return {name: value for name, value in pairs.items() if value is not None}


def check_limits(limits: Limits, chain: Sequence[str]) -> None:
    """Raise UsageError for a limit that makes no sense on the providers of `chain`, given by ONNX Runtime's names."""
    for name, value in limits.given().items():
        if value < 0:
            raise UsageError(f"{name} is {value}; it must be 0 or more")
    if chain and chain[0] == CPU:
        contradicted = [name for name in limits.given() if name == NODES]
        if contradicted:
            raise UsageError(
                f"{NODES} {limits.max_cpu_nodes} contradicts --provider, whose first provider is cpu: every node "
                "belongs there; leave the limit out or name another provider first"
            )


def exceeded(phases: Sequence[Phase], limits: Limits) -> tuple[str, ...]:
    """One sentence for each limit that `phases` do not meet, with the figures and the nodes."""
    if not phases:
        return ()
    sentences = (over_cpu_nodes(phases, limits), over_copies(phases, limits), over_bytes(phases, limits))
    return tuple(sentence for sentence in sentences if sentence)


def repeated_phase(phases: Sequence[Phase]) -> Phase:
    """The phase that is run for every token: decode, or the only one."""
    return next((phase for phase in phases if phase.name == "decode"), phases[-1])


def over_cpu_nodes(phases: Sequence[Phase], limits: Limits) -> str:
    """The sentence about the phase with most nodes on the CPU; empty when the limit is met."""
    if limits.max_cpu_nodes is None:
        return ""
    per_phase = [(phase, cpu_nodes(phase)) for phase in phases]
    phase, names = max(reversed(per_phase), key=lambda entry: len(entry[1]))
    unknown = [node.name for node in phase.nodes if node.provider is None]
    head = f"{NODES} {limits.max_cpu_nodes}: "
    if len(names) > limits.max_cpu_nodes:
        return f"{head}{plural(len(names), 'node')} on {CPU} in {phase.name}: {name_some(names)}"
    if len(names) + len(unknown) > limits.max_cpu_nodes:
        return f"{head}cannot be confirmed in {phase.name}: nobody says where these run: {name_some(unknown)}"
    return ""


def cpu_nodes(phase: Phase) -> list[str]:
    """Nodes on the CPU provider with their operators, those in bodies of control flow included."""
    on_cpu = [node for node in phase.nodes if node.provider == CPU]
    main = [f"{node.name} ({node.op_type})" if node.op_type else node.name for node in on_cpu]
    return [*main, *(phase.bodies.cpu_nodes if phase.bodies else ())]


def over_copies(phases: Sequence[Phase], limits: Limits) -> str:
    """The sentence about Memcpy nodes; empty when the limit is met."""
    phase = repeated_phase(phases)
    names = [copy.name for copy in phase.copies if copy.kind == "memcpy_node"]
    if limits.max_copies is None:
        return ""
    inside = phase.bodies.copies if phase.bodies else 0
    if len(names) + (inside or 0) > limits.max_copies:
        names += [f"{inside} in bodies of control flow"] if inside else []
        count = plural(sum(copy.kind == "memcpy_node" for copy in phase.copies) + (inside or 0), "Memcpy node")
        return f"{COPIES} {limits.max_copies}: {count} in {phase.name}: {name_some(names)}"
    if inside is None:
        return f"{COPIES} {limits.max_copies}: cannot be confirmed in {phase.name}: bodies are not counted"
    return ""


def over_bytes(phases: Sequence[Phase], limits: Limits) -> str:
    """The sentence about bytes; empty when the limit is met. A copy of unknown size may be of any size."""
    phase = repeated_phase(phases)
    if limits.max_copy_bytes_per_token is None:
        return ""
    total = sum(copy.bytes_per_run or 0 for copy in phase.copies)
    unknown = [copy.name for copy in phase.copies if copy.bytes_per_run is None]
    if phase.bodies and phase.bodies.copies != 0:
        unknown.append("those in bodies of control flow")
    head = f"{BYTES} {limits.max_copy_bytes_per_token}: "
    if total > limits.max_copy_bytes_per_token:
        more = f" and {plural(len(unknown), 'copy')} of unknown size" if unknown else ""
        return (
            f"{head}{total:,} bytes in {plural(len(phase.copies), 'copy')} per run of {phase.file} ({phase.name}){more}"
        )
    if unknown:
        return (
            f"{head}cannot be confirmed in {phase.name}: the size of {plural(len(unknown), 'copy')} is unknown: "
            f"{name_some(unknown)}"
        )
    return ""
