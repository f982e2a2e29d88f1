"""Which steps of a reason make sense for what was run, as commands with everything filled in that is known.

A package can be exported anew, and not as it is. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from partita.diagnosis.reasons.base import load_reasons
from partita.diagnosis.records import VariantRecord
from partita.diagnosis.steps import Step
from partita.observations.records import PackageFacts
from partita.observations.text_format import short_provider
from partita.remedies import Remedy

CHECKPOINT, PATH = "CHECKPOINT", "PATH"
"""Stand for what is not known."""
Known = Literal["shown", "shown of some", "untested", "says"]
"""Of a step: a probe shows that it helps; it was not tried; or it changes no placement and only gives information."""
SUFFIXES: Mapping[Known, str] = {
    "shown": "; in an experiment {provider} then supports the node",
    "shown of some": "; in experiments {provider} then supports some of the nodes",
    "untested": "; not tested",
    "says": "",
}


@dataclass(frozen=True, slots=True)
class Action:
    """A command that may fix fallbacks, with what it changes."""

    title: str
    remedy: Remedy
    exports: bool = False
    """It makes the package anew."""
    queries_provider: bool = False
    """It queries the provider for the lowerings that it supports."""
    known: Known = "says"

    @property
    def words(self) -> tuple[str, ...]:
        """The command as the shell splits it."""
        return self.remedy.command

    @property
    def does(self) -> str:
        """What the command does, and how sure it is that this helps."""
        return self.remedy.text


@dataclass(frozen=True, slots=True)
class Situation:
    """What was run, and where it was to run."""

    package: PackageFacts | None
    path: str | None
    chain: tuple[str, ...]
    """ONNX Runtime's names."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Provider options as the command line writes them: webgpu.enableInt64, and the value."""
    device: str = ""
    """The device that a dry run simulated; empty when it was none."""
    pins: tuple[str, ...] = ()
    """`PROVIDER:MODULE`, as the command line has them."""
    libraries: tuple[str, ...] = ()
    """`NAME=PATH` of plugin libraries that the user brought."""
    opened: tuple[str, ...] = ()
    """Options of the command that describe the model: sizes and values of inputs of an ONNX file, contract and variant
    of a folder."""

    def needed(self) -> tuple[str, ...]:
        """Words without which a command does not run it, or not there."""
        dry = ("--dry-run", "--device", self.device) if self.device else ()
        return (*dry, *each("--provider-library", self.libraries), *self.opened)

    def setting(self, but: str) -> tuple[str, ...]:
        """Words of a command that runs it so again. `but`: an option, with its value, that is given otherwise."""
        kept = [f"{name}={value}" for name, value in self.options.items() if name != but.partition("=")[0]]
        return (*each("--pin", self.pins), *each("--provider-option", kept))

    def library(self, provider: str) -> tuple[str, ...]:
        """Words that bring the library of one provider, by the name that a command has for it."""
        own = [text for text in self.libraries if provider_name(text.partition("=")[0]) == provider]
        return each("--provider-library", own)


def each(option: str, values: Iterable[str]) -> tuple[str, ...]:
    """An option that is given once for each value, as words."""
    return tuple(word for value in values for word in (option, value))


def steps_for(
    situation: Situation,
    code: str,
    wanted: str,
    *,
    unprobed: bool = False,
    trials: Sequence[Sequence[VariantRecord]] = (),
) -> list[Action]:
    """The steps of a reason, for nodes that are not on `wanted` (ONNX Runtime's name). `unprobed`: experiments are
    missing. `trials`: those on each of the nodes; what they tried in vain is not among the steps.
    """
    steps = next((reason.steps for reason in load_reasons() if reason.code == code), ())
    found = []
    for step in steps:
        if not _makes_sense(situation.package, step, wanted, unprobed):
            continue
        tried = [[trial for trial in each if _is_of(step, trial)] for each in trials]
        helped = [{trial.now: None for trial in each if trial.outcome == "supported"} for each in tried]
        nodes = sum(map(bool, helped))
        if tried and all(tried) and not nodes:
            continue  # tried in vain on every node
        names = dict.fromkeys(now for each in helped for now in each)
        for now in names if "{now}" in step.remedy.command else ("",):
            count = sum(now in each for each in helped) if now else nodes
            found.append(_fill(situation, wanted, step, now=now, known=_known(step, count, len(trials))))
    return found


def _is_of(step: Step, trial: VariantRecord) -> bool:
    """Whether an experiment changed what the step changes, and was answered: in a dry run, by a run on the CPU."""
    change = step.change
    answered = trial.outcome not in ("invalid", "timed_out", "placed")
    return change is not None and answered and trial.factor == change.factor and change.now in ("", trial.now)


def _known(step: Step, helped: int, nodes: int) -> Known:
    """The certainty that the step helps, from the number of nodes that it helped in probes. A step that queries the
    provider tests its own result.
    """
    if not step.changes or step.chooses_lowering:
        return "says"
    return "untested" if not helped else "shown" if helped == nodes else "shown of some"


def _makes_sense(package: PackageFacts | None, step: Step, wanted: str, unprobed: bool) -> bool:
    """Whether a step can be taken, and changes something."""
    if step.exports and package is None:
        return False
    if step.chooses_lowering and package is not None and package.target == provider_name(wanted):
        return False
    if package is not None and any(getattr(package, field) == same for field, same in step.unless):
        return False
    return unprobed or not step.probes


def _fill(situation: Situation, wanted: str, step: Step, *, now: str = "", known: Known = "says") -> Action:
    """The step with the blanks filled in. `now`: what took the place in an experiment."""
    provider, package = provider_name(wanted), situation.package
    source = package.checkpoint if package is not None and "/" in package.checkpoint else ""
    blanks = {
        "checkpoint": source or CHECKPOINT,
        "out": f"{package.name if package is not None else 'package'}-for-{provider}",
        "path": PATH if situation.path is None else situation.path,
        "provider": provider,
        "chain": ",".join(map(provider_name, situation.chain)) or provider,
        "now": now,
        "needed": situation.needed(),
        "setting": situation.setting(but=now),
        "library": situation.library(provider),
        "libraries": each("--provider-library", situation.libraries),
    }
    action = _written(step, blanks)
    told = replace(action.remedy, text=action.remedy.text + SUFFIXES[known].format(provider=provider))
    return replace(action, remedy=told, known=known)


def _written(step: Step, blanks: Mapping[str, object]) -> Action:
    """The step with its blanks filled in, word by word."""
    return Action(step.title.format(**blanks), step.remedy.filled(**blanks), step.exports, step.chooses_lowering)


def steps_for_provider(situation: Situation, code: str | None, provider: str) -> Sequence[Action]:
    """The steps of a reason for which `provider` (ONNX Runtime's name) is not there."""
    return steps_for(situation, code or "", provider)


def provider_name(provider: str) -> str:
    """A name that --provider takes, for one of ONNX Runtime's."""
    return short_provider(provider).lower()
