"""Two parts of the installation were not made for each other."""

from __future__ import annotations

from partita.diagnosis.reasons.base import ASK_PROVIDER, Context, Finding, Reason, unavailable
from partita.observations.records import ChainEntry


def decide(context: Context) -> Finding | None:
    """Applies when the wanted provider was found unavailable for this very reason, and somebody said so."""
    return unavailable(context, "version_mismatch")


REASON = Reason(
    code="version_mismatch",
    level="provider",
    title="Versions do not fit together",
    condition="ONNX Runtime, a plugin, a library or a driver is there, but in a version that the others "
    "were not built for",
    needs="the chain entry of the wanted provider: status unavailable, reason version_mismatch, with "
    "the error that shows it",
    remedy="install versions that belong together; the evidence names the part that does not fit",
    example=Context(
        node="model.layers.0.mlp.up_proj/MatMul",
        op_type="MatMul",
        provider="CPUExecutionProvider",
        wanted=ChainEntry(
            provider="CUDAExecutionProvider",
            status="unavailable",
            reason="version_mismatch",
            evidence="CUDA driver version is insufficient for CUDA runtime version",
            remedy="update the NVIDIA driver",
        ),
        exported=True,
        replaces=(),
        log=(),
    ),
    decide=decide,
    steps=(ASK_PROVIDER,),
)
