"""The installed ONNX Runtime was built without the preferred provider."""

from __future__ import annotations

from collections.abc import Iterator

from partita.diagnosis.evidence import Context, Finding
from partita.diagnosis.reasons.base import Reason
from partita.diagnosis.steps import ASK_PROVIDER
from partita.observations.records import ChainEntry


def find(context: Context) -> Iterator[Finding]:
    """The provider is unavailable for this reason; the default evidence is its absence from the list."""
    entry = context.skipped
    if not context.started and entry.reason == "not_in_build":
        evidence = entry.evidence or f"{entry.provider} is not among the providers of this build"
        yield Finding("derived", "entry", evidence, entry.remedy)


REASON = Reason(
    code="not_in_build",
    level="provider",
    title="Provider not in this build of ONNX Runtime",
    condition="the installed ONNX Runtime was built without the provider",
    needs="the list of providers of the installed ONNX Runtime",
    remedy="install the ONNX Runtime wheel that contains the provider",
    example=Context(
        node="model.layers.0.mlp.up_proj/MatMul",
        op_type="MatMul",
        skipped=ChainEntry(
            provider="WebGpuExecutionProvider",
            status="unavailable",
            reason="not_in_build",
            evidence="onnxruntime 1.31.1 offers CPUExecutionProvider",
            remedy="pip install onnxruntime-webgpu in an environment without another ONNX Runtime",
        ),
    ),
    find=find,
    found_on=("entry",),
    steps=(ASK_PROVIDER,),
)
