"""Limits of `place` and `generate` as short forms of requirements. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from partita.check.requirements import Requirement, short_form
from partita.errors import UsageError
from partita.observations.names import CPU
from partita.options.flags import option_flags
from partita.options.groups import PlacementLimits

if TYPE_CHECKING:
    from partita.partition_reports.records import Report

FIELD_OF = {"max_cpu_nodes": "cpu_nodes", "max_copies": "memcpy_nodes", "max_copy_bytes_per_token": "copy_bytes"}


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a placement. None: no limit."""

    max_cpu_nodes: int | None = None
    """Nodes on the CPU provider in one phase."""
    max_copies: int | None = None
    """Memcpy nodes in one decode step, or in one run of a model that is not a package."""
    max_copy_bytes_per_token: int | None = None
    """Bytes of all copies in one decode step or run, including session inputs and outputs."""

    @classmethod
    def of(cls, options: PlacementLimits) -> Self:
        """The limits in a command's options."""
        return cls(options.max_cpu_nodes, options.max_copies, options.max_copy_bytes_per_token)

    def given(self) -> dict[str, int]:
        """Name -> limit, without None."""
        return {name: value for name in FIELD_OF if (value := getattr(self, name)) is not None}

    def by_option(self) -> dict[str, int]:
        """Command-line option -> limit, as in a report."""
        return {option_flags()[name]: value for name, value in self.given().items()}

    def requirements(self) -> tuple[Requirement, ...]:
        """The limits as requirements."""
        return tuple(short_form(f"`{name}={most}`", FIELD_OF[name], "<=", most) for name, most in self.given().items())


def check_limits(limits: Limits, chain: Sequence[str]) -> None:
    """Raise UsageError for a limit that contradicts the providers of `chain` (ONNX Runtime's names)."""
    if chain and chain[0] == CPU:
        most = limits.max_cpu_nodes
        if most is not None:
            raise UsageError(
                f"`max_cpu_nodes={most}` contradicts `providers`, whose first provider is cpu: "
                "every node belongs there; remove the limit or name another provider first"
            )


def exceeded_limits(report: Report, limits: Limits) -> tuple[str, ...]:
    """One sentence for each exceeded limit, with values and nodes."""
    if not any(phase.nodes for phase in report.phases):
        return ()
    from partita.check.finding import find

    results = [(requirement, find(requirement, report)) for requirement in limits.requirements()]
    return tuple(
        f"{requirement.written}: {said}" for requirement, found in results for holds, said in found if not holds
    )
