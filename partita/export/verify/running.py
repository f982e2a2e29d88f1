"""The smoke run of a written graph: it is opened, and reads a chunk of a prompt and one token, before it is published.

A lowering that fails when it is opened or run, for whatever reason, is set aside, as is one that a provider computes
wrongly. Running needs the runtime, which this folder may not import: the caller passes functions.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy.typing as npt

from partita.errors import GenerationError, ParityError, PartitaError, ProviderError, ResourceError
from partita.export.checkpoint.companions import Reader
from partita.export.progress import stage
from partita.export.target import Smoke, Target
from partita.export.verify import known_answer, wide_twin
from partita.export.verify.quality import OpenScorer
from partita.export.work import Work, tell
from partita.package.folder import Manifest
from partita.package.records import SmokeRecord, Verification

Replay = Callable[[Path, Manifest], Verification]
"""Replays the known answer of an unpublished package on the CPU provider: folder, manifest -> result."""
WriteAdapter = Callable[[Path, Mapping[str, npt.NDArray[Any]]], None]
"""Writes an adapter file of ONNX Runtime: path, values of graph inputs by name."""
CPU = "cpu"
BY_REPLAY = "the known answer was replayed on it"
TWIN = "its twin in float32 ran"
LONGEST = 400


@dataclass(frozen=True, slots=True)
class Runtime:
    """What the caller lends to run what was written, on the CPU provider, and to read it."""

    replay: Replay
    smoke: Smoke | None = None
    """None: nothing is run but the known answer."""
    reader: Reader | None = None
    """None: what only generate reads is not looked at."""
    scorer: OpenScorer | None = None
    """None: no quality is measured."""
    write_adapter: WriteAdapter | None = None
    """None: no adapters are written beside the weights."""


class NotRunningError(GenerationError):
    """A graph that was written does not open or does not run where it is to run."""

    def __init__(self, message: str, detail: str) -> None:
        super().__init__(message)
        self.detail = detail
        """What was said, without where and what to do."""

    @property
    def refused_by_provider(self) -> bool:
        """The provider says that it does not take all of the graph, or has no kernel for it."""
        return isinstance(self.__cause__, ProviderError)


class SetAsideError(ParityError):
    """A lowering computes something else where another one may not."""

    def __init__(self, message: str, detail: str) -> None:
        super().__init__(message)
        self.detail = detail
        """What the replay said."""


class TargetParityError(SetAsideError):
    """The graph computes what its model computes on the CPU provider, and not on the provider that it is for."""


class RoundingParityError(SetAsideError):
    """In 16 bits the graph differs from its model by more than it may, and the model itself, in that type, does not:
    another lowering may round in other places.
    """


@contextmanager
def opened_and_run(provider: str, folder: Path) -> Iterator[None]:
    """Turn whatever opening and running a graph raises into NotRunningError.

    `folder`: the hidden one that it is in, which no message names. What says nothing about the graph passes: a result
    that differs, memory and disk that are not enough.
    """
    try:
        yield
    except (ParityError, ResourceError, NotRunningError, OSError, MemoryError):
        raise
    except Exception as error:  # a lowering may fail for reasons that nobody has seen yet
        # Of our own errors the problem alone: their remedy is for a package that is published, which this one is not.
        if isinstance(error, PartitaError):
            text = error.said if error.where in (None, folder) else f"{error.where.name}: {error.said}"
        else:
            text = f"{type(error).__name__}: {error}"
        # ONNX Runtime names a file by its whole path.
        said = " ".join(text.split()).replace(f"{folder}{os.sep}", "") or "no message"
        detail = f"does not run on {provider}: {said[:LONGEST]}"
        raise NotRunningError(detail, detail) from error


def run_all(
    work: Work, manifest: Manifest, smoke: Smoke | None, target: Target | None
) -> tuple[Verification | None, tuple[SmokeRecord, ...]]:
    """The smoke run on the CPU provider and on the target, and the known answer on the target, where it can run here.

    Raises TargetParityError and NotRunningError.
    """
    twin = work.options.computing.twin is not None
    verified = manifest.verification.status == "verified" and manifest.verification.twin is None
    same = target is not None and target.provider == CPU and not twin
    first = () if same and not verified else (_on_cpu(work, manifest, smoke),)
    if target is None:
        return None, first
    try:
        result, record = _on_target(work, manifest, target)
    except NotRunningError as error:
        result, record = None, _for_others(work, target, error)
    return result, (record,) if same else (*first, record)


def _on_cpu(work: Work, manifest: Manifest, smoke: Smoke | None) -> SmokeRecord:
    """The smoke run on the CPU provider, of the float32 twin where that speaks for the package; the replay of the known
    answer counts as one. Raises NotRunningError.
    """
    twin = work.options.computing.twin is not None
    packed = work.options.rounds  # then another graph was replayed, which this provider runs, too
    if manifest.verification.status == "verified" and not packed:
        detail = f"{BY_REPLAY}, with its twin in float32" if twin else BY_REPLAY
        return SmokeRecord(chain=CPU, status="ran", detail=detail, replayed=not twin)
    if smoke is None:
        return SmokeRecord(chain=CPU, status="not_run", detail="no runtime was given")
    with stage(work.progress, "smoke run", work.seconds):
        return _tried(work, manifest, _on_twin(smoke) if twin else smoke, CPU)


def _on_twin(smoke: Smoke) -> Smoke:
    """A smoke run of the float32 twin of a bfloat16 package."""

    def run(folder: Path, manifest: Manifest) -> SmokeRecord:
        record = wide_twin.beside(folder, manifest, smoke)
        return record.model_copy(update={"detail": f"{TWIN}: {record.detail}"})

    return run


def _tried(work: Work, manifest: Manifest, smoke: Smoke, provider: str) -> SmokeRecord:
    """A smoke run, or why there is no memory for it. Raises NotRunningError."""
    try:
        if not work.options.verify:  # else it was looked at before the original model ran
            known_answer.check_run_memory(manifest)
        with opened_and_run(provider, work.folder):
            return smoke(work.folder, manifest)
    except ResourceError as error:
        tell(work, f"not run on {provider} here: {error}")
        return SmokeRecord(chain=provider, status="not_run", detail=f"not run here: {error}")


def _on_target(work: Work, manifest: Manifest, target: Target) -> tuple[Verification | None, SmokeRecord]:
    """The known answer replayed on the target and its smoke run, as far as it can run here.

    Raises TargetParityError when it computes something else, NotRunningError when it does not open or run.
    """
    alone = None
    if target.replay is not None and work.options.verify:
        with stage(work.progress, "verify target", work.seconds):
            try:
                with opened_and_run(target.provider, work.folder):
                    result = target.replay(work.folder, manifest)
            except NotRunningError as error:
                if not error.refused_by_provider:
                    raise
                alone = error
            else:
                _refuse_other_results(work, target, result)
                return result, SmokeRecord(chain=target.provider, status="ran", detail=BY_REPLAY, replayed=True)
    if target.smoke is None:
        if alone is not None:
            tell(work, f"not verified on {target.provider}: {alone.__cause__}")
        why = f"not run here: {target.not_here or 'no runtime was given'}"
        return None, SmokeRecord(chain=target.provider, status="not_run", detail=why)
    with stage(work.progress, "smoke target", work.seconds):
        record = _tried(work, manifest, target.smoke, target.provider)
    if alone is not None:
        tell(work, f"not verified on {target.provider}: {alone.__cause__}")
    return None, record


def _refuse_other_results(work: Work, target: Target, result: Verification) -> None:
    if result.status != "verified":
        raise TargetParityError(
            f"{work.options.checkpoint}: {target.provider} does not compute what the model computes: {result.detail}; "
            "nothing was written; name another `attention` or another `target`",
            result.detail,
        )


def _for_others(work: Work, target: Target, error: NotRunningError) -> SmokeRecord:
    """What is recorded of a package that is sound by its twin and does not run on a target that nobody asked for.

    Raises the error again for any other.
    """
    if work.options.computing.twin is None or not target.by_default or not error.refused_by_provider:
        raise error
    tell(
        work,
        f"this bf16 package {error.detail}; its float32 twin was verified, so it runs wherever a provider has bfloat16 "
        f"kernels (`target` queries one); for {target.provider}, export with "
        "`precision=fp16` or fp32",
    )
    return SmokeRecord(chain=target.provider, status="failed", detail=error.detail)


def nothing_runs(checkpoint: str, failed: Sequence[NotRunningError], told: Sequence[str], hint: str) -> PartitaError:
    """The error when every lowering that could be tried was set aside. `told`: each with its reason."""
    message = f"{checkpoint}: {'; '.join(told)}; nothing was written{hint}"
    if all(error.refused_by_provider for error in failed):
        return ProviderError(message)
    return NotRunningError(message, failed[0].detail)
