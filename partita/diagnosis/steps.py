"""What to do about a reason, as command lines of Partita with blanks; the ones that several reasons share."""

from __future__ import annotations

from dataclasses import dataclass

from partita.observations.facts import OPTION, Factor
from partita.remedies import Remedy


@dataclass(frozen=True, slots=True)
class Change:
    """What a step changes, as experiments call it: one that was made tells whether the step helps."""

    factor: Factor
    now: str = ""
    """What takes the place of something else; empty: whatever the experiments found."""


@dataclass(frozen=True, slots=True)
class Step:
    """Something to do about a reason, as a command line of Partita."""

    title: str
    """In three words."""
    remedy: Remedy
    """The command, and what comes of it. In braces what a report fills in: `checkpoint`, `out` (a new package), `path`
    (what was run), `provider` (the preferred one), `chain`, `now` (what took the place in an experiment), `needed`
    (without which it does not run, or not there: a dry run, plugin libraries, what was said of inputs or of a folder),
    `setting` (pins and provider options with which it ran), `library` (the plugin library of `provider`), `libraries`
    (those of the whole chain)."""
    exports: bool = False
    """It makes the package anew, so there has to be one."""
    chooses_lowering: bool = False
    """It asks the provider which lowering it takes: nothing new for a package that was made so."""
    unless: tuple[tuple[str, str], ...] = ()
    """Fields of the package, and values with which the command changes nothing."""
    probes: bool = False
    """It makes the experiments that are missing; without any missing it tells nothing new."""
    change: Change | None = None
    """What it changes about a node, where experiments try the same. A step that changes nothing tells no more than it
    says; of any other, whether it helps is not known unless an experiment shows it."""
    changes: bool = True
    """It is meant to change where nodes run, and does not only tell more."""


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
        "tries {provider} in a process of its own and says what prevents it from running",
        ("partita", "providers", "{libraries}"),
    ),
    changes=False,
)
ASK_OPTIONS = Step(
    "Look up its options",
    Remedy("lists the options of every provider", ("partita", "providers", "--json")),
    changes=False,
)
