"""Options of `plan`."""

from dataclasses import dataclass, field
from typing import Annotated

from partita.options.fields import MAX_TOKENS, MODEL, TOKENS, Option, PathText, Range, option
from partita.options.groups import Precision, ProgressOptions, ViewOptions


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Whether a model fits a device, and how fast it runs there."""

    HELP_GROUP = "Model"
    model: Annotated[
        PathText,
        Option(
            "Checkpoint folder, config.json, GGUF file, hub id, package, or folder of an ONNX decoder.",
            metavar="MODEL",
            positional=True,
            text=MODEL,
        ),
    ] = field(kw_only=False)
    device: str = option(
        "Device to plan for: here (the CPU of this machine), or a GPU, e.g. h100.",
        default="here",
        metavar="DEVICE",
        complete="devices",
    )
    precision: Precision = "auto"
    context: int | None = option(
        "Prompt plus output tokens of a row. Default: the model's, up to 2048; of a package, its cache length.",
        range=Range(2, MAX_TOKENS),
    )
    batch: int = option("Rows.", default=1, range=TOKENS)
    prompt_tokens: int | None = option("Tokens of the prompt of each row. Default: half of --context.", range=TOKENS)


@dataclass(frozen=True, kw_only=True)
class PlanCommand(ViewOptions, ProgressOptions, PlanOptions):
    """Show whether a model fits a device, the largest context and batch that fit, and its speed, without running it.
    Exit code 5 if it does not fit.
    """

    VIEWS = "partita.capacity.document"
