"""Marks of providers on the page: colour, letter and name."""

from __future__ import annotations

from dataclasses import dataclass

from partita.observations.names import CPU, UNKNOWN
from partita.observations.text_format import short_provider
from partita.partition_reports.file_nodes import report_rows
from partita.partition_reports.groups import provider_of
from partita.partition_reports.records import Report

COLOURS = 6
"""Number of provider colours in the style; they repeat for further providers."""


@dataclass(frozen=True, slots=True)
class Mark:
    """Mark of one provider."""

    provider: str
    label: str
    """Short name."""
    css: str
    """CSS class of the colour."""
    letter: str


def find_marks(report: Report) -> dict[str, Mark]:
    """The marks of every provider of the report: the chain, then other providers with nodes."""
    ran = [provider_of(node) for phase in report.phases for node in (*report_rows(phase), *phase.nodes)]
    providers = list(dict.fromkeys([*(entry.provider for entry in report.chain), *ran]))
    letters = pick_letters(providers)
    known = [provider for provider in providers if provider != UNKNOWN]
    # Only the preferred provider has the first colour.
    colours = {name: f"e{n if n < COLOURS else n % (COLOURS - 1) + 1}" for n, name in enumerate(known)}
    return {
        provider: Mark(provider, short_provider(provider), colours.get(provider, "eu"), letters[provider])
        for provider in providers
    }


def pick_letters(providers: list[str]) -> dict[str, str]:
    """A letter per provider: the first free letter of its short name; C is reserved for the CPU."""
    letters: dict[str, str] = {UNKNOWN: "?"}
    for provider in sorted(providers, key=lambda name: name != CPU):
        free = (mark.upper() for mark in short_provider(provider) if mark.isascii() and mark.isalnum())
        letters.setdefault(provider, next((mark for mark in free if mark not in letters.values()), "*"))
    return letters


def main_provider(report: Report) -> str:
    """The provider with the most nodes, whose blocks are small."""
    counts: dict[str, int] = {}
    for phase in report.phases:
        for entry in phase.providers:
            counts[entry.provider] = counts.get(entry.provider, 0) + entry.nodes
    return max(counts, key=lambda provider: counts[provider], default=UNKNOWN)
