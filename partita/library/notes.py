"""What is worth knowing of a loaded package and is no error, in sentences: for a log, a terminal, or a table."""

from __future__ import annotations

from collections.abc import Iterable

from partita.library.engine import Chunk
from partita.observations.records import ChainEntry, remedy_of
from partita.package import Manifest
from partita.package_records import Verification
from partita.providers.resolve import Resolution


def not_used(name: str, entry: ChainEntry | Resolution, *, with_remedy: bool = True) -> str:
    """A provider of the chain that is not active, and why. `name`: what it is called."""
    said = f"{name} is not used: {entry.reason}: {entry.evidence}"
    remedy = remedy_of(entry.remedies) if isinstance(entry, ChainEntry) else entry.remedy
    return f"{said}; {remedy}" if with_remedy and remedy is not None else said


def idle(name: str) -> str:
    """A provider of the chain that started and took no node."""
    return f"{name} is in the chain but was assigned no nodes; place shows why"


def inferred(manifest: Manifest) -> tuple[str, ...]:
    """What was decided about a folder that Partita did not write, and could have been otherwise."""
    return () if manifest.foreign is None else manifest.foreign.notes


def unverified(verification: Verification, package: str = "this package") -> tuple[str, ...]:
    """A package whose answer nobody compared with its model's; nothing for any other."""
    return () if verification.status == "verified" else (f"{package} is unverified: {verification.detail}",)


def chunk_ignored(asked: int | None, chunk: Chunk) -> tuple[str, ...]:
    """A length of prefill chunks that the package does not take; nothing where it takes what was asked."""
    if asked is None or asked == chunk.tokens:
        return ()
    why = "its prefill graph has a fixed size" if chunk.is_fixed else "its attention reads a batch's prompts whole"
    given = f"`prefill_chunk={asked}`"
    return (f"{given} is ignored: a run of this package takes {chunk.tokens}, for {why}",)


def gave_up(reasons: Iterable[str | None]) -> tuple[str, ...]:
    """Notes on rows in which drafting has ended."""
    given = dict.fromkeys(reason for reason in reasons if reason is not None)
    return tuple(f"speculative decoding is off for the rest of this request ({why})" for why in given)
