"""`partita bench`: its arguments and options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer.exceptions import Exit

from partita.commands.arguments import (
    ContractOption,
    JsonOption,
    LengthOption,
    PackageArgument,
    ProviderLibraryOption,
    ProviderOptionsOption,
    ThreadsOption,
    VariantOption,
    complete,
    folder_choice,
    read_path,
)

app = typer.Typer()


@app.command(epilog="Example: partita bench ./package --providers webgpu cpu")
def bench(
    package: PackageArgument,
    more: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="CHAIN",
            autocompletion=complete("chains"),
            help="Additional chains, as positional arguments after --provider.",
        ),
    ] = None,
    provider: Annotated[
        list[str] | None,
        typer.Option(
            "--provider",
            "--providers",
            "-e",
            metavar="CHAIN",
            autocompletion=complete("chains"),
            help="A chain to measure, e.g. cpu or webgpu,cpu; can be repeated, and additional chains may "
            "follow it: --providers webgpu cpu. Default: the best usable provider, then cpu.",
        ),
    ] = None,
    against: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="PACKAGE",
            parser=read_path,
            help="Another package of the same model to compare with; can be repeated.",
        ),
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option(
            metavar="CHAIN",
            autocompletion=complete("chains"),
            help="Chain that ratios are relative to, with PACKAGE. Default: cpu, else the first chain.",
        ),
    ] = None,
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", help="The prompt; - reads it from stdin. Default: generated tokens.")
    ] = None,
    token_ids: Annotated[bool, typer.Option("--token-ids", help="--prompt is token ids, e.g. 1,45,7.")] = False,
    prompt_tokens: Annotated[int | None, typer.Option(help="Length of a generated prompt. Default: 64.")] = None,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", help="Tokens to generate, greedily; at least 2.")
    ] = 32,
    prefill_chunk: Annotated[int | None, typer.Option(help="Prompt tokens per run. Default: 512.")] = None,
    rounds: Annotated[int, typer.Option(help="Measured rounds, after one warm-up round.")] = 5,
    provider_option: ProviderOptionsOption = None,
    provider_library: ProviderLibraryOption = None,
    threads: ThreadsOption = None,
    variant: VariantOption = None,
    contract: ContractOption = None,
    max_length: LengthOption = None,
    timeout: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            help="Time limit for loading and for each round; a provider that exceeds it counts as failed.",
        ),
    ] = 600.0,
    report: Annotated[
        Path | None,
        typer.Option(
            "--report",
            "-r",
            metavar="DIR",
            parser=read_path,
            help="Write the partition report of each contender to this folder.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="FILE",
            parser=read_path,
            help="Write the result as JSON, for report show and report html; - is stdout.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Benchmark one prompt on several providers, interleaved: medians, ratios, whether the tokens are the same, and
    where the time goes. Exit code 3 when a provider could not run; the others are measured all the same.
    """
    from partita.commands import bench as verb
    from partita.library.bench_options import BenchOptions

    raise Exit(
        verb.run(
            BenchOptions(
                package=package,
                against=tuple(against or ()),
                chains=(*(provider or ()), *(more or ())),
                baseline=baseline,
                prompt=verb.read_prompt(prompt, token_ids=token_ids),
                prompt_tokens=prompt_tokens,
                max_new_tokens=max_new_tokens,
                prefill_chunk=prefill_chunk,
                rounds=rounds,
                provider_options=tuple(provider_option or ()),
                provider_libraries=tuple(provider_library or ()),
                threads=threads,
                timeout_seconds=timeout,
                reports=report,
                choice=folder_choice(variant, contract, max_length),
            ),
            out=out,
            as_json=as_json,
        )
    )
