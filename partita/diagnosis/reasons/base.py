"""The reason record: one reason code with its condition, evidence and remedy.

One file per code in this folder exposes `REASON`; the file name is the code. `unavailable` has the reasons for which a
provider does not start. `partita.diagnosis.precedence` ranks reasons.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from string import Formatter
from typing import Literal, get_args

from partita.diagnosis.evidence import Context, Finding, Ground, usual
from partita.diagnosis.probe_conclusions import FORM, TYPE, Code
from partita.diagnosis.steps import Step
from partita.observations.codes import EvidenceKind, ReasonCode
from partita.observations.facts import Factor


@dataclass(frozen=True, slots=True)
class Reason:
    """A reason code with its condition, evidence and remedy."""

    code: ReasonCode
    level: Literal["provider", "node"]
    title: str
    condition: str
    """Condition under which the reason applies, as text."""
    needs: str
    """Required evidence, as text."""
    remedy: str
    example: Context
    """A node that this reason applies to; documentation and test in one."""
    sentence: str = ""
    """The reason as a sentence with {provider}, {op} and {before}, the value that a successful change replaced. Empty:
    the title is used."""
    steps: tuple[Step, ...] = ()
    """Commands of the remedy, the best first."""
    find: Callable[[Context], Iterable[Finding]] | None = None
    """Yields its findings for a node; None: `evidence.usual`."""
    found_on: tuple[Ground, ...] = ()
    """All grounds of findings of `find`; empty without `find`."""
    loses_provider: bool = False
    """A reason of nodes for which a provider may also be unavailable, because it failed on the graph."""
    entry_kind: EvidenceKind = "logged"
    """Kind of the evidence when a provider is unavailable for this reason."""
    undecided: bool = False
    """Its evidence does not show the cause, so probes run, and their finding replaces it."""
    factors: tuple[Factor, ...] = ()
    """Factors of experiments: if the provider supports the node after a change of one, this reason applies."""
    remedies: Mapping[Factor, str] = field(default_factory=dict)
    """Remedies that replace `remedy`, by the factor that shows the reason."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z][a-z_]*", self.code):
            raise ValueError(f"{self.code!r} is not a reason code: lower-case letters and underscores only")
        if (self.find is None) != (not self.found_on):
            raise ValueError(f"{self.code}: `find` and `found_on` go together")

    @property
    def names_change(self) -> bool:
        """Whether the sentence names the value that a successful experiment replaced."""
        return any(field == "before" for _, field, _, _ in Formatter().parse(self.sentence))

    @property
    def grounds(self) -> frozenset[Ground]:
        """All grounds of its findings. The table of precedence has a row for each, and for no other."""
        if self.find is not None:
            return frozenset(self.found_on)
        if self.level == "provider":
            return frozenset({"entry"})
        found: set[Ground] = {"line", "blank_line"}
        found |= {"entry"} if self.loses_provider else set()
        found |= {"alone"} if self.factors or self.code in get_args(Code) else set()
        found |= {"together", "vague_line"} if self.factors else set()
        found |= {"forms"} if {*FORM, *TYPE} & set(self.factors) else set()
        return frozenset(found)

    def findings(self, context: Context) -> tuple[Finding, ...]:
        """The findings of this reason for a node; empty when it does not apply."""
        if self.find is not None:
            return tuple(self.find(context))
        found = usual(context, self.code, self.entry_kind, self.factors)
        return tuple(self._with_remedy(finding) for finding in found if finding.ground in self.grounds)

    def _with_remedy(self, finding: Finding) -> Finding:
        """The finding with the remedy of its factor, if `remedies` has one."""
        other = next((self.remedies[factor] for factor in finding.factors if factor in self.remedies), None)
        return finding if other is None or finding.remedy else replace(finding, remedy=other)


@cache
def load_reasons() -> tuple[Reason, ...]:
    """Every reason of this folder, by code: `REASON` of a file, whose name is the code, or its `REASONS`.

    Raises ValueError when a file and its code have different names, or two reasons name one factor.
    """
    package = importlib.import_module(__name__.rpartition(".")[0])
    names = sorted(found.name for found in pkgutil.iter_modules(package.__path__) if found.name != "base")
    reasons = []
    for name in names:
        module = importlib.import_module(f"{package.__name__}.{name}")
        if hasattr(module, "REASONS"):
            reasons += module.REASONS
            continue
        reason = module.REASON
        if not isinstance(reason, Reason) or reason.code != name:
            raise ValueError(f"{package.__name__}.{name}: REASON must be a Reason whose code is {name!r}")
        reasons.append(reason)
    named = [factor for reason in reasons for factor in reason.factors]
    twice = sorted({factor for factor in named if named.count(factor) > 1})
    if twice:
        raise ValueError(f"{package.__name__}: a change in {', '.join(twice)} shows two reasons; name it in one")
    return tuple(sorted(reasons, key=lambda reason: reason.code))
