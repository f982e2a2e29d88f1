"""The wanted provider has no kernel for the operator, whatever its types, version and attributes."""

from __future__ import annotations

from partita.diagnosis.probe_verdict import conclude
from partita.diagnosis.reasons.base import (
    FINER,
    PROBE,
    RETARGET,
    STANDARD,
    Context,
    Finding,
    Reason,
    inserted,
    logged,
    probed,
    said_of_operator,
)
from partita.observations.facts import NodeProbe, Trial
from partita.observations.log_pattern import LogPattern
from partita.observations.records import ChainEntry

REMEDY = (
    "name a provider that has the kernel first, or write the operation with other operators, a package with another "
    "attention lowering"
)


def decide(context: Context) -> Finding | None:
    """Applies when experiments find nothing that the provider takes, or when it logged that it has no kernel.

    Such a line does not tell the operator from its version or its types, so an experiment that does goes before it.
    """
    shown = conclude(context.probe)
    if (shown is not None and shown.code in FINER) or inserted(context):
        return None
    if context.nameless and shown is not None and shown.code == "not_claimed":
        return None  # a line without a name may be about another node of the same operator
    said = said_of_operator(context)
    if said:
        return Finding("probed", f"alone, it makes the provider fail: {said}", REMEDY)
    if context.rejected is not None:
        return None
    tried = probed(context, "no_kernel_op")
    return Finding(tried.kind, tried.evidence, REMEDY) if tried is not None else logged(context, "no_kernel_op")


REASON = Reason(
    code="no_kernel_op",
    level="node",
    title="No kernel found",
    condition="the wanted provider has no kernel for the operator. Probed: nothing that was changed about the node "
    "made the provider take it. Only logged: no kernel was found for the node as it is, and whether operator, version "
    "or type is missing is not known, because there was no experiment or not all of them were made",
    needs="experiments: the node alone is left to another provider, and so it is with other types, opsets, "
    "attributes, inputs and fixed sizes, as far as they are legal; or a native log line that names the node and not "
    "the cause, e.g. `… kernel not found in registries for Op type: <op> node name: <node>`. An experiment that finds "
    "the cause goes before such a line",
    remedy=f"{REMEDY}; where it is only logged, another opset or precision may do: give --probe-seconds more time to "
    "find out",
    example=Context(
        node="model.rotary_emb/Gather",
        op_type="Gather",
        provider="CPUExecutionProvider",
        wanted=ChainEntry(provider="WebGpuExecutionProvider", status="active"),
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
                Trial("type", "int32 in place of int64", "left", ""),
                Trial("opset", "Gather of opset 11 in place of 13", "left", ""),
            ),
        ),
    ),
    decide=decide,
    steps=(
        RETARGET,
        STANDARD,
        PROBE,
    ),
)
