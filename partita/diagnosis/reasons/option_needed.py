"""The preferred provider supports the unchanged node with another value of one of its options."""

from __future__ import annotations

from collections.abc import Iterator

from partita.diagnosis.evidence import Context, Finding, alone
from partita.diagnosis.reasons.base import Reason
from partita.diagnosis.steps import SET_OPTION
from partita.observations.facts import OPTION, NodeProbe, ProbeRun, Swap
from partita.observations.records import ChainEntry


def find(context: Context) -> Iterator[Finding]:
    """An experiment in which only a provider option was changed."""
    yield from (finding for finding in alone(context, "option_needed", REASON.factors) if finding.ground == "alone")


REASON = Reason(
    code="option_needed",
    level="node",
    title="Provider option needed",
    sentence="{provider} does not support {op} with {before}",
    condition="the provider supports the node only with another value of one of its options",
    needs="an experiment: the provider supports the unchanged node with another value of the option",
    remedy="set the provider option that the evidence names",
    factors=(OPTION,),
    example=Context(
        node="/Range",
        op_type="Range",
        skipped=ChainEntry(provider="WebGpuExecutionProvider", status="active"),
        probe=NodeProbe(
            "/Range",
            (
                ProbeRun("as_is", "", "rejected", ""),
                ProbeRun(
                    OPTION,
                    "webgpu.enableInt64=1",
                    "supported",
                    "",
                    swap=Swap("webgpu.enableInt64=1", "webgpu.enableInt64=0"),
                ),
            ),
        ),
    ),
    find=find,
    found_on=("alone",),
    steps=(SET_OPTION,),
)
