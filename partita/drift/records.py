"""Difference of a model's outputs on two providers. Schema `partita.drift/1`, published in docs/drift.schema.json.

Errors are relative to the reference's largest values. null: not measured. An error of null in an `infinite` entry is
infinite: NaN or infinity on one side, or another shape.
"""

from __future__ import annotations

import math
from typing import Final, Literal

from pydantic import Field

from partita.observations.records import Record

SCHEMA: Final = "partita.drift/1"
Basis = Literal["alone", "in_layer", "whole_graph"]
"""How an error was measured: the part alone on the reference's inputs, the node in its layer on the layer's reference
inputs, or in the whole graph, where errors of earlier parts add up."""


class PartDrift(Record):
    """A layer or a node. Of several steps, the values of the step with the largest error."""

    name: str
    op_type: str | None = None
    """Operator of a node."""
    module: str | None = None
    provider: str | None = None
    """Provider of a node on the tested side; null if ONNX Runtime does not list it."""
    step: str
    tensor: str
    """The output with the largest error."""
    dtype: str
    error: float | None
    """Error in the whole graph, where errors of earlier parts add up."""
    own_error: float | None
    """Error alone, on the reference's inputs."""
    infinite: bool = False
    tolerance: float
    exceeds_tolerance: bool
    """Whether the error that counts exceeds the tolerance: `own_error`, or without one `error`."""
    largest: float | None
    """Largest finite magnitude on the tested side."""
    largest_reference: float | None

    @property
    def compared_error(self) -> float:
        """The error that is compared with the tolerance."""
        if self.own_error is not None:
            return self.own_error
        return math.inf if self.infinite else self.error or 0.0


class NotFinite(Record):
    """The first node with NaN or infinity where the reference has a number."""

    node: str
    op_type: str
    module: str | None
    step: str
    value: Literal["NaN", "infinity"]
    dtype: str
    input_range: tuple[float, float] | None
    """Smallest and largest finite value of its float inputs."""


class PinTrial(Record):
    """A run with a module pinned to another provider."""

    pin: str
    """Value of --pin."""
    chain: str
    """Value of --provider."""
    error: float | None
    """Error of the layer's outputs with the pin; null: infinite, or not run."""
    within_tolerance: bool
    failure: str = ""
    """Why it could not run; empty if it ran."""


class Drift(Record):
    """The comparison of one model on two sides."""

    schema_id: Literal["partita.drift/1"] = Field(default=SCHEMA, alias="schema")
    model: str
    provider: str
    """Chain of the tested side."""
    against: str
    """Chain of the reference, or the source model."""
    versions: tuple[str, str]
    """ONNX Runtime of both sides; empty for the source model."""
    nodes_by_provider: dict[str, int]
    """Nodes of the tested side that ONNX Runtime lists."""
    unused: dict[str, str]
    """Providers of the tested chain on which no node ran, and the reason."""
    free_running: bool
    """Whether states come from the tested side's own steps."""
    steps: tuple[str, ...]
    outputs: PartDrift
    """The output of the graph with the largest error; `name` is its tensor."""
    layers: tuple[PartDrift, ...]
    first_layer: str | None
    """The first layer over its tolerance."""
    first_node: str | None
    basis: Basis | None
    """How the first node's error was measured."""
    nodes: tuple[PartDrift, ...]
    """Nodes of the first layer over tolerance, or all nodes with --by node."""
    not_finite: NotFinite | None
    pin_trials: tuple[PinTrial, ...]
    notes: tuple[str, ...]
    partita_version: str
    created: str

    @property
    def unused_because(self) -> str | None:
        """Why no node ran on the tested provider, so that nothing was compared; None if one did."""
        return self.unused.get(self.provider.partition(",")[0])

    @property
    def worst(self) -> PartDrift:
        """The layer or output with the largest error."""
        return max((*self.layers, self.outputs), key=lambda part: part.compared_error)

    @property
    def is_within(self) -> bool:
        """Whether no output and no layer exceeds its tolerance."""
        return self.first_layer is None and not self.outputs.exceeds_tolerance and self.not_finite is None

    @property
    def layer(self) -> PartDrift | None:
        """The first layer over its tolerance."""
        return next((entry for entry in self.layers if entry.name == self.first_layer), None)

    @property
    def node(self) -> PartDrift | None:
        """The first node over its tolerance."""
        return next((entry for entry in self.nodes if entry.name == self.first_node), None)
