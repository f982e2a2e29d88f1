"""The lowering of standard operators up to opset 18: nothing newer in the file, and the numbers of the model.

Parity in float32 over all architectures, static pairs and rows of unequal length are in test_parity.py, where this
lowering is one of three.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper

from partita.errors import UsageError
from partita.export.pipeline import ExportOptions, check_options
from partita.options.export import Attention
from partita.package.folder import read_manifest
from tests.conftest import MODELS, Exported, TinyCheckpoint

OPSET = 18


def graphs(package: Path) -> list[onnx.ModelProto]:
    files = [file.file for file in read_manifest(package).graph.files]
    return [onnx.load(package / file, load_external_data=False) for file in files]


SAMPLE = ("gemma2",)
"""Softcaps, windows and norms on both sides; the others are variations."""
STATIC: dict[str, Any] = {"static_shapes": True, "prefill_chunk": 6}


@pytest.mark.parametrize(
    ("model_type", "options"),
    [
        *(pytest.param(name, {}, marks=() if name in SAMPLE else pytest.mark.heavy) for name in sorted(MODELS)),
        pytest.param("llama", STATIC, marks=pytest.mark.heavy),
        pytest.param("gemma3_text", STATIC, marks=pytest.mark.heavy),
    ],
)
def test_every_operator_is_a_standard_one_of_opset_18(
    tiny_checkpoint: TinyCheckpoint, exported: Exported, model_type: str, options: dict[str, Any]
) -> None:
    package = exported(tiny_checkpoint(model_type), attention="primitives", **options)
    assert read_manifest(package).graph.opsets == {"": OPSET}
    for model in graphs(package):
        assert [(entry.domain, entry.version) for entry in model.opset_import] == [("", OPSET)]
        assert not model.functions
        for node in model.graph.node:
            assert node.domain == "" and onnx.defs.get_schema(node.op_type, OPSET, "").since_version <= OPSET, node.name
            known = onnx.defs.get_schema(node.op_type, OPSET, "")
            assert {a.name for a in node.attribute} <= set(known.attributes), node.name
            assert known.min_input <= len(node.input) <= known.max_input, node.name


def test_the_cache_is_written_by_position_and_never_rebuilt(
    tiny_checkpoint: TinyCheckpoint, exported: Exported
) -> None:
    """One ScatterElements from past to present per state: what a provider can do in place."""
    package = exported(tiny_checkpoint("llama"), attention="primitives")
    (model,) = graphs(package)
    writers = {output: node for node in model.graph.node for output in node.output}
    for state in read_manifest(package).graph.states:
        node = writers[state.present]
        assert (node.op_type, node.input[0]) == ("ScatterElements", state.past)
    assert {port.role for port in read_manifest(package).graph.files[0].inputs} == {
        "tokens",
        "positions",
        "logits_rows",
    }


def test_float16_masks_what_is_not_there(tiny_checkpoint: TinyCheckpoint, exported: Exported) -> None:
    """An empty cache of zeros has scores above those of real keys: they must get no weight at all."""
    package = exported(tiny_checkpoint("llama", num_hidden_layers=1), attention="primitives", precision="fp16")
    (model,) = graphs(package)
    (lowest,) = {
        float(numpy_helper.to_array(tensor))
        for tensor in model.graph.initializer
        if tensor.data_type == TensorProto.FLOAT16 and tensor.dims == [] and numpy_helper.to_array(tensor) < -1e4
    }
    assert np.isfinite(np.float16(lowest)) and np.exp(np.float16(lowest) - np.float16(-100)) == 0


@pytest.mark.parametrize(("attention", "opset", "least"), [("onnx24", 23, 24)])
def test_an_opset_below_what_a_lowering_needs(tmp_path: Path, attention: Attention, opset: int, least: int) -> None:
    options = ExportOptions("none", tmp_path / "out", attention=attention, opset=opset)
    with pytest.raises(UsageError, match=f"`opset={opset}`: `attention={attention}` needs opset {least} or newer"):
        check_options(options)


@pytest.mark.parametrize("opset", [17, 25])
def test_an_opset_that_is_not_written_at_all(tmp_path: Path, opset: int) -> None:
    with pytest.raises(UsageError, match=f"`opset={opset}`: must be between 18 and 24"):
        check_options(ExportOptions("none", tmp_path / "out", opset=opset))
