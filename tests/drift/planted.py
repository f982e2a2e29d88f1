"""Faults planted in one node of the graph that a provider is given, as a wrong kernel would act: `python -m
tests.drift.planted CHAIN GRAPH=FOLDER…` prints whether each is found; `source=CHECKPOINT` is the reference instead of
the CPU provider.

`faults.toml` has a table per graph. Changes: `scale` multiplies a constant input, `part` an eighth of its columns;
`halves` swaps the halves of its last axis; `attribute` and `operator` replace these.
"""

from __future__ import annotations

import os
import shutil
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from partita.drift.graphs import PartedGraph
from partita.drift.inputs import chosen_steps, file_step, package_steps
from partita.drift.measure import measure
from partita.drift.records import Drift
from partita.drift.sides import Side
from partita.drift.step_comparison import Settings
from partita.foreign.folder import Choice, open_folder
from partita.providers.resolve import parse_chain
from partita.runtime.place.inputs import input_shapes
from partita.runtime.place.onnx_model import read_onnx

FAULTS = Path(__file__).with_name("faults.toml")


@dataclass(frozen=True)
class Fault:
    """A change of one node."""

    graph: str
    name: str
    node: str
    input: int = 1
    scale: float | None = None
    part: float | None = None
    halves: bool = False
    attribute: tuple[str, Any] | None = None
    operator: str = ""
    finite: bool = True
    """Whether the outputs stay numbers."""


def faults() -> list[Fault]:
    """All faults of the file."""
    tables = tomllib.loads(FAULTS.read_text(encoding="utf-8"))
    return [
        Fault(graph, name, **{**row, **({"attribute": tuple(row["attribute"])} if "attribute" in row else {})})
        for graph, rows in tables.items()
        for name, row in rows.items()
    ]


def change(array: np.ndarray[Any, Any], fault: Fault) -> np.ndarray[Any, Any]:
    """The constant with the fault."""
    wide: np.ndarray[Any, Any] = array.astype(np.float64 if array.dtype.kind == "f" else np.int64)
    if fault.halves:
        return np.roll(array, array.shape[-1] // 2, axis=-1)
    if fault.part is not None:
        wide[..., : max(1, array.shape[-1] // 8)] *= fault.part
    if fault.scale is not None:
        wide *= fault.scale
    with np.errstate(over="ignore"):
        return wide.astype(array.dtype)


def plant(folder: Path, fault: Fault, into: Path) -> Path:
    """A copy of a model's folder with the fault in its graphs."""
    shutil.copytree(folder, into)
    for file in folder.glob("*.onnx"):
        plant_file(folder, file.name, fault, into)
    return into


def plant_file(folder: Path, file: str, fault: Fault, into: Path) -> None:
    """Write one graph with the fault."""
    proto = onnx.load(folder / file, load_external_data=False)
    node = next(node for node in proto.graph.node if node.name == fault.node)
    if fault.operator:
        node.op_type = fault.operator
    if fault.attribute is not None:
        kept = [entry for entry in node.attribute if entry.name != fault.attribute[0]]
        del node.attribute[:]
        node.attribute.extend([*kept, onnx.helper.make_attribute(*fault.attribute)])
    if fault.scale is not None or fault.part is not None or fault.halves:
        tensor = onnx.TensorProto()
        tensor.CopyFrom(constant(proto, node.input[fault.input]))
        if tensor.external_data:
            onnx.external_data_helper.load_external_data_for_tensor(tensor, str((folder / file).parent))
        planted = numpy_helper.from_array(change(numpy_helper.to_array(tensor), fault), "planted")
        proto.graph.initializer.append(planted)
        node.input[fault.input] = "planted"
    (into / file).unlink()
    onnx.save(proto, into / file)


def constant(proto: onnx.ModelProto, name: str) -> onnx.TensorProto:
    """An initializer, or the value of a Constant node."""
    found = next((entry for entry in proto.graph.initializer if entry.name == name), None)
    made = next((node for node in proto.graph.node if name in node.output), None)
    return found if found is not None else next(entry.t for entry in made.attribute if entry.name == "value")  # type: ignore[union-attr]


def compare(folder: Path, faulty: Path, chain: str = "cpu", source: Path | None = None, **shapes: Any) -> Drift:
    """Both folders compared, the faulty one on `chain`; of an ONNX file, its folder. `source`: a checkpoint."""
    reference, tested = Side(folder, parse_chain("cpu")), Side(faulty, parse_chain(chain))
    if any(folder.glob("*.json")):
        steps = package_steps(reference, open_folder(folder, Choice()))
    else:
        model = read_onnx(next(iter(folder.glob("*.onnx"))))
        steps = [file_step(model, input_shapes(model.inputs, shapes), {})]
    if source is not None:  # needs torch, which only the main environment has
        from partita.export.checkpoint.description import open_checkpoint
        from partita.library.drifting import source_side

        with TemporaryDirectory() as scratch:
            reference = source_side(folder, open_checkpoint(str(source)), steps, Path(scratch))
            return measure(str(folder), tested, reference, steps, chosen_steps(steps), Settings())
    return measure(str(folder), tested, reference, steps, chosen_steps(steps), Settings())


def judge(
    folder: Path, fault: Fault, into: Path, chain: str = "cpu", source: Path | None = None
) -> tuple[bool, bool, Drift]:
    """Whether layer and node are right, and the result. Nodes in sequence are right if the fault is among them."""
    faulty = plant(folder, fault, into)
    found = compare(folder, faulty, chain, source)
    shutil.rmtree(into)
    graph = PartedGraph(read_onnx(next(iter(folder.glob("*.onnx")))))
    layer = next(part for part in graph.layers() for at in part.nodes if graph.nodes[at].name == fault.node)
    names = [graph.nodes[at].name for at in layer.nodes]
    first, _, last = (found.first_node or "").partition(" to ")
    named = names[names.index(first) : names.index(last or first) + 1] if {first, last or first} <= {*names} else []
    return found.first_layer == layer.name, fault.node in named, found


def rows(folders: dict[str, Path], into: Path, chain: str, source: Path | None, only: str) -> Iterator[str]:
    """A line per fault, the controls, and the counts."""
    layers = nodes = count = 0
    for graph, folder in folders.items():
        control = compare(folder, folder, chain, source)
        count_on = f"; nodes {control.nodes_by_provider}; unused {control.unused}"
        yield f"{graph}: control {'within' if control.is_within else f'OVER {control.first_layer}'}{count_on}"
        for fault in (each for each in faults() if each.graph == graph and only in ("", each.name)):
            layer, node, found = judge(folder, fault, into / "faulty", chain, source)
            layers, nodes, count = layers + layer, nodes + node, count + 1
            exact = node and found.first_node == fault.node
            wrong = "" if layer and exact else f"  got {found.first_layer} {found.first_node} ({found.basis})"
            words = ["right" if right else "WRONG" for right in (layer, node)]
            yield f"{graph}.{fault.name}: layer {words[0]}, node {words[1]}{wrong}"
    yield f"{count} faults: layer right {layers}, node right {nodes}"


def main(arguments: list[str]) -> None:
    """Print the table for GRAPH=FOLDER…; the first argument is the chain. `fault=NAME`: only this one."""
    chain, *given = arguments
    folders = {name: Path(folder) for name, _, folder in (text.partition("=") for text in given)}
    source, only = folders.pop("source", None), folders.pop("fault", None)
    with TemporaryDirectory() as made:
        for line in rows(folders, Path(made), chain, source, "" if only is None else only.name):
            sys.stdout.write(line + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
    os._exit(0)  # SwiftShader may crash while Python unloads it
