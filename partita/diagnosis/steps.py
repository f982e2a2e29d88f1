"""Remedies as command lines of Partita with placeholders, shared by several reasons."""

from __future__ import annotations

from dataclasses import dataclass

from partita.observations.facts import OPTION, Factor
from partita.remedies import Remedy


@dataclass(frozen=True, slots=True)
class Change:
    """What a step changes, as a probe names it: a probe with this change shows whether the step helps."""

    factor: Factor
    now: str = ""
    """What takes the place of something else; empty: whatever the experiments found."""


@dataclass(frozen=True, slots=True)
class Step:
    """Something to do about a reason, as a command line of Partita."""

    title: str
    """In three words."""
    remedy: Remedy
    """The command, and its effect. A report fills in: `checkpoint`, `out` (a new package), `path` (the model that ran),
    `provider` (the preferred provider), `chain`, `now` (the new value of a probe), `needed` (options that the model
    needs: dry run, plugin libraries, inputs, contract), `setting` (pins and provider options of the run), `library`
    (the plugin library of `provider`), `libraries` (plugin libraries of the chain)."""
    exports: bool = False
    """It makes the package anew, so there has to be one."""
    chooses_lowering: bool = False
    """It queries the provider for a lowering; useless for a package that was exported so."""
    unless: tuple[tuple[str, str], ...] = ()
    """Fields of the package, and values with which the command changes nothing."""
    probes: bool = False
    """It makes the missing probes."""
    change: Change | None = None
    """The change of a node that probes try as well. Without a probe it is unknown whether the step helps."""
    changes: bool = True
    """It is meant to change where nodes run."""


EXPORT = ("partita", "export", "{checkpoint}", "{out}")
FOR_TARGET = (*EXPORT, "--target", "{provider}", "{library}")
PLACE = ("partita", "place", "{path}", "--provider", "{chain}", "{needed}")
RETARGET = Step(
    "Export it for {provider}",
    Remedy(
        "queries {provider}, where it is installed, and writes the attention lowering that it supports best",
        FOR_TARGET,
    ),
    exports=True,
    chooses_lowering=True,
)
STATIC = Step(
    "Make all shapes static",
    Remedy(
        "makes every shape static, so that no shapes are computed at run time",
        (*FOR_TARGET, "--static-shapes"),
    ),
    exports=True,
    change=Change("static_shape"),
)
HALF = Step(
    "Export in float16",
    Remedy("writes the package in float16", (*FOR_TARGET, "--precision", "fp16")),
    exports=True,
    unless=(("precision", "fp16"), ("precision", "bf16")),
    change=Change("type", "float16"),
)
SINGLE = Step(
    "Export in float32",
    Remedy("writes the package in float32", (*FOR_TARGET, "--precision", "fp32")),
    exports=True,
    unless=(("precision", "fp32"),),
    change=Change("type", "float32"),
)
STANDARD = Step(
    "Use standard operators",
    Remedy(
        "writes attention and cache in operators of opset 18, without querying a provider",
        (*EXPORT, "--attention", "primitives"),
    ),
    exports=True,
    unless=(("attention", "primitives"),),
)
SET_OPTION = Step(
    "Set the option",
    Remedy("sets the option of {provider}", (*PLACE, "{setting}", "--provider-option", "{now}")),
    change=Change(OPTION),
)
PROBE = Step(
    "Find out why",
    Remedy("makes the missing experiments", (*PLACE, "{setting}", "--probe-seconds", "600", "--report", "again.json")),
    probes=True,
    changes=False,
)
WITHOUT_OPTIONS = Step(
    "Place it without constraints", Remedy("places it without pins and without a memory budget", PLACE)
)
ASK_PROVIDER = Step(
    "Test the provider",
    Remedy(
        "tries {provider} in a separate process and reports what prevents it from running",
        ("partita", "providers", "{libraries}"),
    ),
    changes=False,
)
ASK_OPTIONS = Step(
    "Look up its options",
    Remedy("lists the options of every provider", ("partita", "providers", "--json")),
    changes=False,
)
