"""Steps of the remedies of reasons: commands, filled in for the model that ran. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from partita.diagnosis.records import VariantRecord
from partita.observations.facts import OPTION, Factor
from partita.observations.records import PackageFacts
from partita.observations.text_format import short_provider
from partita.remedies import Remedy

CHECKPOINT, PATH = "CHECKPOINT", "PATH"
"""Placeholders for unknown values."""
REPEATED = ("fp16", "bf16", "int8", "int4")
"""Values of --precision that an export has to repeat; a foreign folder may have others."""


@dataclass(frozen=True, slots=True)
class Step:
    """A fix for a reason, as a command line of Partita."""

    title: str
    """Title of about three words."""
    text: str
    """Effect of the command."""
    command: tuple[str, ...]
    """The words of the command. A report fills in: `checkpoint`, `out` (a new package), `path` (the model that ran),
    `provider` (the preferred provider), `chain`, `now` (the new value of a probe), `needed` (options that the model
    needs: dry run, plugin libraries, inputs, contract), `setting` (pins and provider options of the run), `library`
    (the plugin library of `provider`), `libraries` (plugin libraries of the chain), `same_precision` (--precision of
    the package, unless it is the default)."""
    unless: tuple[tuple[str, str], ...] = ()
    """Fields of the package, and their values with which the command has no effect."""
    probes: bool = False
    """It runs the missing probes."""
    factor: Factor = ""
    """Factor of the probe that shows whether the step helps; empty: none does."""
    new_value: str = ""
    """The new value in that probe; empty: any."""

    @property
    def exports(self) -> bool:
        """It exports the package again, so it requires a package."""
        return self.command[1] == "export"


EXPORT = ("partita", "export", "{checkpoint}", "{out}")
FOR_TARGET = (*EXPORT, "--target", "{provider}", "{library}")
PLACE = ("partita", "place", "{path}", "--provider", "{chain}", "{needed}")
RETARGET = Step(
    "Export it for {provider}",
    "keeps the precision; queries {provider} for its best attention lowering, which may have more nodes",
    (*FOR_TARGET, "{same_precision}"),
    unless=(("target", "{provider}"),),
)
STATIC = Step(
    "Make all shapes static",
    "makes every shape static, so that no shapes are computed at run time; batch and length are fixed",
    (*FOR_TARGET, "{same_precision}", "--static-shapes"),
    factor="static_shape",
)
HALF = Step(
    "Export in float16",
    "writes the package in float16 (half the size, less precise)",
    (*FOR_TARGET, "--precision", "fp16"),
    unless=(("precision", "fp16"), ("precision", "bf16")),
    factor="type",
    new_value="float16",
)
SINGLE = Step(
    "Export in float32",
    "writes the package in float32 (twice the size)",
    (*FOR_TARGET, "--precision", "fp32"),
    unless=(("precision", "fp32"),),
    factor="type",
    new_value="float32",
)
STANDARD = Step(
    "Use standard operators",
    "writes attention and cache in operators of opset 18, which are more nodes than a fused kernel",
    (*EXPORT, "--attention", "primitives", "{same_precision}"),
    unless=(("attention", "primitives"),),
)
SET_OPTION = Step(
    "Set the option",
    "sets the option of {provider} for all nodes",
    (*PLACE, "{setting}", "--provider-option", "{now}"),
    factor=OPTION,
)
PROBE = Step(
    "Run the experiments",
    "runs the missing experiments (up to 10 minutes)",
    (*PLACE, "{setting}", "--probe-seconds", "600", "--report", "again.json"),
    probes=True,
)
WITHOUT_OPTIONS = Step(
    "Remove the constraints",
    "places the model without pins and without a memory budget, which may use more device memory",
    PLACE,
)
ASK_PROVIDER = Step(
    "Test the provider",
    "tests {provider} in a separate process and reports the reason if it does not run",
    ("partita", "providers", "{libraries}"),
)
ASK_OPTIONS = Step(
    "Look up its options",
    "lists the options of every provider",
    ("partita", "providers", "--json"),
)


class Action(NamedTuple):
    """A step with all known values filled in."""

    step: Step
    title: str
    remedy: Remedy
    """The command, its effect, and experiments that show that it helps."""


@dataclass(frozen=True, slots=True)
class Situation:
    """The model that ran, its provider chain and options."""

    package: PackageFacts | None
    path: str | None
    chain: tuple[str, ...]
    """ONNX Runtime's names."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Provider options by their names on the command line, e.g. webgpu.enableInt64, with their values."""
    pins: tuple[str, ...] = ()
    """Pins as `PROVIDER:MODULE`."""
    libraries: tuple[str, ...] = ()
    """Plugin libraries of the user as `NAME=PATH`."""
    needed: tuple[str, ...] = ()
    """Further options, as words: dry run, plugin libraries, sizes and values of inputs, contract and variant."""

    def blanks(self, preferred: str, now: str) -> dict[str, object]:
        """The values of placeholders. `now`: an option with its value that the command sets differently."""
        provider, package = provider_name(preferred), self.package
        settings = [f"{name}={value}" for name, value in self.options.items() if name != now.partition("=")[0]]
        own = [text for text in self.libraries if provider_name(text.partition("=")[0]) == provider]
        repeated = [package.precision] if package is not None and package.precision in REPEATED else []
        return {
            "checkpoint": package.checkpoint if package is not None and "/" in package.checkpoint else CHECKPOINT,
            "out": f"{package.name if package is not None else 'package'}-for-{provider}",
            "path": PATH if self.path is None else self.path,
            "provider": provider,
            "chain": ",".join(map(provider_name, self.chain)) or provider,
            "now": now,
            "needed": self.needed,
            "setting": (*each("--pin", self.pins), *each("--provider-option", settings)),
            "library": each("--provider-library", own),
            "same_precision": each("--precision", repeated),
            "libraries": each("--provider-library", self.libraries),
        }


def each(option: str, values: Iterable[str]) -> tuple[str, ...]:
    """The words of an option that is repeated for each value."""
    return tuple(word for value in values for word in (option, value))


def steps_for(
    situation: Situation,
    steps: Sequence[Step],
    preferred: str,
    *,
    unprobed: bool = False,
    trials: Sequence[Sequence[VariantRecord]] = (),
) -> list[Action]:
    """The applicable steps of a reason, for nodes that are not on `preferred` (ONNX Runtime's name).

    `unprobed`: experiments are missing. `trials`: the experiments on each node; steps that helped no node are omitted.
    """
    found = []
    for step in steps:
        if not _is_applicable(situation.package, step, preferred, unprobed):
            continue
        tried = [[trial for trial in each if _is_of(step, trial)] for each in trials]
        helped = [{trial.after: None for trial in each if trial.outcome == "supported"} for each in tried]
        nodes = sum(map(bool, helped))
        if tried and all(tried) and not nodes:
            continue  # it helped no node
        names = dict.fromkeys(now for each in helped for now in each)
        for now in names if "{now}" in step.command else ("",):
            count = sum(now in each for each in helped) if now else nodes
            blanks = situation.blanks(preferred, now)
            remedy = Remedy(step.text, step.command).filled(**blanks)
            if count:
                which = "the node" if count == len(trials) else "some of the nodes"
                text = f"{remedy.text}; in an experiment {blanks['provider']} then supports {which}"
                remedy = replace(remedy, text=text)
            found.append(Action(step, step.title.format(**blanks), remedy))
    return found


def _is_of(step: Step, trial: VariantRecord) -> bool:
    """Whether an experiment made the change of the step and has a conclusive outcome."""
    answered = trial.outcome not in ("invalid", "timed_out", "placed")
    return answered and trial.factor == step.factor and step.new_value in ("", trial.after)


def _is_applicable(package: PackageFacts | None, step: Step, preferred: str, unprobed: bool) -> bool:
    """Whether a step is possible and has an effect."""
    if step.exports and package is None:
        return False
    same = [(field, value.format(provider=provider_name(preferred))) for field, value in step.unless]
    if package is not None and any(getattr(package, field) == value for field, value in same):
        return False
    return unprobed or not step.probes


def provider_name(provider: str) -> str:
    """The name for --provider of a provider with ONNX Runtime's name."""
    return short_provider(provider).lower()
