"""Error messages for ONNX Runtime load and run failures."""

from __future__ import annotations

from pathlib import Path, PureWindowsPath

import numpy as np
import pytest
from onnx import external_data_helper, numpy_helper, parser

import partita
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


def test_unknown_operator_version_error_suggests_matching_onnxruntime(tmp_path: Path) -> None:
    """Exporting again with the same versions would give the same file."""
    error = open_error(tmp_path / "model.onnx", ["CPUExecutionProvider"], InvalidGraph(SCHEMA), ())
    assert isinstance(error, PackageError) and "run it with the ONNX Runtime it was exported for" in str(error)
    other = open_error(tmp_path / "model.onnx", ["CPUExecutionProvider"], InvalidGraph("This is an invalid model."), ())
    assert "onnx.checker" in str(other)


def test_shader_compilation_failure_is_a_provider_error() -> None:
    error = run_error("model.onnx", RuntimeError(PIPELINE))
    assert isinstance(error, ProviderError) and "use another provider" in str(error)


@pytest.mark.parametrize("location", [".\\d.data", "weights\\d.data"])
def test_windows_path_of_external_data_is_reported_with_correction(tmp_path: Path, location: str) -> None:
    model = parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 17]> g (float[4] x) => (float[4] y) { y = Add(x, w) }'
    )
    model.graph.initializer.append(numpy_helper.from_array(np.ones(4, np.float32), "w"))
    external_data_helper.set_external_data(model.graph.initializer[0], location)
    model.graph.initializer[0].ClearField("raw_data")
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(PackageError) as caught:
        partita.place(tmp_path / "model.onnx", "cpu")
    wanted = PureWindowsPath(location).as_posix()
    assert f"the path {location!r} is a Windows path; write {wanted!r} instead" in str(caught.value)
    model.graph.initializer[0].external_data[0].value = wanted
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    (tmp_path / wanted).parent.mkdir(exist_ok=True)
    (tmp_path / wanted).write_bytes(np.ones(4, np.float32).tobytes())
    assert partita.place(tmp_path / "model.onnx", "cpu").chain[0].provider == "CPUExecutionProvider"
