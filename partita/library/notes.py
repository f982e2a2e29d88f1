"""Notes about a loaded package that are not errors, as sentences for a log, a terminal, or a table."""

from __future__ import annotations

from partita.library.chain import Target
from partita.library.engine.base import OpenedPackage
from partita.observations.records import ChainEntry, remedy_of
from partita.package.folder import Manifest
from partita.package.records import Verification
from partita.providers.resolve import Resolution


def not_used(name: str, entry: ChainEntry | Resolution, *, with_remedy: bool = True) -> str:
    """The note on an inactive provider of the chain. `name`: its name in the note."""
    message = f"{name} is not used: {entry.reason}: {entry.evidence}"
    remedy = remedy_of(entry.remedies) if isinstance(entry, ChainEntry) else entry.remedy
    return f"{message}; {remedy}" if with_remedy and remedy is not None else message


def opened_notes(target: Target, opened: OpenedPackage, manifest: Manifest) -> tuple[str, ...]:
    """Notes on an opened package: unused providers of the named chain, providers without nodes, and its model."""
    entries = opened.chain[len(target.skipped) :]
    unused = (
        not_used(provider.name, entry)
        for provider, entry in zip(target.chain, entries, strict=True)
        if entry.status != "active"
    )
    return (
        *unused,
        *opened.notes,
        *(f"{name} is in the chain but was assigned no nodes; place shows why" for name in opened.idle_providers),
        *unverified_note(manifest.verification),
        *(() if manifest.foreign is None else manifest.foreign.notes),
    )


def unverified_note(verification: Verification, package: str = "this package") -> tuple[str, ...]:
    """A note for a package that was not compared with its model; empty for others."""
    return () if verification.status == "verified" else (f"{package} is unverified: {verification.detail}",)


def chunk_ignored(requested: int | None, chunk: int) -> tuple[str, ...]:
    """A note if the package does not support the requested prefill chunk. `chunk`: the supported one."""
    if requested is None or requested == chunk:
        return ()
    return (f"`prefill_chunk={requested}` is ignored: this package prefills {chunk} prompt tokens per run",)
