"""Remedies as command lines of Partita with placeholders, shared by several reasons."""

from __future__ import annotations

from dataclasses import dataclass

from partita.observations.facts import OPTION, Factor
from partita.remedies import Remedy


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
