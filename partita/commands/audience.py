"""The audience of a verb: notes and progress on stderr."""

from __future__ import annotations

from collections.abc import Sequence

from partita.commands.terminal import Spinner, note
from partita.library.audience import Audience
from partita.library.chain import Target
from partita.library.notes import not_used
from partita.observations.records import ChainEntry
from partita.providers.resolve import Resolution


def say(text: str) -> None:
    """A note on stderr."""
    note(f"note: {text}")


TERMINAL = Audience(say, Spinner)


def say_target(target: Target) -> None:
    """Notes on stderr that are known before anything is opened."""
    if target.by_default is not None:
        names = ",".join(provider.name for provider in target.chain)
        say(f"provider {names}, by default: {target.by_default}")
    for line in target.notes:
        say(line)


def say_chain(target: Target, resolutions: Sequence[Resolution]) -> None:
    """Notes on stderr once a model is open: what is known of the chain, and each provider of it that is not used."""
    say_target(target)
    for entry in resolutions:
        if entry.status != "active":
            say(not_used(entry.provider.name, entry))


def unused(target: Target, chain: Sequence[ChainEntry]) -> tuple[str, ...]:
    """Notes on providers that are not used. `chain`: of an open package."""
    entries = chain[len(target.skipped) :]
    return tuple(
        not_used(provider.name, entry)
        for provider, entry in zip(target.chain, entries, strict=True)
        if entry.status != "active"
    )
