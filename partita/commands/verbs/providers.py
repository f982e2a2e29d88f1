"""`partita providers`: its options."""

from __future__ import annotations

import typer

from partita.commands.arguments import JsonOption, ProviderLibraryOption

app = typer.Typer()


@app.command(epilog="Example: partita providers --json")
def providers(provider_library: ProviderLibraryOption = None, as_json: JsonOption = False) -> None:
    """Show which execution providers run on this machine, and why the others do not."""
    from partita.commands import providers as verb

    verb.run(tuple(provider_library or ()), as_json=as_json)
