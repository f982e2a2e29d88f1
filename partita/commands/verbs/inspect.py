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
    max_length: LengthOption = None,
    view: Annotated[str | None, view_option("partita.inspection.views")] = None,
    out: OutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what a package holds, without running it: graphs, contract, cache, weights, precision, provenance."""
    from partita.commands import inspect as verb
    from partita.commands.showing import asked

    verb.run(package, against, asked(view, out, as_json=as_json), folder_choice(variant, contract, max_length))
