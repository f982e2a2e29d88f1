"""`partita generate`: its arguments and options."""

from __future__ import annotations

from dataclasses import replace
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
    PackageArgument,
    PinOption,
    PrefillChunkOption,
    PrefixOption,
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
)

app = typer.Typer()


@app.command(epilog='Example: partita generate ./package "Return the" --max-new-tokens 64 --report run.json')
def generate(
    context: typer.Context,
    package: PackageArgument,
    prompts: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PROMPT",
            help="The prompt; - reads it from stdin, without a trailing newline. One per row when the batch size "
            "is above 1.",
        ),
    ] = None,
    more_prompts: Annotated[
        list[str] | None,
        typer.Option("--prompt", "-p", metavar="TEXT", help="An additional prompt, after the positional ones."),
    ] = None,
    input_: Annotated[
        Path | None,
        typer.Option(
            "--input",
            "-i",
            metavar="FILE",
            parser=read_path,
            help="File of prompts, a row each: .jsonl (objects with prompt, messages or tokens, an id and options of "
            "the row), .txt (a prompt per line) or .parquet; - reads .jsonl from stdin. The rows take turns in the "
            "batch.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            parser=read_path,
            help="File for the answers to --input, .jsonl or .parquet, in the order of the rows. A run that was ended "
            "goes on where it was when it is started again.",
        ),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Ray cluster that answers the rows of --input: auto (the one on this machine), HOST:PORT, or local "
            "(one is started for this run).",
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Worker processes of the cluster, each with the package loaded. Default: one per GPU where the chain "
            "leads with cuda, else one per machine.",
        ),
    ] = None,
    provider: ProviderOption = None,
    max_new_tokens: Annotated[
        int | None, typer.Option("--max-new-tokens", "-n", help="Maximum number of tokens to generate. Default: 128.")
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            "--temperature",
            "--temp",
            "-t",
            help="0 (default) always takes the most likely token; from 0.001 to 100, higher values are more random.",
        ),
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(help="Sample from the k most likely tokens; 0 (default) turns this off.")
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            help="Sample from the most likely tokens that add up to this probability; 1 (default) turns this off."
        ),
    ] = None,
    min_p: Annotated[
        float | None,
        typer.Option(
            help="Drop tokens below this fraction of the most likely token's probability; 0 (default) turns this off."
        ),
    ] = None,
    repetition_penalty: Annotated[
        float | None,
        typer.Option(help="From 0.01 to 100; above 1 (default) tokens that already occurred are less likely."),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option("--seed", "-s", help="Seed of the sampler, to reproduce a run. Default: random, and printed."),
    ] = None,
    sampling: Annotated[
        str | None,
        typer.Option(
            metavar="checkpoint",
            autocompletion=complete("samplings"),
            help="Sample as the checkpoint's generation_config.json suggests; options given explicitly take "
            "precedence.",
        ),
    ] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop when this text appears; can be repeated.")] = None,
    chat: Annotated[
        bool, typer.Option("--chat", "-c", help="Apply the tokenizer's chat template to the prompt.")
    ] = False,
    system: Annotated[str | None, typer.Option(help="System message; implies --chat.")] = None,
    token_ids: Annotated[
        bool, typer.Option("--token-ids", help="Prompts and output are token ids, e.g. '1,45,7'; needs no tokenizer.")
    ] = False,
    prefill_chunk: PrefillChunkOption = None,
    adapter: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Adapter of the package to switch on, of `export --with-adapters`."),
    ] = None,
    prefix: PrefixOption = None,
    save_prefix: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            parser=read_path,
            help="Read the prompt, or the --system message, keep the state of the cache in FILE, and generate nothing.",
        ),
    ] = None,
    speculate: Annotated[
        str | None,
        typer.Option(
            metavar="ngram",
            autocompletion=complete("speculations"),
            help="Guess what follows from what was written so far: several tokens a step, and the text is the same.",
        ),
    ] = None,
    draft: DraftOption = None,
    provider_option: ProviderOptionsOption = None,
    provider_library: ProviderLibraryOption = None,
    pin: PinOption = None,
    graph_capture: Annotated[
        bool, typer.Option("--graph-capture", help="Record a decode step once and replay it; cuda and webgpu can.")
    ] = False,
    max_cpu_nodes: MaxCpuNodesOption = None,
    max_copies: MaxCopiesOption = None,
    max_copy_bytes_per_token: MaxCopyBytesOption = None,
    threads: ThreadsOption = None,
    variant: VariantOption = None,
    contract: ContractOption = None,
    max_length: LengthOption = None,
    report: Annotated[
        Path | None,
        typer.Option(
            "--report", "-r", metavar="FILE", parser=read_path, help="Write the partition report of this run to a file."
        ),
    ] = None,
    probe_seconds: ProbeSecondsOption = 120.0,
    as_json: JsonOption = False,
) -> None:
    """Generate text from a package, or from another exporter's folder. Text goes to stdout as it comes, timings to
    stderr.
    """
    from partita.check.limits import Limits
    from partita.commands import generate as verb
    from partita.commands.generate_options import GenerateOptions
    from partita.library.sampling import Sampling
    from partita.library.speculation import Speculation

    raise Exit(
        verb.run(
            GenerateOptions(
                package=package,
                prompts=(*(prompts or ()), *(more_prompts or ())),
                where=replace(
                    chain_options(context, provider, provider_option, provider_library, pin, threads),
                    graph_capture=graph_capture,
                ),
                limits=Limits(max_cpu_nodes, max_copies, max_copy_bytes_per_token),
                sampling=Sampling(
                    temperature, top_k, top_p, min_p, repetition_penalty, seed, max_new_tokens, source=sampling
                ),
                stop=tuple(stop or ()),
                chat=chat or system is not None,
                system=system,
                token_ids=token_ids,
                prefill_chunk=prefill_chunk,
                report=report,
                adapter=adapter,
                prefix=prefix,
                save_prefix=save_prefix,
                speculation=Speculation(speculate, None if draft is None else str(draft)),
                probe_seconds=probe_seconds,
                as_json=as_json,
                choice=folder_choice(variant, contract, max_length),
                input=input_,
                output=output,
                address=address,
                workers=workers,
            )
        )
    )
