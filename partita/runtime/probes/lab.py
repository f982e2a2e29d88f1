"""Carries experiments out: in a child process, within a time budget, and not again when the answer is known.

A child that crashes or hangs over one model has answered for it; another one goes on with the next. What happens in a
child that has opened other models before counts only once it happens in a fresh one. Knows nothing of nodes and
reasons.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from partita.files import temporary_directory
from partita.observations.facts import FAILED, Outcome
from partita.observations.native_text import FULL, cut
from partita.providers.cuda_dry_run.devices import PREFIX
from partita.providers.resolve import Resolution
from partita.runtime.probes.cache import Cache, cache_for
from partita.runtime.probes.cases import ZEROS, fingerprint, zeros_needed
from partita.runtime.probes.child import Order
from partita.runtime.probes.process import ProbeProcess
from partita.runtime.process.children import ChildOutcome
from partita.runtime.provider_child import PROBE_MODEL
from partita.signals import ended_by_exception

if TYPE_CHECKING:
    import onnx

CHILD = "partita.runtime.probes.child"
KILLED = 9
"""SIGKILL, which no process sends itself; Windows has no such signal."""
START_SECONDS = 60.0
"""Loading ONNX Runtime and starting the provider; a GPU may compile for a long time."""
MODEL_SECONDS = 20.0
PATIENCE = 3.0
"""How much longer a model that was late gets when it is tried again, last of all: a slow machine is no hang."""
BUDGET = "probing budget exhausted (--probe-seconds)"
LEAST_SECONDS = 0.5
"""With less left, no child is started."""
START_FILE = "start.onnx"
LONGEST_SAID = 600


@dataclass(frozen=True, slots=True)
class Turn:
    """When a model's turn comes: not at all, once a model of an earlier place among the same was taken."""

    among: int
    place: int


Turns = Mapping[str, Sequence[Turn]]
"""The turns of models, by key; a model that is for several nodes has several, and is tried when one of them comes."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Outcome of one experiment: a model, opened by the provider in a child process, or known from the cache."""

    outcome: Outcome
    said: str
    cached: bool = False
    unfolded: bool = False
    """Taken as the nodes of the operator's function, and not as itself."""
    killed: bool = False
    """Whatever ends processes for want of memory may have ended this one."""

    @property
    def lasts(self) -> bool:
        """Whether the answer is the same another time, on a machine that does other things beside."""
        if self.outcome == "timed_out" or self.killed:
            return False
        return self.outcome not in FAILED or not FULL.search(self.said)


class Lab:
    """Experiments on one provider. `experiments`, `cached` and `crashes` count what was done.

    Within its context the child that a batch leaves behind answers the next one, and at the end the answers are saved;
    outside, each batch has a child of its own.
    """

    def __init__(
        self, resolution: Resolution, cache: Cache, deadline: float, environment: Mapping[str, str] | None = None
    ) -> None:
        self.environment = os.environ if environment is None else environment
        """Of the children; another than ours where they are to be a dry run."""
        self.resolution, self.cache, self.deadline = resolution, cache, deadline
        self.experiments = self.cached = self.crashes = 0
        self.refused_options: set[tuple[str, str]] = set()
        """Options and values with which the provider did not start."""
        self.unusable = ""
        """Why the provider cannot be asked at all; empty while it can."""
        self._process = ProbeProcess(CHILD, self.environment)
        self._context: ExitStack | None = None

    def __enter__(self) -> Self:
        with ExitStack() as begun:
            begun.enter_context(ended_by_exception())
            begun.callback(self.cache.save)  # also what was found before somebody interrupted it
            begun.callback(self._process.end)
            self._context = begun.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        context, self._context = self._context, None
        if context is not None:
            context.close()

    def try_with(
        self, option: str, value: str, models: Sequence[onnx.ModelProto], *, one_node: bool = True
    ) -> list[Answer | None]:
        """Answers of the same provider, opened with another value of one of its options."""
        if (option, value) in self.refused_options:
            return [None for _ in models]
        resolution = replace(self.resolution, options={**self.resolution.options, option: value})
        cache = cache_for(resolution, self.environment) if self.cache.path is not None else Cache(None)
        other = Lab(resolution, cache, self.deadline, self.environment)
        try:
            with other:
                return other.try_all(models, one_node=one_node)
        finally:
            if other.unusable:
                self.refused_options.add((option, value))
            self.experiments += other.experiments
            self.cached += other.cached
            self.crashes += other.crashes

    @property
    def dry_run(self) -> bool:
        """Whether the provider computes nothing."""
        return any(name.startswith(PREFIX) for name in self.environment)

    @property
    def seconds_left(self) -> float:
        """What is left of the time budget, in seconds."""
        return self.deadline - time.monotonic()

    def try_all(
        self, models: Sequence[onnx.ModelProto], *, one_node: bool = True, turns: Sequence[Turn] = ()
    ) -> list[Answer | None]:
        """An answer for each model; None where the time was up before, or the provider cannot be asked.

        `turns`: of each model, where an answer can make others needless; there is none for those then.
        """
        keys = [f"{'node' if one_node else 'part'}:{fingerprint(model)}" for model in models]
        answers: dict[str, Answer] = {}
        for key in dict.fromkeys(keys):
            known = self.cache.get(key)
            if known is not None:
                answers[key] = Answer(known.outcome, known.said, cached=True, unfolded=known.unfolded)
                self.cached += 1
        waiting = {key: model for key, model in zip(keys, models, strict=True) if key not in answers}
        by_key: dict[str, list[Turn]] = {}
        for key, turn in zip(keys, turns, strict=False):
            by_key.setdefault(key, []).append(turn)
        if waiting:
            self.carry_out(waiting, answers, one_node, by_key)
        for key in (key for key, count in Counter(keys).items() for _ in range(count - 1) if key in answers):
            self.cached += answers[key].cached  # variants that come to the same model count each
            self.experiments += not answers[key].cached
        return [answers.get(key) for key in keys]

    def starts(self) -> bool:
        """Whether the provider opens a model that every provider takes."""
        import onnx

        (answer,) = self.try_all([onnx.ModelProto.FromString(PROBE_MODEL)], one_node=False)
        return answer is not None and answer.outcome == "taken"

    def carry_out(
        self, waiting: dict[str, onnx.ModelProto], answers: dict[str, Answer], one_node: bool, turns: Turns
    ) -> None:
        """Try models in children, one after the other, until all are answered or needless, or the time is up."""
        late: dict[str, Answer] = {}
        with temporary_directory() as name:
            folder = Path(name)
            files = written = write_models(folder, waiting)
            while (files := _left(files, answers, turns)) and self.seconds_left > LEAST_SECONDS and not self.unusable:
                fresh = not self._process.running
                wait = {file: [[turn.among, turn.place] for turn in turns.get(key, ())] for file, key in files.items()}
                outcome = self.run_child(folder, tuple(files), one_node, turns=wait)
                found, begun = _read_answers(folder / "answers", files)
                for key, answer in found.items():
                    self.keep(key, answer, answers)
                ended_over = begun if begun in files and files[begun] not in found else None
                if outcome.late:
                    break  # the budget is spent, which says nothing of the model that was being tried, or of the start
                alone = fresh and not found
                if ended_over is not None and _late_with_one(outcome):
                    late[ended_over] = crash(outcome, START_SECONDS if alone else MODEL_SECONDS)
                elif ended_over is not None and alone:
                    self.keep(files[ended_over], crash(outcome, START_SECONDS), answers)
                files = {file: key for file, key in files.items() if key not in answers and file not in late}
                if ended_over is not None and ended_over in files:
                    # A model that came before may have left damage behind: only a fresh child shows whose crash it is.
                    files = {ended_over: files[ended_over], **files}
                if alone and ended_over is None:
                    self.unusable = _why_unusable(outcome, folder / "answers")
            for file, verdict in late.items():
                self.keep(written[file], self.try_late(folder, file, one_node) or verdict, answers)

    def try_late(self, folder: Path, file: str, one_node: bool) -> Answer | None:
        """The answer of a model that was late, in a child of its own and with more time; None where that is lacking.

        A model that every provider takes starts the provider, so that the whole time is for the one that was late.
        """
        if self.seconds_left <= LEAST_SECONDS or self.unusable:
            return None
        (folder / START_FILE).write_bytes(PROBE_MODEL)
        self._process.end()
        outcome = self.run_child(folder, (START_FILE, file), one_node, patience=PATIENCE)
        found, begun = _read_answers(folder / "answers", {START_FILE: START_FILE, file: file})
        if file in found:
            return found[file]
        if begun != file or outcome.late:
            return None
        return crash(outcome, MODEL_SECONDS * PATIENCE)

    def keep(self, key: str, answer: Answer, answers: dict[str, Answer]) -> None:
        """Count an answer, and remember it unless it may be another one next time."""
        answers[key] = answer
        self.experiments += 1
        if answer.outcome == "crashed":
            self.crashes += 1
        if answer.lasts:
            self.cache.put(key, answer.outcome, answer.said, unfolded=answer.unfolded)

    def run_child(
        self,
        folder: Path,
        models: Sequence[str],
        one_node: bool,
        *,
        patience: float = 1.0,
        turns: Mapping[str, Sequence[Sequence[int]]] | None = None,
    ) -> ChildOutcome:
        """A child tries these models. `patience`: how many times longer than usual each may take."""
        (folder / "answers").unlink(missing_ok=True)
        provider = self.resolution.provider
        request = {
            "provider": {
                "name": provider.name,
                "ort_name": provider.ort_name,
                "options": self.resolution.provider_options,
                "library": str(self.resolution.library) if self.resolution.library else None,
                "own": str(provider.library) if provider.library else None,
            },
            "folder": str(folder),
            "models": list(models),
            "answers": str(folder / "answers"),
            "one_node": one_node,
            "turns": turns or {},
            "start_seconds": START_SECONDS,
            "model_seconds": MODEL_SECONDS * patience,
        }
        try:
            return self._process.ask(request, max(self.seconds_left, 1.0))
        finally:
            if self._context is None:
                self._process.end()


def _left(files: Mapping[str, str], answers: Mapping[str, Answer], turns: Turns) -> dict[str, str]:
    """Models that are still to be tried: those of which no answer has made all turns needless."""
    order = Order({key: [(turn.among, turn.place) for turn in told] for key, told in turns.items()})
    for key, answer in answers.items():
        if answer.outcome == "taken" and not answer.unfolded:
            order.taken(key)
    return {file: key for file, key in files.items() if order.comes(key)}


def write_models(folder: Path, models: Mapping[str, onnx.ModelProto]) -> dict[str, str]:
    """Write the models and the zeros that they read; file name to key."""
    files = {f"{position}.onnx": key for position, key in enumerate(models)}
    for name, key in files.items():
        (folder / name).write_bytes(models[key].SerializeToString())
    length = zeros_needed(tuple(models.values()))
    if length:
        with (folder / ZEROS).open("wb") as file:
            file.truncate(length)
    return files


def _read_answers(path: Path, files: Mapping[str, str]) -> tuple[dict[str, Answer], str]:
    """Answers by key, and the model that was begun last."""
    found: dict[str, Answer] = {}
    begun = ""
    for line in _read_lines(path):
        if "begun" in line:
            begun = str(line["begun"])
        elif "model" in line:
            answer = Answer(line["outcome"], cut(str(line["said"]), LONGEST_SAID), unfolded=line["unfolded"])
            found[files[line["model"]]] = answer
    return found, begun


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """Whole lines of JSON; one that a crash cut off is left out."""
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            lines.append(json.loads(text))
        except ValueError:
            continue
    return lines


def _late_with_one(outcome: ChildOutcome) -> bool:
    """Whether the child was ended by its own alarm, over the model that it was at."""
    return outcome.signal is not None and outcome.signal == getattr(signal, "SIGALRM", None)


def crash(outcome: ChildOutcome, seconds: float) -> Answer:
    """What a child's end says of the model that it was at, which had so many seconds."""
    last = f"; its last output: {cut(outcome.log[-1], LONGEST_SAID)}" if outcome.log else ""
    ended = outcome.ended or "ended"
    if _late_with_one(outcome):
        return Answer("timed_out", f"no answer within {seconds:g} s{last}")
    return Answer("crashed", f"its process {ended}{last}", killed=outcome.signal == KILLED)


def _why_unusable(outcome: ChildOutcome, path: Path) -> str:
    """Why a child could not try anything."""
    told = next((str(line["unusable"]) for line in _read_lines(path) if "unusable" in line), "")
    if not told and _late_with_one(outcome):
        told = f"the provider did not start within {START_SECONDS:g} s in the process of the experiments"
    last = f"; its last output: {cut(outcome.log[-1], LONGEST_SAID)}" if outcome.log else ""
    return told or f"the process of the experiments {outcome.ended or 'gave no output'} while it started{last}"
