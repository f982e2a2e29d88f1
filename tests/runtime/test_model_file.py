"""What is read from an ONNX file before ONNX Runtime sees it."""

from __future__ import annotations

import onnx
import pytest

from partita.errors import PackageError
from partita.runtime.model_file import graph_node, read_model_file


def point_weights_at(folder, location: str) -> None:
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    for entry in model.graph.initializer[0].external_data:
        if entry.key == "location":
            entry.value = location
    (folder / "model.onnx").write_bytes(model.SerializeToString())


@pytest.mark.parametrize("location", ["../secret", "/etc/passwd", "a/../../b", "..\\secret"])
def test_weights_outside_the_package_are_refused(package_copy, location):
    folder = package_copy()
    point_weights_at(folder, location)
    with pytest.raises(PackageError, match="leaves the package folder"):
        read_model_file(folder / "model.onnx", folder)


def test_a_link_that_leaves_the_package_is_refused(package_copy, tmp_path):
    folder = package_copy()
    (tmp_path / "elsewhere").write_bytes(b"x")
    (folder / "link").symlink_to(tmp_path / "elsewhere")
    point_weights_at(folder, "link")
    with pytest.raises(PackageError, match="leaves the package folder"):
        read_model_file(folder / "model.onnx", folder)


def test_weights_in_an_attribute_of_a_subgraph_are_checked_too(tmp_path):
    hidden = onnx.helper.make_tensor("hidden", onnx.TensorProto.FLOAT, [1], [1.0])
    hidden.ClearField("float_data")
    hidden.data_location = onnx.TensorProto.EXTERNAL
    hidden.external_data.add(key="location", value="../out")
    output = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [1])
    body = onnx.helper.make_graph([onnx.helper.make_node("Constant", [], ["y"], value=hidden)], "b", [], [output])
    node = onnx.helper.make_node("If", ["c"], ["y"], then_branch=body, else_branch=body)
    condition = onnx.helper.make_tensor_value_info("c", onnx.TensorProto.BOOL, [])
    onnx.save(onnx.helper.make_model(onnx.helper.make_graph([node], "g", [condition], [output])), tmp_path / "m.onnx")
    with pytest.raises(PackageError, match="leaves the package folder"):
        read_model_file(tmp_path / "m.onnx", tmp_path)


def test_missing_weights_and_damaged_files_are_package_errors(package_copy):
    folder = package_copy()
    point_weights_at(folder, "nowhere.data")
    with pytest.raises(PackageError, match=r"'nowhere\.data' is missing"):
        read_model_file(folder / "model.onnx", folder)
    (folder / "model.onnx").write_bytes(b"garbage" * 100)
    with pytest.raises(PackageError, match="not a readable ONNX file"):
        read_model_file(folder / "model.onnx", folder)


def test_nodes_say_where_they_come_from(tiny_package):
    folder = tiny_package()
    model = read_model_file(folder / "model.onnx", folder)
    linear = next(node for node in model.nodes if node.name.startswith("model.layers.1.mlp.down_proj/"))
    assert linear.op_type == "MatMul"
    assert linear.module == "model.layers.1.mlp.down_proj"
    assert linear.module_class == "torch.nn.modules.linear.Linear"
    assert linear.source is not None
    assert linear.source.startswith("torch/nn/modules/linear.py:")
    assert "past_key_values.1.value" in model.inputs
    assert model.outputs[0] == "logits"


def test_the_exporters_own_metadata_wins():
    node = onnx.helper.make_node("Add", ["a", "b"], ["c"], name="x.y/Add")
    for key, value in {
        "partita.module": "model.norm", "partita.class": "Norm", "partita.source": "modeling_x.py:7",
        "pkg.torch.onnx.name_scopes": "['', 'other', 'add']", "pkg.torch.onnx.class_hierarchy": "['A', 'B', 'add']",
        "pkg.torch.onnx.stack_trace": 'File "/a/b.py", line 3, in f',
    }.items():  # fmt: skip
        node.metadata_props.add(key=key, value=value)
    fact = graph_node(node)
    assert (fact.module, fact.module_class, fact.source) == ("model.norm", "Norm", "modeling_x.py:7")


def test_a_node_without_metadata_goes_by_its_name():
    assert graph_node(onnx.helper.make_node("Add", ["a"], ["b"], name="x.y/Add")).module == "x.y"
    plain = graph_node(onnx.helper.make_node("Add", ["a"], ["b"], name="Add_1"))
    assert (plain.module, plain.module_class, plain.source) == (None, None, None)
