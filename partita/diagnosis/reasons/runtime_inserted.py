"""ONNX Runtime put the node there itself: a copy, a layout change or a type change."""

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
    what = f"the ONNX file has no {context.op_type}"
    if context.rewritten_with:
        rewrote = name_some(context.rewritten_with, 3)
        told = f"{what} here; ONNX Runtime added it when it rewrote {rewrote} for the provider they are on"
        yield Finding("derived", "origin", told)
    else:
        yield Finding("derived", "origin", f"{what} of this name; ONNX Runtime gives such names to nodes of its own")


REASON = Reason(
    code="runtime_inserted",
    level="node",
    title="Inserted by ONNX Runtime",
    sentence="ONNX Runtime inserted {op}",
    condition="the node is not in the ONNX file: ONNX Runtime inserted a copy, a change of layout (Transpose, "
    "ReorderInput, ReorderOutput), a Cast, or a QuantizeLinear or DequantizeLinear",
    needs="the exported graph, and a name of the form that ONNX Runtime gives its own nodes",
    remedy="look at its neighbours: it disappears when they run on one provider, in one layout and type",
    example=Context(
        node="Transpose_token_4",
        op_type="Transpose",
        skipped=ChainEntry(provider="WebGpuExecutionProvider", status="active"),
        exported=False,
    ),
    find=find,
    found_on=("origin",),
)
