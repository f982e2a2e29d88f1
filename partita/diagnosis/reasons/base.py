"""The row of the table of reasons, and remedies as command lines of Partita, shared by several reasons."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from string import Formatter
from typing import Literal, get_args

from partita.diagnosis.evidence import Basis, Context, Finding, usual
from partita.diagnosis.probe_conclusions import FORM, TYPE, Code
from partita.observations.codes import PROVIDER_CODES, EvidenceKind, ReasonCode
from partita.observations.facts import OPTION, Factor
from partita.remedies import Remedy


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


@dataclass(frozen=True, slots=True)
class Change:
    """The change of a step in the terms of a probe. A probe with this change shows whether the step helps."""

    factor: Factor
    new_value: str = ""
    """The new value; empty: the value that helped in an experiment."""


@dataclass(frozen=True, slots=True)
class Step:
    """A fix for a reason, as a command line of Partita."""

    title: str
    """Title of about three words."""
    remedy: Remedy
    """The command and its effect. A report fills in: `checkpoint`, `out` (a new package), `path` (the model that ran),
    `provider` (the preferred provider), `chain`, `now` (the new value of a probe), `needed` (options that the model
    needs: dry run, plugin libraries, inputs, contract), `setting` (pins and provider options of the run), `library`
    (the plugin library of `provider`), `libraries` (plugin libraries of the chain), `same_precision` (--precision of
    the package, unless it is the default)."""
    exports: bool = False
    """It exports the package again, so it requires a package."""
    chooses_lowering: bool = False
    """It queries the provider for a lowering; without effect for a package that was exported in this way."""
    unless: tuple[tuple[str, str], ...] = ()
    """Fields of the package, and their values with which the command has no effect."""
    probes: bool = False
    """It runs the missing probes."""
    change: Change | None = None
    """The same change in a probe; None: no probe shows whether the step helps."""
    changes: bool = True
    """It may change the placement of nodes."""


EXPORT = ("partita", "export", "{checkpoint}", "{out}")
FOR_TARGET = (*EXPORT, "--target", "{provider}", "{library}")
PLACE = ("partita", "place", "{path}", "--provider", "{chain}", "{needed}")
RETARGET = Step(
    "Export it for {provider}",
    Remedy(
        "keeps the precision; queries {provider} for its best attention lowering, which may have more nodes",
        (*FOR_TARGET, "{same_precision}"),
    ),
    exports=True,
    chooses_lowering=True,
)
STATIC = Step(
    "Make all shapes static",
    Remedy(
        "makes every shape static, so that no shapes are computed at run time; batch and length are fixed",
        (*FOR_TARGET, "{same_precision}", "--static-shapes"),
    ),
    exports=True,
    change=Change("static_shape"),
)
HALF = Step(
    "Export in float16",
    Remedy("writes the package in float16 (half the size, less precise)", (*FOR_TARGET, "--precision", "fp16")),
    exports=True,
    unless=(("precision", "fp16"), ("precision", "bf16")),
    change=Change("type", "float16"),
)
SINGLE = Step(
    "Export in float32",
    Remedy("writes the package in float32 (twice the size)", (*FOR_TARGET, "--precision", "fp32")),
    exports=True,
    unless=(("precision", "fp32"),),
    change=Change("type", "float32"),
)
STANDARD = Step(
    "Use standard operators",
    Remedy(
        "writes attention and cache in operators of opset 18, which are more nodes than a fused kernel",
        (*EXPORT, "--attention", "primitives", "{same_precision}"),
    ),
    exports=True,
    unless=(("attention", "primitives"),),
)
SET_OPTION = Step(
    "Set the option",
    Remedy("sets the option of {provider} for all nodes", (*PLACE, "{setting}", "--provider-option", "{now}")),
    change=Change(OPTION),
)
PROBE = Step(
    "Run the experiments",
    Remedy(
        "runs the missing experiments (up to 10 minutes)",
        (*PLACE, "{setting}", "--probe-seconds", "600", "--report", "again.json"),
    ),
    probes=True,
    changes=False,
)
WITHOUT_OPTIONS = Step(
    "Remove the constraints",
    Remedy("places the model without pins and without a memory budget, which may use more device memory", PLACE),
)
ASK_PROVIDER = Step(
    "Test the provider",
    Remedy(
        "tests {provider} in a separate process and reports the reason if it does not run",
        ("partita", "providers", "{libraries}"),
    ),
    changes=False,
)
ASK_OPTIONS = Step(
    "Look up its options",
    Remedy("lists the options of every provider", ("partita", "providers", "--json")),
    changes=False,
)
