"""Options of `export`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal, TypeAlias

from partita.options.fields import MAX_TOKENS, MODEL, TOKENS, Option, PathText, Range, Value, option
from partita.options.groups import (
    Json,
    PackageArgument,
    Precision,
    ProgressOptions,
    ProviderLibraries,
    ProviderValues,
    Revision,
)

Attention: TypeAlias = Literal["auto", "gqa", "onnx24", "primitives", "growing"]
"""`auto`, or a file of `partita.export.trace.attention`."""
Quantiser: TypeAlias = Literal["refit", "gptq", "nearest"]
"""The names of `partita.export.quantise.rounding.QUANTISERS`."""


@dataclass(frozen=True, kw_only=True)
class TargetOptions:
    """The provider that a package is built for."""

    HELP_GROUP = "Provider"
    target: str | None = option(
        "Provider to build the package for; it is probed for its best attention lowering. With --format ort-package "
        "one or several (cpu,openvino). Default: the best usable one.",
        metavar="PROVIDER",
        complete="providers",
    )
    target_default: bool = option(
        "If the target cannot be probed here, use the default lowering for that provider.", default=False
    )
    target_options: Mapping[str, Value | ProviderValues] | None = option(
        "Provider option, e.g. cuda.device_id=1.",
        flags=("--provider-option",),
        metavar="PROVIDER.NAME=VALUE",
        text="provider_options",
    )
    """Options of the target, by name; or by provider, then by name."""
    target_libraries: ProviderLibraries = None


@dataclass(frozen=True, kw_only=True)
class PrecisionOptions:
    """Data types of weights, cache and arithmetic."""

    HELP_GROUP = "Precision"
    precision: Precision = "auto"
    block_size: int | None = option(
        "int8, int4: number of weights that share a scale: 32, 64 or 128. Default: the target's, 64 for int4 on cpu."
    )
    activations: Literal["fp32", "fp16", "bf16", "int8"] | None = option(
        "Data type of the cache, and of products with weights of at most 16 bits: fp32, fp16 or bf16; with "
        "--precision int8 also int8, quantised per token, for products. Default: what the target has a kernel for.",
    )
    prefill_precision: Literal["int8"] | None = option(
        "int8, int4: a second graph for prefill with 8-bit weights and activations quantised per token, for "
        "processors with fast integer products.",
    )
    requantise: bool = option(
        "int8, int4: quantise the weights of a quantised checkpoint again where their stored form cannot be kept.",
        default=False,
        flags=("--requantise", "--requantize"),
    )
    keep: Mapping[str, str] | None = option(
        "int8, int4: modules with another weight precision, e.g. lm_head=int8,layers.0=fp16.",
        metavar="MODULE=PRECISION,...",
        text="pairs",
    )
    quantiser: Quantiser | None = option(
        "int8, int4: method that quantises the weights. Default: refit, or gptq with --calibrate.",
        flags=("--quantiser", "--quantizer"),
    )
    calibrate: PathText | None = option(
        "int8, int4: UTF-8 text to calibrate the weights on; must differ from --quality-text."
    )
    max_perplexity_ratio: float | None = option(
        "int8, int4: keep the perplexity within this ratio of the source model's (e.g. 1.01) by raising the precision "
        "of as few weights as possible.",
        range=Range(maximum=10, above=1, text="above 1 (no loss) and at most 10"),
    )
    max_weight_size: int | None = option(
        "int8, int4: size budget (e.g. 600MiB or 2GiB), spent on the most sensitive weights.",
        metavar="SIZE",
        text="size",
        range=Range(1, text="a number of bytes"),
    )
    cache_precision: Literal["int8"] | None = option(
        "int8: store cache keys and values as integers, with scales from the text of --calibrate, else of "
        "--quality-text. Default: the type of the activations.",
    )


@dataclass(frozen=True, kw_only=True)
class GraphOptions:
    """Sizes and operators of the graph. Sizes in tokens."""

    HELP_GROUP = "Graph"
    max_length: int | None = option(
        "Cache length N: maximum number of prompt and generated tokens together. Default: the model's, up to 2048.",
        range=Range(2, MAX_TOKENS),
    )
    cache: Literal["fixed", "window", "growing"] = option(
        "Layout of the cache: fixed, one buffer written in place; window, the same, but only the window "
        "in layers with sliding-window attention; growing, as in optimum, for its ORTModelForCausalLM.",
        default="fixed",
    )
    batch_size: int = option("Batch size, fixed in the graph.", default=1, range=TOKENS)
    attention: Attention = option("Lowering of attention and cache; auto queries the target.", default="auto")
    static_shapes: bool = option("Write prefill.onnx and decode.onnx with static shapes only.", default=False)
    prefill_chunk: int | None = option(
        "Tokens per run of the static prefill.onnx. Default: 128, or 16 with recurrent states.", range=TOKENS
    )
    opset: int | None = option("ONNX opset. Default: the opset that the attention lowering needs.")
    exporter: Literal["native", "optimum"] = option("Exporter to use.", default="native")
    without_pass: Sequence[str] = option(
        "Disable a pass over the graph, to see its effect; repeatable. --explain lists them.",
        default=(),
        metavar="NAME",
    )


@dataclass(frozen=True, kw_only=True)
class VerificationOptions:
    """Comparison of the package with the source model."""

    HELP_GROUP = "Verification"
    verify: bool = option("Skip the comparison with the source model; the package is marked unverified.", default=True)
    verify_length: int | None = option(
        "Maximum length of sliding windows, attention chunks and trained contexts that verification "
        "crosses, in tokens. Default: 1,024.",
        range=TOKENS,
    )
    quality_text: PathText | None = option(
        "int8, int4: UTF-8 text on which the package is compared with the source model. Default: the text that "
        "ships with Partita."
    )
    quality_tokens: int | None = option(
        "Tokens of the quality text to compare on. Default: 512; more with --max-perplexity-ratio.",
        range=Range(32, MAX_TOKENS),
    )


@dataclass(frozen=True, kw_only=True)
class ExportOptions(VerificationOptions, GraphOptions, PrecisionOptions, TargetOptions):
    """Checkpoint, output folder, adapters and settings of an export."""

    HELP_GROUP = "Model"
    checkpoint: Annotated[
        PathText,
        Option(
            "Checkpoint folder, GGUF file, or hub id (name, owner/name, owner/name@revision).",
            metavar="CHECKPOINT",
            positional=True,
            text=MODEL,
        ),
    ] = field(kw_only=False)
    out: Annotated[PathText, Option("Folder to write the package to.", metavar="OUT", positional=True)] = field(
        kw_only=False
    )
    revision: Revision = None
    adapter: PathText | None = option("PEFT adapter, LoRA or DoRA, to merge into the weights.", metavar="FOLDER")
    with_adapters: Mapping[str, PathText] | None = option(
        "PEFT adapter (LoRA) to store next to the weights, for `generate --adapter NAME`; repeatable.",
        metavar="NAME=FOLDER",
        text="folders",
    )
    format: Literal["package", "ort-package"] = option(
        "Output: a package, or a model package of ONNX Runtime 1.32 with a variant for each --target.",
        default="package",
        group="Output",
    )
    force: bool = option("Replace an existing package.", default=False, short="-f", group="Output")


@dataclass(frozen=True, kw_only=True)
class ExportCommand(ProgressOptions, ExportOptions):
    """Export a checkpoint to a package and check it against the source model."""

    explain: bool = option(
        "Also print what each pass over the graph does and how many changes it made.", default=False, group="Output"
    )
    as_json: Json = False


@dataclass(frozen=True, kw_only=True)
class PushCommand(ProgressOptions):
    """Upload a package to the Hugging Face hub. Every verb that takes a MODEL reads it there by its id."""

    package: PackageArgument
    repository: Annotated[str, Option("Repository, created if missing.", metavar="OWNER/NAME", positional=True)]
    private: bool = option("Create a private repository.", default=False)
