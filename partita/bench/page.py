"""A benchmark as one HTML page: the verdict, speeds as bars with their ranges, and every table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from partita.bench.records import Bench
from partita.bench.sections import PHASES, document, speeds_of
from partita.observations.text_format import decimals
from partita.partition_reports.render.html import render
from partita.partition_reports.render.view import View

COLOURS = 6
"""Number of colours in the style; contenders are also labelled with their names."""


@dataclass(frozen=True, slots=True)
class Bar:
    """One contender in one phase; widths are percent of the widest."""

    name: str
    css: str
    width: float
    low: float
    high: float
    speed_text: str


@dataclass(frozen=True, slots=True)
class Chart:
    """The speeds of one phase."""

    title: str
    bars: tuple[Bar, ...]


def to_text(bench: Bench) -> str:
    """The whole page."""
    made = document(bench)
    contents = [("glance", "At a glance"), *((section.key, section.title) for section in made.sections)]
    return render(
        __package__,
        "bench",
        {
            "title": f"{made.kind}: {made.name}",
            "version": bench.partita_version,
            "contents": contents,
            "document": made,
            "charts": tuple(_draw(bench)),
        },
    )


def _draw(bench: Bench) -> Iterator[Chart]:
    """A chart for every phase with runs, each on its own scale."""
    for phase in PHASES:
        found = [
            (number, entry.name, speed.tokens_per_second)
            for number, entry in enumerate(bench.contenders)
            for name, speed in speeds_of(entry)
            if name == phase
        ]
        most = max((rate.high for _, _, rate in found), default=0.0)
        if most > 0:
            bars = tuple(
                Bar(
                    name=name,
                    css=f"e{number % COLOURS}",
                    width=round(100 * rate.median / most, 2),
                    low=round(100 * rate.low / most, 2),
                    high=round(100 * rate.high / most, 2),
                    speed_text=f"{decimals(rate.median)} tokens/s ({decimals(rate.low)} to {decimals(rate.high)})",
                )
                for number, name, rate in found
            )
            yield Chart(phase, bars)


VIEW = View("html", ".html", "the benchmark as one HTML page", to_text, file_kind="page")
