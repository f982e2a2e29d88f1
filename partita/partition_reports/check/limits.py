"""Limits that `place` and `generate` take, as short forms of requirements. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from partita.errors import UsageError
from partita.observations.names import CPU
from partita.partition_reports.check.finding import find
from partita.partition_reports.check.requirements import Requirement, short_form
from partita.partition_reports.records import Report

NODES, COPIES, BYTES = "--max-cpu-nodes", "--max-copies", "--max-copy-bytes-per-token"
FIELD_OF = {NODES: "cpu_nodes", COPIES: "memcpy_nodes", BYTES: "copy_bytes"}


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

    def requirements(self) -> tuple[Requirement, ...]:
        """The same in the words of `--require`."""
        return tuple(short_form(f"{name} {most}", FIELD_OF[name], "<=", most) for name, most in self.given().items())


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


def exceeded(report: Report, limits: Limits) -> tuple[str, ...]:
    """One sentence for each limit that the report does not meet, with the figures and the nodes."""
    if not any(phase.nodes for phase in report.phases):
        return ()
    asked = [(requirement, find(requirement, report)) for requirement in limits.requirements()]
    return tuple(f"{requirement.written}: {said}" for requirement, found in asked for holds, said in found if not holds)
