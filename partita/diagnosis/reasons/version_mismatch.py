"""A library, plugin or driver has a version that is incompatible with the others."""

from __future__ import annotations

from partita.diagnosis.evidence import Context
from partita.diagnosis.reasons.base import Reason
from partita.diagnosis.steps import ASK_PROVIDER
from partita.observations.records import ChainEntry

REASON = Reason(
    code="version_mismatch",
    level="provider",
    title="Incompatible versions",
    condition="a library, plugin or driver is installed in a version that is incompatible with the others",
    needs="the error message",
    remedy="install compatible versions; the evidence names the incompatible component",
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
