"""The row of the table of reasons."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from string import Formatter
from typing import Literal, get_args

from partita.diagnosis.evidence import Basis, Context, Finding, usual
from partita.diagnosis.probe_conclusions import FORM, TYPE, Code
from partita.diagnosis.steps import Step
from partita.observations.codes import PROVIDER_CODES, EvidenceKind, ReasonCode
from partita.observations.facts import Factor


@dataclass(frozen=True, slots=True)
class Reason:
    """A reason code with its condition, evidence and remedy."""

    code: ReasonCode
    title: str
    condition: str
    """Condition under which the reason applies, as text."""
    needs: str
    """Required evidence, as text."""
    remedy: str
    sentence: str = ""
    """The reason as a sentence with {provider}, {op} and {before}, the value that a successful change replaced. Empty:
    the title is used."""
    steps: tuple[Step, ...] = ()
    """Commands of the remedy, the best first."""
    find: Callable[[Context], Iterable[Finding]] | None = None
    """Yields its findings for a node; None: `evidence.usual`."""
    found_on: tuple[Basis, ...] = ()
    """All bases of findings of `find`; empty without `find`."""
    loses_provider: bool = False
    """A reason of nodes for which a provider may also be unavailable, because it failed on the graph."""
    entry_kind: EvidenceKind = "logged"
    """Kind of the evidence when a provider is unavailable for this reason."""
    needs_probes: bool = False
    """Its evidence does not show the cause, so probes run, and their finding replaces it."""
    factors: tuple[Factor, ...] = ()
    """Factors of experiments: if the provider supports the node after a change of one, this reason applies."""
    remedies: Mapping[Factor, str] = field(default_factory=dict)
    """Remedies that replace `remedy`, by the factor that shows the reason."""

    @property
    def level(self) -> Literal["provider", "node"]:
        """Whether the provider does not start, or one node is not on it."""
        return "provider" if self.code in PROVIDER_CODES else "node"

    @property
    def names_change(self) -> bool:
        """Whether the sentence names the value that a successful experiment replaced."""
        return any(field == "before" for _, field, _, _ in Formatter().parse(self.sentence))

    @property
    def bases(self) -> frozenset[Basis]:
        """All bases of its findings. The table of precedence has a row for each, and for no other."""
        if self.find is not None:
            return frozenset(self.found_on)
        if self.level == "provider":
            return frozenset({"entry"})
        found: set[Basis] = {"line", "blank_line"}
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
        return tuple(self._with_remedy(finding) for finding in found if finding.basis in self.bases)

    def _with_remedy(self, finding: Finding) -> Finding:
        """The finding with the remedy of its factor, if `remedies` has one."""
        other = next((self.remedies[factor] for factor in finding.factors if factor in self.remedies), None)
        return finding if other is None or finding.remedy else replace(finding, remedy=other)
