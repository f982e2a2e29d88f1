"""The preferred provider did not start, and its message matches no pattern."""

from __future__ import annotations

from partita.diagnosis.evidence import Context
from partita.diagnosis.reasons.base import Reason
from partita.diagnosis.steps import ASK_PROVIDER
from partita.observations.records import ChainEntry

REASON = Reason(
    code="initialisation_failed",
    level="provider",
    title="Initialisation failed",
    condition="the provider failed, crashed or hung at its start, and its message matches no other reason",
    needs="the signal, or the first line of the error",
    remedy="read the evidence; `partita providers` tests the provider in a separate process",
    example=Context(
        node="model.layers.0.mlp.up_proj/MatMul",
        op_type="MatMul",
        skipped=ChainEntry(
            provider="CUDAExecutionProvider",
            status="unavailable",
            reason="initialisation_failed",
            evidence="the process was killed by SIGABRT while opening a session; its last output: terminate called "
            "without an active exception",
            remedy="see the evidence; nvidia-smi shows whether GPU and driver answer",
        ),
    ),
    steps=(ASK_PROVIDER,),
)
