"""`partita inspect`: its arguments and options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from partita.commands.arguments import (
    ContractOption,
    JsonOption,
    LengthOption,
    OutOption,
    VariantOption,
    folder_choice,
    read_path,
    view_option,
)

app = typer.Typer()


@app.command(epilog="Example: partita inspect ./package --against ./other-package")
def inspect(
    package: Annotated[
        Path,
        typer.Argument(
            metavar="PACKAGE",
            help="Package folder, folder of ONNX files, or an ONNX file.",
            show_default=False,
            parser=read_path,
        ),
    ],
    against: Annotated[
        Path | None,
        typer.Option(metavar="PACKAGE", parser=read_path, help="Show what is different in this one."),
    ] = None,
    variant: VariantOption = None,
    contract: ContractOption = None,
    against_variant: Annotated[
        str | None, typer.Option(metavar="NAME", help="As --variant, of the folder after --against.")
    ] = None,
    against_contract: Annotated[
        Path | None,
        typer.Option(metavar="FILE.toml", parser=read_path, help="As --contract, of the folder after --against."),
    ] = None,
    max_length: LengthOption = None,
    hashes: Annotated[
        bool, typer.Option("--hashes", help="Read files whose SHA-256 no manifest and no hub snapshot says.")
    ] = False,
    view: Annotated[str | None, view_option("partita.inspection.views")] = None,
    out: OutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what a package holds, without running it: graphs, contract, cache, weights, precision, provenance."""
    from partita.commands import inspect as verb
    from partita.commands.showing import asked

    verb.run(
        package,
        against,
        asked(view, out, as_json=as_json),
        folder_choice(variant, contract, max_length),
        folder_choice(against_variant, against_contract, None),
        hashes=hashes,
    )
