"""Write a state only after all its readers have run: past and present are one buffer.

    past ─ A ─ present          past ─ A ─ Reshape ─┐
      └─ B ─ y                    └─ B ─ y ─ first ┴ Concat ─ Slice ─ Reshape ─ present

B does not depend on `present`, so a runtime could run A first and B would read the written value. Where a reader is not
upstream of the node that writes, the written value gets a dependency on one number of the reader's output.
"""

from __future__ import annotations

import math

import onnx_ir as ir

from partita.export.passes.base import Pass, TracedGraph, integers, take_names

VIEWS = frozenset({"Reshape", "Unsqueeze", "Squeeze", "Flatten", "Identity", "Transpose", "Cast"})
"""Operators whose output may share the memory of their input, or that ONNX Runtime fuses into their consumer (the last
two)."""


def run(traced: TracedGraph) -> int:
    """Make every state wait for its readers; returns the number of changed states."""
    count = 0
    for _, past, present in list(traced.state_values()):
        writer = present.producer()
        if writer is None:
            continue
        before = upstream(writer)
        late = [node for node in _readers(past) if node not in before]
        if late:
            _wait(traced.graph, writer, present, late)
            count += 1
    return count


def _readers(value: ir.Value) -> list[ir.Node]:
    """The nodes that may read the memory of `value`, directly or through views."""
    found: list[ir.Node] = []
    for use in value.uses():
        found += _readers(use.node.outputs[0]) if use.node.op_type in VIEWS and use.idx == 0 else [use.node]
    return found


def upstream(node: ir.Node) -> set[ir.Node]:
    """`node`, and every node that runs before it."""
    seen, left = {node}, [node]
    while left:
        for value in left.pop().inputs:
            producer = value.producer() if value is not None else None
            if producer is not None and producer not in seen:
                seen.add(producer)
                left.append(producer)
    return seen


def _wait(graph: ir.Graph, writer: ir.Node, present: ir.Value, late: list[ir.Node]) -> None:
    """Let `present` be written after the nodes in `late`."""
    shape, dtype, name = present.shape, present.dtype, present.name or ""
    assert shape is not None and dtype is not None and shape.is_static()
    sizes = [int(size) for size in shape.numpy()]
    total = math.prod(sizes)

    def add(operator: str, inputs: list[ir.Value], kind: ir.DataType, length: int | None, **given: int) -> ir.Value:
        node = ir.node(operator, inputs=inputs, attributes=given)
        take_names(node, writer)
        node.outputs[0].dtype, node.outputs[0].shape = kind, None if length is None else ir.Shape([length])
        graph.append(node)
        return node.outputs[0]

    present.name = f"{name}.early"
    labelled = (("flat", [-1]), ("zero", [0]), ("one", [1]))
    flat, zero, one = (integers(graph, values, f"{name}.{label}") for label, values in labelled)
    parts = [add("Reshape", [present, flat], dtype, total)]
    for seen in (node.outputs[0] for node in late):
        assert seen.dtype is not None
        number = add("Slice", [add("Reshape", [seen, flat], seen.dtype, None), zero, one, zero], seen.dtype, 1)
        parts.append(number if seen.dtype == dtype else add("Cast", [number], dtype, 1, to=int(dtype)))
    joined = add("Concat", parts, dtype, total + len(late), axis=0)
    kept = add("Slice", [joined, zero, integers(graph, [total], f"{name}.size"), zero], dtype, total)
    whole = add("Reshape", [kept, integers(graph, sizes, f"{name}.shape")], dtype, None)
    whole.name, whole.shape = name, ir.Shape(sizes)
    graph.outputs[list(graph.outputs).index(present)] = whole


PASS = Pass("write_after_read", run, required=True)
