"""`partita verify`: its arguments and options."""

from __future__ import annotations

from typing import Annotated

import typer
from typer.exceptions import Exit

from partita.commands.arguments import (
    ContractOption,
    JsonOption,
    LengthOption,
    PackageArgument,
    PinOption,
    ProviderLibraryOption,
    ProviderOption,
    ProviderOptionsOption,
    ThreadsOption,
    VariantOption,
    chain_options,
    folder_choice,
    not_empty,
)

app = typer.Typer()


@app.command(epilog="Example: partita verify ./package --provider cpu")
def verify(
    context: typer.Context,
    package: PackageArgument,
    provider: ProviderOption = None,
    provider_option: ProviderOptionsOption = None,
    provider_library: ProviderLibraryOption = None,
    pin: PinOption = None,
    threads: ThreadsOption = None,
    reference: Annotated[
        str | None,
        typer.Option(
            metavar="CHECKPOINT",
            parser=not_empty,
            help="Original model, a folder or a hub id, to compare a folder with that has no known answer.",
        ),
    ] = None,
    variant: VariantOption = None,
    contract: ContractOption = None,
    max_length: LengthOption = None,
    as_json: JsonOption = False,
) -> None:
    """Replay the known answer of a package on a provider, without torch. Exit code 4 when it disagrees."""
    from partita.commands import verify as verb

    raise Exit(
        verb.run(
            package,
            chain_options(context, provider, provider_option, provider_library, pin, threads),
            as_json=as_json,
            choice=folder_choice(variant, contract, max_length),
            reference=reference,
        )
    )
