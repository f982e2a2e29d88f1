"""Options of `drift`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from partita.options.fields import PathText, Range, option, view_option
from partita.options.groups import ForeignFolder, Json, Out, Process, ProgressOptions, ProviderChain
from partita.options.placement import ModelOptions


@dataclass(frozen=True, kw_only=True)
class DriftOptions(ForeignFolder, ProviderChain, ModelOptions):
    """Where the outputs of a model on one provider differ from those on another."""

    HELP_GROUP = "Comparison"
    against: str | None = option(
        "Reference: a provider chain; a virtual environment with another ONNX Runtime; original or a checkpoint for "
        "the source model. Default: cpu.",
        metavar="CHAIN|VENV|CHECKPOINT",
    )
    by: Literal["layer", "node"] = option(
        "Compare layers, then the nodes of the first layer over tolerance; or all nodes.", default="layer"
    )
    tolerance: float | None = option(
        "Largest relative error. Default: by element type, 1e-4 for float32, 2e-2 for float16.",
        range=Range(maximum=1.0, above=0),
    )
    free_running: bool = option(
        "Let the tested side read the states of its own steps, so that errors add up.", default=False
    )
    shapes: Mapping[str, int | Sequence[int]] | None = option(
        "Shape of an input of an ONNX file (x=1,3,224,224) or value of a symbolic dimension (batch=1).",
        flags=("--shape",),
        metavar="NAME=SIZES",
        text="shapes",
        group="Input",
    )
    inputs: Mapping[str, PathText] | None = option(
        "Values of an input of an ONNX file. Default: generated values.",
        flags=("--input",),
        metavar="NAME=FILE.npy",
        text="inputs",
        group="Input",
    )
    process: Process = "auto"


@dataclass(frozen=True, kw_only=True)
class DriftCommand(ProgressOptions, DriftOptions):
    """Find the layer and node whose output on a provider differs from the reference. Exit code 4 on a difference."""

    view: str | None = view_option("partita.drift.document")
    out: Out = None
    as_json: Json = False
