"""The child process of a support table: `python -m partita.runtime.support.child`, JSON in, JSON lines out.

It writes down every variant before it asks about it, so that a crash has a name, and goes on after one from what its
file already holds: variants of the session that did not come back are asked first, and alone.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from partita.observations.names import CPU
from partita.orphans import end_with_parent
from partita.providers.cuda_dry_run.standins import BUILD_VARIABLE, ensure_child
from partita.runtime.probes.child import STARTUP, say, set_alarm, wanted_provider
from partita.runtime.support.asking import Asker, Verdict
from partita.runtime.support.plan import Plan
from partita.runtime.support.variants import Variant
from partita.support.answers import Outcome

if TYPE_CHECKING:
    from partita.providers.resolve import Resolution

NO_TENSORS = re.compile(r"MLDataType for: (?P<kind>\S+) is not currently registered")
CHUNK, COMPILED_CHUNK = 48, 16
"""Variants in one session; a provider that compiles takes long over many, and fails over all of them."""


def main() -> None:
    """Read the request, ask, and leave without running anybody's destructors."""
    end_with_parent()
    request = json.load(sys.stdin)
    warnings.simplefilter("ignore")
    os.dup2(2, 1)  # native code prints to stdout
    path = Path(request["answers"])
    before = read_lines(path)
    with path.open("a", encoding="utf-8") as out:
        Examiner(request, before, out).examine()
    os._exit(0)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Whole lines of JSON; one that a crash cut off is left out."""
    found = []
    for text in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            found.append(json.loads(text))
        except ValueError:
            continue
    return found


class Examiner:
    """Asks a provider about everything that is wanted, until the time is up."""

    def __init__(self, request: Mapping[str, Any], before: Sequence[Mapping[str, Any]], out: TextIO) -> None:
        self.request, self.out = request, out
        self.deadline = time.monotonic() + request["seconds"]
        self.answers: dict[str, Outcome] = {line["id"]: line["outcome"] for line in before if "outcome" in line}
        self.planned = {line["id"] for line in before if "plan" in line}
        begun: list[str] = next((line["begun"] for line in reversed(before) if "begun" in line), [])
        self.suspects = {key for key in begun if key not in self.answers}
        self.unknown: dict[str, str] = {}
        """Types that this ONNX Runtime has no tensors of, and what it says of them."""
        self.begun: set[str] = set()
        """Variants that this process has had in a session."""
        self.keys: dict[str, str] = {}
        """Of the variants of the session that is being opened, by their names in it."""

    def examine(self) -> None:
        """Ask, and say at the end whether everything was asked."""
        say(self.out, {"begun": [STARTUP]})
        set_alarm(self.request["start_seconds"])
        if os.environ.get(BUILD_VARIABLE):
            ensure_child()
        try:
            resolution = wanted_provider(self.request["provider"])
        except Exception as error:  # noqa: BLE001 - whatever it is, the parent reads it as the finding
            say(self.out, {"unusable": f"{type(error).__name__}: {error}"})
            return
        cpu = wanted_provider({"name": "cpu", "ort_name": CPU, "own": None, "library": None, "options": {}})
        from partita.runtime.support.wanted import all_wanted, name_of, newest_of

        found = all_wanted(self.request["what"], lambda opset: _legal_opset(cpu, opset, self.folder))
        say(self.out, {"opset": found.opset, "needs": [asdict(need) for need in found.needs]})
        plan = Plan(found.versions, newest_of(found), self.answers)
        lacking = [name_of(entry.operator) for entry in found.versions if not plan.forms[entry.operator]]
        say(self.out, {"without_example": lacking})
        asker, judge = self.asker(resolution), self.asker(cpu, judge=True)
        try:
            for wave in plan.waves():
                self.ask_all(wave, asker, judge if resolution.provider.ort_name != CPU else None)
        except TimeoutError:
            say(self.out, {"late": True})
        for operator, count in plan.left_out.items():
            say(self.out, {"left_out": count, "operator": [operator.domain, operator.name, operator.since]})
        set_alarm(0)
        say(self.out, {"done": True, "sessions": asker.sessions + judge.sessions})

    @property
    def folder(self) -> Path:
        """Where models are said to be."""
        return Path(self.request["folder"])

    def asker(self, resolution: Resolution, *, judge: bool = False) -> Asker:
        """Asks one provider. `judge`: it is the CPU provider, which tells what is a valid model."""

        def before(names: Sequence[str]) -> None:
            if time.monotonic() >= self.deadline:
                raise TimeoutError
            keys = [self.keys[name] for name in names]
            fresh = self.begun <= set(keys)  # nobody else can have left damage behind
            set_alarm(self.request["session_seconds"] if self.begun else self.request["start_seconds"])
            say(self.out, {"begun": keys, "fresh": fresh, "judge": judge})
            self.begun.update(keys)

        return Asker(resolution, self.folder, before)

    def ask_all(self, wave: Sequence[Variant], asker: Asker, judge: Asker | None) -> None:
        """Ask about the variants of a wave that nobody has asked about yet; suspects first."""
        distinct = {variant.key: variant for variant in wave}
        waiting = {key: variant for key, variant in distinct.items() if key not in self.answers}
        for key, variant in waiting.items():
            if key not in self.planned:
                self.planned.add(key)
                say(self.out, {"plan": _described(variant), "id": key})
        suspects = {key: variant for key, variant in waiting.items() if key in self.suspects}
        for key, variant in suspects.items():
            self.settle({key: variant}, asker, judge)
        rest = {key: variant for key, variant in waiting.items() if key not in self.answers}
        for part in _chunks(rest, COMPILED_CHUNK if asker.compiles else CHUNK):
            self.settle(part, asker, judge)

    def settle(self, variants: Mapping[str, Variant], asker: Asker, judge: Asker | None) -> None:
        """Answer for some variants of one version of an operator set: whether they are legal, then who takes them."""
        named = {f"v{number}": variant for number, variant in enumerate(variants.values())}
        self.keys = dict(zip(named, variants, strict=True))
        for name, variant in list(named.items()):
            said = next((self.unknown[kind] for _, kind in variant.types if kind in self.unknown), None)
            if said is not None:
                self.keep(name, Verdict("invalid", said))
                del named[name]
        if not named:
            return
        runs_on_cpu, others = dict(named), {}
        if judge is not None:
            verdicts = dict(judge.ask(named))
            for name, verdict in verdicts.items():
                if verdict.outcome == "invalid":
                    self.keep(name, verdict)
            # A session fails over a node that nobody has a kernel for: those that the CPU lacks go apart.
            runs_on_cpu = {name: variant for name, variant in named.items() if verdicts[name].outcome == "taken"}
            others = {name: named[name] for name, verdict in verdicts.items() if verdict.outcome in ("left", "failed")}
        for part in (runs_on_cpu, others):
            if part:
                for name, verdict in asker.ask(part):
                    self.keep(name, verdict)

    def keep(self, name: str, verdict: Verdict) -> None:
        """Write an answer down."""
        key = self.keys[name]
        unknown = NO_TENSORS.search(verdict.said) if verdict.outcome == "invalid" else None
        if unknown is not None:
            self.unknown.setdefault(unknown["kind"], verdict.said)
        self.answers[key] = verdict.outcome
        told = {"outcome": verdict.outcome, "said": verdict.said, "replaced": verdict.replaced}
        say(self.out, {"id": key, **told})


def _described(variant: Variant) -> dict[str, Any]:
    """A variant as the parent reads it."""
    form, operator = variant.form, variant.form.operator
    return {
        "domain": operator.domain,
        "operator": operator.name,
        "since": operator.since,
        "until": operator.until,
        "kind": variant.kind,
        "types": variant.types,
        "what": form.note,
        "factors": sorted(form.factors),
    }


def _chunks(variants: Mapping[str, Variant], size: int) -> Iterator[dict[str, Variant]]:
    """Variants that can be in one session, so many at a time."""
    groups: dict[tuple[str, int], dict[str, Variant]] = {}
    for key, variant in variants.items():
        operator = variant.form.operator
        groups.setdefault((operator.domain, operator.opset), {})[key] = variant
    for group in groups.values():
        keys = list(group)
        for start in range(0, len(keys), size):
            yield {key: group[key] for key in keys[start : start + size]}


def _legal_opset(cpu: Resolution, opset: int, folder: Path) -> bool:
    """Whether ONNX Runtime opens a model of this version of ONNX's operator set."""
    from partita.runtime.ort.session import NativeFailureError, Opening, open_native
    from partita.runtime.support.wanted import opset_model

    try:
        open_native(folder / "model.onnx", [cpu], Opening(threads=1, optimise=False, model=opset_model(opset))).close()
    except NativeFailureError:
        return False
    return True


if __name__ == "__main__":
    main()
