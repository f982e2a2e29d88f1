"""Runs of any ONNX model on given or generated inputs: names, sizes, values, errors and facts."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper, parser

from partita.commands.build import LISTS, split_shapes
from partita.errors import GenerationError, PackageError, ProviderError, ResourceError, UsageError
from partita.observations.facts import AssignedNode
from partita.providers.resolve import parse_chain, resolve
from partita.runtime import time_limit
from partita.runtime.ort.binding import Binding
from partita.runtime.ort.errors import run_error
from partita.runtime.place.inputs import (
    check_free_memory,
    input_shapes,
    read_values,
)
from partita.runtime.place.model_file import graph_node, read_model_file
from partita.runtime.place.onnx_model import ModelPort, read_onnx
from partita.runtime.place.run_phases import (
    FileRun,
    OpenOptions,
    RunLateError,
    place_model,
)

if TYPE_CHECKING:
    from partita.runtime.ort.session import Session

CPU = "CPUExecutionProvider"
F = TensorProto.FLOAT
HEAD = '<ir_version: 10, opset_import: ["" : 21, "own" : 1]>\n'
RELU = "g (float[4,4] x) => (float[4,4] y) { [a] y = Relu(x) }"


def written(path: Path, text: str) -> Path:
    onnx.save(parser.parse_model(HEAD + text), path)
    return path


def chain(path: Path, *nodes: tuple[str, str]) -> Path:
    """x [4, 4] -> nodes (operator, name), each reading the one before -> y."""
    tensors = ["x", *(f"t{number}" for number in range(1, len(nodes))), "y"]
    made = [helper.make_node(op, [tensors[i]], [tensors[i + 1]], name=name) for i, (op, name) in enumerate(nodes)]
    ports = [helper.make_tensor_value_info(name, F, (4, 4)) for name in "xy"]
    graph = helper.make_graph(made, "g", ports[:1], ports[1:])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path)
    return path


def where(**changes) -> OpenOptions:
    return OpenOptions(**{"chain": parse_chain("cpu"), "options": {}, "pins": (), "threads": 1, "runs": 3, **changes})


def placed(path: Path, *shapes: str, **changes):
    model = read_onnx(path)
    return place_model(model, input_shapes(model.inputs, split_shapes(shapes)), where(**changes))


# --- reading -------------------------------------------------------------------------------------------------------


def test_damaged_files_raise_single_line_package_error(tmp_path):
    whole = chain(tmp_path / "m.onnx", ("Relu", "m/Relu"), ("Neg", "b")).read_bytes()
    empty = helper.make_model(helper.make_graph([], "g", [], []))
    cases = [
        (b"", "no graph, no IR version or no operator set"),
        (b"not a model", "not a protobuf message"),
        (b"\x08\x0a", "no graph"),
        (empty.SerializeToString(), "no nodes"),
        *((whole[: int(len(whole) * part)], "broken.onnx") for part in (0.3, 0.7, 0.99)),
        (whole.replace(b"m/Relu", b"m/R\xff\xfeu"), "is not UTF-8"),
        (whole.replace(b"Relu", b"R\xff\xfeu"), "is not UTF-8"),
    ]
    path = tmp_path / "broken.onnx"
    for content, message in cases:
        path.write_bytes(content)
        with pytest.raises(PackageError, match=message) as caught:
            read_onnx(path)
        assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(PackageError, match="not a package"):
        read_onnx(tmp_path)
    with pytest.raises(PackageError, match="no such file"):
        read_onnx(tmp_path / "none.onnx")


def test_operator_that_onnx_runtime_does_not_know_is_a_package_error(tmp_path):
    with pytest.raises(PackageError, match="NoSuchOperator"):
        placed(chain(tmp_path / "n.onnx", ("NoSuchOperator", "a")))


def with_data(folder: Path, location: str = "m.data", *, names: bool = True) -> Path:
    """x + w with w outside the file."""
    folder.mkdir()
    model = parser.parse_model(HEAD + "g (float[4,4] x) => (float[4,4] y) { [add] y = Add(x, w) }")
    model.graph.node[0].name = "add" if names else ""
    weight = numpy_helper.from_array(np.ones((4, 4), np.float32), "w")
    weight.data_location = TensorProto.EXTERNAL
    weight.external_data.add(key="location", value=location)
    (folder / "m.data").write_bytes(weight.raw_data)
    weight.ClearField("raw_data")
    model.graph.initializer.append(weight)
    (folder / "m.onnx").write_bytes(model.SerializeToString())
    return folder / "m.onnx"


def test_external_data_is_counted_and_invalid_paths_are_rejected(tmp_path):
    model = read_onnx(with_data(tmp_path / "a"))
    assert (model.data_files, model.weight_bytes) == (("m.data",), 64)
    assert placed(model.path).error is None
    assert placed(with_data(tmp_path / "b", names=False)).error is None, "also when nodes had to be named"
    with pytest.raises(PackageError, match="'none.data' is missing"):
        read_onnx(with_data(tmp_path / "c", "none.data"))
    (tmp_path / "secret").write_bytes(b"x" * 64)
    for number, location in enumerate(("../secret", str(tmp_path / "secret"))):
        with pytest.raises(PackageError, match="is outside the model folder"):
            read_onnx(with_data(tmp_path / f"d{number}", location))


def test_nodes_receive_unique_single_line_names(tmp_path):
    nodes = [("Relu", ""), ("Neg", "same"), ("Abs", "same"), ("Neg", "Relu_0"), ("Relu", "a\nb"), ("Abs", 'x "c"\\d')]
    path = chain(tmp_path / "m.onnx", *nodes)
    before = path.read_bytes()
    result = placed(path)
    (session,) = result.facts.sessions
    names = [node.name for node in session.graph]
    assert names == ["Relu_0_", "same", "same_2", "Relu_0", "a_b", 'x "c"\\d']
    assert [name for stream in session.plan or () for name in stream] == names
    assert {event.name for event in session.events} == set(names)
    assert any(note.startswith("nodes without a unique name in the file (3)") for note in result.facts.notes)
    assert path.read_bytes() == before


# --- sizes ---------------------------------------------------------------------------------------------------------


def ports(**shapes) -> list[ModelPort]:
    return [ModelPort(name, "tensor", "float32", shape) for name, shape in shapes.items()]


def test_input_shapes_combine_file_input_and_symbol_sizes():
    two = ports(x=("batch", 3, None), mask=("batch",), fixed=(2,))
    wanted = {"x": (5, 3, 7), "mask": (5,), "fixed": (2,)}
    assert input_shapes(two, split_shapes(["x=5,3,7"])) == wanted, "a size given with one input holds for its symbol"
    assert input_shapes(two, split_shapes(["x=5,3,7", "batch=5"])) == wanted
    assert input_shapes(ports(s=None), split_shapes(["s="])) == {"s": ()}
    assert input_shapes(ports(**{"a=b": ("n",)}), split_shapes(["a=b=4"])) == {"a=b": (4,)}
    assert input_shapes(ports(x=("n", "n")), split_shapes(["x=2,2"])) == {"x": (2, 2)}
    assert input_shapes([], {}) == {}


def test_missing_sizes_error_is_single_line_with_valid_example():
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
    ("texts", "message"),
    [
        (["x=1,2"], "needs 3 sizes, not 2"),
        (["nosuch=3"], "'nosuch' is neither an input nor a symbolic size; inputs are x"),
        (["x=2,-3,1"], "must be 1 or more"),
        (["x=2,0,1"], "must be 1 or more"),
        (["x=2,4,1"], "size 1 of x is fixed to 3"),
        (["x=two,3,1"], "not a list of sizes"),
        (["x"], "write NAME=SIZES"),
        (["=3"], "write NAME=SIZES"),
        (["batch=1,2"], "needs 1 size, not 2"),
        (["batch=1", "x=2,3,1"], "conflicting values for the symbolic size"),
        (["x=1,3,2", "y=2,2"], "conflicting values for the symbolic size"),
        (["x=1,3,2", "x=1,3,2"], "set twice"),
        (["y=2,3"], "conflicting values for the symbolic size batch: 3 and 2"),
    ],
)
def test_invalid_size_raises_usage_error(texts, message):
    with pytest.raises(UsageError, match=message):
        input_shapes(ports(x=("batch", 3, None), y=("batch", "batch")), split_shapes(texts))


# --- values --------------------------------------------------------------------------------------------------------


def npy(path: Path, array: Any) -> Path:
    np.save(path, array)
    return path


HUGE = f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({10**30},), }}\n".encode()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x", "write NAME=FILE.npy"),
        ("y={good}", "write NAME=FILE.npy"),
        ("x=", "write NAME=FILE.npy"),
        ("x={missing}", "cannot be read: No such file"),
        ("x={text}", "not a .npy file"),
        ("x={pickled}", "not a .npy file"),
        ("x={endless}", "not a .npy file"),
        ("x={several}", "not a .npy file"),
        ("x={double}", "is float64, but x is float32"),
    ],
)
def test_invalid_input_values_raise_single_line_usage_error(tmp_path, text, message):
    files = {name: tmp_path / f"{name}.npy" for name in ("good", "missing", "text", "pickled", "double")}
    npy(files["good"], np.ones(3, np.float32))
    npy(files["double"], np.ones(3))
    files["text"].write_text("1, 2, 3")
    np.save(files["pickled"], np.array([None]), allow_pickle=True)
    files |= {"several": tmp_path / "several.npz", "endless": tmp_path / "endless.npy"}
    np.savez(files["several"], a=np.ones(1))
    files["endless"].write_bytes(b"\x93NUMPY\x01\x00" + len(HUGE).to_bytes(2, "little") + HUGE)
    with pytest.raises(UsageError, match=message) as caught:
        read_values(ports(x=("n",), s=(3,)), LISTS["inputs"]([text.format(**files)]))
    assert "\n" not in str(caught.value)


def test_inputs_exceeding_free_memory_raise_resource_error(tmp_path):
    model = read_onnx(written(tmp_path / "m.onnx", RELU))
    wide = {"x": (1 << 19, 1 << 18)}
    message = r"needs 1 TiB of memory.* is free; the largest is x\[524288,262144\], 512 GiB"
    with pytest.raises(ResourceError, match=message):
        place_model(model, wide, where())
    check_free_memory(model.inputs, wide, {"x"})


# --- runs that fail or do not end ----------------------------------------------------------------------------------

ENDLESS = """g (float x, bool go) => (float y) {
  [loop] y = Loop(, go, x) <body = b (int64 i, bool in, float a) => (bool out, float c) {
    [again] out = Identity(in) [more] c = Add(a, a) }>
}"""


def test_endless_run_is_stopped_and_placement_is_preserved(tmp_path):
    result = placed(written(tmp_path / "m.onnx", ENDLESS), run_seconds=0.3)
    assert isinstance(result.error, RunLateError) and "did not end within 0.3 s" in str(result.error)
    assert result.facts.sessions[0].plan == (("loop",),) and result.facts.steps == ()
    assert any(note.startswith("run 1 of 3 did not end, so measurements") for note in result.facts.notes)


@pytest.mark.parametrize("before", [0, 1])
def test_hanging_kernel_is_abandoned_after_time_limit(tmp_path, monkeypatch, before):
    """Steps completed before it are reported, without the profile, which ONNX Runtime writes at the end."""
    monkeypatch.setattr(time_limit, "STOP_SECONDS", 0.05)
    monkeypatch.setattr(time_limit, "_running", [])
    runs, ended, run = [0], threading.Event(), Binding.run

    def hang(binding: Binding) -> None:
        runs[0] += 1
        if runs[0] > before:
            ended.wait()
        else:
            run(binding)

    monkeypatch.setattr(Binding, "run", hang)
    result = placed(written(tmp_path / "m.onnx", RELU), run_seconds=0.5)
    assert time_limit._running
    ended.set()
    assert len(result.facts.steps) == before and result.facts.sessions[0].plan == (("a",),)
    assert isinstance(result.error, RunLateError) == (before == 0)
    late = [note for note in result.facts.notes if note.startswith("run 2 of 3 exceeded the time limit")]
    assert len(late) == before and result.facts.sessions[0].runs == ()


class Fallen:
    """A session with two nodes, of which the list names the one on the CPU only."""

    resolutions = tuple(replace(entry, status="active") for entry in resolve(parse_chain("webgpu,cpu"), (), {}))

    def assigned(self) -> tuple[AssignedNode, ...]:
        return (AssignedNode("b", "Range", "", CPU, 0),)


@pytest.mark.parametrize("node", ["a", "in_a_subgraph"])
@pytest.mark.parametrize("message", ["only shapes of rank 4", "indices element out of data bounds"])
def test_failed_run_is_provider_error_only_if_cpu_run_succeeds(tmp_path, monkeypatch, node, message):
    path = written(tmp_path / "m.onnx", RELU)
    native = RuntimeError(f"while running Relu node. Name:'{node}' Status Message: {message}")
    failure = run_error("m.onnx", native)
    failure.__cause__ = native
    fallen, binding = FileRun(read_onnx(path), cast("Session", Fallen()), where()), cast("Binding", None)
    for succeeds, kind, remedy in ((False, GenerationError, "other sizes"), (True, ProviderError, "--provider cpu")):
        monkeypatch.setattr(FileRun, "_runs_on_cpu", lambda *_, succeeds=succeeds: succeeds)
        error = fallen._error_of(failure, binding)
        assert type(error) is kind and node in str(error) and message in str(error) and remedy in str(error)


# --- running -------------------------------------------------------------------------------------------------------


def test_multi_input_model_has_facts_from_every_source(tmp_path):
    text = """g (int64[n] ids, float[n,8] x, bool[n,1] mask) => (float[n,8] y)
    <float[2,8] table = {1,1,1,1,1,1,1,1, 1,1,1,1,1,1,1,1}> {
      [embed] e = Gather(table, ids)
      [scale] m = Mul(e, x)
      [where] y = Where(mask, m, x)
    }"""
    result = placed(written(tmp_path / "m.onnx", text), "n=6")
    (session,) = result.facts.sessions
    assert result.error is None and session.phases == ("run",)
    assert len(result.facts.steps) == 3 and len(session.runs) == 3 and session.plan and session.assigned
    names = ("embed", "scale", "where")
    assert {(event.name, event.provider) for event in session.events} == {(name, CPU) for name in names}
    sizes = {entry.name: (entry.direction, entry.bytes_per_decode_step, entry.bound_memory) for entry in session.ports}
    inputs = {"ids": ("input", 48, "Cpu"), "x": ("input", 192, "Cpu"), "mask": ("input", 6, "Cpu")}
    assert sizes == {**inputs, "y": ("output", 192, "Cpu")}
    assert result.facts.finish_reason is None and result.facts.memory.weight_bytes == 64


def test_failed_run_preserves_placement(tmp_path):
    text = "g (float[a] x, float[b] z) => (float[c] y) { [add] y = Add(x, z) }"
    result = placed(written(tmp_path / "m.onnx", text), "a=2", "b=3")
    assert isinstance(result.error, GenerationError) and "generated inputs failed" in str(result.error)
    assert result.facts.sessions[0].plan == (("add",),) and result.facts.sessions[0].runs == ()
    assert any(note.startswith("run 1 of 3 failed") for note in result.facts.notes)


# --- the file ------------------------------------------------------------------------------------------------------


def test_external_data_in_subgraph_attributes_is_validated(tmp_path):
    hidden = helper.make_tensor("hidden", TensorProto.FLOAT, [1], [1.0])
    hidden.ClearField("float_data")
    hidden.data_location = TensorProto.EXTERNAL
    hidden.external_data.add(key="location", value="../out")
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])
    body = helper.make_graph([helper.make_node("Constant", [], ["y"], value=hidden)], "b", [], [output])
    node = helper.make_node("If", ["c"], ["y"], then_branch=body, else_branch=body)
    condition = helper.make_tensor_value_info("c", TensorProto.BOOL, [])
    onnx.save(helper.make_model(helper.make_graph([node], "g", [condition], [output])), tmp_path / "m.onnx")
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
    node = helper.make_node("Add", ["a", "b"], ["c"], name=name)
    for key, value in notes.items():
        node.metadata_props.add(key=key, value=value)
    fact = graph_node(node)
    assert (fact.module, fact.source) == facts
