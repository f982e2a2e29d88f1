"""`partita providers`: its options."""

from __future__ import annotations

from typing import Annotated

import typer

from partita.commands.arguments import JsonOption, OutOption, ProviderLibraryOption, view_option

app = typer.Typer()


@app.command(epilog="Example: partita providers --json")
def providers(
    provider_library: ProviderLibraryOption = None,
    view: Annotated[str | None, view_option("partita.machine.views")] = None,
    out: OutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show which execution providers run on this machine, and why the others do not."""
    from partita.commands import providers as verb
    from partita.commands.showing import asked

    verb.run(tuple(provider_library or ()), asked(view, out, as_json=as_json))
