"""ONNX Runtime's log of a run, in which some kernels report slow paths."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from partita import streams
from partita.observations.names import CPU
from partita.runtime.ort.native_log import captured_output
from partita.runtime.worker.parent import Worker

INFO, WARNING = 1, 2
RESTORES = "DequantizeLinear"
"""Operator that remains if the optimiser did not fuse it with a MatMul of quantised weights."""
UNPACKED = "unpacked compute mode"
"""MatMulNBits on the CPU provider: no kernel for this form on this processor, so every run dequantises the whole matrix
(contrib_ops/cpu/quantization/matmul_nbits.cc, `Compute`)."""


def unpacks_weights(model: bytes, sizes: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether the CPU provider dequantises quantised weights in every run of `model`, by one run on zeros.

    `sizes`: of its inputs. Run it in a worker process if the log must not be captured in this process. Raises ONNX
    Runtime's exceptions.
    """
    if not streams.own_process:
        with Worker(__name__) as worker:
            answer: bool = worker.call("unpacks_weights", model, sizes)
            return answer
    import onnx

    with TemporaryDirectory() as folder:
        optimised = Path(folder) / "optimised.onnx"
        if any(UNPACKED in line for line in _lines_of_run(model, sizes, optimised)):
            return True
        return any(node.op_type == RESTORES for node in onnx.load(optimised).graph.node)


def _lines_of_run(model: bytes, sizes: Mapping[str, tuple[int, ...]], optimised: Path) -> tuple[str, ...]:
    """The log at INFO of opening and running `model`; the optimised graph is written to `optimised`."""
    options: Any = ort.SessionOptions()
    options.log_severity_level = INFO
    options.optimized_model_filepath = str(optimised)
    with captured_output() as captured:
        ort.set_default_logger_severity(INFO)
        try:
            session = ort.InferenceSession(model, options, providers=[CPU])
            session.run(None, {port.name: _zeros(port, sizes[port.name]) for port in session.get_inputs()})
        finally:
            ort.set_default_logger_severity(WARNING)
    return captured.lines


def _zeros(port: Any, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """An input of zeros."""
    kinds = {"tensor(int64)": np.int64, "tensor(float16)": np.float16}
    return np.zeros(shape, kinds.get(port.type, np.float32))


HANDLERS = {"unpacks_weights": unpacks_weights}
