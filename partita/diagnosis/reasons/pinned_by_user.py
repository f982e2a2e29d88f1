"""The user pinned the node to another provider."""

from __future__ import annotations

from collections.abc import Iterator

from partita.diagnosis.evidence import Context, Finding, lines
from partita.diagnosis.reasons.base import Reason
from partita.diagnosis.steps import WITHOUT_OPTIONS
from partita.observations.log_pattern import LogPattern
from partita.observations.records import ChainEntry


def find(context: Context) -> Iterator[Finding]:
    """A pin covers the node, or the provider logged that an option assigns the node to the CPU."""
    if context.pin is not None:
        yield Finding("derived", "pin", f"--pin {context.pin}")
    yield from lines(context, "pinned_by_user")


REASON = Reason(
    code="pinned_by_user",
    level="node",
    title="Pinned by the user",
    condition="a pin assigns the node to another provider, or an option of the preferred provider assigns it "
    "to the CPU",
    needs="the pin in the request; or a log line such as `Force CPU execution for node: <node>`",
    remedy="remove the node from the pin or from the option",
    example=Context(
        node="lm_head/MatMul",
        op_type="MatMul",
        skipped=ChainEntry(provider="WebGpuExecutionProvider", status="active"),
        log=(
            "[I:onnxruntime:, webgpu_execution_provider.cc:620 GetCapability] Force CPU execution for node: "
            "lm_head/MatMul",
        ),
        patterns=(LogPattern("pinned_by_user", r"Force CPU execution for node: (?P<node>\S+)"),),
    ),
    find=find,
    found_on=("pin", "line", "blank_line"),
    steps=(WITHOUT_OPTIONS,),
)
