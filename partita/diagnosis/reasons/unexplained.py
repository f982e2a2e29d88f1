"""No source says why. An honest answer, and a counted one."""

from __future__ import annotations

from partita.diagnosis.reasons.base import PROBE, Context, Finding, Reason
from partita.observations.records import ChainEntry


def decide(context: Context) -> Finding:
    """Applies to every node; having no evidence, it gives way to any other reason."""
    entry = context.wanted
    if entry.status == "unavailable":
        return Finding("none", entry.evidence or f"{entry.provider} is unavailable ({entry.reason})", entry.remedy)
    why = f"; experiments: {context.probe.unprobed}" if context.probe is not None and context.probe.unprobed else ""
    return Finding("none", f"no source says why the node is not on the wanted provider{why}")


REASON = Reason(
    code="unexplained",
    level="node",
    title="Unexplained",
    condition="no other reason applies",
    needs="nothing",
    remedy="run with the native log at INFO, and report the node with its operator, types and ONNX Runtime version",
    example=Context(
        node="model.norm/Mul",
        op_type="Mul",
        provider="CPUExecutionProvider",
        wanted=ChainEntry(provider="WebGpuExecutionProvider", status="active"),
        exported=True,
        replaces=(),
        log=(),
    ),
    decide=decide,
    steps=(PROBE,),
)
