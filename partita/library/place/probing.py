"""Experiments on nodes that fell back: after the run, within the user's budget."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from partita.errors import ProviderError
from partita.library.audience import QUIET, Audience
from partita.observations.facts import RunFacts
from partita.observations.names import CPU
from partita.providers.resolve import Resolution, known_providers
from partita.runtime.chain.open_chain import ChainError
from partita.runtime.ort.errors import NoKernelError, NotOpenedError
from partita.runtime.place.onnx_model import OnnxModel, read_onnx

REFUSAL_SECONDS = 20.0
"""Most time for experiments before a chain is refused: somebody waits for an answer."""
TITLE = "probing nodes that fell back, one at a time (Ctrl-C: report without it)"


def with_probes(
    facts: RunFacts,
    resolutions: tuple[Resolution, ...],
    models: Mapping[str, OnnxModel],
    sizes: Mapping[str, Mapping[str, tuple[int, ...]]],
    seconds: float,
    audience: Audience = QUIET,
) -> tuple[RunFacts, tuple[Resolution, ...]]:
    """The facts and the chain with what experiments tell. Ctrl-C ends the experiments, not the report."""
    from partita.runtime.lab.probes import probe_run

    try:
        with audience.busy(TITLE):
            return probe_run(facts, resolutions, models, sizes, seconds)
    except KeyboardInterrupt:
        told = "experiments on nodes that fell back were interrupted, so none is in the report"
        facts = replace(facts, interrupted=(*facts.interrupted, "experiments"))
    except OSError as error:
        told = f"experiments on nodes that fell back could not be made: {error.strerror or error}"
    return replace(facts, notes=(*facts.notes, told)), resolutions


def probe_package(
    facts: RunFacts, resolutions: tuple[Resolution, ...], folder: Path, seconds: float, audience: Audience = QUIET
) -> tuple[RunFacts, tuple[Resolution, ...]]:
    """The same for a package, whose symbolic sizes are those of a decode step."""
    if seconds <= 0 or resolutions[0].provider.ort_name == CPU:
        return facts, resolutions
    models = {session.file: read_onnx(folder / session.file) for session in facts.sessions}
    sizes = {file: decode_sizes(model) for file, model in models.items()}
    return with_probes(facts, resolutions, models, sizes, seconds, audience)


def why_refused(
    error: ChainError | NoKernelError | NotOpenedError,
    model: OnnxModel,
    sizes: Mapping[str, tuple[int, ...]],
    seconds: float,
    audience: Audience = QUIET,
) -> ProviderError:
    """A refusal with what experiments tell of it; as it was when there is no time for them, or they are interrupted."""
    from partita.runtime.lab.probes import probe_missing_kernel, probe_not_opened, probe_refusal

    def explained() -> ProviderError:
        if isinstance(error, ChainError):
            return probe_refusal(error, model, sizes, seconds)
        cpu = Resolution(known_providers()["cpu"], "active")
        if isinstance(error, NotOpenedError):
            return probe_not_opened(error, cpu, model, sizes, seconds)
        return probe_missing_kernel(error, cpu, model, sizes, seconds)

    if seconds <= 0:
        return error
    try:
        with audience.busy(TITLE):
            return explained()
    except KeyboardInterrupt:
        audience.note("experiments were interrupted, so the refusal says only what was logged")
    except OSError as failed:
        audience.note(f"experiments could not be made: {failed.strerror or failed}")
    return error


def package_refused(
    error: ChainError | NoKernelError, seconds: float = REFUSAL_SECONDS, audience: Audience = QUIET
) -> ProviderError:
    """The refusal of a package's graph, explained within `seconds`, and in no more than somebody waits for."""
    refused = read_onnx(error.path)
    return why_refused(error, refused, decode_sizes(refused), min(seconds, REFUSAL_SECONDS), audience)


def decode_sizes(model: OnnxModel) -> dict[str, tuple[int, ...]]:
    """Shapes of the inputs of a package's graph when it reads one token."""
    return {
        port.name: tuple(size if isinstance(size, int) else 1 for size in port.shape)
        for port in model.inputs
        if port.shape is not None
    }
