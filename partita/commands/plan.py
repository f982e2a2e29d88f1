"""`partita plan`: whether a model fits a device, the largest settings that fit, and its speed."""

from __future__ import annotations

from partita.commands.outputs import prepare
from partita.commands.terminal import TERMINAL, Bars
from partita.errors import ReportCheckError
from partita.library.exporting import own_compile_cache
from partita.library.planning import make_plan
from partita.options.inspection import PlanCommand


def run(options: PlanCommand) -> None:
    """Plan and show. Then raises ReportCheckError if the model does not fit."""
    showing = prepare(options)
    with own_compile_cache(), Bars() as bars:
        found = make_plan(options, bars, TERMINAL)
    showing.show(found)
    if not found.fits:
        from partita.capacity.document import headline, largest

        raise ReportCheckError(f"{found.model}: {headline(found)}; largest that fit: {largest(found)}")
