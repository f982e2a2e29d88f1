"""`partita place` on operators that ONNX Runtime unfolds into nodes without a name, in a dry run of CUDA."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from onnx import parser

from tests.contract.commands import execute

MODEL = """<ir_version: 10, opset_import: ["" : 21]>
g (float[1,4,16,16] x) => (float[1,4,16,16] normed, float[1,4,8,8] cropped)
<float[4] ones = {1,1,1,1}, int64[2] sizes = {8,8}> {
  [norm] normed = GroupNormalization <num_groups = 2> (x, ones, ones)
  [relu] r = Relu (x)
  [crop] cropped = CenterCropPad <axes = [2, 3]> (r, sizes)
}"""


@pytest.mark.usefixtures("stand_ins")
def test_shape_computations_of_functions_are_told_from_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PARTITA_CACHE_DIR", str(tmp_path / "cache"))
    path = tmp_path / "model.onnx"
    onnx.save(parser.parse_model(MODEL), path)
    options = ("--provider", "cuda,cpu", "--dry-run", "--runs", 1, "--json")
    done = execute("-m", "partita", "place", path, *options, folder=tmp_path)
    assert done.code == 0, done
    content = done.json
    assert {entry["reason"] for entry in content["fallbacks"]} == {"cpu_preferred"}
    assert len(content["fallbacks"]) == 12
    assert content["disagreements"] == []
    placed = {node["name"]: node["provider"] for node in content["phases"][0]["nodes"]}
    assert sum(name.startswith("Div") and "CPU" in provider for name, provider in placed.items()) == 3
