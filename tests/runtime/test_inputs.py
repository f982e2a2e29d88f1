"""Which input a `NAME=FILE` is about, where both may have a = in them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from partita.runtime.inputs import name_and_file


@pytest.mark.parametrize(
    ("text", "name", "file"),
    [
        ("x=a.npy", "x", "a.npy"),
        ("x=runs/lr=0.1/x.npy", "x", "runs/lr=0.1/x.npy"),
        ("x=y=a.npy", "x=y", "a.npy"),
        ("x=", "x", ""),
        ("z=a.npy", "", ""),
        ("", "", ""),
    ],
)
def test_the_longest_name_of_an_input_is_the_name(text: str, name: str, file: str):
    assert name_and_file(text, ["x", "x=y"]) == (name, file)


def test_a_file_in_a_folder_with_an_equals_sign_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    from onnx import TensorProto, helper, save

    from partita.cli import run

    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", ports[:1], ports[1:])
    opset = [helper.make_opsetid("", 17)]
    save(helper.make_model(graph, opset_imports=opset, ir_version=8), tmp_path / "m.onnx")
    array = tmp_path / "lr=0.1" / "x.npy"
    array.parent.mkdir()
    np.save(array, np.ones(2, np.float32))
    before = array.read_bytes()
    given = ["place", str(tmp_path / "m.onnx"), "--provider", "cpu", "--input", f"x={array}"]
    assert run([*given, "--report", str(array)]) == 2 and array.read_bytes() == before
    assert "x.npy" in capsys.readouterr().err
    assert run(given) == 0
