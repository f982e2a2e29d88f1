"""ONNX Runtime placed a small shape computation on the CPU, because copies would cost more."""

from __future__ import annotations

from partita.diagnosis.evidence import Context
from partita.diagnosis.reasons.base import Reason
from partita.diagnosis.steps import STATIC
from partita.observations.log_pattern import LogPattern
from partita.observations.records import ChainEntry

REASON = Reason(
    code="cpu_preferred",
    level="node",
    title="CPU preferred by ONNX Runtime",
    sentence="ONNX Runtime places {op} on the CPU, because the inputs are small values in CPU memory",
    condition="the inputs are small values in CPU memory, so ONNX Runtime expects the copies to cost more than the "
    "provider saves",
    needs="the log line `ORT optimization- Force fallback to CPU execution for node: <node>`",
    remedy="usually harmless; static shapes remove most shape computations (for a package: export --static-shapes)",
    example=Context(
        node="/Concat",
        op_type="Concat",
        skipped=ChainEntry(provider="CUDAExecutionProvider", status="active"),
        log=(
            "[I:onnxruntime:, fallback_cpu_capability.cc:171 operator()] ORT optimization- Force fallback to CPU "
            "execution for node: /Concat because the CPU execution path is deemed faster than overhead involved with "
            "execution on other EPs  capable of executing this node",
        ),
        patterns=(LogPattern("cpu_preferred", r"Force fallback to CPU execution for node: (?P<node>\S+) because"),),
    ),
    steps=(STATIC,),
)
