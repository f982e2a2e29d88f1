"""Two parts of the installation were not made for each other."""

from __future__ import annotations

from partita.diagnosis.evidence import Context
from partita.diagnosis.reasons.base import Reason
from partita.diagnosis.steps import ASK_PROVIDER
from partita.observations.records import ChainEntry

REASON = Reason(
    code="version_mismatch",
    level="provider",
    title="Versions do not fit together",
    condition="a library, plugin or driver is present in a version that does not fit the others",
    needs="the error message",
    remedy="install versions that belong together; the evidence names the part that does not fit",
    example=Context(
        node="model.layers.0.mlp.up_proj/MatMul",
        op_type="MatMul",
        skipped=ChainEntry(
            provider="CUDAExecutionProvider",
            status="unavailable",
            reason="version_mismatch",
            evidence="CUDA driver version is insufficient for CUDA runtime version",
            remedy="update the NVIDIA driver",
        ),
    ),
    steps=(ASK_PROVIDER,),
)
