"""The audience of a verb: notes and progress on stderr."""

from __future__ import annotations

from collections.abc import Sequence

from partita.commands.terminal import Spinner, note
from partita.library.audience import Audience
from partita.library.chain import Target
from partita.library.notes import not_used
from partita.observations.records import ChainEntry
from partita.providers.resolve import Resolution


def print_note(text: str) -> None:
    """Print a note on stderr."""
    note(f"note: {text}")


TERMINAL = Audience(print_note, Spinner)


def print_target_notes(target: Target) -> None:
    """Print notes on stderr before a model is opened."""
    if target.by_default is not None:
        names = ",".join(provider.name for provider in target.chain)
        print_note(f"provider {names}, by default: {target.by_default}")
    for line in target.notes:
        print_note(line)


def print_chain_notes(target: Target, resolutions: Sequence[Resolution]) -> None:
    """Print notes on stderr after a model was opened: the chain and its unused providers."""
    print_target_notes(target)
    for entry in resolutions:
        if entry.status != "active":
            print_note(not_used(entry.provider.name, entry))


def unused_provider_notes(target: Target, chain: Sequence[ChainEntry]) -> tuple[str, ...]:
    """Notes on unused providers. `chain`: of an open package."""
    entries = chain[len(target.skipped) :]
    return tuple(
        not_used(provider.name, entry)
        for provider, entry in zip(target.chain, entries, strict=True)
        if entry.status != "active"
    )
