"""The provider chain of a run: checked providers, options, plugin libraries and pins."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from partita.errors import UsageError
from partita.files import STDIN
from partita.observations.records import ChainEntry
from partita.observations.text_format import listing
from partita.options.fields import PathText
from partita.options.groups import ProviderChain, ProviderValues
from partita.providers.base import Provider
from partita.providers.generic import parse_libraries
from partita.providers.options import parse_options, unchecked_notes
from partita.providers.resolve import all_names, known_providers, parse_chain

GIVEN = "given"
"""Source of a chain in a report."""


@dataclass(frozen=True, slots=True)
class ChainOptions:
    """The chain and its options as the user set them."""

    provider: str | None = None
    """The chain; None for the best usable provider, then cpu."""
    provider_options: Mapping[str, ProviderValues] = field(default_factory=dict)
    provider_libraries: Mapping[str, PathText] = field(default_factory=dict)
    pins: tuple[str, ...] = ()
    threads: int | None = None
    graph_capture: bool = False
    """Enable graph capture: record a decode step once and replay it."""
    source: str = GIVEN
    """Source of the chain in a report."""
    skipped: tuple[ChainEntry, ...] = ()
    """Installed providers that the default chain leaves out."""

    def with_names(self, target: Target) -> ChainOptions:
        """These options with the chain's names, so that a worker process does not choose the default again."""
        names = ",".join(provider.ort_name for provider in target.chain)
        return replace(self, provider=names, source=target.source, skipped=target.skipped)


def chain_of(options: ProviderChain) -> ChainOptions:
    """The chain of a command's options. Raises UsageError."""
    given = options.providers
    entries = [given] if isinstance(given, str) else list(given or ())
    if given is not None and not entries:
        raise UsageError("`providers` is empty; name at least one, or omit it for the best usable provider")
    return ChainOptions(
        provider=None if given is None else ",".join(each if isinstance(each, str) else each[0] for each in entries),
        provider_options=_merged([dict([entry]) for entry in entries if not isinstance(entry, str)], options),
        provider_libraries={name: os.fspath(path) for name, path in (options.provider_libraries or {}).items()},
        pins=tuple(options.pins),
        threads=options.threads,
    )


def _merged(named: Sequence[Mapping[str, ProviderValues]], options: ProviderChain) -> dict[str, ProviderValues]:
    """Options given with the providers' names, merged with `provider_options`. Raises UsageError for a duplicate."""
    found: dict[str, dict[str, Any]] = {}
    for word, values in (pair for given in (*named, options.provider_options or {}) for pair in given.items()):
        for name, value in values.items():
            if name in found.setdefault(word, {}):
                written = f"`provider_options={word}.{name}={value}`"
                raise UsageError(f"{written}: {word}.{name} is set twice; set it once")
            found[word][name] = value
    return dict(found)


def read_by(where: ChainOptions, *given: Path) -> tuple[Path, ...]:
    """Input files and folders: `given`, existing paths in the chain's options, and stdin."""
    options = (value for values in where.provider_options.values() for value in values.values())
    values = [
        value
        for value in (*options, *(os.fspath(path) for path in where.provider_libraries.values()))
        if isinstance(value, str)
    ]
    # Path.exists() raises for an option that is too long for a name.
    return (*given, *(Path(value) for value in values if value and os.path.exists(value)), STDIN)  # noqa: PTH110


def _recording(chain: Sequence[Provider], options: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, str]]:
    """The options with graph capture enabled for the first provider. Raises UsageError if it is not supported."""
    first = chain[0]
    if not first.capture_option:
        able = listing(sorted(entry.name for entry in known_providers().values() if entry.capture_option))
        raise UsageError(
            f"`graph_capture`: {first.name}, the first provider, does not support graph capture; {able} do"
        )
    kept = {name: dict(pairs) for name, pairs in options.items()}
    if kept.setdefault(first.name, {}).setdefault(first.capture_option, "1") != "1":
        raise UsageError(f"`graph_capture`: {first.name}.{first.capture_option} is set to off; omit one of them")
    return kept


@dataclass(frozen=True, slots=True)
class Target:
    """A checked chain of providers with its options."""

    chain: tuple[Provider, ...]
    source: str
    """Source of the chain in a report."""
    options: Mapping[str, Mapping[str, str]]
    """Provider options by provider name."""
    pins: tuple[str, ...]
    notes: tuple[str, ...]
    """Notes for the user and the report."""
    by_default: str | None = None
    """Why this chain is the default; empty if the user named it."""
    skipped: tuple[ChainEntry, ...] = ()
    """Installed providers with a higher rank than the default chain, which could not start."""

    @property
    def requested_names(self) -> tuple[str, ...]:
        """ONNX Runtime's names of the chain that the user named; empty for the default."""
        return () if self.by_default else tuple(provider.ort_name for provider in self.chain)


def read_chain_options(given: ChainOptions) -> Target:
    """Check every option before anything is loaded. Raises UsageError.

    Without a chain, the installed providers are checked in worker processes.
    """
    libraries = parse_libraries(given.provider_libraries, all_names())
    by_default, skipped = None, given.skipped
    if given.provider is None:
        from partita.runtime.chain.open_chain import chain_entry
        from partita.runtime.chain.provider_check import best_chain
        from partita.runtime.ort.registry import available_ort_names

        best = best_chain(available_ort_names())
        chain, source, by_default = best.chain, f"default: {best.reason}", best.reason
        skipped = tuple(map(chain_entry, best.skipped))
    else:
        chain = parse_chain(given.provider, libraries)
        source = given.source
    unused = [library.name for library in libraries if library not in chain]
    if unused:
        names = ", ".join(provider.name for provider in chain)
        what = f"`provider_libraries`: {unused[0]} is not in the provider chain ({names})"
        raise UsageError(f"{what}; add it to `providers`")
    options = parse_options(given.provider_options, chain)
    if given.graph_capture:
        options = _recording(chain, options)
    notes = tuple(unchecked_notes(options, chain))
    return Target(chain, source, options, given.pins, notes, by_default, skipped)
