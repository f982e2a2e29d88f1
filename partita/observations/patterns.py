"""Data of the providers' files: patterns of log lines that name a reason, and rows that name the kernel of a node."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from partita.observations.codes import ReasonCode
from partita.remedies import Remedy

NODE_GROUP = r"(?P<node>\S+)"
"""The group for a node's name in most patterns; a real name may contain blanks."""
ABSENT, PRESENT = "", "*"
"""Values of a fact that a node does not have, and that it has with any value."""


@dataclass(frozen=True, slots=True)
class LogPattern:
    """A log line of ONNX Runtime that names a reason."""

    reason: ReasonCode
    pattern: str
    """Regular expression to search in one line, with optional groups `node`, `op` and `why`."""

    vague: bool = False
    """The line names the reason, but not the property of the node that is unsupported."""

    @property
    def names_node(self) -> bool:
        """Whether it has the group `node`, so its lines are about one node."""
        return "(?P<node>" in self.pattern

    @property
    def with_blank(self) -> re.Pattern[str] | None:
        """The pattern for lines with a blank in place of the name; None if it has no node name."""
        if self.pattern.endswith(f" {NODE_GROUP}"):
            return re.compile(self.pattern.removesuffix(f" {NODE_GROUP}") + r"\s*$")
        blank = self.pattern.replace(f" {NODE_GROUP} ", " {2,}")
        return re.compile(blank) if blank != self.pattern else None

    def is_about(self, line: str, name: str) -> bool:
        """Whether the group `node` matches exactly this name in `line`."""
        if NODE_GROUP in self.pattern:
            end = r"\s*$" if self.pattern.endswith(NODE_GROUP) else r"""(?![^\s'":\],;)}])"""
            exact = self.pattern.replace(NODE_GROUP, f"(?P<node>{re.escape(name)}){end}")
            return bool(name) and re.search(exact, line) is not None
        return any(match["node"] == name for match in re.finditer(self.pattern, line))


@dataclass(frozen=True, slots=True)
class KernelRow:
    """One kernel path of some operators. The first row that matches a node gives its path.

    Facts of a node are texts: each attribute by its name; `input3` and `output0`: element type; `constant3`: yes;
    `rank3`; `head_size%8`; `domain`; `prefix`: its name up to the first underscore; `added`: yes if ONNX Runtime added
    it; `attention`: path chosen for the CPU provider; `integer_unit`: instruction set for products of integers.
    """

    operators: tuple[str, ...]
    path: str
    """Name of the path: `flash`, `packed weights, int8 products`."""
    source: str
    """How the row was verified, with the version of ONNX Runtime."""
    when: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Fact -> allowed values, all of which must hold."""
    log: str = ""
    """Regular expression for a line of the run's log. With a group `node` the line must name the node. Without it, a
    captured log must contain a matching line; if no log was captured, `when` decides."""
    program: str = ""
    """Regular expression for a device program of the node in the profile."""
    cause: str = ""
    """Why the path is slow, in one sentence; empty for a path that is not slow."""
    remedy: Remedy | None = None
    unknown: str = ""
    """A property of the kernel that no source reports, with facts in braces; empty for none."""
    probe: tuple[str, str] | None = None
    """Attribute and its integer, or input and ABSENT (`input3`), with which a node on a slow path may be faster."""

    @property
    def names_node(self) -> bool:
        """Whether a log line or a program of the node itself is required."""
        return bool(self.program) or "(?P<node>" in self.log

    def fits(self, facts: Mapping[str, str]) -> bool:
        """Whether a node with these facts meets `when`."""
        return all(
            facts.get(name, ABSENT) in values or (PRESENT in values and name in facts)
            for name, values in self.when.items()
        )
