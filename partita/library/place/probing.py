"""Experiments on nodes that fell back, after a run and within the user's time budget."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from partita.errors import ProviderError
from partita.library.api import QUIET, Audience
from partita.observations.facts import RunFacts
from partita.observations.names import CPU
from partita.providers.resolve import Resolution
from partita.runtime.chain.open_chain import ChainError
from partita.runtime.ort.errors import NoKernelError, NotOpenedError
from partita.runtime.place.onnx_model import OnnxModel, read_onnx

REFUSAL_SECONDS = 20.0
"""Maximum seconds of experiments before a chain is refused, because the user waits."""
TITLE = "probing nodes that fell back or are slow, one at a time (Ctrl-C: report without it)"


def with_probes(
    facts: RunFacts,
    resolutions: tuple[Resolution, ...],
    models: Mapping[str, OnnxModel],
    sizes: Mapping[str, Mapping[str, tuple[int, ...]]],
    seconds: float,
    audience: Audience = QUIET,
) -> tuple[RunFacts, tuple[Resolution, ...]]:
    """The facts and the chain with experiment results. Ctrl-C ends the experiments, not the report."""
    from partita.runtime.lab.probes import probe_run

    try:
        with audience.busy(TITLE):
            return probe_run(facts, resolutions, models, sizes, seconds)
    except KeyboardInterrupt:
        note = "experiments on fallback nodes were interrupted, so the report contains none"
        facts = replace(facts, interruptions=(*facts.interruptions, "experiments"))
    except OSError as error:
        note = f"experiments on nodes that fell back could not be made: {error.strerror or error}"
    return replace(facts, notes=(*facts.notes, note)), resolutions


def probe_package(
    facts: RunFacts, resolutions: tuple[Resolution, ...], folder: Path, seconds: float, audience: Audience = QUIET
) -> tuple[RunFacts, tuple[Resolution, ...]]:
    """`with_probes` for a package, whose symbolic sizes are those of a decode step."""
    from partita.runtime.lab.probes import slow_kernels

    alone = resolutions[0].provider.ort_name == CPU
    if seconds <= 0 or (alone and not any(slow_kernels(session, resolutions[0]) for session in facts.sessions)):
        return facts, resolutions
    models = {session.file: read_onnx(folder / session.file) for session in facts.sessions}
    sizes = {file: decode_sizes(model) for file, model in models.items()}
    return with_probes(facts, resolutions, models, sizes, seconds, audience)


@contextmanager
def refusals_explained(
    seconds: float = REFUSAL_SECONDS,
    audience: Audience = QUIET,
    model: OnnxModel | None = None,
    sizes: Mapping[str, tuple[int, ...]] | None = None,
) -> Iterator[None]:
    """Raise the refusal of a model with its explanation by experiments of at most `seconds`.

    Without time for them, or if they are interrupted, it is unchanged. `model` and `sizes`: of an ONNX file; None: the
    refused graph of a package in a decode step.
    """
    try:
        yield
    except (ChainError, NoKernelError, NotOpenedError) as error:
        if seconds <= 0 or (model is None and isinstance(error, NotOpenedError)):
            raise
        from partita.runtime.lab.probes import probe_missing_kernel, probe_not_opened, probe_refusal

        refused = read_onnx(error.path) if model is None else model
        sizes = decode_sizes(refused) if sizes is None else sizes
        explained: ProviderError = error
        try:
            with audience.busy(TITLE):
                match error:
                    case ChainError():
                        explained = probe_refusal(error, refused, sizes, seconds)
                    case NoKernelError():
                        explained = probe_missing_kernel(error, refused, sizes, seconds)
                    case NotOpenedError():
                        explained = probe_not_opened(error, refused, sizes, seconds)
        except KeyboardInterrupt:
            audience.note("experiments were interrupted, so the error is based on the log only")
        except OSError as failed:
            audience.note(f"experiments could not be made: {failed.strerror or failed}")
        if explained is error:
            raise
        raise explained from error


def decode_sizes(model: OnnxModel) -> dict[str, tuple[int, ...]]:
    """Shapes of a package graph's inputs in a decode step."""
    return {
        port.name: tuple(size if isinstance(size, int) else 1 for size in port.shape)
        for port in model.inputs
        if port.shape is not None
    }
