"""Verification and quality of a package on a chain.

A foreign folder has no reference logits; they are computed with the source model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from partita.dtypes import precision
from partita.errors import PackageError, UsageError
from partita.extras import explain
from partita.files import temporary_directory
from partita.library.api import QUIET, Audience
from partita.library.chain import Target, not_used
from partita.library.place.probing import refusals_explained
from partita.package.folder import Manifest
from partita.package.known_answer import KnownAnswer, read_known_answer
from partita.package.records import Evaluation, Verification
from partita.remedies import Remedy
from partita.runtime.chain.pins import parse_pins
from partita.runtime.generate.runner import Runner
from partita.runtime.verify.quality import evaluate as measure
from partita.runtime.verify.quality import read_figures
from partita.runtime.verify.replay import open_briefly, replay_opened

if TYPE_CHECKING:
    from partita.export.checkpoint.description import Checkpoint

COMPARE = Remedy("compare it with its source model", ("partita", "verify", "{folder}", "--reference", "CHECKPOINT"))


def verify_with(
    folder: Path,
    manifest: Manifest,
    target: Target,
    reference: str | None = None,
    *,
    audience: Audience = QUIET,
) -> Verification:
    """Replay the reference logits of a package, or those of `reference`, the source model of a foreign folder.

    The files have been checked. `reference`: a folder or a hub id; it runs on a prompt first. Unused providers of the
    chain are noted. No tolerance applies to quantised weights of a foreign folder: the detail then has the largest
    error, and the status is unverified. Raises PackageError for a foreign folder without a reference, UsageError for a
    package with one, CheckpointError, InstallationError without torch, and the errors of a replay.
    """
    if reference is None and manifest.foreign is not None:
        raise PackageError(
            f"{folder}: Partita did not export it, so it has no known answer", remedy=COMPARE.filled(folder=folder)
        )
    answer = read_known_answer(folder) if reference is None else _source_answer(folder, manifest, reference, audience)
    with _opened(folder, manifest, target, audience) as runner:
        found = replay_opened(manifest, runner, answer)
    bits = None if reference is None else precision(manifest.graph.precision).bits
    if bits is None:
        return found
    equal = sum(step.tokens_equal for step in found.steps)
    largest = max((step.max_rel_error for step in found.steps), default=0.0)
    detail = (
        f"no verdict: its weights are quantised to {bits} bits, so it differs from its reference; largest "
        f"relative error {largest:.2e}, greedy tokens equal in {equal} of {len(found.steps)} steps"
    )
    return found.model_copy(update={"status": "unverified", "detail": detail, "tolerance": None})


def evaluate(folder: Path, manifest: Manifest, target: Target, *, audience: Audience = QUIET) -> Evaluation:
    """Measure the quality of a package whose files have been checked. Unused providers of the chain are noted.

    Raises PackageError when the package has no text, ProviderError when the chain cannot be honoured, ResourceError,
    and GenerationError when a run fails.
    """
    figures = read_figures(folder, manifest)
    with _opened(folder, manifest, target, audience) as runner:
        return measure(runner, figures)


@contextmanager
def _opened(folder: Path, manifest: Manifest, target: Target, audience: Audience) -> Iterator[Runner]:
    """The package opened on the chain, with notes on unused providers; a refusal is explained by experiments."""
    with refusals_explained(audience=audience):
        runner = open_briefly(
            folder,
            target.chain,
            threads=target.threads,
            manifest=manifest,
            options=target.options,
            pins=parse_pins(target.pins, target.chain),
        )
    with runner:
        for entry in runner.resolutions:
            if entry.status != "active":
                audience.note(not_used(entry.provider.name, entry))
        yield runner


def _source_answer(folder: Path, manifest: Manifest, reference: str, audience: Audience) -> KnownAnswer:
    """The reference logits of a foreign folder's source model, which runs on a prompt."""
    if manifest.foreign is None:
        raise UsageError(f"`reference` is for foreign folders; {folder} has its own known answer")
    try:
        from partita.export.checkpoint.description import open_checkpoint
        from partita.export.verify import known_answer
        from partita.export.weights import memory_map
    except ImportError as error:
        raise explain(error) or error from error
    checkpoint = open_checkpoint(reference)
    _check_model(folder, manifest, checkpoint)
    graph = manifest.graph
    with temporary_directory() as made, audience.busy("running the source model"):
        scratch = Path(made)
        known_answer.check_memory(memory_map.resident_parameters(checkpoint.tensors, scratch), graph.cache_bytes)
        return known_answer.compute(checkpoint, graph.vocab_size, graph.max_length, scratch=scratch)


def _check_model(folder: Path, manifest: Manifest, checkpoint: Checkpoint) -> None:
    """Raise UsageError if the checkpoint has another vocabulary."""
    theirs, ours = checkpoint.model_type, manifest.source.model_type
    vocab = getattr(checkpoint.config.get_text_config(), "vocab_size", None)
    if vocab is not None and vocab != manifest.graph.vocab_size:
        raise UsageError(
            f"`reference={checkpoint.folder}`: a {theirs} with a vocabulary of {vocab:,}, but {folder} is "
            f"a {ours} with {manifest.graph.vocab_size:,}; choose its source model"
        )
