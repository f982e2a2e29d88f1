"""What says where a model is to run, shared by everything that runs one: chain, provider options, plugin libraries and
pins. As texts, in the form of the command line.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from partita.errors import UsageError
from partita.files import STDIN
from partita.observations.records import ChainEntry
from partita.observations.text_format import listing
from partita.providers.base import Provider
from partita.providers.generic import parse_libraries
from partita.providers.options import parse_options, unchecked_notes
from partita.providers.resolve import all_names, known_providers, parse_chain
from partita.spelling import spelled

MAX_THREADS = 1024
COMMAND_LINE = "command line"
PROGRAM = "program"
"""Where a chain comes from, as a report says it."""


@dataclass(frozen=True, slots=True)
class ChainOptions:
    """The chain and its options as the user wrote them, not yet resolved."""

    provider: str | None = None
    """The chain; None for the best usable provider, then cpu."""
    provider_options: tuple[str, ...] = ()
    provider_libraries: tuple[str, ...] = ()
    pins: tuple[str, ...] = ()
    threads: int | None = None
    graph_capture: bool = False
    """Decode steps are to be recorded once and replayed."""
    own_process: bool = False
    """The process is the command's own and may be forked; False when somebody calls the command line as a function."""
    source: str = COMMAND_LINE
    """Where the chain comes from, as the report says it, when there is one."""
    skipped: tuple[str, ...] = ()
    """Each a `ChainEntry` as JSON: installed providers that the default chain leaves out."""

    def resolved(self, target: Target) -> ChainOptions:
        """The same with the chain that it comes to, for a child process that shall not look for it again."""
        names = ",".join(provider.ort_name for provider in target.chain)
        skipped = tuple(entry.model_dump_json() for entry in target.skipped)
        return replace(self, provider=names, source=target.source, skipped=skipped)


def chain_options(given: Mapping[str, Any]) -> ChainOptions:
    """The options as `dataclasses.asdict` and JSON have them."""
    values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    return ChainOptions(**values)


def read_by(where: ChainOptions, *given: Path) -> tuple[Path, ...]:
    """Files and folders that are read: those `given`, what the chain's options name, and what stdin comes from."""
    values = [option.partition("=")[2] for option in (*where.provider_options, *where.provider_libraries)]
    # Path.exists() raises for an option that is too long for a name.
    return (*given, *(Path(value) for value in values if value and os.path.exists(value)), STDIN)  # noqa: PTH110


def _recording(chain: Sequence[Provider], options: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, str]]:
    """The options with which the provider that leads the chain records runs. Raises UsageError where it cannot."""
    first = chain[0]
    if not first.capture_option:
        able = listing(sorted(entry.name for entry in known_providers().values() if entry.capture_option))
        raise UsageError(f"{spelled('graph_capture')}: {first.name} leads the chain and records no graphs; {able} do")
    kept = {name: dict(pairs) for name, pairs in options.items()}
    if kept.setdefault(first.name, {}).setdefault(first.capture_option, "1") != "1":
        raise UsageError(
            f"{spelled('graph_capture')}: {first.name}.{first.capture_option} is given as off; leave one out"
        )
    return kept


@dataclass(frozen=True, slots=True)
class Target:
    """A chain of providers with everything that its options say, checked."""

    chain: tuple[Provider, ...]
    source: str
    """Where the chain comes from, as the report says it."""
    options: Mapping[str, Mapping[str, str]]
    """Provider options by provider name."""
    pins: tuple[str, ...]
    notes: tuple[str, ...]
    """Sentences for the user and the report."""
    own_process: bool
    by_default: str | None = None
    """Why it is this chain, when nobody named one."""
    skipped: tuple[ChainEntry, ...] = ()
    """Installed providers that a default chain would begin with, and that could not start."""

    @property
    def asked_names(self) -> tuple[str, ...]:
        """ONNX Runtime's names of the chain that the user wrote; empty when it is the default."""
        return () if self.by_default else tuple(provider.ort_name for provider in self.chain)


def read_chain_options(given: ChainOptions) -> Target:
    """Check every option before anything is loaded.

    Without --provider the installed providers are asked, which takes a child process each. Raises UsageError.
    """
    if given.threads is not None and not 1 <= given.threads <= MAX_THREADS:
        raise UsageError(f"{spelled('threads')} is {given.threads}; it must be between 1 and {MAX_THREADS:,}")
    libraries = parse_libraries(given.provider_libraries, all_names())
    by_default, skipped = None, tuple(map(ChainEntry.model_validate_json, given.skipped))
    if given.provider is None:
        from partita.runtime.chain import chain_entry
        from partita.runtime.ort.registry import available_ort_names
        from partita.runtime.provider_check import best_chain

        best = best_chain(available_ort_names())
        chain, source, by_default = best.chain, f"default: {best.reason}", best.reason
        skipped = tuple(map(chain_entry, best.skipped))
    else:
        chain = parse_chain(given.provider, libraries)
        source = given.source
    unused = [library.name for library in libraries if library not in chain]
    if unused:
        names = ", ".join(provider.name for provider in chain)
        what = f"{spelled('provider_libraries')}: {unused[0]} is not in the provider chain ({names})"
        raise UsageError(f"{what}; add it to {spelled('providers')}")
    options = parse_options(given.provider_options, chain)
    if given.graph_capture:
        options = _recording(chain, options)
    notes = tuple(unchecked_notes(options, chain))
    return Target(chain, source, options, given.pins, notes, given.own_process, by_default, skipped)
