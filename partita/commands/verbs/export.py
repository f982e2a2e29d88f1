"""`partita export`: its arguments and options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from partita.commands.arguments import (
    JsonOption,
    ProviderLibraryOption,
    ProviderOptionsOption,
    complete,
    not_empty,
    read_pair,
    read_pairs,
    read_path,
    read_size,
    split_pair,
)
from partita.export.attention import names as attention_names
from partita.export.exporters import names as exporter_names
from partita.export.quantisers import names as quantiser_names

LOWERINGS = ", ".join(attention_names())
EXPORTERS = ", ".join(exporter_names())
QUANTISERS = ", ".join(quantiser_names())
app = typer.Typer()


@app.command(epilog="Example: partita export ./my-checkpoint ./package --precision fp16 --max-length 512")
def export(
    context: typer.Context,
    checkpoint: Annotated[
        str,
        typer.Argument(
            metavar="CHECKPOINT",
            help="Checkpoint folder, or a hub id such as owner/name.",
            show_default=False,
            parser=not_empty,
        ),
    ],
    out: Annotated[
        Path,
        typer.Argument(metavar="OUT", help="Folder to write the package to.", show_default=False, parser=read_path),
    ],
    precision: Annotated[
        str,
        typer.Option(
            autocompletion=complete("precisions"),
            help="Data type of weights, cache and arithmetic: fp32, fp16 or bf16; int8 or int4 for weights packed in "
            "blocks, computed in fp32. auto is fp32, and of a quantised checkpoint what it stores.",
        ),
    ] = "auto",
    block_size: Annotated[
        int | None,
        typer.Option(
            help="int8, int4: weights that share a scale, 32, 64 or 128. Default: the target's, 64 for int4 on cpu."
        ),
    ] = None,
    activations: Annotated[
        str | None,
        typer.Option(
            autocompletion=complete("activations"),
            help="What weights of 16 bits or less are multiplied with: fp32; fp16 or bf16, with a cache in it; int8, "
            "rounded for every token, with --precision int8. Default: what the target has a kernel for.",
        ),
    ] = None,
    prefill_precision: Annotated[
        str | None,
        typer.Option(
            autocompletion=complete("prefill_precisions"),
            help="int8, int4: a second graph for prompts: int8, weights of 8 bits and activations rounded for every "
            "token, for processors that multiply integers fast.",
        ),
    ] = None,
    requantise: Annotated[
        bool,
        typer.Option(
            "--requantise",
            help="int8, int4: round the weights of a checkpoint that is quantised already a second time, where they "
            "cannot be taken as they are stored.",
        ),
    ] = False,
    keep: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE=PRECISION,...",
            help="int8, int4: modules with another precision of weights, as lm_head=int8,layers.0=fp16.",
        ),
    ] = None,
    quantiser: Annotated[
        str | None,
        typer.Option(
            autocompletion=complete("quantisers"),
            help=f"int8, int4: what rounds the weights: {QUANTISERS}. Default: refit, or gptq with --calibrate.",
        ),
    ] = None,
    calibrate: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            parser=read_path,
            help="int8, int4: UTF-8 text on which the weights are rounded; another than that of --quality-text.",
        ),
    ] = None,
    max_perplexity_ratio: Annotated[
        float | None,
        typer.Option(
            help="int8, int4: pack weights wider, as few as will do, until the perplexity is at most so many times the "
            "original's, as 1.01."
        ),
    ] = None,
    max_weight_size: Annotated[
        int | None,
        typer.Option(
            metavar="SIZE",
            parser=read_size,
            help="int8, int4: pack those weights wider that matter most, as long as all take at most so much, as "
            "600MiB or 2GiB.",
        ),
    ] = None,
    quality_text: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            parser=read_path,
            help="int8, int4: UTF-8 text on which the package is compared with the original model. Default: the text "
            "that ships with Partita.",
        ),
    ] = None,
    max_length: Annotated[
        int | None,
        typer.Option(
            help="Cache length N: maximum number of prompt and generated tokens together. Default: the model's, "
            "up to 2048."
        ),
    ] = None,
    cache: Annotated[
        str,
        typer.Option(
            autocompletion=complete("caches"),
            help="Layout of the cache: fixed, one buffer that is written in place; window, the same, where layers with "
            "a sliding window keep that alone; growing, as optimum has it, for its ORTModelForCausalLM.",
        ),
    ] = "fixed",
    cache_precision: Annotated[
        str | None,
        typer.Option(
            autocompletion=complete("cache_precisions"),
            help="int8: cache keys and values as integers, with scales from a text: that of --calibrate, else that of "
            "--quality-text. Default: in what is computed in.",
        ),
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Batch size, fixed in the graph.")] = 1,
    attention: Annotated[
        str,
        typer.Option(
            autocompletion=complete("attentions"),
            help=f"Lowering of attention and cache: {LOWERINGS}, or auto, which queries the target.",
        ),
    ] = "auto",
    target: Annotated[
        str | None,
        typer.Option(
            metavar="PROVIDER",
            autocompletion=complete("providers"),
            help="Provider to build the package for: it is queried for the attention lowering it supports best. "
            "Default: "
            "the best usable one.",
        ),
    ] = None,
    target_default: Annotated[
        bool,
        typer.Option(
            "--target-default",
            help="If the target cannot be queried here, use the default lowering for that provider.",
        ),
    ] = False,
    provider_option: ProviderOptionsOption = None,
    provider_library: ProviderLibraryOption = None,
    static_shapes: Annotated[
        bool, typer.Option("--static-shapes", help="Write prefill.onnx and decode.onnx with static shapes only.")
    ] = False,
    prefill_chunk: Annotated[
        int | None,
        typer.Option(help="Tokens per run of the static prefill.onnx. Default: 128, or 16 with recurrent states."),
    ] = None,
    no_verify: Annotated[
        bool,
        typer.Option(
            "--no-verify", help="Skip the comparison with the original model; the package is marked unverified."
        ),
    ] = False,
    verify_length: Annotated[
        int | None,
        typer.Option(
            help="Longest sliding window, attention chunk or original context that verification crosses, in tokens. "
            "Default: 1,024."
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", "-f", help="Replace an existing package.")] = False,
    adapter: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", parser=read_path, help="PEFT adapter, LoRA or DoRA, to merge into the weights."),
    ] = None,
    with_adapters: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=FOLDER",
            parser=read_pair,
            help="PEFT adapter, LoRA, to put beside the weights, for `generate --adapter NAME`; repeatable.",
        ),
    ] = None,
    opset: Annotated[
        int | None, typer.Option(help="ONNX opset. Default: the one that the attention lowering needs.")
    ] = None,
    exporter: Annotated[
        str, typer.Option(autocompletion=complete("exporters"), help=f"Exporter to use: {EXPORTERS}.")
    ] = "native",
    without_pass: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Leave a pass over the graph out, to see what it brings; repeatable. --explain names them all.",
        ),
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Also print what each pass over the graph does and how often it did it.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Export a checkpoint to a package and check it against the original model."""
    from partita.library.scratch import own_compile_cache

    context.with_resource(own_compile_cache())
    from partita.commands.terminal import Bars
    from partita.export.progress import stage
    from partita.export.publish import check_target
    from partita.providers.resolve import parse_chain

    check_target([checkpoint], out, force=force)
    if target is not None and not provider_library:  # a library may bring a provider of another name
        parse_chain(target, argument="target")

    bars = Bars()
    with bars, stage(bars, "load libraries", {}):  # torch and transformers take seconds
        from partita.commands import export as verb
        from partita.export.pipeline import ExportOptions
        from partita.library.exporting import TargetOptions

    verb.run(
        ExportOptions(
            checkpoint=checkpoint,
            out=out,
            precision=precision,
            max_length=max_length,
            batch_size=batch_size,
            attention=attention,
            static_shapes=static_shapes,
            prefill_chunk=prefill_chunk,
            verify=not no_verify,
            verify_length=verify_length,
            force=force,
            opset=opset,
            exporter=exporter,
            block_size=block_size,
            quantiser=quantiser,
            keep=read_pairs(keep),
            quality_text=quality_text,
            activations=activations,
            calibrate=calibrate,
            max_perplexity_ratio=max_perplexity_ratio,
            max_weight_size=max_weight_size,
            cache_precision=cache_precision,
            without_pass=tuple(without_pass or ()),
            prefill_precision=prefill_precision,
            requantise=requantise,
            adapter=adapter,
            with_adapters=tuple((name, Path(folder)) for name, _, folder in map(split_pair, with_adapters or ())),
            cache=cache,
        ),
        TargetOptions(
            target,
            tuple(provider_option or ()),
            tuple(provider_library or ()),
            default_allowed=target_default,
        ),
        bars,
        as_json=as_json,
        explain=explain,
    )
