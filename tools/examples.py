"""Examples of ONNX's operators, from the backend tests of the onnx package: partita/runtime/lab/examples.jsonl.

To write it again, after a move to a newer onnx: python -m tools.examples

One line per form of an operator: which inputs and outputs it has, their types and shapes, and its attributes. What a
small input after the first held is kept, because shapes, axes and scales have to make sense. The tests that onnx makes
of an operator's function, of several nodes, are no examples of it.
"""

from __future__ import annotations

import base64
import json
import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

FILE = Path(__file__).parent.parent / "partita" / "runtime" / "lab" / "examples.jsonl"
MOST_VALUES = 32
"""Elements of an input that is kept with its values."""
MOST_SIZE = 3000
"""Characters of a line; one that is longer, with a table of weights or a body in it, is left out unless it is alone."""
PLAIN = ("float", "int", "string", "floats", "ints", "strings")
TYPES = frozenset({"to", "dtype", "output_dtype", "output_datatype"})
"""Attributes that choose a type: types are varied anyway, and make no form of their own."""


def main() -> None:
    """Write the file."""
    warnings.simplefilter("ignore")
    lines = list(dict.fromkeys(examples()))
    FILE.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def examples() -> Iterator[str]:
    """One line per distinct form, in the order of operators."""
    from onnx.backend.test.case.node import collect_testcases

    found: dict[str, tuple[str, str, int, str]] = {}
    for case in collect_testcases(None):
        model = case.model
        if model is None or len(model.graph.node) != 1 or model.graph.initializer or model.functions:
            continue
        (node,) = model.graph.node
        version = {entry.domain: entry.version for entry in model.opset_import}.get(node.domain)
        if version is None or not onnx.defs.has(node.op_type, node.domain):
            continue
        since = onnx.defs.get_schema(node.op_type, version, node.domain).since_version
        record = describe(model, node, case.data_sets)
        text = json.dumps({"domain": node.domain, "op": node.op_type, "since": since, **record}, separators=(",", ":"))
        form = json.dumps([node.domain, node.op_type, since, form_of(record)])
        if form not in found or rank_of(text) < rank_of(found[form][3]):
            found[form] = (node.domain, node.op_type, since, text)
    alone = {entry[:2] for entry in found.values()} - {
        entry[:2] for entry in found.values() if len(entry[3]) < MOST_SIZE
    }
    rows = [entry for entry in found.values() if len(entry[3]) < MOST_SIZE or entry[:2] in alone]
    yield from (entry[3] for entry in sorted(rows, key=lambda entry: (*entry[:3], rank_of(entry[3]))))


def form_of(record: dict[str, Any]) -> Any:
    """What makes two examples the same form: attributes, and ranks of what is there."""
    ranks = [port and len(port["shape"]) for port in record["inputs"]]
    attributes = {name: value for name, value in record.get("attributes", {}).items() if name not in TYPES}
    return [attributes, record.get("node"), ranks, record["outputs"]]


def rank_of(text: str) -> tuple[int, int, str]:
    """Of two examples of a form the one with more inputs of float32 is taken, then the shorter."""
    return (-text.count('"tensor(float)"'), len(text), text)


def describe(model: onnx.ModelProto, node: onnx.NodeProto, data_sets: Any) -> dict[str, Any]:
    """Inputs, outputs and attributes of the only node."""
    values = list(data_sets[0][0]) if data_sets else []
    given = {port.name: value for port, value in zip(model.graph.input, values, strict=False)}
    kinds = {port.name: port.type for port in model.graph.input}
    inputs = [describe_port(kinds[name], given.get(name)) if name else None for name in node.input]
    record: dict[str, Any] = {"inputs": inputs, "outputs": [int(bool(name)) for name in node.output]}
    attributes = {entry.name: attribute_value(entry) for entry in node.attribute}
    if None in attributes.values():
        record["node"] = base64.b64encode(node.SerializeToString()).decode()
    elif attributes:
        record["attributes"] = attributes
    return record


def describe_port(kind: onnx.TypeProto, value: Any) -> dict[str, Any]:
    """Type, shape, and the values of few elements."""
    record: dict[str, Any] = {"type": type_text(kind)}
    if kind.WhichOneof("value") == "tensor_type":
        array = np.asarray(value) if value is not None and not isinstance(value, (list, tuple)) else None
        shape = [entry.dim_value for entry in kind.tensor_type.shape.dim]
        if array is not None and len(array.shape) == len(shape):
            shape = list(array.shape)
        record["shape"] = shape
        if array is not None and math.prod(shape) <= MOST_VALUES and array.dtype.kind in "biuf":
            record["values"] = rounded(array.ravel().tolist())
    else:
        inner = kind
        while inner.WhichOneof("value") != "tensor_type":
            which = inner.WhichOneof("value")
            inner = inner.map_type.value_type if which == "map_type" else getattr(inner, which).elem_type
        record["shape"] = [entry.dim_value for entry in inner.tensor_type.shape.dim]
    return record


def rounded(values: list[Any]) -> list[Any]:
    """Floats in few digits: what they are does not matter, whether they are in range does."""
    return [float(f"{value:.4g}") if isinstance(value, float) else value for value in values]


def type_text(kind: onnx.TypeProto) -> str:
    """As schemas spell it: seq(tensor(float))."""
    which = kind.WhichOneof("value")
    if which == "tensor_type":
        return f"tensor({onnx.helper.tensor_dtype_to_string(kind.tensor_type.elem_type).split('.')[1].lower()})"
    if which == "sequence_type":
        return f"seq({type_text(kind.sequence_type.elem_type)})"
    if which == "optional_type":
        return f"optional({type_text(kind.optional_type.elem_type)})"
    raise ValueError(f"a {which} is no input of an example")


def attribute_value(attribute: onnx.AttributeProto) -> Any:
    """The value as JSON; None for a graph and the like, which the whole node is kept for."""
    kind = onnx.AttributeProto.AttributeType.Name(attribute.type).lower()
    if kind == "tensor":
        array = numpy_helper.to_array(attribute.t)
        if attribute.t.data_type == onnx.TensorProto.STRING:
            values = [text.decode() if isinstance(text, bytes) else str(text) for text in array.ravel().tolist()]
        elif array.dtype.kind in "biuf":
            values = array.ravel().tolist()
        else:
            return None
        name = onnx.TensorProto.DataType.Name(attribute.t.data_type).lower()
        return {"type": name, "shape": list(attribute.t.dims), "values": values}
    if kind not in PLAIN:
        return None
    value = onnx.helper.get_attribute_value(attribute)
    if kind == "string":
        return value.decode()
    if kind == "strings":
        return [text.decode() for text in value]
    return rounded([value])[0] if kind in ("float", "int") else rounded(list(value))


if __name__ == "__main__":
    main()
