"""The partitions of a placement as a ribbon."""

from __future__ import annotations

from dataclasses import dataclass

from partita.observations.text_format import plural
from partita.partition_reports.outcome import preferred_of
from partita.partition_reports.records import Report
from partita.partition_reports.sections.shared import placements
from partita.partition_reports.verdict import phase_names
from partita.partition_reports.views._page.marks import Mark

WIDTH = 1000
"""Width of a ribbon in its own units."""
MOST_BANDS = 600
"""Maximum drawn partitions."""


@dataclass(frozen=True, slots=True)
class Band:
    """One partition in a ribbon."""

    css: str
    left: float
    width: float
    lane: int
    """0 for the preferred provider, 1 for others."""


@dataclass(frozen=True, slots=True)
class Ribbon:
    """The partitions of phases with equal placement."""

    title: str
    description: str
    bands: tuple[Band, ...]


def draw_ribbons(report: Report, marks: dict[str, Mark]) -> tuple[Ribbon, ...]:
    """One ribbon per placement."""
    ribbons = []
    for phases in placements(report):
        phase = phases[0]
        total = len(phase.nodes)
        bands = tuple(
            Band(
                css=marks[part.provider].css if part.provider in marks else "eu",
                left=round(WIDTH * part.first_position / total, 2),
                width=round(WIDTH * part.nodes / total, 2),
                lane=int(part.provider != preferred_of(report)),
            )
            for part in phase.partitions[:MOST_BANDS]
        )
        description = f"{plural(len(phase.partitions), 'partition')} over {plural(total, 'executed node')}"
        ribbons.append(Ribbon(phase_names(phases), description, bands))
    return tuple(ribbons)
