"""Facts read from an ONNX file before ONNX Runtime loads it, and tensor types that only ONNX Runtime infers."""

from __future__ import annotations

import re

import onnx
import onnx.parser
import pytest

from partita.errors import PackageError
from partita.runtime.place.model_file import graph_node, read_model_file
from partita.runtime.place.tensor_types import tensor_types


def test_external_data_in_subgraph_attributes_is_validated(tmp_path):
    hidden = onnx.helper.make_tensor("hidden", onnx.TensorProto.FLOAT, [1], [1.0])
    hidden.ClearField("float_data")
    hidden.data_location = onnx.TensorProto.EXTERNAL
    hidden.external_data.add(key="location", value="../out")
    output = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [1])
    body = onnx.helper.make_graph([onnx.helper.make_node("Constant", [], ["y"], value=hidden)], "b", [], [output])
    node = onnx.helper.make_node("If", ["c"], ["y"], then_branch=body, else_branch=body)
    condition = onnx.helper.make_tensor_value_info("c", onnx.TensorProto.BOOL, [])
    onnx.save(onnx.helper.make_model(onnx.helper.make_graph([node], "g", [condition], [output])), tmp_path / "m.onnx")
    with pytest.raises(PackageError, match="is outside the model folder"):
        read_model_file(tmp_path / "m.onnx", tmp_path)


OURS = {"partita.module": "model.norm", "partita.class": "Norm", "partita.source": "modeling_x.py:7"}
TORCHS = {
    "pkg.torch.onnx.name_scopes": "['', 'model', 'model.layers.1.mlp.down_proj', 'linear_13']",
    "pkg.torch.onnx.stack_trace": (
        'File "/env/site-packages/transformers/modeling_llama.py", line 164, in forward\n'
        "    down = self.down_proj(x)\n"
        'File "/env/site-packages/torch/nn/modules/linear.py", line 134, in forward\n'
        "    return F.linear(input, self.weight, self.bias)"
    ),
}


@pytest.mark.parametrize(
    ("name", "notes", "facts"),
    [
        ("x.y/Add", {**OURS, **TORCHS}, ("model.norm", "modeling_x.py:7")),
        ("node_linear_13", TORCHS, ("model.layers.1.mlp.down_proj", "torch/nn/modules/linear.py:134")),
        ("x.y/Add", {}, ("x.y", None)),
        ("Add_1", {}, (None, None)),
    ],
    ids=["ours before torch's", "torch's", "by name", "none"],
)
def test_node_origin_is_read_from_metadata_or_name(
    name: str, notes: dict[str, str], facts: tuple[str | None, str | None]
) -> None:
    node = onnx.helper.make_node("Add", ["a", "b"], ["c"], name=name)
    for key, value in notes.items():
        node.metadata_props.add(key=key, value=value)
    fact = graph_node(node)
    assert (fact.module, fact.source) == facts


HEAD = '<ir_version: 10, opset_import: ["" : 21, "ai.onnx.ml" : 3, "com.microsoft" : 1]>\n'


@pytest.mark.parametrize(
    ("graph", "sizes"),
    [
        ("g (float[4,16] x) => (float y) { p = ai.onnx.ml.Scaler<offset=[0.5], scale=[2.0]>(x) y = Neg(p) }", None),
        ("g (float x) => (float y) { p = com.microsoft.QuickGelu(x) y = Neg(p) }", ()),
        ("g (float[4,16] x) => (float[4,16] y) { p = com.microsoft.QuickGelu(x) y = Neg(p) }", (4, 16)),
    ],
    ids=["no rank", "scalar", "matrix"],
)
def test_unknown_rank_is_not_inferred_as_scalar(graph: str, sizes: tuple[int, ...] | None) -> None:
    kind = tensor_types(onnx.parser.parse_model(HEAD + graph), by_runtime=True)["p"].tensor_type
    assert kind.elem_type == onnx.TensorProto.FLOAT
    assert (tuple(size.dim_value for size in kind.shape.dim) if kind.HasField("shape") else None) == sizes


def test_nodes_of_a_package_have_module_and_source_line(tiny_package):
    folder = tiny_package()
    nodes = read_model_file(folder / "model.onnx", folder).nodes
    linear = next(node for node in nodes if node.name.startswith("model.layers.1.mlp.down_proj/"))
    assert (linear.op_type, linear.module) == ("MatMul", "model.layers.1.mlp.down_proj")
    assert re.fullmatch(r"transformers/models/llama/modeling_llama\.py:\d+", linear.source or "")
