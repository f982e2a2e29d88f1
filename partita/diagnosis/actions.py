"""The applicable steps of a reason, as commands with all known values filled in. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from partita.diagnosis.reasons.base import Step
from partita.diagnosis.reasons.table import REASONS
from partita.diagnosis.records import VariantRecord
from partita.observations.records import PackageFacts
from partita.observations.text_format import short_provider
from partita.remedies import Remedy

CHECKPOINT, PATH = "CHECKPOINT", "PATH"
"""Placeholders for unknown values."""
KEPT = ("fp16", "bf16", "int8", "int4")
"""Values of --precision that an export has to repeat; a foreign folder may have others."""


@dataclass(frozen=True, slots=True)
class Action:
    """A command that may fix fallbacks, with what it changes."""

    title: str
    remedy: Remedy
    step: Step

    @property
    def words(self) -> tuple[str, ...]:
        """The words of the command."""
        return self.remedy.command

    @property
    def does(self) -> str:
        """The effect of the command, and experiments that show that it helps."""
        return self.remedy.text


@dataclass(frozen=True, slots=True)
class Situation:
    """The model that ran, its provider chain and options."""

    package: PackageFacts | None
    path: str | None
    chain: tuple[str, ...]
    """ONNX Runtime's names."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Provider options by their names on the command line, e.g. webgpu.enableInt64, with their values."""
    device: str = ""
    """The device that a dry run simulated; empty for a real run."""
    pins: tuple[str, ...] = ()
    """Pins as `PROVIDER:MODULE`."""
    libraries: tuple[str, ...] = ()
    """Plugin libraries of the user as `NAME=PATH`."""
    model_options: tuple[str, ...] = ()
    """Options that describe the model: sizes and values of inputs of an ONNX file, contract and variant of a folder."""

    def needed(self) -> tuple[str, ...]:
        """Options that every command on this model and provider needs."""
        dry = ("--dry-run", "--device", self.device) if self.device else ()
        return (*dry, *each("--provider-library", self.libraries), *self.model_options)

    def setting(self, but: str) -> tuple[str, ...]:
        """Pins and provider options of the run. `but`: an option with its value that the command sets differently."""
        options = [f"{name}={value}" for name, value in self.options.items() if name != but.partition("=")[0]]
        return (*each("--pin", self.pins), *each("--provider-option", options))

    def library(self, provider: str) -> tuple[str, ...]:
        """The option with the plugin library of one provider (its name on the command line); empty without one."""
        own = [text for text in self.libraries if provider_name(text.partition("=")[0]) == provider]
        return each("--provider-library", own)


def each(option: str, values: Iterable[str]) -> tuple[str, ...]:
    """The words of an option that is repeated for each value."""
    return tuple(word for value in values for word in (option, value))


def steps_for(
    situation: Situation,
    code: str,
    preferred: str,
    *,
    unprobed: bool = False,
    trials: Sequence[Sequence[VariantRecord]] = (),
) -> list[Action]:
    """The applicable steps of a reason, for nodes that are not on `preferred` (ONNX Runtime's name).

    `unprobed`: experiments are missing. `trials`: the experiments on each node; steps that helped no node are omitted.
    """
    found = []
    for step in REASONS[code].steps if code in REASONS else ():
        if not _is_applicable(situation.package, step, preferred, unprobed):
            continue
        tried = [[trial for trial in each if _is_of(step, trial)] for each in trials]
        helped = [{trial.after: None for trial in each if trial.outcome == "supported"} for each in tried]
        nodes = sum(map(bool, helped))
        if tried and all(tried) and not nodes:
            continue  # it helped no node
        names = dict.fromkeys(now for each in helped for now in each)
        for now in names if "{now}" in step.remedy.command else ("",):
            count = sum(now in each for each in helped) if now else nodes
            shown = "" if not count else f"; in an experiment {provider_name(preferred)} then supports "
            shown += "" if not count else "the node" if count == len(trials) else "some of the nodes"
            found.append(_fill(situation, preferred, step, now=now, shown=shown))
    return found


def _is_of(step: Step, trial: VariantRecord) -> bool:
    """Whether an experiment made the change of the step and has a conclusive outcome."""
    change = step.change
    answered = trial.outcome not in ("invalid", "timed_out", "placed")
    return change is not None and answered and trial.factor == change.factor and change.new_value in ("", trial.after)


def _is_applicable(package: PackageFacts | None, step: Step, preferred: str, unprobed: bool) -> bool:
    """Whether a step is possible and has an effect."""
    if step.exports and package is None:
        return False
    if step.chooses_lowering and package is not None and package.target == provider_name(preferred):
        return False
    if package is not None and any(getattr(package, field) == same for field, same in step.unless):
        return False
    return unprobed or not step.probes


def _fill(situation: Situation, preferred: str, step: Step, *, now: str, shown: str) -> Action:
    """The step with its placeholders filled. `now`: the new value in an experiment; `shown`: its result."""
    provider, package = provider_name(preferred), situation.package
    blanks = {
        "checkpoint": checkpoint_of(package),
        "out": f"{package.name if package is not None else 'package'}-for-{provider}",
        "path": PATH if situation.path is None else situation.path,
        "provider": provider,
        "chain": ",".join(map(provider_name, situation.chain)) or provider,
        "now": now,
        "needed": situation.needed(),
        "setting": situation.setting(but=now),
        "library": situation.library(provider),
        "same_precision": same_precision(package),
        "libraries": each("--provider-library", situation.libraries),
    }
    remedy = step.remedy.filled(**blanks)
    return Action(step.title.format(**blanks), replace(remedy, text=f"{remedy.text}{shown}"), step)


def checkpoint_of(package: PackageFacts | None) -> str:
    """The checkpoint that a package was exported from, or its placeholder."""
    return package.checkpoint if package is not None and "/" in package.checkpoint else CHECKPOINT


def same_precision(package: PackageFacts | None) -> tuple[str, ...]:
    """The option with the precision of a package, if an export has to repeat it."""
    return each("--precision", [package.precision] if package is not None and package.precision in KEPT else [])


def provider_name(provider: str) -> str:
    """The name for --provider of a provider with ONNX Runtime's name."""
    return short_provider(provider).lower()
