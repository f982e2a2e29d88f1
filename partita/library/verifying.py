"""Whether a graph computes what its model computes: the known answer of a package is replayed.

A folder that Partita did not write has none: it is made on the spot, of the original model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from partita.dtypes import precision
from partita.errors import PackageError, UsageError
from partita.extras import explain
from partita.files import temporary_directory
from partita.library.audience import QUIET, Audience
from partita.library.chain import Target
from partita.library.probing import package_refused
from partita.package import Manifest
from partita.package_records import Verification
from partita.providers.resolve import Resolution
from partita.remedies import Remedy
from partita.runtime.chain import ChainError
from partita.runtime.ort.errors import NoKernelError
from partita.runtime.pins import parse_pins
from partita.runtime.verify import replay
from partita.spelling import spelled

if TYPE_CHECKING:
    from partita.export.checkpoint import Checkpoint

COMPARE = Remedy(
    "compare it with the model that it was made from", ("partita", "verify", "{folder}", "--reference", "CHECKPOINT")
)
LEAST_LENGTH = 2


def no_answer(folder: Path) -> PackageError:
    """The error for a folder that has nothing to be verified with."""
    return PackageError(
        f"{folder}: Partita did not write it, so it has no known answer", remedy=COMPARE.filled(folder=folder)
    )


def verify_with(
    folder: Path,
    manifest: Manifest,
    reference: str | None,
    target: Target,
    threads: int | None,
    *,
    told: Callable[[Sequence[Resolution]], object] = len,
    audience: Audience = QUIET,
) -> Verification:
    """Replay the known answer of a package, or compare a folder of another exporter with `reference`.

    Raises PackageError for such a folder without a reference, and as `verify_against` does.
    """
    if reference is not None:
        return verify_against(folder, manifest, reference, target, threads, told=told, audience=audience)
    if manifest.foreign is not None:
        raise no_answer(folder)
    return verify(folder, manifest, target, threads, told=told, audience=audience)


def verify(
    folder: Path,
    manifest: Manifest,
    target: Target,
    threads: int | None,
    *,
    told: Callable[[Sequence[Resolution]], object] = len,
    audience: Audience = QUIET,
    answers: Path | None = None,
) -> Verification:
    """Replay the known answer of a package whose files have been checked. `told` hears what became of the chain;
    `answers`: the folder of the known answer, where it is not in the package.
    """
    pins = parse_pins(target.pins, target.chain)
    try:
        return replay(
            folder,
            target.chain,
            threads=threads,
            manifest=manifest,
            options=target.options,
            pins=pins,
            told=told,
            answers=answers,
        )
    except (ChainError, NoKernelError) as error:
        raise package_refused(error, audience=audience) from error


def verify_against(
    folder: Path,
    manifest: Manifest,
    reference: str,
    target: Target,
    threads: int | None,
    *,
    told: Callable[[Sequence[Resolution]], object] = len,
    audience: Audience = QUIET,
) -> Verification:
    """Run the original model `reference`, a folder or a hub id, on a fixed prompt; replay that on the folder's graph.

    Weights that are rounded to integers make another model, for which no tolerance says right or wrong: then how far it
    is off is told, and the status is unverified. Raises UsageError for a package, which has its own answer,
    CheckpointError, InstallationError without torch, and what `verify` does.
    """
    if manifest.foreign is None:
        raise UsageError(
            f"{spelled('reference')} is for folders that Partita did not write; {folder} has its own known answer"
        )
    try:
        from partita.export import known_answer, spilled
        from partita.export.checkpoint import open_checkpoint
    except ImportError as error:
        lacking = explain(error)
        raise lacking if lacking is not None else error from error
    checkpoint = open_checkpoint(reference)
    _check_model(folder, manifest, checkpoint)
    graph = manifest.graph
    with temporary_directory() as made, audience.busy("running the original model"):
        scratch = Path(made)
        known_answer.check_memory(spilled.resident_parameters(checkpoint.tensors, scratch), graph.cache_bytes)
        answer = known_answer.compute(checkpoint, graph.vocab_size, graph.max_length, scratch=scratch)
        known_answer.save(answer, Path(made))
        found = verify(folder, manifest, target, threads, told=told, audience=audience, answers=Path(made))
    bits = precision(graph.precision).bits
    return found if bits is None else _told(found, bits)


def _check_model(folder: Path, manifest: Manifest, checkpoint: Checkpoint) -> None:
    """Raise UsageError where the checkpoint is plainly of another model."""
    theirs, ours = checkpoint.model_type, manifest.source.model_type
    vocab = getattr(checkpoint.config.get_text_config(), "vocab_size", None)
    if vocab is not None and vocab != manifest.graph.vocab_size:
        raise UsageError(
            f"{spelled('reference', str(checkpoint.folder))}: a {theirs} with a vocabulary of {vocab:,}, and {folder} "
            f"is a {ours} with {manifest.graph.vocab_size:,}"
        )


def _told(found: Verification, bits: int) -> Verification:
    """What a comparison with rounded weights says."""
    steps = found.steps
    equal = sum(step.tokens_equal for step in steps)
    largest = max((step.max_rel_error for step in steps), default=0.0)
    detail = (
        f"not judged: its weights are rounded to {bits} bits, so it is another model than its reference; largest "
        f"relative error {largest:.2e}, greedy tokens equal in {equal} of {len(steps)} steps"
    )
    return found.model_copy(update={"status": "unverified", "detail": detail, "tolerance": None})
