"""The preferred provider has no kernel for the operator, whatever its types, version and attributes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from partita.diagnosis.evidence import Context, Finding, Ground, alone, left_by_itself, lines, said_of_operator
from partita.diagnosis.reasons.base import Reason
from partita.diagnosis.steps import PROBE, RETARGET, STANDARD
from partita.observations.facts import NodeProbe, Trial
from partita.observations.log_pattern import LogPattern
from partita.observations.records import ChainEntry

REMEDY = (
    "put a provider that implements it first in --provider, or express it with other operators (a package: export it "
    "with another --attention)"
)


def find(context: Context) -> Iterator[Finding]:
    """Experiments that found nothing the provider takes, a line that says so, or what it said as it failed alone."""
    said = said_of_operator(context, "no_kernel_op")
    if said:
        yield Finding("probed", "alone_said", said, REMEDY)
    for found in alone(context, "no_kernel_op"):
        ground: Ground = "alone_left" if left_by_itself(context) else found.ground
        yield replace(found, ground=ground, remedy=REMEDY)
    yield from lines(context, "no_kernel_op")


REASON = Reason(
    code="no_kernel_op",
    level="node",
    title="No kernel found",
    says="{provider} has no kernel for {op}",
    condition="the preferred provider has no kernel for the operator. Probed: no variation of the node made "
    "the provider claim it, and it claimed no other node of the operator that was tried. Only logged: no kernel was "
    "found for the node as it is, and it is not known whether operator, version or type is missing, because no "
    "experiments were made or not all of them",
    needs="experiments: the provider does not claim the node as it is, nor any of the variations that were tried, in "
    "types, opset, attributes, inputs and shapes, as far as they are valid; or a native log line that names the node "
    "and not the cause, e.g. `… kernel not found in registries for Op type: <op> node name: <node>`. An "
    "experiment that finds the cause takes precedence over such a line",
    remedy=f"{REMEDY}; where it is only logged, another opset or precision may help: a larger --probe-seconds tells",
    undecided=True,
    example=Context(
        node="model.rotary_emb/Gather",
        op_type="Gather",
        provider="CPUExecutionProvider",
        skipped=ChainEntry(provider="WebGpuExecutionProvider", status="active"),
        exported=True,
        replaces=(),
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
                Trial("as_is", "", "left", ""),
                Trial("type", "int32 in place of int64", "left", "", kind="other types"),
                Trial("opset", "Gather of opset 11 in place of 13", "left", "", kind="other opsets"),
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
