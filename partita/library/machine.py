"""Which execution providers run on this machine, as a function."""

from __future__ import annotations

from partita.library.edge import takes
from partita.machine.records import MachineReport
from partita.options.inspection import ProvidersOptions
from partita.providers.generic import parse_libraries
from partita.providers.resolve import all_names


@takes(ProvidersOptions)
def providers(options: ProvidersOptions) -> MachineReport:
    """Try every execution provider in a process of its own, and say what keeps those that do not run; takes seconds.

    `provider_libraries`: files of plugin providers by name. Raises ArgumentError for a file that is no library.
    """
    from partita.runtime.machine import describe_machine

    return describe_machine(parse_libraries(options.provider_libraries or {}, all_names()))
