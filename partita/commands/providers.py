"""`partita providers`: which execution providers run on this machine, and why the others do not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from partita.commands.showing import Asked, prepare
from partita.providers.generic import parse_libraries
from partita.providers.resolve import all_names
from partita.runtime.machine import describe_machine

VIEWS = "partita.machine.views"


def run(libraries: Sequence[str], asked: Asked) -> None:
    """Try every provider and show what came of it. `libraries` are NAME=PATH texts of plugin libraries.

    That a provider is not usable is what was asked about, and no error. Raises UsageError for a library that is none.
    """
    showing = prepare(asked, VIEWS, [Path(text.partition("=")[2]) for text in libraries])
    showing.show(describe_machine(parse_libraries(libraries, all_names())))
