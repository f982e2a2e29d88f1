"""The wanted provider does not take an option as it was given."""

from __future__ import annotations

from partita.diagnosis.reasons.base import ASK_OPTIONS, Context, Finding, Reason, unavailable
from partita.observations.records import ChainEntry


def decide(context: Context) -> Finding | None:
    """Applies when the wanted provider was found unavailable for this very reason, and somebody said so."""
    return unavailable(context, "option_rejected")


REASON = Reason(
    code="option_rejected",
    level="provider",
    title="Option rejected",
    condition="a provider option has a value that the provider does not take on this machine",
    needs="the chain entry of the wanted provider: status unavailable, reason option_rejected, with the complaint",
    remedy="change or leave out the option that the evidence names",
    example=Context(
        node="model.layers.0.mlp.up_proj/MatMul",
        op_type="MatMul",
        provider="CPUExecutionProvider",
        wanted=ChainEntry(
            provider="CUDAExecutionProvider",
            status="unavailable",
            reason="option_rejected",
            evidence="Invalid device ID: 7, must be between 0 and 0 (inclusive)",
            remedy="see `partita providers --json` for its options",
        ),
        exported=True,
        replaces=(),
        log=(),
    ),
    decide=decide,
    steps=(ASK_OPTIONS,),
)
