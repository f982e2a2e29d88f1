"""Faults planted in one node of the graph that a provider is given, as a wrong kernel would act.

`faults.toml` has the kinds; `faults_of` plants each in one node of a graph, a different layer for every graph.
"""

from __future__ import annotations

import re
import shutil
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import onnx
from onnx import numpy_helper

from partita.drift.graphs import PartedGraph
from partita.runtime.place.onnx_model import read_onnx
from tests.conftest import DEMO_CHECKPOINT
from tests.foreign.conftest import SAMPLES

PRIMITIVES: dict[str, Any] = {"attention": "primitives"}
STATIC: dict[str, Any] = {"static_shapes": True, "prefill_chunk": 8}
PACKAGES: dict[str, dict[str, Any]] = {
    "llama-fp32": {},
    "llama-fp16": {"precision": "fp16"},
    "llama-int4": {"precision": "int4"},
    "llama-onnx24-fp32": {"attention": "onnx24"},
    "llama-primitives-fp32": PRIMITIVES,
    "llama-primitives-static-fp16": {**PRIMITIVES, **STATIC, "precision": "fp16"},
    "llama-primitives-int4": {**PRIMITIVES, "precision": "int4"},
    "gemma3_text-fp32": {},
    "gemma3_text-primitives-fp32": PRIMITIVES,
    "demo-primitives-static-fp16": {**PRIMITIVES, **STATIC, "precision": "fp16"},
    "demo-int4": {"precision": "int4"},
    "demo-fp16": {"precision": "fp16"},
}
"""Name -> options of the export. A name begins with a model type of tests/conftest.py or with demo, the embedded
checkpoint, and ends with the precision.
"""
FOREIGN = {"genai-int4-cpu": "int4", "genai-fp32-cpu": "fp32", "optimum": "fp32"}
"""Samples of other exporters, and their precision."""
GRAPHS = (*PACKAGES, *FOREIGN)
KINDS: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_name("faults.toml").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Fault:
    """A change of one node."""

    graph: str
    kind: str
    node: str
    input: int = 1
    scale: float | None = None
    part: float | None = None
    halves: bool = False
    reversed: bool = False
    attribute: tuple[str, Any] | None = None
    operator: str = ""
    finite: bool = True
    """Whether the outputs stay numbers."""


def precision_of(graph: str) -> str:
    """The precision of a graph."""
    return FOREIGN.get(graph) or graph.rpartition("-")[2]


def export_package(graph: str, export: Callable[..., Path], checkpoint: Callable[[str], Path]) -> Path:
    """The folder of a graph, exported with `export` if it is a package."""
    if graph in FOREIGN:
        return SAMPLES / graph
    model = graph.partition("-")[0]
    length = 128 if model == "demo" else 64
    return export(DEMO_CHECKPOINT if model == "demo" else checkpoint(model), max_length=length, **PACKAGES[graph])


def faults_of(graph: str, folder: Path) -> list[Fault]:
    """One fault of each kind for which the graph has a node. Nodes of constants, which are folded, have none."""
    model = read_onnx(next(iter(folder.glob("*.onnx"))))
    parted, found = PartedGraph(model), []
    nodes = [parted.nodes[at] for at in parted.compared]
    for kind, row in KINDS.items():
        if precision_of(graph) not in row.get("only", (precision_of(graph),)):
            continue
        inputs = {name: _input(row, name) for name in row["operators"]}
        named = [node for node in nodes if node.op_type in inputs and re.search(row.get("nodes", ""), node.name)]
        first = crc32(f"{graph} {kind}".encode()) % (len(named) or 1)
        for node in (*named[first:], *named[:first]):
            fault = _fault(graph, kind, row, node, inputs[node.op_type])
            if _changes(model.proto, folder, node, row, fault):
                found.append(fault)
                break
    return found


def _changes(proto: onnx.ModelProto, folder: Path, node: onnx.NodeProto, row: dict[str, Any], fault: Fault) -> bool:
    """Whether the node has what is changed, and the change is one."""
    name, value = row.get("attribute", ("", None))
    if row.get("present") and all(entry.name != name or entry.i == value for entry in node.attribute):
        return False
    if "input" not in row:
        return not fault.reversed or len(node.input) == 2  # more: a shape
    array = constant(proto, folder, node.input[fault.input]) if fault.input < len(node.input) else None
    return array is not None and (bool(name) or not np.array_equal(changed(array, fault), array))


def _input(row: dict[str, Any], operator: str) -> int | None:
    place = row.get("input")
    return place[operator] if isinstance(place, dict) else place


def _fault(graph: str, kind: str, row: dict[str, Any], node: onnx.NodeProto, place: int | None) -> Fault:
    size = 0 if precision_of(graph) == "fp32" else 1
    change: dict[str, Any] = {name: row[name][size] for name in ("scale", "part") if name in row}
    change |= {name: row[name] for name in ("halves", "reversed", "operator", "finite") if name in row}
    change |= {"attribute": tuple(row["attribute"])} if "attribute" in row else {}
    return Fault(graph, kind, node.name, place or 0, **change)


def changed(array: np.ndarray[Any, Any], fault: Fault) -> np.ndarray[Any, Any]:
    """The constant with the fault."""
    wide: np.ndarray[Any, Any] = array.astype(np.float64 if array.dtype.kind == "f" else np.int64)
    if fault.halves:
        return np.roll(array, array.shape[-1] // 2, axis=-1)
    if fault.part is not None:
        columns = (..., slice(-max(1, array.shape[-1] // 8), None)) if array.ndim else ()
        wide[columns] = wide[columns] * fault.part
    if fault.scale is not None:
        wide = wide * fault.scale
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
        del node.attribute[:]
        node.domain = ""
    if fault.reversed:
        node.input[:] = [*node.input][::-1]
    if fault.attribute is not None:
        others = [entry for entry in node.attribute if entry.name != fault.attribute[0]]
        del node.attribute[:]
        node.attribute.extend([*others, onnx.helper.make_attribute(*fault.attribute)])
    if fault.scale is not None or fault.part is not None or fault.halves:
        array = constant(proto, folder, node.input[fault.input])
        assert array is not None
        planted = numpy_helper.from_array(changed(array, fault), "planted")
        proto.graph.initializer.append(planted)
        node.input[fault.input] = "planted"
    (into / file).unlink()
    onnx.save(proto, into / file)


def constant(proto: onnx.ModelProto, folder: Path, name: str) -> np.ndarray[Any, Any] | None:
    """An initializer, or the value of a Constant node."""
    found = next((entry for entry in proto.graph.initializer if entry.name == name), None)
    made = (node for node in proto.graph.node if node.op_type == "Constant" and name in node.output)
    found = found or next((entry.t for node in made for entry in node.attribute if entry.name == "value"), None)
    return None if found is None else numpy_helper.to_array(found, str(folder))
