"""Error messages for ONNX Runtime load and run failures."""

from __future__ import annotations

import subprocess
from pathlib import Path, PureWindowsPath

import numpy as np
import onnx
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


ESCAPES = (
    "[ONNXRuntimeError] : 1 : FAIL : External data path validation failed for initializer: w. Error: "
    'tensorprotoutils.cc:346 ValidateExternalDataPath External data path: "d.data" escapes model directory: "/snapshot"'
)
"""ONNX Runtime 1.24.1's message for a link out of the model's folder."""


def test_custom_library_operator_error_names_onnxruntime_extensions(tmp_path: Path) -> None:
    path, sets = tmp_path / "model.onnx", '"" : 17, "ai.onnx.contrib" : 1'
    graph = "g (float[4] x) => (float[4] y) { [n] y = ai.onnx.contrib.BertTokenizer(x) }"
    onnx.save(parser.parse_model(f"<ir_version: 10, opset_import: [{sets}]> {graph}"), path)
    said = "belongs to onnxruntime-extensions; export it without that operator"
    with pytest.raises(PackageError, match=said) as caught:
        partita.place(path, "cpu")
    assert "made for" not in f"{caught.value.message}; {caught.value.remedy}"


def test_remedy_for_external_symlinks_copies_files(tmp_path: Path) -> None:
    blob, folder = tmp_path / "blob", tmp_path / "snapshot"
    blob.write_bytes(b"1234")
    folder.mkdir()
    (folder / "d.data").symlink_to(blob)
    remedy = open_error(folder / "model.onnx", ["CPUExecutionProvider"], RuntimeError(ESCAPES), ()).remedy
    assert remedy is not None and "onnx.checker" not in str(remedy)
    *command, target = remedy.command
    subprocess.run([*command, tmp_path / target], check=True)
    assert not (tmp_path / target / "d.data").is_symlink() and (tmp_path / target / "d.data").read_bytes() == b"1234"


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
