"""Difference of a model's outputs on two providers, and its document.

Schema `partita.drift/1`, published in docs/drift.schema.json.

Errors are relative to the reference's largest values. null: not measured. An error of null in an `infinite` entry is
infinite: NaN or infinity on one side, or another shape.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final, Literal

from pydantic import Field

from partita.observations.records import Record
from partita.observations.text_format import NOT_KNOWN, listing, named_provider, plural
from partita.partition_reports.render.show import Views
from partita.partition_reports.sections.model import Block, Document, Line, Plot, Section, numbers, pairs, table

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


# Document

NEAR_LARGEST_HALF = 0.5 * 65504.0
"""Half of the largest float16: layers are named from here on."""
ROWS = 40


def document(found: Drift) -> Document:
    """Every section that is not empty."""
    sections = (_first(found), _growth(found), _nodes(found), _trials(found), _notes(found))
    return Document(
        kind="Numeric drift",
        name=found.model,
        headline=(headline(found),),
        opening=tuple(_opening(found)),
        sections=tuple(filter(None, sections)),
        created=found.created,
        version=found.partita_version,
    )


VIEWS = Views(document)


def headline(found: Drift) -> str:
    """The outcome in one sentence."""
    sides = f"{found.provider} against {found.against}"
    worst, layer, node, outputs = found.worst, found.layer, found.node, found.outputs
    if found.is_within and found.unused_because is not None:
        return f"nothing was compared on {found.provider.partition(',')[0]}: {found.unused_because}"
    if found.is_within and worst.compared_error == 0:
        return f"no difference on {sides}"
    if found.is_within:
        return f"no layer over tolerance on {sides}; largest error {error_text(worst.compared_error)} in {worst.name}"
    if layer is None:
        return f"output {outputs.name} differs on {sides}: {_limited(outputs.error, outputs)}"
    if node is not None:
        return f"first node over tolerance on {sides}: {node.name}, error {error_text(node.compared_error)}"
    if found.basis == "whole_graph":
        return f"errors add up on {sides}, no layer alone is over tolerance; their sum is from {layer.name}"
    return f"first layer over tolerance on {sides}: {layer.name}, error {error_text(layer.compared_error)}"


def error_text(error: float | None) -> str:
    """A relative error; None is infinite."""
    return "infinite" if error is None or math.isinf(error) else f"{error:.1e}"


def _limited(error: float | None, part: PartDrift) -> str:
    """An error of a part with its tolerance."""
    return f"error {error_text(error)}, tolerance {part.tolerance:.0e}"


def _opening(found: Drift) -> Iterator[Block]:
    """Outputs, first NaN or infinity, and float16 layers near the largest number."""
    outputs = found.outputs
    states = "states of the reference" if all(found.versions) else "states of the package's run on cpu"
    states = "own states" if found.free_running else states
    steps = "the run" if found.steps == ("run",) else f"{listing(found.steps)} ({states})"
    text = f"output {outputs.name} of {steps}: {_limited(outputs.error, outputs)}"
    yield Line(text, tone="bad" if outputs.exceeds_tolerance else "good")
    counts = [f"{named_provider(name)} {count}" for name, count in found.nodes_by_provider.items()]
    counts += [f"none on {name} ({reason})" for name, reason in found.unused.items()]
    if counts:
        yield Line(f"nodes of {found.provider}: {listing(counts)}", tone="warn" if found.unused else "plain")
    if all(found.versions) and len(set(found.versions)) > 1:
        yield Line(f"ONNX Runtime {found.versions[0]} against {found.versions[1]}")
    if found.not_finite is not None:
        yield Line(_not_finite_text(found.not_finite), tone="bad")
    near = [part for part in found.layers if part.dtype == "float16" and (part.largest or 0.0) >= NEAR_LARGEST_HALF]
    if near:
        worst = max(near, key=lambda part: part.largest or 0.0)
        yield Line(
            f"{plural(len(near), 'layer')} near the largest float16 (65,504): up to {worst.largest:,.0f} in "
            f"{worst.name}",
            tone="warn",
        )


def _not_finite_text(first: NotFinite) -> str:
    """The first NaN or infinity, with the range of values before it."""
    low, high = first.input_range or (0.0, 0.0)
    values = f"; its inputs are from {low:.4g} to {high:.4g}" if first.input_range else ""
    overflow = " (float16 ends at 65,504)" if first.dtype == "float16" and first.value == "infinity" else ""
    return f"first {first.value}: node {first.node} ({first.op_type}), {first.step}{values}{overflow}"


MEASURED = {
    "alone": "alone, on the reference's inputs",
    "in_layer": "in its layer, on the layer's reference inputs; alone it is within tolerance",
    "whole_graph": "in the whole graph, where errors of earlier parts add up",
    None: NOT_KNOWN,
}


def _first(found: Drift) -> Section | None:
    """The first layer and node over tolerance."""
    layer, node = found.layer, found.node
    if layer is None:
        return None
    shown = node or layer
    values = f"{_value(shown.largest)}, reference {_value(shown.largest_reference)}"
    rows = {
        "layer": layer.name,
        "node": node and node.name,
        "operator": node and node.op_type,
        "runs on": named_provider(node.provider) if node is not None and node.provider is not None else None,
        "error": f"{error_text(shown.compared_error)}, tolerance {shown.tolerance:.0e}",
        "measured": MEASURED[found.basis],
        "output": f"{shown.tensor} ({shown.dtype}), {shown.step}",
        "largest value": None if None in (shown.largest, shown.largest_reference) else values,
    }
    known = [(name, text) for name, text in rows.items() if text]
    return Section("first", "First over tolerance", (pairs("First difference", known),))


def _growth(found: Drift) -> Section | None:
    """Errors over the layers."""
    if not found.layers:
        return None
    points = tuple((part.name, part.error) for part in found.layers)
    limit = max(part.tolerance for part in found.layers)
    growth = Plot("error in the whole graph, by layer", points, limit, "tolerance")
    return Section("layers", "Layers", (growth, _errors("layer", found.layers, values=True)))


def _nodes(found: Drift) -> Section | None:
    """Nodes of the first layer over tolerance, or all nodes."""
    return Section("nodes", "Nodes", (_errors("node", found.nodes, values=False),)) if found.nodes else None


def _errors(noun: str, parts: Sequence[PartDrift], *, values: bool) -> Block:
    """A table of errors. `values`: also the largest values."""
    heads = (noun, *numbers("own error", "in the graph", *(("largest", "reference") * values)), "")
    rows = []
    for part in parts:
        errors = (part.own_error, part.error)
        cells = [NOT_KNOWN if each is None and not part.infinite else error_text(each) for each in errors]
        cells += [_value(part.largest), _value(part.largest_reference)] if values else []
        rows.append((part.name, *cells, "over" if part.exceeds_tolerance else ""))
    return table(f"Errors by {noun}", heads, rows, obvious=True, most=ROWS)


def _value(magnitude: float | None) -> str:
    return NOT_KNOWN if magnitude is None else f"{magnitude:.4g}"


def _trials(found: Drift) -> Section | None:
    """Pins that were tried."""
    blocks: list[Block] = []
    for trial in found.pin_trials:
        outcome = "within tolerance" if trial.within_tolerance else "still over tolerance"
        result = f"the layer is {outcome}, error {error_text(trial.error)}"
        result = f"not possible: {trial.failure}" if trial.failure else result
        blocks.append(Line(f"{trial.pin}: {result}", tone="good" if trial.within_tolerance else "plain"))
        if trial.within_tolerance:
            blocks.append(Line(" ".join(("--provider", trial.chain, "--pin", trial.pin)), "add"))
    return Section("pins", "Pins tried", tuple(blocks)) if blocks else None


def _notes(found: Drift) -> Section | None:
    return Section("notes", "Notes", tuple(Line(note, "note") for note in found.notes)) if found.notes else None
