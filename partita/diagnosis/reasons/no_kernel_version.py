"""The wanted provider has the operator, but not as this version of the operator set defines it."""

from __future__ import annotations

from partita.diagnosis.evidence import Context
from partita.diagnosis.reasons.base import Reason
from partita.diagnosis.steps import RETARGET, STANDARD
from partita.observations.facts import NodeProbe, Trial
from partita.observations.records import ChainEntry

REASON = Reason(
    code="no_kernel_version",
    level="node",
    title="No kernel for the opset version",
    condition="the provider takes the node as another operator set version has it, and not as the model's has it",
    needs="experiments: the node alone is left or fails, and is taken with another version of its operator and "
    "nothing else changed",
    remedy="use the operator set that the evidence names, for a package: export --opset; or a version of ONNX Runtime"
    " whose provider knows the newer one",
    example=Context(
        node="/Reshape",
        op_type="Reshape",
        provider="CPUExecutionProvider",
        skipped=ChainEntry(provider="CUDAExecutionProvider", status="active"),
        exported=True,
        replaces=(),
        log=(),
        probe=NodeProbe(
            "/Reshape",
            (
                Trial("as_is", "", "left", "CUDA kernel not found in registries for Op type: Reshape node name: probe"),
                Trial("opset", "Reshape of opset 23 in place of 25", "taken", ""),
            ),
        ),
    ),
    steps=(RETARGET, STANDARD),
)
