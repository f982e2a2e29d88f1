"""The quality of a package on a provider, as a function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from partita.library.audience import QUIET, Audience
from partita.library.chain import Target
from partita.library.probing import package_refused
from partita.package import Manifest
from partita.package_records import Evaluation
from partita.providers.resolve import Resolution
from partita.runtime.chain import ChainError
from partita.runtime.evaluate import evaluate as measure
from partita.runtime.ort.errors import NoKernelError
from partita.runtime.pins import parse_pins


def evaluate(
    folder: Path,
    manifest: Manifest,
    target: Target,
    threads: int | None,
    *,
    told: Callable[[Sequence[Resolution]], object] = len,
    audience: Audience = QUIET,
) -> Evaluation:
    """Read the text of a package whose files have been checked. `told` hears what became of the chain.

    Raises PackageError when the package has no text, ProviderError when the chain cannot be honoured, ResourceError,
    and GenerationError when a run fails.
    """
    try:
        return measure(
            folder,
            target.chain,
            threads=threads,
            manifest=manifest,
            options=target.options,
            pins=parse_pins(target.pins, target.chain),
            told=told,
        )
    except (ChainError, NoKernelError) as error:
        raise package_refused(error, audience=audience) from error
