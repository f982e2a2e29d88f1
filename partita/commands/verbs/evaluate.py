"""`partita evaluate`: its arguments and options."""

from __future__ import annotations

import typer
from typer.exceptions import Exit

from partita.commands.arguments import (
    JsonOption,
    PackageArgument,
    PinOption,
    ProviderLibraryOption,
    ProviderOption,
    ProviderOptionsOption,
    ThreadsOption,
    chain_options,
)

app = typer.Typer()


@app.command(epilog="Example: partita evaluate ./package-int4 --provider cpu")
def evaluate(
    context: typer.Context,
    package: PackageArgument,
    provider: ProviderOption = None,
    provider_option: ProviderOptionsOption = None,
    provider_library: ProviderLibraryOption = None,
    pin: PinOption = None,
    threads: ThreadsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure what rounding costs a package (all but plain fp32) on a provider, without torch: perplexity beside its
    original's.
    """
    from partita.commands import evaluate as verb

    raise Exit(
        verb.run(
            package, chain_options(context, provider, provider_option, provider_library, pin, threads), as_json=as_json
        )
    )
