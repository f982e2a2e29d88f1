"""No source shows the cause. The report counts these nodes."""

from __future__ import annotations

from collections.abc import Iterator

from partita.diagnosis.evidence import Context, Finding
from partita.diagnosis.reasons.base import Reason
from partita.diagnosis.steps import PROBE
from partita.observations.names import UNKNOWN
from partita.observations.records import ChainEntry


def find(context: Context) -> Iterator[Finding]:
    """Applies to every node, after every other reason."""
    entry = context.skipped
    if not context.started:
        evidence = entry.evidence or f"{entry.provider} is unavailable ({entry.reason})"
        yield Finding("none", "nothing", evidence, entry.remedy)
    elif context.provider == UNKNOWN:
        yield Finding("none", "nowhere", "no source shows where this node runs")
    else:
        missing = (
            f"; experiments: {context.probe.missing_probes}"
            if context.probe is not None and context.probe.missing_probes
            else ""
        )
        yield Finding("none", "nothing", f"no source shows why the node is not on the preferred provider{missing}")


REASON = Reason(
    code="unexplained",
    level="node",
    title="Unexplained",
    sentence="no source shows why {provider} does not run {op}",
    condition="no other reason applies",
    needs="nothing",
    remedy="report the node with its operator, types and ONNX Runtime version, and a native log at INFO",
    undecided=True,
    example=Context(
        node="model.norm/Mul",
        op_type="Mul",
        skipped=ChainEntry(provider="WebGpuExecutionProvider", status="active"),
    ),
    find=find,
    found_on=("nowhere", "nothing"),
    steps=(PROBE,),
)
