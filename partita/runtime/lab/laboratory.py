"""Opens models on one provider in a worker process, within a time budget, and stores the answers.

If a worker crashes or times out, that is the answer for its model, and a new worker continues. A crash of a worker that
has opened other models before counts only if it repeats in a fresh worker.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Self

import onnx
from pydantic import TypeAdapter

from partita.files import cache_folder
from partita.files import replace as replace_file
from partita.observations.native_text import cut
from partita.providers.resolve import Resolution
from partita.runtime.chain.provider_check import PROBE_MODEL
from partita.runtime.lab.graph import CannotProbeError, Graph
from partita.runtime.lab.placement import Placement
from partita.runtime.lab.variant import node_variant, variant_model, zeros_needed
from partita.runtime.ort.registry import provider_identity
from partita.runtime.worker.parent import Worker, WorkerLostError

CHILD = "partita.runtime.lab.placement"
START_SECONDS = 60.0
"""Time limit to load ONNX Runtime, start the provider, and open the first model: a GPU may compile for a long time."""
MODEL_SECONDS = 20.0
PATIENCE = 3.0
"""Factor on the time limit when a late model is tested again at the end, because the machine may just be slow."""
BUDGET = "probing budget exhausted (--probe-seconds)"
LEAST_SECONDS = 0.5
"""Minimum seconds left to start a worker."""
LONGEST_MESSAGE = 600
FORMAT = 13
"""Increment when experiments change, to invalidate stored answers."""
KIND = "probes"
"""Subfolder of the user's cache folder for stored answers."""
MOST_ANSWERS = 20_000
ANSWERS = TypeAdapter(dict[str, Placement])
"""Format of stored answers."""


class Lab:
    """Experiments on one provider until `deadline` (time.monotonic()). Closing it ends the worker and saves answers."""

    def __init__(
        self, resolution: Resolution, cache: Cache, deadline: float, environment: Mapping[str, str] | None = None
    ) -> None:
        self.environment = os.environ if environment is None else environment
        self.resolution, self.cache, self.deadline = resolution, cache, deadline
        self.experiments = self.cached = self.crashes = 0
        self.refused_options: set[tuple[str, str]] = set()
        """Option values with which the provider did not start."""
        self.unusable = ""
        """The reason why the provider cannot be tested; empty if it can."""
        self._worker: Worker | None = None
        self._fresh = True
        """The worker has not opened a model yet."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        self.cache.save()

    @property
    def compiles(self) -> bool:
        """Whether the provider compiles subgraphs, so it may support no partition of a single node."""
        return self.resolution.provider.compiles

    @property
    def remaining_seconds(self) -> float:
        """The rest of the time budget, in seconds."""
        return self.deadline - time.monotonic()

    def try_with(
        self, option: str, value: str, models: Sequence[onnx.ModelProto], *, one_node: bool = True
    ) -> list[Placement | None]:
        """Answers of the provider with another value of one option."""
        if (option, value) in self.refused_options:
            return [None for _ in models]
        resolution = replace(self.resolution, options={**self.resolution.options, option: value})
        cache = cache_for(resolution, self.environment) if self.cache.path is not None else Cache(None)
        with Lab(resolution, cache, self.deadline, self.environment) as other:
            answers = other.try_all(models, one_node=one_node)
        if other.unusable:
            self.refused_options.add((option, value))
        self.experiments += other.experiments
        self.cached += other.cached
        self.crashes += other.crashes
        return answers

    def starts(self) -> bool:
        """Whether the provider opens a model that every provider supports."""
        (answer,) = self.try_all([onnx.ModelProto.FromString(PROBE_MODEL)], one_node=False)
        return answer is not None and answer.outcome == "supported"

    def try_all(self, models: Sequence[onnx.ModelProto], *, one_node: bool = True) -> list[Placement | None]:
        """An answer for each model; None if time ran out or the provider is untestable.

        `one_node`: find the placement of the node; otherwise only whether the provider opens the model.
        """
        contents = [model.SerializeToString(deterministic=True) for model in models]
        zeros = {content: zeros_needed(model) for content, model in zip(contents, models, strict=True)}
        answers = {content: self._answer(content, zeros[content], one_node, MODEL_SECONDS) for content in zeros}
        for content, answer in answers.items():
            if answer is not None and answer.outcome == "timed_out":
                self._end()  # a fresh worker and more time for late models
                answers[content] = self._answer(content, zeros[content], one_node, MODEL_SECONDS * PATIENCE) or answer
        for answer in filter(None, answers.values()):
            self.cached += answer.cached
            self.experiments += not answer.cached
            self.crashes += answer.outcome == "crashed" and not answer.cached
        return [answers[content] for content in contents]

    def try_nodes(self, nodes: Iterable[tuple[Graph, str]]) -> list[Placement | None]:
        """An answer for each node alone; None also for a node of which no model can be made."""
        models: list[onnx.ModelProto | None] = []
        for graph, name in nodes:
            try:
                models.append(variant_model(node_variant(graph, name), auxiliary=self.compiles))
            except CannotProbeError:
                models.append(None)
        answers = iter(self.try_all([model for model in models if model is not None]))
        return [None if model is None else next(answers) for model in models]

    def _answer(self, model: bytes, zeros: int, one_node: bool, seconds: float) -> Placement | None:
        """The stored answer for a model, else that of a worker within `seconds`. `zeros`: size of its weights file."""
        key = f"{'node' if one_node else 'part'}:{hashlib.sha256(model).hexdigest()}"
        answer = self.cache.get(key)
        while answer is None and self._start():
            answer = self._ask(model, zeros, one_node, seconds)
            if answer is not None and answer.is_repeatable:
                self.cache[key] = answer
        return answer

    def _ask(self, model: bytes, zeros: int, one_node: bool, seconds: float) -> Placement | None:
        """The worker's answer for a model; None if the end of the worker was not caused by it."""
        assert self._worker is not None
        fresh, self._fresh = self._fresh, False
        allowed = max(seconds, START_SECONDS) if fresh else seconds
        timeout = min(allowed, max(self.remaining_seconds, LEAST_SECONDS))
        try:
            placed: Placement = self._worker.call("measure", model, zeros, one_node, timeout=timeout)
        except WorkerLostError as lost:
            self._end()
            if lost.late:
                late = Placement("timed_out", f"no answer within {allowed:g} s{_last_line(lost)}")
                return late if self.remaining_seconds > LEAST_SECONDS else None
            crashed = Placement("crashed", f"its process {lost.how}{_last_line(lost)}", was_killed=lost.out_of_memory)
            return crashed if fresh else None
        return replace(placed, message=cut(placed.message, LONGEST_MESSAGE))

    def _start(self) -> bool:
        """Start a worker if none is running; False if the provider does not start or time ran out."""
        if self.unusable or self.remaining_seconds <= LEAST_SECONDS:
            return False
        if self._worker is not None:
            return True
        self._worker, self._fresh = Worker(CHILD, environment=self.environment), True
        allowed = min(START_SECONDS, self.remaining_seconds)
        # Options of the session configuration, e.g. a memory budget, are no part of an experiment.
        tested = replace(self.resolution, options=self.resolution.provider_options)
        try:
            self.unusable = self._worker.call("start", tested, timeout=allowed)
            started = not self.unusable
        except WorkerLostError as lost:
            started = False
            if not lost.late:
                self.unusable = f"the probing process {lost.how} while it started{_last_line(lost)}"
            elif self.remaining_seconds > LEAST_SECONDS:
                self.unusable = f"the provider did not start within {allowed:g} s in the probing process"
        if not started:
            self._end()
        return started

    def _end(self) -> None:
        """End the worker, if any."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.kill()


def _last_line(lost: WorkerLostError) -> str:
    """The last line of the worker's stderr, as the end of a sentence."""
    return f"; its last output: {cut(lost.log[-1], LONGEST_MESSAGE)}" if lost.log else ""


# --- stored answers ------------------------------------------------------------------------------------------------


class Cache(dict[str, Placement]):
    """Stored answers: a JSON file per ONNX Runtime build, provider, options and device; without a path, none."""

    def __init__(self, path: Path | None) -> None:
        super().__init__(_read(path))
        self.path, self._stored = path, len(self)

    def save(self) -> None:
        """Write new answers, merged with those of other processes."""
        if self.path is None or len(self) == self._stored:
            return
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            merged = {**_read(self.path), **self}
            kept = {key: replace(each, cached=True) for key, each in list(merged.items())[-MOST_ANSWERS:]}
            replace_file(self.path, ANSWERS.dump_json(kept, exclude_defaults=True))


def _read(path: Path | None) -> dict[str, Placement]:
    """The answers in a file; empty if it is unreadable."""
    try:
        return ANSWERS.validate_json(path.read_bytes()) if path is not None else {}
    except (OSError, ValueError):
        return {}


def cache_for(resolution: Resolution, environment: Mapping[str, str] | None = None) -> Cache:
    """The cache of a provider on this machine, or on the device simulated by the worker's `environment`."""
    folder = cache_folder(KIND)
    if folder is None:
        return Cache(None)
    identity = provider_identity(resolution, os.environ if environment is None else environment)
    text = json.dumps({"format": FORMAT, **identity}, sort_keys=True)
    return Cache(folder / f"{resolution.provider.name}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json")
