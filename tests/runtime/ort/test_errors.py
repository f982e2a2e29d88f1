"""What is said of a file that another ONNX Runtime was meant for, and of a device that cannot build what it took."""

from __future__ import annotations

from pathlib import Path

from partita.errors import PackageError, ProviderError
from partita.runtime.ort.errors import open_error, run_error


class InvalidGraph(Exception):  # noqa: N818 - as ONNX Runtime calls it
    """As ONNX Runtime 1.24 raises it."""


SCHEMA = (
    "[ONNXRuntimeError] : 10 : INVALID_GRAPH : This is an invalid model. In Node, ... Error Node(attention) with "
    "schema(com.microsoft::GroupQueryAttention:1) has input size 14 not in range [min=7, max=12]."
)
PIPELINE = (
    "[ONNXRuntimeError] : 1 : FAIL : Non-zero status code returned while running GroupQueryAttention node. Status "
    'Message: Failed to create a WebGPU compute pipeline: [Invalid ShaderModule "Split"] is invalid'
)


def test_a_file_for_a_newer_operator_is_not_called_damaged(tmp_path: Path) -> None:
    """Exporting it again as it was would give the same file."""
    error = open_error(tmp_path / "model.onnx", ["CPUExecutionProvider"], InvalidGraph(SCHEMA), ())
    assert isinstance(error, PackageError) and "run it with the ONNX Runtime that it was made with" in str(error)
    other = open_error(tmp_path / "model.onnx", ["CPUExecutionProvider"], InvalidGraph("This is an invalid model."), ())
    assert "onnx.checker" in str(other)


def test_a_shader_that_cannot_be_built_is_the_providers_trouble() -> None:
    error = run_error("model.onnx", RuntimeError(PIPELINE))
    assert isinstance(error, ProviderError) and "name another provider" in str(error)
