"""`partita providers`: which execution providers run on this machine, and why the others do not."""

from __future__ import annotations

from pathlib import Path

from partita.commands.outputs import prepare, requested_view
from partita.library.place.support import providers
from partita.options.inspection import ProvidersCommand

VIEWS = "partita.machine.document"


def run(options: ProvidersCommand) -> None:
    """Try every provider and show the results. Raises UsageError for a library that cannot be used."""
    libraries = options.provider_libraries or {}
    showing = prepare(requested_view(options), VIEWS, [Path(path) for path in libraries.values()])
    showing.show(providers(provider_libraries=libraries))
