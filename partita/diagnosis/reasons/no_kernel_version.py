"""The preferred provider supports the operator, but not in the version of this operator set."""

from __future__ import annotations

from partita.diagnosis.evidence import Context
from partita.diagnosis.reasons.base import Reason
from partita.diagnosis.steps import RETARGET, STANDARD
from partita.observations.facts import NodeProbe, ProbeRun
from partita.observations.records import ChainEntry

REASON = Reason(
    code="no_kernel_version",
    level="node",
    title="No kernel for the opset version",
    sentence="{provider} has no kernel for {op} of opset {before}",
    condition="the provider supports the operator in another opset version, but not in the model's",
    needs="experiments: the provider supports the node with another version of its operator and no other change",
    remedy="export with the opset that the evidence names (for a package: export --opset), or use an ONNX Runtime "
    "whose provider supports the newer version",
    factors=("opset",),
    example=Context(
        node="/Reshape",
        op_type="Reshape",
        skipped=ChainEntry(provider="CUDAExecutionProvider", status="active"),
        probe=NodeProbe(
            "/Reshape",
            (
                ProbeRun(
                    "as_is", "", "rejected", "CUDA kernel not found in registries for Op type: Reshape node name: probe"
                ),
                ProbeRun("opset", "Reshape of opset 23 in place of 25", "supported", ""),
            ),
        ),
    ),
    steps=(RETARGET, STANDARD),
)
