"""The wanted provider has the operator, but not as this version of the operator set defines it."""

from __future__ import annotations

from partita.diagnosis.reasons.base import RETARGET, STANDARD, Context, Finding, Reason, probed
from partita.observations.facts import NodeProbe, Trial
from partita.observations.records import ChainEntry


def decide(context: Context) -> Finding | None:
    """Applies when an experiment shows that another version of the operator is all it takes."""
    return probed(context, "no_kernel_version")


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
        wanted=ChainEntry(provider="CUDAExecutionProvider", status="active"),
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
    decide=decide,
    steps=(RETARGET, STANDARD),
)
