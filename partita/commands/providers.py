"""`partita providers`: which execution providers run on this machine, and why the others do not."""

from __future__ import annotations

from collections.abc import Sequence

from partita.commands.terminal import print_json, stdout_console
from partita.providers.generic import parse_libraries
from partita.providers.resolve import all_names
from partita.runtime.machine import describe_machine


def run(libraries: Sequence[str], *, as_json: bool) -> None:
    """Try every provider and print what came of it. `libraries` are NAME=PATH texts of plugin libraries.

    That a provider is not usable is what was asked about, and no error. Raises UsageError for a library that is none.
    """
    report = describe_machine(parse_libraries(libraries, all_names()))
    if as_json:
        print_json(report.model_dump(mode="json", by_alias=True))
        return

    from partita.machine.views.text import render

    render(report, stdout_console())
