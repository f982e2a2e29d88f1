"""The preferred provider has no kernel for the operator in any type, version or form."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from partita.diagnosis.evidence import Context, Finding, Ground, alone, lines, operator_outcome, rejected_alone
from partita.diagnosis.reasons.base import Reason
from partita.diagnosis.steps import PROBE, RETARGET, STANDARD
from partita.observations.facts import NodeProbe, ProbeRun
from partita.observations.log_pattern import LogPattern
from partita.observations.records import ChainEntry

REMEDY = (
    "put a provider that supports the operator first in --provider, or use other operators (for a package: export it "
    "with another --attention)"
)


def find(context: Context) -> Iterator[Finding]:
    """Probes without a supported variant, a log line, or the provider's error on the node in isolation."""
    outcome = operator_outcome(context, "no_kernel_op")
    if outcome:
        yield Finding("probed", "alone_said", outcome, REMEDY)
    for found in alone(context, "no_kernel_op"):
        ground: Ground = "alone_left" if rejected_alone(context) else found.ground
        yield replace(found, ground=ground, remedy=REMEDY)
    yield from lines(context, "no_kernel_op")


REASON = Reason(
    code="no_kernel_op",
    level="node",
    title="No kernel found",
    sentence="{provider} has no kernel for {op}",
    condition="the provider has no kernel for the operator; if a log line is the only evidence, it may lack only this "
    "version or type",
    needs="experiments: the provider supports no variation of the node and no other node of the operator; "
    "or a log line such as `… kernel not found in registries for Op type: <op> node name: <node>`",
    remedy=f"{REMEDY}; if a log line is the only evidence, raise --probe-seconds to test other opsets and types",
    undecided=True,
    example=Context(
        node="model.rotary_emb/Gather",
        op_type="Gather",
        skipped=ChainEntry(provider="WebGpuExecutionProvider", status="active"),
        log=(
            "[I:onnxruntime:, webgpu_execution_provider.cc:635 GetCapability] webgpu kernel not found in registries "
            "for Op type: Gather node name: model.rotary_emb/Gather",
        ),
        patterns=(
            LogPattern(
                "no_kernel_op",
                r"webgpu kernel not found in registries for Op type: (?P<op>\S+) node name: (?P<node>\S+)",
            ),
        ),
        probe=NodeProbe(
            "model.rotary_emb/Gather",
            (
                ProbeRun("as_is", "", "rejected", ""),
                ProbeRun("type", "int32 in place of int64", "rejected", "", kind="other types"),
                ProbeRun("opset", "Gather of opset 11 in place of 13", "rejected", "", kind="other opsets"),
            ),
        ),
    ),
    find=find,
    found_on=("alone_said", "alone_left", "alone", "line", "blank_line"),
    steps=(
        RETARGET,
        STANDARD,
        PROBE,
    ),
)
