"""The provider chains of a run: checked providers, options, plugin libraries and pins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from partita.errors import UsageError
from partita.observations.records import ChainEntry, remedy_of
from partita.observations.text_format import listing
from partita.options.groups import ProviderChain, ProviderValues
from partita.options.inspection import BenchOptions
from partita.providers.base import Provider
from partita.providers.options import parse_libraries, parse_options, unchecked_notes
from partita.providers.resolve import Resolution, all_names, known_providers, parse_chain

GIVEN = "given"
"""Source of a chain in a report."""


def _entries(options: ProviderChain) -> list[str | tuple[str, ProviderValues]]:
    """The entries of `providers`; a text is a single one."""
    return [options.providers] if isinstance(options.providers, str) else list(options.providers or ())


def _merged(options: ProviderChain) -> dict[str, ProviderValues]:
    """Options given with the providers' names, merged with `provider_options`. Raises UsageError for a duplicate."""
    found: dict[str, dict[str, Any]] = {}
    named = [entry for entry in _entries(options) if not isinstance(entry, str)]
    for word, values in (*named, *(options.provider_options or {}).items()):
        for name, value in values.items():
            if name in found.setdefault(word, {}):
                written = f"`provider_options={word}.{name}={value}`"
                raise UsageError(f"{written}: {word}.{name} is set twice; set it once")
            found[word][name] = value
    return dict(found)


def _recording(chain: Sequence[Provider], options: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, str]]:
    """The options with graph capture enabled for the first provider. Raises UsageError if it is not supported."""
    first = chain[0]
    if not first.capture_option:
        able = listing(sorted(entry.name for entry in known_providers().values() if entry.capture_option))
        raise UsageError(
            f"`graph_capture`: {first.name}, the first provider, does not support graph capture; {able} do"
        )
    changed = {name: dict(pairs) for name, pairs in options.items()}
    if changed.setdefault(first.name, {}).setdefault(first.capture_option, "1") != "1":
        raise UsageError(f"`graph_capture`: {first.name}.{first.capture_option} is set to off; omit one of them")
    return changed


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
    threads: int | None = None
    by_default: str | None = None
    """Why this chain is the default; empty if the user named it."""
    skipped: tuple[ChainEntry, ...] = ()
    """Installed providers with a higher rank than the default chain, which could not start."""

    @property
    def name(self) -> str:
        """The chain as text: `webgpu,cpu`."""
        return ",".join(provider.name for provider in self.chain)

    @property
    def ort_names(self) -> tuple[str, ...]:
        """ONNX Runtime's names of the chain."""
        return tuple(provider.ort_name for provider in self.chain)

    @property
    def opening_notes(self) -> tuple[str, ...]:
        """Notes for the user before a model is opened: that the chain is the default, and `notes`."""
        if self.by_default is None:
            return self.notes
        return (f"provider {self.name}, by default: {self.by_default}", *self.notes)

    @property
    def requested_names(self) -> tuple[str, ...]:
        """ONNX Runtime's names of the chain that the user named; empty for the default."""
        return () if self.by_default else self.ort_names


def read_chain(options: ProviderChain, *, graph_capture: bool = False) -> Target:
    """Check every option before anything is loaded. Raises UsageError.

    Without a chain, the installed providers are checked in worker processes. `graph_capture`: record a decode step once
    and replay it.
    """
    libraries = parse_libraries(options.provider_libraries or {}, all_names())
    by_default: str | None = None
    skipped: tuple[ChainEntry, ...] = ()
    if options.providers is None:
        from partita.runtime.chain.open_chain import chain_entry
        from partita.runtime.chain.provider_check import best_chain
        from partita.runtime.ort.registry import available_ort_names

        best = best_chain(available_ort_names())
        chain, source, by_default = best.chain, f"default: {best.reason}", best.reason
        skipped = tuple(map(chain_entry, best.skipped))
    else:
        names = [entry if isinstance(entry, str) else entry[0] for entry in _entries(options)]
        if not names:
            raise UsageError("`providers` is empty; name at least one, or omit it for the best usable provider")
        chain, source = parse_chain(",".join(names), libraries), GIVEN
    unused = [library.name for library in libraries if library not in chain]
    if unused:
        listed = ", ".join(provider.name for provider in chain)
        what = f"`provider_libraries`: {unused[0]} is not in the provider chain ({listed})"
        raise UsageError(f"{what}; add it to `providers`")
    settings = parse_options(_merged(options), chain)
    if graph_capture:
        settings = _recording(chain, settings)
    notes = tuple(unchecked_notes(settings, chain))
    return Target(chain, source, settings, tuple(options.pins), notes, options.threads, by_default, skipped)


def read_chains(options: BenchOptions) -> tuple[Target, ...]:
    """The chains that the user named, or the default chain, each with the options and libraries of its providers.

    Raises UsageError, also for options and libraries of providers outside all chains.
    """
    given, libraries = options.provider_options or {}, options.provider_libraries or {}
    if options.chains is None:
        default = ProviderChain(provider_options=given, provider_libraries=libraries, threads=options.threads)
        return (read_chain(default),)
    texts = (options.chains,) if isinstance(options.chains, str) else options.chains
    if not texts:
        raise UsageError("`chains` is empty; name at least one, or omit it for the best usable provider")
    plugins = parse_libraries(libraries, all_names())
    chains = [
        parse_chain(text if isinstance(text, str) else ",".join(text), plugins, argument="chains") for text in texts
    ]
    names = [",".join(provider.name for provider in chain) for chain in chains]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UsageError(f"`chains={twice[0]}`: it is listed twice; list each chain once")
    every = {provider.name: provider for chain in chains for provider in chain}
    settings = parse_options(given, tuple(every.values()))
    if unused := [plugin.name for plugin in plugins if plugin.name not in every]:
        raise UsageError(f"`provider_libraries`: {unused[0]} is in no chain; add it to `chains`")
    targets = []
    for chain in chains:
        own = {provider.name: settings[provider.name] for provider in chain if provider.name in settings}
        targets.append(Target(chain, GIVEN, own, (), tuple(unchecked_notes(own, chain)), options.threads))
    return tuple(targets)


def not_used(name: str, entry: ChainEntry | Resolution, *, with_remedy: bool = True) -> str:
    """The note on an inactive provider of the chain. `name`: its name in the note."""
    message = f"{name} is not used: {entry.reason}: {entry.evidence}"
    remedy = remedy_of(entry.remedies) if isinstance(entry, ChainEntry) else entry.remedy
    return f"{message}; {remedy}" if with_remedy and remedy is not None else message
