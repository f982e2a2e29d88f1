"""What to do about a reason, as command lines of Partita with blanks; the ones that several reasons share."""

from __future__ import annotations

from dataclasses import dataclass

from partita.remedies import Remedy


@dataclass(frozen=True, slots=True)
class Step:
    """Something to do about a reason, as a command line of Partita."""

    title: str
    """In three words."""
    remedy: Remedy
    """The command, and what comes of it. In braces what a report fills in: `checkpoint`, `out` (a new package), `path`
    (what was run), `provider` (the one that was wanted), `chain`."""
    exports: bool = False
    """It makes the package anew, so there has to be one."""
    chooses_lowering: bool = False
    """It asks the provider which lowering it takes: nothing new for a package that was made so."""
    unless: tuple[tuple[str, str], ...] = ()
    """Fields of the package, and values with which the command changes nothing."""
    probes: bool = False
    """It makes the experiments that are missing; without any missing it tells nothing new."""


EXPORT = ("partita", "export", "{checkpoint}", "{out}")
PLACE = ("partita", "place", "{path}", "--provider", "{chain}")
RETARGET = Step(
    "Export it for {provider}",
    Remedy(
        "queries {provider}, where it is installed, and writes the attention lowering that it supports best",
        (*EXPORT, "--target", "{provider}"),
    ),
    exports=True,
    chooses_lowering=True,
)
STATIC = Step(
    "Make all shapes static",
    Remedy(
        "makes every shape static, so that no shapes are computed at run time",
        (*EXPORT, "--target", "{provider}", "--static-shapes"),
    ),
    exports=True,
)
HALF = Step(
    "Export in float16",
    Remedy("writes the package in float16", (*EXPORT, "--target", "{provider}", "--precision", "fp16")),
    exports=True,
    unless=(("precision", "fp16"), ("precision", "bf16")),
)
SINGLE = Step(
    "Export in float32",
    Remedy("writes the package in float32", (*EXPORT, "--target", "{provider}", "--precision", "fp32")),
    exports=True,
    unless=(("precision", "fp32"),),
)
STANDARD = Step(
    "Use standard operators",
    Remedy(
        "writes attention and cache in operators of opset 17, without querying a provider",
        (*EXPORT, "--attention", "primitives"),
    ),
    exports=True,
    unless=(("attention", "primitives"),),
)
PROBE = Step(
    "Find out why",
    Remedy("makes the missing experiments", (*PLACE, "--probe-seconds", "600", "--report", "again.json")),
    probes=True,
)
WITHOUT_OPTIONS = Step(
    "Place it without constraints", Remedy("places it without pins and without a memory budget", PLACE)
)
ASK_PROVIDER = Step(
    "Test the provider",
    Remedy("tries {provider} in a process of its own and says what prevents it from running", ("partita", "providers")),
)
ASK_OPTIONS = Step(
    "Look up its options", Remedy("lists the options of every provider", ("partita", "providers", "--json"))
)
