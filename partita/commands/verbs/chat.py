"""`partita chat`: its arguments and options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer.exceptions import Exit

from partita.commands.arguments import (
    ContractOption,
    DraftOption,
    LengthOption,
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


@app.command(epilog="Example: partita chat ./package --system 'You answer in one sentence.'")
def chat(
    context: typer.Context,
    package: PackageArgument,
    provider: ProviderOption = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    resume: Annotated[
        Path | None,
        typer.Option(metavar="FILE", parser=read_path, help="Go on with a conversation that /save has written."),
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-new-tokens", "-n", help="Maximum number of tokens of an answer. Default: what the cache holds."
        ),
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
        typer.Option("--seed", "-s", help="Seed of the first answer; each later one has the next. Default: random."),
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
    stop: Annotated[
        list[str] | None, typer.Option(help="Stop an answer when this text appears; can be repeated.")
    ] = None,
    prefix: PrefixOption = None,
    prefill_chunk: PrefillChunkOption = None,
    adapter: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Adapter of the package to switch on, of `export --with-adapters`."),
    ] = None,
    speculate: Annotated[
        str | None,
        typer.Option(
            metavar="ngram",
            autocompletion=complete("speculations"),
            help="Guess what follows from the conversation and confirm several tokens per step; answers are the same.",
        ),
    ] = None,
    draft: DraftOption = None,
    provider_option: ProviderOptionsOption = None,
    provider_library: ProviderLibraryOption = None,
    pin: PinOption = None,
    threads: ThreadsOption = None,
    variant: VariantOption = None,
    contract: ContractOption = None,
    max_length: LengthOption = None,
    probe_seconds: ProbeSecondsOption = 120.0,
) -> None:
    """Talk to a package whose tokenizer has a chat template. The cache is kept between turns; Ctrl-C ends an answer,
    Ctrl-D the session, and /help shows the commands. Without a terminal, every line of stdin is a message or a command.
    """
    from partita.commands import chat as verb
    from partita.library.sampling import Sampling
    from partita.library.speculation import Speculation

    raise Exit(
        verb.run(
            verb.ChatOptions(
                package=package,
                where=chain_options(context, provider, provider_option, provider_library, pin, threads),
                sampling=Sampling(
                    temperature, top_k, top_p, min_p, repetition_penalty, seed, max_new_tokens, source=sampling
                ),
                system=system,
                resume=resume,
                prefix=prefix,
                stop=tuple(stop or ()),
                prefill_chunk=prefill_chunk,
                adapter=adapter,
                speculation=Speculation(speculate, None if draft is None else str(draft)),
                probe_seconds=probe_seconds,
                choice=folder_choice(variant, contract, max_length),
            )
        )
    )
