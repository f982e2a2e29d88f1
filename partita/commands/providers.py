"""`partita providers`: the execution providers of this machine, and the reasons of unusable ones."""

from __future__ import annotations

from pathlib import Path

from partita.commands.outputs import prepare, requested_view
from partita.library.place.support import providers
from partita.options.inspection import ProvidersCommand

VIEWS = "partita.machine.document"


def run(options: ProvidersCommand) -> None:
    """Check every provider and show the results. Raises UsageError for an unusable library."""
    libraries = options.provider_libraries or {}
    showing = prepare(requested_view(options), VIEWS, [Path(path) for path in libraries.values()])
    showing.show(providers(provider_libraries=libraries, measure=options.measure))
