"""The preferred provider rejects the value of an option."""

from __future__ import annotations

from partita.diagnosis.evidence import Context
from partita.diagnosis.reasons.base import Reason
from partita.diagnosis.steps import ASK_OPTIONS
from partita.observations.records import ChainEntry

REASON = Reason(
    code="option_rejected",
    level="provider",
    title="Option rejected",
    condition="the provider rejects the value of one of its options on this machine",
    needs="the provider's error message",
    remedy="change or remove the option that the evidence names",
    example=Context(
        node="model.layers.0.mlp.up_proj/MatMul",
        op_type="MatMul",
        skipped=ChainEntry(
            provider="CUDAExecutionProvider",
            status="unavailable",
            reason="option_rejected",
            evidence="Invalid device ID: 7, must be between 0 and 0 (inclusive)",
            remedy="see `partita providers --json` for its options",
        ),
    ),
    steps=(ASK_OPTIONS,),
)
