"""The wanted provider is not part of the installed ONNX Runtime."""

from __future__ import annotations

from partita.diagnosis.reasons.base import ASK_PROVIDER, Context, Finding, Reason, unavailable
from partita.observations.records import ChainEntry


def decide(context: Context) -> Finding | None:
    """Applies when the wanted provider was found unavailable for this very reason."""
    otherwise = f"{context.wanted.provider} is not among the providers of this build"
    return unavailable(context, "not_in_build", kind="derived", otherwise=otherwise)


REASON = Reason(
    code="not_in_build",
    level="provider",
    title="Provider not in this build of ONNX Runtime",
    condition="the wanted provider is not in the list of providers that the installed ONNX Runtime was built with",
    needs="the chain entry of the wanted provider: status unavailable, reason not_in_build",
    remedy="install the ONNX Runtime wheel that contains the provider",
    example=Context(
        node="model.layers.0.mlp.up_proj/MatMul",
        op_type="MatMul",
        provider="CPUExecutionProvider",
        wanted=ChainEntry(
            provider="WebGpuExecutionProvider",
            status="unavailable",
            reason="not_in_build",
            evidence="onnxruntime 1.31.1 offers CPUExecutionProvider",
            remedy="pip install onnxruntime-webgpu in an environment without another ONNX Runtime",
        ),
        exported=True,
        replaces=(),
        log=(),
    ),
    decide=decide,
    steps=(ASK_PROVIDER,),
)
