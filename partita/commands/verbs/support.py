"""`partita support`: its arguments and options."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.exceptions import Exit

from partita.commands.arguments import (
    JsonOption,
    ProviderLibraryOption,
    ProviderOptionsOption,
    chain_options,
    complete,
    read_path,
    view_option,
)
from partita.errors import UsageError
from partita.observations.text_format import listing

SECONDS = 300.0

app = typer.Typer()


def _file_option(name: str, what: str) -> Any:
    """An option that names a file for one view of the table."""
    return typer.Option(
        name, metavar="FILE", parser=read_path, help=f"Write the table to a file as {what}; - is stdout."
    )


def _refuse_beside_diff(options: Sequence[str]) -> None:
    """Raise UsageError for options of a measurement, where two tables are compared."""
    if options:
        raise UsageError(f"support diff compares two tables that were written, and takes no {listing(options)}")


@app.command(epilog="Example: partita support Resize com.microsoft:MatMulNBits --provider webgpu")
def support(
    context: typer.Context,
    what: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="OP|MODEL",
            help="Operators (Cast, com.microsoft:MatMulNBits) or an ONNX file; `diff A B` compares two tables that "
            "--out wrote.",
        ),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every operator of ONNX and of ONNX Runtime.")] = False,
    provider: Annotated[
        str | None,
        typer.Option(
            "--provider",
            "-e",
            metavar="NAME",
            autocompletion=complete("providers"),
            help="Provider to test. Default: the best usable one.",
        ),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option("--model", metavar="FILE", parser=read_path, help="Only what this ONNX file needs."),
    ] = None,
    seconds: Annotated[float, typer.Option(help="Time budget; variants not reached are listed as untried.")] = SECONDS,
    provider_option: ProviderOptionsOption = None,
    provider_library: ProviderLibraryOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Test CUDA without a GPU; needs --provider cuda.")] = False,
    device: Annotated[
        str | None, typer.Option(autocompletion=complete("devices"), help="GPU to simulate in the dry run, e.g. h100.")
    ] = None,
    out: Annotated[Path | None, _file_option("--out", "JSON, for `support diff`")] = None,
    markdown: Annotated[Path | None, _file_option("--markdown", "Markdown")] = None,
    html: Annotated[Path | None, _file_option("--html", "one HTML page")] = None,
    view: Annotated[str | None, view_option("partita.support.views")] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure which operators a provider supports: opset versions, types, attribute and input variants."""
    from partita.commands import support as verb
    from partita.commands.showing import asked
    from partita.library.supporting import SupportOptions

    words = tuple(what or ())
    files = (("json", out), ("markdown", markdown), ("html", html))
    shown = verb.Shown(
        asked(view, as_json=as_json).view, tuple((view, path) for view, path in files if path is not None)
    )
    if words[:1] == (verb.DIFF,):
        given = {
            "--provider": provider,
            "--model": model,
            "--all": everything,
            "--dry-run": dry_run,
            "--device": device,
            "--provider-option": provider_option,
            "--provider-library": provider_library,
            "--seconds": seconds != SECONDS,
        }
        _refuse_beside_diff([option for option, value in given.items() if value])
        raise Exit(verb.diff(words[1:], shown))
    named = verb.model_in(words)
    if named is not None and model is None:
        words, model = (), named
    raise Exit(
        verb.run(
            SupportOptions(
                where=chain_options(context, provider, provider_option, provider_library, None, None),
                operators=words,
                model=model,
                everything=everything,
                dry_run=dry_run,
                device=device,
                seconds=seconds,
            ),
            shown,
        )
    )
