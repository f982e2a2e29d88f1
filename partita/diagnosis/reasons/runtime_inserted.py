"""ONNX Runtime inserted the node: a copy, a change of layout or a change of type."""

from __future__ import annotations

from collections.abc import Iterator

from partita.diagnosis.evidence import Context, Finding, inserted
from partita.diagnosis.reasons.base import Reason
from partita.observations.records import ChainEntry
from partita.observations.text_format import name_some


def find(context: Context) -> Iterator[Finding]:
    """The file has no such node, and its neighbours or its name show that ONNX Runtime inserted it."""
    if not inserted(context) or not context.started:
        return
    absent = f"the ONNX file has no {context.op_type}"
    if context.rewritten_with:
        rewritten = name_some(context.rewritten_with, 3)
        evidence = f"{absent} here; ONNX Runtime added it when it rewrote {rewritten}"
    else:
        evidence = f"{absent} of this name; its name has the form of nodes that ONNX Runtime inserts"
    yield Finding("derived", "origin", evidence)


REASON = Reason(
    code="runtime_inserted",
    level="node",
    title="Inserted by ONNX Runtime",
    sentence="ONNX Runtime inserted {op}",
    condition="the node is not in the ONNX file: ONNX Runtime inserted a copy, a change of layout (Transpose, "
    "ReorderInput, ReorderOutput), a Cast, or a QuantizeLinear or DequantizeLinear",
    needs="the graph of the file, and the neighbours of the node or a name in the form of inserted nodes",
    remedy="place its neighbours on one provider, in one layout and type; the node then disappears",
    example=Context(
        node="Transpose_token_4",
        op_type="Transpose",
        skipped=ChainEntry(provider="WebGpuExecutionProvider", status="active"),
        exported=False,
    ),
    find=find,
    found_on=("origin",),
)
