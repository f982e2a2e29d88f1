"""Select rows with one Gather.

    x [B, S, H] ─ Transpose ─ GatherND(Unsqueeze(rows)) ─ Transpose ─ y [B, K, H]      before
    x [B, S, H] ─ Gather(rows, axis=1) ─ y [B, K, H]                                   after

    x [N, ...] ─ GatherND(Unsqueeze(rows, -1)) ─ y                                     before
    x [N, ...] ─ Gather(rows, axis=0) ─ y                                              after

torch lowers `x[:, rows, :]` and `x[rows]` to the first forms. Several execution providers have no int64 kernel for
them. A GatherND that stays gets int64 indices, its only index type.
"""

from __future__ import annotations

import onnx_ir as ir

from partita.export.passes.base import Pass, PassContext, constant, only_consumer, replace, rewrite_nodes, take_names

SWAP = [1, 0, 2]


def run(model: ir.Model, context: PassContext) -> int:
    """Rewrite every occurrence; returns their number."""
    count = rewrite_nodes(model, ("GatherND",), lambda gather: _swapped(model.graph, gather))
    return count + rewrite_nodes(model, ("GatherND",), lambda gather: _first_axis(model.graph, gather))


def _swapped(graph: ir.Graph, gather: ir.Node) -> bool:
    """Rewrite a GatherND along the second axis between two Transposes; False where it does not match."""
    first, rows = (v.producer() if v is not None else None for v in gather.inputs[:2])
    last = only_consumer(gather.outputs[0])
    if first is None or rows is None or last is None or gather.attributes.get_int("batch_dims", 0) != 0:
        return False
    swaps = [n.op_type == "Transpose" and list(n.attributes.get_ints("perm", [])) == SWAP for n in (first, last)]
    if not all(swaps) or rows.op_type != "Unsqueeze" or constant(rows.inputs[1]) not in ([1], [-1]):
        return False
    source, indices = first.inputs[0], rows.inputs[0]
    if indices is None or indices.shape is None or indices.shape.rank() != 1:
        return False
    new = ir.node("Gather", inputs=[source, indices], attributes={"axis": 1})
    take_names(new, last)
    replace(graph, last, new, dead=(gather, rows, first))
    return True


def _first_axis(graph: ir.Graph, gather: ir.Node) -> bool:
    """Rewrite a GatherND along the first axis; cast the indices of others to int64. True when it was rewritten."""
    indices = gather.inputs[1]
    assert indices is not None
    rows = indices.producer()
    if rows is not None and rows.op_type == "Unsqueeze" and gather.attributes.get_int("batch_dims", 0) == 0:
        source = rows.inputs[0]
        rank = source.shape.rank() if source is not None and source.shape is not None else None
        if rank is not None and constant(rows.inputs[1]) in ([-1], [rank]):
            new = ir.node("Gather", inputs=[gather.inputs[0], source], attributes={"axis": 0})
            take_names(new, gather)
            replace(graph, gather, new, dead=(rows,))
            return True
    if indices.dtype == ir.DataType.INT32:
        cast = ir.node("Cast", inputs=[indices], attributes={"to": int(ir.DataType.INT64)})
        cast.outputs[0].shape, cast.outputs[0].dtype = indices.shape, ir.DataType.INT64
        take_names(cast, gather)
        graph.insert_before(gather, cast)
        gather.replace_input_with(1, cast.outputs[0])
    return False


PASS = Pass("gather_rows", run)
