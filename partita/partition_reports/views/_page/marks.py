"""How a provider is told apart on the page: by colour, by letter and by name, never by colour alone."""

from __future__ import annotations

from dataclasses import dataclass

from partita.observations.names import CPU, UNKNOWN
from partita.observations.text_format import short_provider
from partita.partition_reports.groups import provider_of
from partita.partition_reports.records import Report

COLOURS = 6
"""Colours that the style has for providers; with more of them they come round again, and letters tell."""


@dataclass(frozen=True, slots=True)
class Mark:
    """One provider as the page shows it."""

    provider: str
    label: str
    """Short name."""
    css: str
    """Class that gives the colour."""
    letter: str


def find_marks(report: Report) -> dict[str, Mark]:
    """The marks of every provider of the report: the chain in its order, then what else ran nodes."""
    ran = [provider_of(node) for phase in report.phases for node in phase.nodes]
    providers = list(dict.fromkeys([*(entry.provider for entry in report.chain), *ran]))
    letters = pick_letters(providers)
    known = [provider for provider in providers if provider != UNKNOWN]
    # The first colour is the preferred provider's alone.
    colours = {name: f"e{n if n < COLOURS else n % (COLOURS - 1) + 1}" for n, name in enumerate(known)}
    return {
        provider: Mark(provider, short_provider(provider), colours.get(provider, "eu"), letters[provider])
        for provider in providers
    }


def pick_letters(providers: list[str]) -> dict[str, str]:
    """A letter per provider: the first of its short name that is still free. C is the CPU's in every report."""
    letters: dict[str, str] = {UNKNOWN: "?"}
    for provider in sorted(providers, key=lambda name: name != CPU):
        free = (mark.upper() for mark in short_provider(provider) if mark.isascii() and mark.isalnum())
        letters.setdefault(provider, next((mark for mark in free if mark not in letters.values()), "*"))
    return letters


def main_provider(report: Report) -> str:
    """The provider of most nodes: its blocks are small, so that every other one stands out."""
    counts: dict[str, int] = {}
    for phase in report.phases:
        for entry in phase.providers:
            counts[entry.provider] = counts.get(entry.provider, 0) + entry.nodes
    return max(counts, key=lambda provider: counts[provider], default=UNKNOWN)
