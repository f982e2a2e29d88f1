"""Any ONNX model, read and run on generated inputs: names, sizes, values, and the facts that come of it."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from partita.commands.build import split_inputs, split_shapes
from partita.errors import GenerationError, PackageError, PartitaError, ProviderError, ResourceError, UsageError
from partita.observations.facts import AssignedNode
from partita.process import rss_bytes
from partita.providers.resolve import parse_chain, resolve
from partita.runtime import in_time
from partita.runtime.inputs import check_room, input_shapes, make_values, not_generated, read_values
from partita.runtime.onnx_model import ModelPort, fixed_shapes, read_onnx
from partita.runtime.ort.binding import Binding
from partita.runtime.ort.errors import run_error
from partita.runtime.place import Where, filled_buffer, output_bytes, place_model, place_package
from partita.runtime.run_errors import RunLateError, told_error

if TYPE_CHECKING:
    from partita.runtime.ort.session import Session

CPU = "CPUExecutionProvider"
F = TensorProto.FLOAT
TENSOR = helper.make_tensor_type_proto(F, [2])


def port(name: str, kind: int = F, shape: Any = (4, 4)) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def save(path: Path, nodes, inputs, outputs, weights=(), functions=(), **options) -> Path:
    graph = helper.make_graph(nodes, "g", inputs, outputs, list(weights))
    imports = [helper.make_opsetid("", 21), *(helper.make_opsetid(f.domain, 1) for f in functions)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=10, functions=list(functions))
    onnx.save(model, path, **options)
    return path


def chain(nodes, path: Path, **options) -> Path:
    """x [4, 4] -> nodes, each reading the one before -> y."""
    tensors = ["x", *(f"t{number}" for number in range(1, len(nodes))), "y"]
    made = [
        helper.make_node(op, [tensors[number]], [tensors[number + 1]], name=name)
        for number, (op, name) in enumerate(nodes)
    ]
    return save(path, made, [port("x")], [port("y")], **options)


def where(**changes) -> Where:
    return Where(**{"chain": parse_chain("cpu"), "options": {}, "pins": (), "threads": 1, "runs": 3, **changes})


def placed(path: Path, *shapes: str, **changes):
    model = read_onnx(path)
    return place_model(model, input_shapes(model.inputs, split_shapes(shapes)), where(**changes))


# --- reading -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "not an ONNX model"),
        (b"not a model", "cannot be parsed"),
        (b"\x08\x0a", "no graph"),
    ],
)
def test_what_is_no_model_is_one_line(tmp_path, content, says):
    path = tmp_path / "broken.onnx"
    path.write_bytes(content)
    with pytest.raises(PackageError, match=says) as caught:
        read_onnx(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("keep", [0.3, 0.7, 0.99])
def test_a_file_that_was_cut_off(tmp_path, keep):
    path = chain([("Relu", "a"), ("Neg", "b")], tmp_path / "m.onnx")
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * keep)])
    with pytest.raises(PackageError):
        read_onnx(path)


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        (b"batch", b"b\xff\xfech"),
        (b"m/Relu", b"m/R\xff\xfeu"),
        (b"Relu", b"R\xff\xfeu"),
    ],
)
def test_names_that_are_no_text(tmp_path, good, bad):
    node = helper.make_node("Relu", ["x"], ["y"], name="m/Relu")
    path = save(tmp_path / "m.onnx", [node], [port("x", F, ["batch"])], [port("y", F, ["batch"])])
    path.write_bytes(path.read_bytes().replace(good, bad))
    with pytest.raises(PackageError, match="damaged"):
        read_onnx(path)


def test_a_folder_a_missing_file_and_an_empty_graph(tmp_path):
    with pytest.raises(PackageError, match="not a Partita package"):
        read_onnx(tmp_path)
    with pytest.raises(PackageError, match="no such file"):
        read_onnx(tmp_path / "none.onnx")
    with pytest.raises(PackageError, match="no nodes"):
        read_onnx(save(tmp_path / "m.onnx", [], [port("x")], [port("x")]))


def with_data(folder: Path, location: str = "m.data", *, names: bool = True) -> Path:
    """x + w with w outside the file."""
    folder.mkdir()
    weight = numpy_helper.from_array(np.ones((4, 4), np.float32), "w")
    node = helper.make_node("Add", ["x", "w"], ["y"], name="add" if names else "")
    path = save(
        folder / "m.onnx",
        [node],
        [port("x")],
        [port("y")],
        [weight],
        save_as_external_data=True,
        location="m.data",
        size_threshold=0,
    )
    model = onnx.load(path, load_external_data=False)
    for entry in model.graph.initializer[0].external_data:
        if entry.key == "location":
            entry.value = location
    path.write_bytes(model.SerializeToString())
    return path


def test_weights_outside_the_file_are_found_counted_and_run(tmp_path):
    model = read_onnx(with_data(tmp_path / "a"))
    assert (model.data_files, model.weight_bytes) == (("m.data",), 64)
    assert placed(model.path).error is None
    assert placed(with_data(tmp_path / "b", names=False)).error is None, "also when nodes had to be named"


def test_missing_weights_and_weights_outside_the_folder_are_refused(tmp_path):
    with pytest.raises(PackageError, match="'none.data' is missing"):
        read_onnx(with_data(tmp_path / "a", "none.data"))
    (tmp_path / "secret").write_bytes(b"x" * 64)
    for number, location in enumerate(("../secret", str(tmp_path / "secret"))):
        with pytest.raises(PackageError, match="leaves the model folder"):
            read_onnx(with_data(tmp_path / f"b{number}", location))


def test_nodes_without_a_name_and_with_one_name_are_told_apart(tmp_path):
    path = chain([("Relu", ""), ("Neg", "same"), ("Abs", "same"), ("Neg", "Relu_0")], tmp_path / "m.onnx")
    before = path.read_bytes()
    result = placed(path)
    (session,) = result.facts.sessions
    names = [node.name for node in session.graph]
    assert names == ["Relu_0_", "same", "same_2", "Relu_0"]
    assert [name for stream in session.plan or () for name in stream] == names
    assert {event.name for event in session.events} == set(names)
    assert [note for note in result.facts.notes if "without a name" in note or "of another node" in note] == [
        "1 node without a name in the file: called <operator>_<position> here",
        "1 node with the name of another node: called <name>_<position> here; ONNX Runtime does not load the file as "
        "it is",
    ]
    assert path.read_bytes() == before


def test_a_name_may_come_again_in_a_body(tmp_path):
    """ONNX Runtime wants names that are different in one graph alone."""
    path = tmp_path / "m.onnx"
    flag, x, y = (
        onnx.helper.make_tensor_value_info(name, kind, [1])
        for name, kind in (
            ("flag", onnx.TensorProto.BOOL),
            ("x", onnx.TensorProto.FLOAT),
            ("y", onnx.TensorProto.FLOAT),
        )
    )
    branches = {
        f"{name}_branch": onnx.helper.make_graph(
            [onnx.helper.make_node(op, ["x"], [f"{name}_y"], name="same")],
            name,
            [],
            [onnx.helper.make_tensor_value_info(f"{name}_y", onnx.TensorProto.FLOAT, [1])],
        )
        for name, op in (("then", "Neg"), ("else", "Abs"))
    }
    node = onnx.helper.make_node("If", ["flag"], ["y"], name="choice", **branches)
    graph = onnx.helper.make_graph([node], "g", [flag, x], [y])
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8), path)
    notes = [note for note in read_onnx(path).notes if "of another node" in note]
    assert notes == ["1 node with the name of another node: called <name>_<position> here"]


def test_nodes_of_functions_without_a_name_are_called_after_their_function(tmp_path):
    path = tmp_path / "m.onnx"
    text = (
        '<ir_version: 10, opset_import: ["" : 21, "own" : 1]>\n'
        "g (float[2] x) => (float[2] y) {\n  [one] h = own.Part(x)\n  [two] y = own.Part(h)\n}\n"
        '<domain: "own", opset_import: ["" : 21]>\n'
        "Part (a) => (c) {\n  [given] b = Selu(a)\n  m = ReduceMax<keepdims=0>(b)\n  g = Cast<to=9>(m)\n"
        "  c = If(g)<then_branch = t () => (d) { d = Abs(b) }, else_branch = e () => (f) { f = Neg(b) }>\n}"
    )
    onnx.save(onnx.parser.parse_model(text), path)
    result = placed(path)
    assert result.error is None
    (session,) = result.facts.sessions
    own = ["given", "ReduceMax_1", "Cast_2", "If_3"]
    planned = [name for stream in session.plan or () for name in stream]
    assert planned == [f"_inlfunc_Part_{call}{name}" for call in ("", "token_0_") for name in own]
    inner = {f"_inlfunc_Part_{call}{name}" for call in ("", "token_0_") for name in ("Abs_4", "Neg_5")}
    assert {event.name for event in session.events} <= {*planned, *inner}
    assert "5 nodes of functions without a name in the file: <operator>_<position> here" in result.facts.notes


def test_names_of_several_lines_are_on_one(tmp_path):
    result = placed(chain([("Relu", "a\nb"), ("Neg", "a_b"), ("Abs", 'say "c"\\d')], tmp_path / "m.onnx"))
    assert result.error is None
    names = [node.name for node in result.facts.sessions[0].graph]
    assert names == ["a_b", "a_b_1", 'say "c"\\d']
    assert {event.name for event in result.facts.sessions[0].events} == set(names)
    assert any("1 node with line breaks" in note for note in result.facts.notes)


def test_control_flow_bodies_count_as_part_of_their_node(tmp_path):
    bodies = {
        f"{word}_branch": helper.make_graph([helper.make_node(op, ["x"], [word])], word, [], [port(word)])
        for word, op in (("then", "Relu"), ("else", "Neg"))
    }
    nodes = [
        helper.make_node("If", ["flag"], ["t"], name="if", **bodies),
        helper.make_node("MatMul", ["t", "x"], ["y"], name="mm"),
    ]
    result = placed(save(tmp_path / "m.onnx", nodes, [port("flag", TensorProto.BOOL, ()), port("x")], [port("y")]))
    assert result.error is None
    assert [name for stream in result.facts.sessions[0].plan or () for name in stream] == ["if", "mm"]
    assert any("2 nodes in control-flow subgraphs" in note for note in result.facts.notes)


def test_functions_are_run_and_noted(tmp_path):
    inside = [helper.make_node("Relu", ["a"], ["r"], name="r"), helper.make_node("Neg", ["r"], ["b"], name="n")]
    function = helper.make_function("my", "F", ["a"], ["b"], inside, [helper.make_opsetid("", 21)])
    nodes = [helper.make_node("F", ["x"], ["y"], name="call", domain="my")]
    result = placed(save(tmp_path / "m.onnx", nodes, [port("x")], [port("y")], functions=[function]))
    assert result.error is None
    assert any("1 call of functions" in note for note in result.facts.notes)


# --- sizes ---------------------------------------------------------------------------------------------------------


def ports(**shapes) -> list[ModelPort]:
    return [ModelPort(name, "tensor", "float32", shape) for name, shape in shapes.items()]


def test_sizes_come_from_the_file_the_input_or_the_symbol():
    two = ports(x=("batch", 3, None), mask=("batch",), fixed=(2,))
    wanted = {"x": (5, 3, 7), "mask": (5,), "fixed": (2,)}
    assert input_shapes(two, split_shapes(["x=5,3,7"])) == wanted, "a size given with one input holds for its symbol"
    assert input_shapes(two, split_shapes(["x=5,3,7", "batch=5"])) == wanted
    assert input_shapes(ports(s=None), split_shapes(["s="])) == {"s": ()}
    assert input_shapes(ports(**{"a=b": ("n",)}), split_shapes(["a=b=4"])) == {"a=b": (4,)}
    assert input_shapes([], {}) == {}


def test_missing_sizes_are_asked_for_in_one_line_with_an_example_that_works():
    some = ports(ids=("batch", "seq"), image=(1, 3, None, "w"), free=None, fine=(2, 2))
    with pytest.raises(UsageError) as caught:
        input_shapes(some, {})
    message = str(caught.value)
    assert "\n" not in message and "fine" not in message
    assert message.startswith("3 inputs need sizes: ids float32[batch,seq]; image float32[1,3,?,w]; free float32")
    example = message.partition("as in: ")[2].replace("--shape ", "").split()
    assert input_shapes(some, split_shapes(example))["image"] == (1, 3, 1, 1)
    with pytest.raises(UsageError, match="1 input needs sizes: b"):
        input_shapes(ports(a=("n",), b=("m",)), split_shapes(["n=3"]))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x=1,2", "takes 3 sizes, not 2"),
        ("nosuch=3", "'nosuch' is neither an input nor a symbolic size; inputs are x"),
        ("x=2,-3,1", "must be 1 or more"),
        ("x=2,0,1", "must be 1 or more"),
        ("x=2,4,1", "size 1 of x is fixed to 3"),
        ("x=two,3,1", "not a list of sizes"),
        ("x", "write NAME=SIZES"),
        ("=3", "write NAME=SIZES"),
        ("batch=1,2", "one symbolic size"),
    ],
)
def test_a_bad_size_is_a_usage_error(text, says):
    with pytest.raises(UsageError, match=says):
        input_shapes(ports(x=("batch", 3, None)), split_shapes([text]))


def test_sizes_that_contradict_each_other():
    both = ports(x=("n", 2), y=("n",))
    for texts in (["n=1", "x=2,2"], ["x=1,2", "y=2"]):
        with pytest.raises(UsageError, match="conflicting values for the symbolic size"):
            input_shapes(both, split_shapes(texts))
    with pytest.raises(UsageError, match="given twice"):
        input_shapes(both, split_shapes(["x=1,2", "x=1,2"]))


def test_an_input_that_has_one_size_twice_takes_it_twice():
    square = ports(x=("n", "n"))
    assert input_shapes(square, split_shapes(["x=2,2"])) == {"x": (2, 2)}
    with pytest.raises(UsageError, match="n is the size of two axes of x, here 2 and 3; the file says that they are"):
        input_shapes(square, split_shapes(["x=2,3"]))


# --- values --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype",
    [
        "float16",
        "float32",
        "float64",
        "bfloat16",
        "bool",
        "int8",
        "int16",
        "int32",
        "int64",
        "uint8",
        "uint16",
        "uint32",
        "uint64",
    ],
)
def test_every_plain_type_has_values_the_same_ones_each_time(dtype):
    entry = ModelPort("x", "tensor", dtype, (3, 5))
    first, second = (make_values(entry, (3, 5), np.random.default_rng(0)) for _ in range(2))
    assert first.shape == (3, 5) and np.array_equal(first, second)
    if dtype.startswith("float"):
        assert first.dtype == dtype and 0 < float(np.abs(first).max()) < 1
    scalar = make_values(ModelPort("x", "tensor", dtype, ()), (), np.random.default_rng(0))
    assert scalar.shape == ()


def test_integers_are_safe_as_indices_and_masks_let_everything_through():
    rng = np.random.default_rng(0)
    assert make_values(ModelPort("ids", "tensor", "int64", (2,)), (2,), rng).max() == 0
    for name in ("attention_mask", "total_sequence_length", "seq_len"):
        assert make_values(ModelPort(name, "tensor", "int64", (2,)), (2,), rng).min() == 1
    assert make_values(ModelPort("flag", "tensor", "bool", (2,)), (2,), rng).all()


def test_an_input_larger_than_any_memory():
    with pytest.raises(UsageError, match="larger than 1 TiB"):
        make_values(ports(x=(1,))[0], (1 << 40, 1 << 40), np.random.default_rng(0))


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (helper.make_tensor_value_info("s", TensorProto.COMPLEX64, [2]), "a tensor of complex64"),
        (helper.make_tensor_value_info("s", TensorProto.INT4, [2]), "a tensor of int4"),
        (helper.make_tensor_sequence_value_info("s", F, [2]), "a sequence"),
        (helper.make_value_info("s", helper.make_optional_type_proto(TENSOR)), "an optional"),
        (helper.make_value_info("s", helper.make_map_type_proto(TensorProto.INT64, TENSOR)), "a map"),
    ],
)
def test_an_input_that_cannot_be_generated_is_named_with_its_type(tmp_path, made, says):
    model = read_onnx(save(tmp_path / "m.onnx", [helper.make_node("Identity", ["s"], ["y"])], [made], [port("y")]))
    assert not_generated(model.inputs[0]) == says and input_shapes(model.inputs, {}).get("s", (2,)) == (2,)
    if model.inputs[0].kind != "tensor":
        with pytest.raises(UsageError, match=f"s is {says}, which has no sizes"):
            input_shapes(model.inputs, split_shapes(["s=2"]))
    with pytest.raises(UsageError, match=f"s is {says}, which no .npy file can hold"):
        read_values(model.inputs, {"s": npy(tmp_path / "s.npy", np.zeros(2))})


def npy(path: Path, array: Any) -> Path:
    np.save(path, array)
    return path


def test_values_from_files_are_what_the_model_is_run_on(tmp_path):
    nodes = [helper.make_node("OneHot", ["i", "depth", "pair"], ["y"], name="h", axis=0)]
    inputs = [port("i", TensorProto.INT64, ["n"]), port("depth", TensorProto.INT64, ()), port("pair", F, [2])]
    model = read_onnx(save(tmp_path / "m.onnx", nodes, inputs, [port("y", F, None)]))
    given = {"i": np.arange(3), "depth": np.array(5)}
    files = {name: npy(tmp_path / f"{name}.npy", array) for name, array in given.items()}
    values = read_values(model.inputs, files)
    shapes = input_shapes(model.inputs, {}, {name: array.shape for name, array in values.items()})
    assert shapes == {"i": (3,), "depth": (), "pair": (2,)}
    result = place_model(model, shapes, where(values=values))
    assert result.error is None
    (out,) = [entry for entry in result.facts.sessions[0].ports if entry.direction == "output"]
    assert out.bytes_per_decode_step == 4 * 3 * 5, "the depth is the one of the file"


HUGE = f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({10**30},), }}\n".encode()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x", "write NAME=FILE.npy, where NAME is an input: x and s"),
        ("y={good}", "write NAME=FILE.npy"),
        ("x=", "write NAME=FILE.npy"),
        ("x={missing}", "cannot be read: No such file"),
        ("x={text}", "not a .npy file"),
        ("x={pickled}", "not a .npy file"),
        ("x={cut}", "not a .npy file"),
        ("x={header}", "not a .npy file"),
        ("x={endless}", "not a .npy file"),
        ("x={several}", "several arrays"),
        ("x={double}", "is float64, and x is float32"),
        ("s={good}", "is float32, and s is string"),
    ],
)
def test_values_that_do_not_fit_are_one_line(tmp_path, text, says):
    files = {name: tmp_path / f"{name}.npy" for name in ("good", "missing", "text", "pickled", "double")}
    npy(files["good"], np.ones(3, np.float32))
    npy(files["double"], np.ones(3))
    files["text"].write_text("1, 2, 3")
    np.save(files["pickled"], np.array([None]), allow_pickle=True)
    files["several"] = tmp_path / "several.npz"
    np.savez(files["several"], a=np.ones(1))
    files["cut"] = tmp_path / "cut.npz"
    files["cut"].write_bytes(files["several"].read_bytes()[:-30])
    headers = {"header": b"{'descr': '<f4', 'fortran_order': False, 'shape': (3,", "endless": HUGE}
    for name, header in headers.items():
        files[name] = tmp_path / f"{name}.npy"
        files[name].write_bytes(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header)
    both = [*ports(x=("n",)), ModelPort("s", "tensor", "string", (3,))]
    with pytest.raises(UsageError, match=says) as caught:
        read_values(both, split_inputs([text.format(**files)]))
    assert "\n" not in str(caught.value) and str(caught.value).startswith("--input")


def test_values_of_another_shape_and_sizes_given_twice():
    with pytest.raises(UsageError, match="--input x=3: x is float32"):
        input_shapes(ports(x=("n", 2)), {}, {"x": (3,)})
    with pytest.raises(UsageError, match="--input x=3: conflicting values .* n: 3 here, 4 by another option"):
        input_shapes(ports(x=("n",)), split_shapes(["n=4"]), {"x": (3,)})
    assert input_shapes(ports(x=("n",), y=("n",)), {}, {"x": (3,)}) == {"x": (3,), "y": (3,)}


def test_strings_are_empty_or_given(tmp_path):
    text = TensorProto.STRING
    node = helper.make_node("Equal", ["s", "u"], ["y"], name="e")
    made = [port("s", text, ["n"]), port("u", text, ["n"])]
    path = save(tmp_path / "m.onnx", [node], made, [port("y", TensorProto.BOOL, ["n"])])
    assert placed(path, "n=3").error is None
    model = read_onnx(path)
    values = read_values(model.inputs, {"s": npy(tmp_path / "s.npy", np.array(["ä", "b"]))})
    result = place_model(model, input_shapes(model.inputs, {}, {"s": (2,)}), where(values=values))
    assert result.error is None
    sizes = {entry.name: entry.bytes_per_decode_step for entry in result.facts.sessions[0].ports}
    assert sizes == {"s": None, "u": None, "y": 2}


def test_what_must_not_be_zero_is_one(tmp_path):
    scalar = [port(name, TensorProto.INT64, ()) for name in ("start", "limit", "delta")]
    nodes = [helper.make_node("Range", ["start", "limit", "delta"], ["y"], name="r")]
    assert placed(save(tmp_path / "r.onnx", nodes, scalar, [port("y", TensorProto.INT64, None)])).error is None
    nodes = [helper.make_node("OneHot", ["i", "depth", "v"], ["y"], name="h")]
    inputs = [port("i", TensorProto.INT64, [2]), port("depth", TensorProto.INT64, ()), port("v", F, [2])]
    assert placed(save(tmp_path / "h.onnx", nodes, inputs, [port("y", F, None)])).error is None


def test_an_axis_is_one_that_the_operator_takes_by_itself(tmp_path):
    """Along the batch this DFT has no samples; the kernel of ONNX Runtime 1.27 does not end then."""
    nodes = [helper.make_node("DFT", ["x", "", "axis"], ["y"], name="d", inverse=1, onesided=1)]
    inputs = [port("x", F, [1, 6, 2]), port("axis", TensorProto.INT64, ())]
    path = save(tmp_path / "d.onnx", nodes, inputs, [port("y", F, [1, 10, 1])])
    assert placed(path).error is None
    buffer = filled_buffer(read_onnx(path), read_onnx(path).inputs[1], (), where(), np.random.default_rng(0))
    assert buffer.host == -2


def endless(path: Path) -> Path:
    """A loop that goes on for as long as x is there."""
    kept, x = [port(name, TensorProto.BOOL, ()) for name in ("in", "out")], port("x", F, ())
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["in"], ["out"], name="again"),
            helper.make_node("Add", ["a", "a"], ["b"], name="more"),
        ],
        "body",
        [port("i", TensorProto.INT64, ()), kept[0], port("a", F, ())],
        [kept[1], port("b", F, ())],
    )
    nodes = [helper.make_node("Loop", ["", "go", "x"], ["y"], name="loop", body=body)]
    return save(path, nodes, [x, port("go", TensorProto.BOOL, ())], [port("y", F, ())])


def test_a_run_that_does_not_end_is_given_up_and_keeps_the_placement(tmp_path):
    result = placed(endless(tmp_path / "m.onnx"), run_seconds=0.3)
    assert isinstance(result.error, RunLateError)
    assert "a run on generated inputs did not end within 0.3 s; where its nodes are holds" in str(result.error)
    assert result.facts.sessions[0].plan == (("loop",),) and result.facts.steps == ()
    assert any(note.startswith("run 1 of 3 did not end, so what") for note in result.facts.notes)


@pytest.mark.parametrize("before", [0, 1])
def test_a_kernel_that_never_ends_is_left_behind(tmp_path, monkeypatch, before):
    """Figures of runs that ended before it hold, without the profile, which ONNX Runtime writes at the end."""
    monkeypatch.setattr(in_time, "STOP_SECONDS", 0.05)
    monkeypatch.setattr(in_time, "_left", [])
    runs, ended, run = [0], threading.Event(), Binding.run

    def hang(binding: Binding) -> None:
        runs[0] += 1
        if runs[0] > before:
            ended.wait()
        else:
            run(binding)

    monkeypatch.setattr(Binding, "run", hang)
    result = placed(chain([("Relu", "a")], tmp_path / "m.onnx"), run_seconds=0.5)
    assert in_time.left()
    ended.set()
    assert len(result.facts.steps) == before and result.facts.sessions[0].plan == (("a",),)
    assert isinstance(result.error, RunLateError) == (before == 0)
    said = (
        "run 2 of 3 did not end before the 0.5 s for runs (--run-seconds) were over, so figures are of 1 run; times of"
    )
    assert any(note.startswith(said) for note in result.facts.notes) == (before == 1)
    assert result.facts.sessions[0].runs == ()


def test_inputs_that_do_not_fit_into_free_memory_are_refused_before_they_are_made(tmp_path):
    path = chain([("Relu", "a")], tmp_path / "m.onnx")
    model = read_onnx(path)
    wide = {"x": (1 << 19, 1 << 18)}
    said = r"needs 1 TiB of memory.* is free; the largest is x\[524288,262144\], 512 GiB"
    with pytest.raises(ResourceError, match=said):
        place_model(model, wide, where())
    check_room(model.inputs, wide, {"x"})


def test_inputs_of_a_dry_run_take_no_memory(tmp_path):
    model = read_onnx(chain([("Relu", "a")], tmp_path / "m.onnx"))
    (x,) = model.inputs
    began = rss_bytes()
    buffer = filled_buffer(model, x, (1 << 14, 1 << 15), where(dry=True), np.random.default_rng(0))
    assert buffer.size_bytes == 2 << 30 and rss_bytes() - began < 1 << 28


class Fallen:
    """A session with two nodes, of which the list names the one on the CPU only."""

    plan = (("a", "a_token_1", "b"),)
    resolutions = tuple(replace(entry, status="active") for entry in resolve(parse_chain("webgpu,cpu"), (), {}))

    def assigned(self) -> tuple[AssignedNode, ...]:
        return (AssignedNode("b", "Range", "", CPU, 0),)


@pytest.mark.parametrize(
    ("node", "message", "kind", "says"),
    [
        (
            "a",
            "The antialias attribute of Resize operator is NOT implemented",
            ProviderError,
            "WebGpuExecutionProvider took node 'a' (Resize) and cannot run it: The antialias attribute of Resize "
            "operator is NOT implemented; leave the node to the CPU: --provider-option webgpu.forceCpuNodeNames=a",
        ),
        (
            "a_token_1",
            "Using column major storage_order is not supported yet",
            ProviderError,
            "took node 'a' (Resize) and cannot run it: Using column major storage_order is not supported yet; leave "
            "the node to the CPU: --provider-option webgpu.forceCpuNodeNames=a",
        ),
        (
            "a",
            "Program CumSum requires f16 but the device does not support it",
            ProviderError,
            "the device does not support it; run it without that provider: --provider cpu",
        ),
        ("a", "Incompatible dimensions for matrix multiplication", GenerationError, "other sizes: --shape NAME=SIZES"),
        ("b", "delta in Range operator can not be zero!", GenerationError, "other values: --input NAME=FILE.npy"),
        ("elsewhere", "too bad", GenerationError, "other values"),
    ],
)
def test_a_run_that_fails_is_laid_at_the_right_door(tmp_path, node, message, kind, says):
    model = read_onnx(chain([("Relu", "a")], tmp_path / "m.onnx"))
    text = f"Non-zero status code returned while running Resize node. Name:'{node}' Status Message: {message}"
    told = told_error(model, cast("Session", Fallen()), failed_run(text))
    assert type(told) is kind and says in str(told)


def failed_run(text: str) -> PartitaError:
    """What a run raises that ends in ONNX Runtime with this text."""
    native = RuntimeError(text)
    error = run_error("m.onnx", native)
    error.__cause__ = native
    return error


def test_nodes_that_a_user_leaves_to_the_cpu_already_stay_there(tmp_path):
    model = read_onnx(chain([("Relu", "a")], tmp_path / "m.onnx"))
    session = Fallen()
    webgpu, cpu = session.resolutions
    session.resolutions = (replace(webgpu, options={"forceCpuNodeNames": "x"}), cpu)
    error = failed_run("while running Relu node. Name:'a' Status Message: not there yet")
    told = told_error(model, cast("Session", session), error)
    assert told.remedy is not None
    assert told.remedy.options == ("--provider-option", "webgpu.forceCpuNodeNames=x\na")
    session.resolutions = (webgpu,)
    told = told_error(model, cast("Session", session), error)
    assert told.remedy is not None and told.remedy.options == ("--provider", "cpu")


def test_an_output_that_nothing_makes_is_no_matter_of_values(tmp_path):
    node = helper.make_node("SkipLayerNormalization", ["x", "x", "s"], ["y", "m"], name="n", domain="com.microsoft")
    path = save(tmp_path / "m.onnx", [node], [port("x"), port("s", F, [4])], [port("y"), port("m")])
    error = failed_run("Error in execution: Unsupported OrtValue type.")
    told = told_error(read_onnx(path), cast("Session", Fallen()), error)
    assert type(told) is ProviderError and "--input" not in str(told)
    assert "makes no value of an output of the graph, as it may leave 'm' of node 'n' (SkipLayerNormalization)" in str(
        told
    )


# --- running -------------------------------------------------------------------------------------------------------


def test_a_model_with_several_inputs_runs_and_every_source_speaks(tmp_path):
    table = numpy_helper.from_array(np.ones((5, 8), np.float32), "table")
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["e"], name="embed/Gather"),
        helper.make_node("Mul", ["e", "x"], ["m"], name="scale/Mul"),
        helper.make_node("Where", ["mask", "m", "x"], ["y"], name="mask/Where"),
    ]
    inputs = [port("ids", TensorProto.INT64, ["n"]), port("x", F, ["n", 8]), port("mask", TensorProto.BOOL, ["n", 1])]
    result = placed(save(tmp_path / "m.onnx", nodes, inputs, [port("y", F, ["n", 8])], [table]), "n=6")
    (session,) = result.facts.sessions
    assert result.error is None and session.phases == ("run",)
    assert len(result.facts.steps) == 3 and len(session.runs) == 3 and session.plan and session.assigned
    assert {(event.name, event.provider) for event in session.events} == {(node.name, CPU) for node in nodes}
    sizes = {entry.name: (entry.direction, entry.bytes_per_decode_step, entry.bound_memory) for entry in session.ports}
    assert sizes == {
        "ids": ("input", 48, "Cpu"),
        "x": ("input", 192, "Cpu"),
        "mask": ("input", 6, "Cpu"),
        "y": ("output", 192, "Cpu"),
    }
    assert result.facts.finish_reason is None and result.facts.memory.weight_bytes == 160


def test_initializers_are_no_inputs_and_a_model_may_have_none(tmp_path):
    weight = numpy_helper.from_array(np.ones((4, 4), np.float32), "x")
    nodes = [helper.make_node("RandomNormalLike", ["x"], ["y"], name="r")]
    path = save(tmp_path / "m.onnx", nodes, [port("x")], [port("y")], [weight])
    assert read_onnx(path).inputs == ()
    assert placed(path).error is None


def test_a_run_that_fails_keeps_the_placement(tmp_path):
    nodes = [helper.make_node("Add", ["x", "z"], ["y"], name="add")]
    path = save(tmp_path / "m.onnx", nodes, [port("x", F, ["a"]), port("z", F, ["b"])], [port("y", F, None)])
    result = placed(path, "a=2", "b=3")
    assert isinstance(result.error, GenerationError) and "generated inputs failed" in str(result.error)
    assert result.facts.sessions[0].plan == (("add",),) and result.facts.sessions[0].runs == ()
    assert any(note.startswith("run 1 of 3 failed") for note in result.facts.notes)


def test_a_provider_that_does_not_start_is_said_or_an_error(tmp_path):
    path = chain([("Relu", "a")], tmp_path / "m.onnx")
    result = placed(path, chain=parse_chain("openvino,cpu"))
    assert [entry.status for entry in result.resolutions] == ["unavailable", "active"]
    with pytest.raises(ProviderError, match="not_in_build"):
        placed(path, chain=parse_chain("openvino"))


def test_a_model_that_onnxruntime_refuses(tmp_path):
    with pytest.raises(PackageError, match="NoSuchOperator"):
        placed(chain([("NoSuchOperator", "a")], tmp_path / "m.onnx"))


def test_sizes_of_outputs():
    assert output_bytes("tensor(float16)", (2, 3)) == 12
    assert output_bytes("tensor(int64)", ()) == 8
    assert output_bytes("tensor(string)", (2,)) is None
    assert output_bytes("seq(tensor(float))", None) is None


@pytest.mark.parametrize("options", [{}, {"static_shapes": True, "prefill_chunk": 8, "attention": "onnx24"}])
def test_a_package_runs_both_phases_on_dummy_tokens(tiny_package, options):
    result = place_package(tiny_package(**options), where())
    steps = [(step.phase, step.tokens) for step in result.facts.steps]
    assert result.error is None and steps == [("prefill", 8 if options else 16)] * 3 + [("decode", 1)] * 3
    assert {phase for session in result.facts.sessions for phase in session.phases} == {"prefill", "decode"}
    assert all(session.events for session in result.facts.sessions)
    assert all(state.same_address for state in result.facts.states)
    assert result.facts.finish_reason is None


def test_more_runs_than_the_cache_is_long(tiny_package):
    result = place_package(tiny_package(), where(runs=70))
    assert result.error is None and len(result.facts.steps) == 140


def test_shapes_that_follow_from_the_inputs(tmp_path):
    nodes = [
        helper.make_node("Relu", ["x"], ["a"], name="a"),
        helper.make_node("NonZero", ["a"], ["i"], name="nz"),
        helper.make_node("Shape", ["a"], ["s"], name="s"),
        helper.make_node("ReduceMax", ["a"], ["y"], name="m", keepdims=0),
    ]
    outputs = [port("i", TensorProto.INT64, [2, "k"]), port("y", F, ())]
    model = read_onnx(save(tmp_path / "m.onnx", nodes, [port("x", F, ["n", 4])], outputs))
    assert fixed_shapes(model.proto, {"x": (3, 4)}) == {"x", "a", "s", "y"}
    assert "a" not in fixed_shapes(model.proto, {})
