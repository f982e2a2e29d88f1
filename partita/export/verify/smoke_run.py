"""The smoke run of a graph before publication: it is opened, and runs a prompt chunk and one token.

A lowering that fails or computes wrong results is set aside. The caller passes the runtime's functions, because this
folder may not import it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from partita.errors import GenerationError, ParityError, PartitaError, ProviderError, ResourceError
from partita.export.exporters import Work, add_note
from partita.export.progress import stage
from partita.export.target import Smoke, Target
from partita.export.verify import changed_copy, known_answer
from partita.package.folder import Manifest
from partita.package.records import SmokeRecord, Verification

CPU = "cpu"
BY_REPLAY = "the known answer was replayed on it"
BY_QUALITY = "its quality was measured on it"
COPY_RAN = "its float32 copy ran"
LONGEST = 400


class RejectedError(PartitaError):
    """A variant is rejected, and another may do."""

    def __init__(self, message: str, detail: str) -> None:
        super().__init__(message)
        self.detail = detail
        """The message without location and remedy."""


class NotRunningError(RejectedError, GenerationError):
    """A written graph does not open or run."""

    @property
    def refused_by_provider(self) -> bool:
        """Whether the provider does not support all of the graph, or has no kernel for it."""
        return isinstance(self.__cause__, ProviderError)


class MismatchError(RejectedError, ParityError):
    """A lowering computes wrong results, and another may not."""


class TargetParityError(MismatchError):
    """The graph computes the model's results on the CPU provider, and not on its target."""


class RoundingParityError(MismatchError):
    """The 16-bit graph exceeds the tolerance, and the model in 16 bits does not: another may round less."""


@contextmanager
def opened_and_run(provider: str, folder: Path) -> Iterator[None]:
    """Convert errors of opening and running a graph into NotRunningError, without the hidden `folder`."""
    try:
        yield
    except (ParityError, ResourceError, NotRunningError, OSError, MemoryError):
        raise
    except Exception as error:  # a lowering may fail in any way
        # Without the remedy of PartitaErrors, which is for published packages.
        if isinstance(error, PartitaError):
            text = error.message if error.path in (None, folder) else f"{error.path.name}: {error.message}"
        else:
            text = f"{type(error).__name__}: {error}"
        # ONNX Runtime names a file by its whole path.
        error_text = " ".join(text.split()).replace(f"{folder}{os.sep}", "") or "no message"
        detail = f"does not run on {provider}: {error_text[:LONGEST]}"
        raise NotRunningError(detail, detail) from error


def run_all(
    work: Work, manifest: Manifest, target: Target | None, *, measured: bool = False
) -> tuple[Verification | None, tuple[SmokeRecord, ...]]:
    """The smoke runs on the CPU provider and the target, and the known answer there. Raises TargetParityError."""
    has_copy = work.options.computing.cpu_dtype is not None
    verified = manifest.verification.status == "verified" and manifest.verification.converted_copy is None
    same = target is not None and target.provider == CPU and not has_copy
    by_quality = measured and not manifest.graph.symbolic_batch
    first = () if same and not verified else (run_on_cpu(work, manifest, by_quality=by_quality),)
    if target is None:
        return None, first
    try:
        result, record = _on_target(work, manifest, target)
    except NotRunningError as error:
        result, record = None, _record_unverified(work, target, error)
    return result, (record,) if same else (*first, record)


def run_on_cpu(work: Work, manifest: Manifest, *, by_quality: bool = False) -> SmokeRecord:
    """The smoke run on the CPU provider, of the float32 copy where that is verified. Raises NotRunningError."""
    has_copy, smoke = work.options.computing.cpu_dtype is not None, work.smoke
    packed = work.options.quantises  # then another graph was replayed
    if manifest.verification.status == "verified" and not packed:
        detail = f"{BY_REPLAY}, with its float32 copy" if has_copy else BY_REPLAY
        return SmokeRecord(chain=CPU, status="ran", detail=detail, replayed=not has_copy)
    if smoke is None:
        return SmokeRecord(chain=CPU, status="not_run", detail="no runtime was given")
    if by_quality:
        return SmokeRecord(chain=CPU, status="ran", detail=f"{COPY_RAN}: {BY_QUALITY}" if has_copy else BY_QUALITY)

    def run_float32_copy(folder: Path, manifest: Manifest) -> SmokeRecord:
        record = changed_copy.on_wide(folder, manifest, smoke)
        return record.model_copy(update={"detail": f"{COPY_RAN}: {record.detail}"})

    with stage(work.progress, "smoke run", work.seconds):
        return _try_run(work, manifest, run_float32_copy if has_copy else smoke, CPU)


def _try_run(work: Work, manifest: Manifest, smoke: Smoke, provider: str) -> SmokeRecord:
    """A smoke run, or a record that there is no memory for it. Raises NotRunningError."""
    try:
        if not work.options.verify:  # otherwise checked before the source model ran
            known_answer.check_run_memory(manifest)
        with opened_and_run(provider, work.folder):
            return smoke(work.folder, manifest)
    except ResourceError as error:
        add_note(work, f"not run on {provider} here: {error}")
        return SmokeRecord(chain=provider, status="not_run", detail=f"not run here: {error}")


def _on_target(work: Work, manifest: Manifest, target: Target) -> tuple[Verification | None, SmokeRecord]:
    """The known answer replayed on the target and its smoke run, as far as it can run here."""
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
                if result.status != "verified":
                    raise TargetParityError(
                        f"{work.options.checkpoint}: {target.provider} does not match the source model: "
                        f"{result.detail}; nothing was written; choose another `attention` or another `target`",
                        result.detail,
                    )
                return result, SmokeRecord(chain=target.provider, status="ran", detail=BY_REPLAY, replayed=True)
    if alone is not None:
        add_note(work, f"not verified on {target.provider}: {alone.__cause__}")
    if target.smoke is None:
        reason = f"not run here: {target.not_here or 'no runtime was given'}"
        return None, SmokeRecord(chain=target.provider, status="not_run", detail=reason)
    with stage(work.progress, "smoke target", work.seconds):
        return None, _try_run(work, manifest, target.smoke, target.provider)


def _record_unverified(work: Work, target: Target, error: NotRunningError) -> SmokeRecord:
    """The record of a package whose float32 copy is verified and which does not run on a default target."""
    if work.options.computing.cpu_dtype is None or not target.by_default or not error.refused_by_provider:
        raise error
    add_note(
        work,
        f"this bf16 package {error.detail}; its float32 copy was verified, so it runs on providers with "
        f"bfloat16 kernels (`target` queries one); for {target.provider}, export with `precision=fp16` or "
        "fp32",
    )
    return SmokeRecord(chain=target.provider, status="failed", detail=error.detail)


def nothing_runs(checkpoint: str, failed: Sequence[NotRunningError], reasons: Sequence[str], hint: str) -> PartitaError:
    """The error when every lowering was set aside. `reasons`: the lowerings with their reasons."""
    message = f"{checkpoint}: {'; '.join(reasons)}; nothing was written{hint}"
    if all(error.refused_by_provider for error in failed):
        return ProviderError(message)
    return NotRunningError(message, failed[0].detail)
