"""The loader does not find a shared library of the preferred provider."""

from __future__ import annotations

from partita.diagnosis.evidence import Context
from partita.diagnosis.reasons.base import Reason
from partita.diagnosis.steps import ASK_PROVIDER
from partita.observations.records import ChainEntry

REASON = Reason(
    code="library_missing",
    level="provider",
    title="Library missing",
    condition="the provider is in the build, but the loader does not find a shared library that it needs",
    needs="the loader's message",
    remedy="install the library that the evidence names, in a folder that the loader searches",
    example=Context(
        node="model.layers.0.mlp.up_proj/MatMul",
        op_type="MatMul",
        skipped=ChainEntry(
            provider="CUDAExecutionProvider",
            status="unavailable",
            reason="library_missing",
            evidence="libcublasLt.so.13: cannot open shared object file: No such file or directory",
            remedy='pip install "onnxruntime-gpu[cuda,cudnn]"',
        ),
    ),
    steps=(ASK_PROVIDER,),
)
