"""Which execution providers run on this machine, as a function."""

from __future__ import annotations

import os

from partita.library.edge import public
from partita.library.where import Libraries
from partita.machine.records import MachineReport
from partita.providers.generic import parse_libraries
from partita.providers.resolve import all_names


@public
def providers(*, provider_libraries: Libraries | None = None) -> MachineReport:
    """Try every execution provider in a process of its own, and say what keeps those that do not run; takes seconds.

    `provider_libraries`: files of plugin providers by name. Raises ArgumentError for a file that is no library.
    """
    from partita.runtime.machine import describe_machine

    texts = [f"{name}={os.fspath(path)}" for name, path in (provider_libraries or {}).items()]
    return describe_machine(parse_libraries(texts, all_names()))
