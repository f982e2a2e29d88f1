"""`partita place`: its arguments and options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer.exceptions import Exit

from partita.commands.arguments import (
    ContractOption,
    JsonOption,
    LengthOption,
    MaxCopiesOption,
    MaxCopyBytesOption,
    MaxCpuNodesOption,
    PinOption,
    ProbeSecondsOption,
    ProviderLibraryOption,
    ProviderOption,
    ProviderOptionsOption,
    ThreadsOption,
    VariantOption,
    chain_options,
    complete,
    folder_choice,
    read_pair,
    read_path,
)

app = typer.Typer()


@app.command(epilog="Example: partita place model.onnx --provider cuda,cpu --dry-run --device h100 --max-cpu-nodes 0")
def place(
    context: typer.Context,
    model: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL",
            help="An ONNX file, a package folder written by `partita export`, or the folder of an ONNX decoder that "
            "another exporter wrote.",
            show_default=False,
            parser=read_path,
        ),
    ],
    provider: ProviderOption = None,
    provider_option: ProviderOptionsOption = None,
    provider_library: ProviderLibraryOption = None,
    pin: PinOption = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=SIZES", help="Shape of an input (x=1,3,224,224) or value of a symbolic dimension (batch=1)."
        ),
    ] = None,
    values: Annotated[
        list[str] | None,
        typer.Option(
            "--input",
            metavar="NAME=FILE.npy",
            parser=read_pair,
            help="Values of an input; the others are generated.",
        ),
    ] = None,
    runs: Annotated[int, typer.Option(help="Session runs per phase.")] = 3,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Place on CUDA without a GPU; needs --provider cuda or cuda,cpu.")
    ] = False,
    device: Annotated[
        str | None, typer.Option(autocompletion=complete("devices"), help="GPU to simulate in the dry run, e.g. h100.")
    ] = None,
    graph_capture: Annotated[
        bool, typer.Option("--graph-capture", help="In a dry run: report whether CUDA graphs could be captured.")
    ] = False,
    run_seconds: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Time limit for the runs of an ONNX file. Default: 120.")
    ] = None,
    probe_seconds: ProbeSecondsOption = 120.0,
    max_cpu_nodes: MaxCpuNodesOption = None,
    max_copies: MaxCopiesOption = None,
    max_copy_bytes_per_token: MaxCopyBytesOption = None,
    threads: ThreadsOption = None,
    variant: VariantOption = None,
    contract: ContractOption = None,
    max_length: LengthOption = None,
    report: Annotated[
        Path | None,
        typer.Option("--report", "-r", metavar="FILE", parser=read_path, help="Write the partition report to a file."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show where the nodes of any ONNX model would run, what is copied, and why; without generating."""
    from partita.check.limits import Limits
    from partita.commands import place as verb
    from partita.library.place_options import PlaceOptions

    raise Exit(
        verb.run(
            PlaceOptions(
                model=model,
                where=chain_options(context, provider, provider_option, provider_library, pin, threads),
                shapes=tuple(shape or ()),
                values=tuple(values or ()),
                runs=runs,
                limits=Limits(max_cpu_nodes, max_copies, max_copy_bytes_per_token),
                dry_run=dry_run,
                device=device,
                graph_capture=graph_capture,
                probe_seconds=probe_seconds,
                run_seconds=run_seconds,
                choice=folder_choice(variant, contract, max_length),
            ),
            verb.Shown(report, as_json),
        )
    )
