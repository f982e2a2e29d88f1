"""`partita serve`: its arguments and options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer.exceptions import Exit

from partita.commands.arguments import (
    ContractOption,
    DraftOption,
    JsonOption,
    LengthOption,
    MaxCopiesOption,
    MaxCopyBytesOption,
    MaxCpuNodesOption,
    PinOption,
    PrefillChunkOption,
    ProbeSecondsOption,
    ProviderLibraryOption,
    ProviderOption,
    ProviderOptionsOption,
    ThreadsOption,
    VariantOption,
    chain_options,
    complete,
    folder_choice,
    read_path,
    read_size,
)

app = typer.Typer()


@app.command(epilog="Example: partita serve ./package --provider cpu --port 8000")
def serve(
    context: typer.Context,
    packages: Annotated[
        list[Path],
        typer.Argument(
            metavar="PACKAGE...",
            help="Package folders, or folders of ONNX decoders of another exporter; each is a model of the API.",
            show_default=False,
            parser=read_path,
        ),
    ],
    name: Annotated[
        list[str] | None,
        typer.Option(metavar="MODEL", help="Name of a package in the API, once for each. Default: its folder's."),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; the default takes this machine's clients only.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(help="Port to listen on; 0 for any that is free.")] = 8000,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY", help="Key that clients have to send; can be repeated. Default: that in PARTITA_API_KEY."
        ),
    ] = None,
    allowed_origin: Annotated[
        list[str] | None,
        typer.Option(metavar="ORIGIN", help="Origin of web pages that may send requests, or *; can be repeated."),
    ] = None,
    provider: ProviderOption = None,
    provider_option: ProviderOptionsOption = None,
    provider_library: ProviderLibraryOption = None,
    pin: PinOption = None,
    max_cpu_nodes: MaxCpuNodesOption = None,
    max_copies: MaxCopiesOption = None,
    max_copy_bytes_per_token: MaxCopyBytesOption = None,
    threads: ThreadsOption = None,
    sampling: Annotated[
        str | None,
        typer.Option(
            metavar="checkpoint",
            autocompletion=complete("samplings"),
            help="What a request leaves open is as the checkpoint suggests. Default: as OpenAI's API has it, "
            "temperature 1.",
        ),
    ] = None,
    adapter: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Adapter of the packages to switch on, of `export --with-adapters`."),
    ] = None,
    speculate: Annotated[
        str | None,
        typer.Option(
            metavar="ngram",
            autocompletion=complete("speculations"),
            help="Guess what follows from what was written so far: several tokens a step, and answers are the same.",
        ),
    ] = None,
    draft: DraftOption = None,
    prefix: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            parser=read_path,
            help="A prefix of `generate --save-prefix`: prompts that begin with it are not read so far. Once for each "
            "package.",
        ),
    ] = None,
    prefill_chunk: PrefillChunkOption = None,
    max_queue: Annotated[
        int, typer.Option(help="Most prompts of each package that wait for a row of its batch; more are refused.")
    ] = 256,
    max_body: Annotated[str, typer.Option(metavar="SIZE", help="Largest request.")] = "4MiB",
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="Longest time for a request, waiting included.")
    ] = 600.0,
    max_requests: Annotated[int, typer.Option(help="Most requests that are open at once.")] = 1024,
    drain_timeout: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS", help="Time for open requests once SIGTERM has come. Default: as long as they may take."
        ),
    ] = None,
    variant: VariantOption = None,
    contract: ContractOption = None,
    max_length: LengthOption = None,
    probe_seconds: ProbeSecondsOption = 0.0,
    as_json: JsonOption = False,
) -> None:
    """Serve packages over HTTP with OpenAI's API; requests join a running batch. Exit code 3 when the chain is not
    honoured.
    """
    from partita.check.limits import Limits
    from partita.commands import serve as verb
    from partita.library.speculation import Speculation

    raise Exit(
        verb.run(
            verb.ServeOptions(
                packages=tuple(packages),
                names=tuple(name or ()),
                where=chain_options(context, provider, provider_option, provider_library, pin, threads),
                host=host,
                port=port,
                keys=tuple(api_key or ()),
                allowed_origins=tuple(allowed_origin or ()),
                placement=Limits(max_cpu_nodes, max_copies, max_copy_bytes_per_token),
                choice=folder_choice(variant, contract, max_length),
                adapter=adapter,
                speculation=Speculation(speculate, None if draft is None else str(draft)),
                prefixes=tuple(prefix or ()),
                prefill_chunk=prefill_chunk,
                sampling=sampling,
                body_bytes=read_size(max_body),
                queue=max_queue,
                seconds=timeout,
                requests=max_requests,
                drain_seconds=drain_timeout,
                probe_seconds=probe_seconds,
                as_json=as_json,
            )
        )
    )
