"""The options that say where a model is to run, shared by every verb that runs one: chain, provider options, plugin
libraries and pins.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from partita.errors import UsageError
from partita.providers.base import Provider
from partita.providers.generic import parse_libraries
from partita.providers.options import parse_options, unchecked_notes
from partita.providers.resolve import all_names, parse_chain

MAX_THREADS = 1024
COMMAND_LINE = "command line"


@dataclass(frozen=True, slots=True)
class ChainOptions:
    """What the user wrote."""

    provider: str | None = None
    """The chain; None for the best usable provider, then cpu."""
    provider_options: tuple[str, ...] = ()
    provider_libraries: tuple[str, ...] = ()
    pins: tuple[str, ...] = ()
    threads: int | None = None
    own_process: bool = False
    """The process is the command's own and may be forked; False when somebody calls the command line as a function."""


@dataclass(frozen=True, slots=True)
class Target:
    """What it means."""

    chain: tuple[Provider, ...]
    source: str
    """Where the chain comes from, as the report says it."""
    options: Mapping[str, Mapping[str, str]]
    """Provider options by provider name."""
    pins: tuple[str, ...]
    notes: tuple[str, ...]
    """Sentences for stderr and the report."""
    own_process: bool

    @property
    def asked_names(self) -> tuple[str, ...]:
        """ONNX Runtime's names of the chain that the user wrote; empty when it is the default."""
        return tuple(provider.ort_name for provider in self.chain) if self.source == COMMAND_LINE else ()


def read_chain_options(given: ChainOptions) -> Target:
    """Check every option before anything is loaded.

    Without --provider the installed providers are asked, which takes a child process each. Raises UsageError.
    """
    if given.threads is not None and not 1 <= given.threads <= MAX_THREADS:
        raise UsageError(f"--threads is {given.threads}; it must be between 1 and {MAX_THREADS:,}")
    libraries = parse_libraries(given.provider_libraries, all_names())
    if given.provider is None:
        from partita.runtime.ort_registry import available_ort_names
        from partita.runtime.provider_check import best_chain

        best = best_chain(available_ort_names())
        chain, source = best.chain, f"default: {best.reason}"
    else:
        chain, source = parse_chain(given.provider, libraries), COMMAND_LINE
    unused = [library.name for library in libraries if library not in chain]
    if unused:
        names = ", ".join(provider.name for provider in chain)
        raise UsageError(f"--provider-library {unused[0]}: not in the provider chain ({names}); add it to --provider")
    options = parse_options(given.provider_options, chain)
    return Target(chain, source, options, given.pins, tuple(unchecked_notes(options, chain)), given.own_process)
