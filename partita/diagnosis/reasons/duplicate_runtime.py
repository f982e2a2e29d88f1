"""Several ONNX Runtime wheels are installed in one folder and overwrite each other's files."""

from __future__ import annotations

from partita.diagnosis.evidence import Context
from partita.diagnosis.reasons.base import Reason
from partita.diagnosis.steps import ASK_PROVIDER
from partita.observations.records import ChainEntry

REASON = Reason(
    code="duplicate_runtime",
    level="provider",
    title="Several ONNX Runtimes in one environment",
    condition="more than one ONNX Runtime wheel is installed; they share one folder and overwrite each other's files",
    needs="the list of installed wheels",
    remedy="uninstall every ONNX Runtime wheel, then install one of them again",
    example=Context(
        node="model.layers.0.mlp.up_proj/MatMul",
        op_type="MatMul",
        skipped=ChainEntry(
            provider="CUDAExecutionProvider",
            status="unavailable",
            reason="duplicate_runtime",
            evidence="onnxruntime 1.31.1 and onnxruntime-gpu 1.31.1 are installed side by side",
            remedy="pip uninstall onnxruntime onnxruntime-gpu, then pip install onnxruntime-gpu",
        ),
    ),
    entry_kind="derived",
    steps=(ASK_PROVIDER,),
)
