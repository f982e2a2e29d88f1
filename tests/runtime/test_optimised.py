"""The optimised graph, which the first session writes without weights."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import onnx
import onnx.parser
import pytest
from onnx import parser

from partita.check.requirements import Limits
from partita.errors import ResourceError
from partita.library.run_report import report_run
from partita.partition_reports.records import Request
from partita.providers.resolve import Resolution, known_providers
from partita.runtime.chain.open_chain import chain_entry
from partita.runtime.generate import run_facts
from partita.runtime.generate.run_facts import add_optimised, with_captured, with_optimised
from partita.runtime.lab.graph import cut_graph
from partita.runtime.lab.variant import node_variant
from partita.runtime.machine import environment
from partita.runtime.ort.session import NativeFailureError, open_native
from partita.runtime.ort.session_options import Opening
from partita.runtime.place import run_phases as place
from partita.runtime.place.model_file import graph_node
from partita.runtime.place.onnx_model import read_onnx
from partita.runtime.place.tensor_types import element_of, sizes_of, tensor_types
from tests.runtime.place.test_run_phases import placed, written

NORM = """g (float[2,4,4] x, float[2,4,4] y) => (float[2,4,4] z)
<float[4] g = {1,1,1,1}, float[4] b = {1,1,1,1}, float two = {2}> {
  [add] s = Add(x, y) [ln] l = LayerNormalization(s, g, b) [pow] z = Pow(l, two)
}"""
"""ONNX Runtime fuses the first two into one node that it names SkipLayerNormalization."""


SIZED = "(float[1,2048] y) <int64[2] s = {2048, 2048}> {"
CPU_ONLY = [Resolution(known_providers()["cpu"], "active")]


def session_of(result):
    (session,) = result.facts.sessions
    return session


def asked(folder):
    request = Request(
        verb="place",
        path=str(folder),
        chain=("cpu",),
        chain_source="default",
        options={},
        threads=None,
        prompt_tokens=None,
        max_new_tokens=None,
        prefill_chunk_tokens=None,
    )
    return request, Limits()


def test_unnamed_fused_node_is_mapped_to_replaced_nodes(tmp_path):
    result = placed(written(tmp_path / "m.onnx", NORM))
    assert session_of(result).optimised_missing_reason == ""
    assert [node.op_type for node in session_of(result).optimised] == ["SkipLayerNormalization", "Pow"]
    report = report_run(result.facts, tuple(map(chain_entry, result.resolutions)), environment(), *asked(tmp_path))
    replaced = {node.name: (node.op_type, node.replaces) for node in report.phases[0].nodes}
    rows = {row.name: (row.op_type, row.ran_as, row.state) for row in report.phases[0].file_nodes}
    assert rows["ln"] == ("LayerNormalization", ("SkipLayerNormalization",), "executed")
    assert replaced == {"SkipLayerNormalization": ("SkipLayerNormalization", ("add", "ln")), "pow": ("Pow", ())}
    assert [check for check in report.checks if not check.passed] == [] and report.conflicts == ()


def test_package_has_optimised_graph_for_each_session(open_runner):
    runner = open_runner(observe=True, static_shapes=True)
    assert place.run_package(runner, 1) is None
    facts = with_optimised(run_facts.run_facts(runner), [entry.session for entry in runner.graphs])
    assert len(facts.sessions) == 2
    for session in facts.sessions:
        planned = {name for stream in session.plan or () for name in stream}
        assert {node.name for node in session.optimised or ()} == planned and planned


def test_graph_is_written_while_the_session_opens_and_without_weights(tmp_path):
    """The reason is the same for weights of every size: they are discarded."""
    text = (
        "g (float[1,2048] x) => (float[1,2048] y) { w = ConstantOfShape<value = float[1] {0.5}>(s) y = MatMul(x, w) }"
    )
    model = parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : 21]>\n{text.replace("(float[1,2048] y) {", SIZED)}'
    )
    onnx.save(model, tmp_path / "m.onnx")
    with closing(open_native(tmp_path / "m.onnx", CPU_ONLY, Opening(observe=True))) as session:
        assert session.optimised is not None and len(session.optimised) < 4096
        (product,) = onnx.load_from_string(session.optimised).graph.node
        assert product.op_type == "MatMul", "16 MiB of folded weights are not in the file"
    with closing(open_native(tmp_path / "m.onnx", CPU_ONLY, Opening())) as session:
        assert session.optimised is None


def test_missing_optimised_graph_has_a_reason(open_runner, monkeypatch):
    runner = open_runner(observe=True)
    facts, session = run_facts.run_facts(runner), runner.graphs[0].session
    assert place.with_graphs(facts, [session], ResourceError("memory ran out")) is facts
    (seen,) = facts.sessions
    session.optimised = b"no graph"
    assert "not a valid ONNX file" in add_optimised(seen, session, 0).optimised_missing_reason
    (entry,) = session.active
    compiling = replace(entry.provider, compiles=True)
    session.active, session.optimised = (replace(entry, provider=compiling),), None
    assert "cpu compiles" in add_optimised(seen, session, 0).optimised_missing_reason
    session.active = (replace(entry, provider=replace(compiling, ort_name="Idle")), entry)
    monkeypatch.setattr(run_facts, "open_native", lambda path, active, opening: open_native(path, [entry], opening))
    assert add_optimised(seen, session, 0).optimised, "a provider without nodes compiled nothing"

    assert "1 GiB again" in add_optimised(seen, session, 1 << 30).optimised_missing_reason

    def fails(*_):
        raise NativeFailureError(RuntimeError("no room\nat all"), ())

    monkeypatch.setattr(run_facts, "open_native", fails)
    assert "no room at all" in add_optimised(seen, session, 0).optimised_missing_reason


def test_node_inputs_include_values_captured_by_subgraphs():
    text = """g (float x, int64 trips, float around, float outer, bool f) => (float y) {
      [loop] y = Loop(trips, , x) <body = b (int64 i, bool c, float own) => (bool d, float m) {
        d = Identity(c)
        t = Add(own, around)
        m = If(f) <then_branch = t () => (float n) { n = Neg(outer) }, else_branch = e () => (float n) { n = Neg(t) }>
      }>
    }"""
    (node,) = onnx.parser.parse_graph(text).node
    assert with_captured(graph_node(node), node).inputs == ("trips", "", "x", "around", "f", "outer")


# Types and nodes that only a function tells: operators of ONNX without a rule for their types, and local function


NORMALISED = (
    '<ir_version: 10, opset_import: ["" : 21]>\n'
    "g (float16[1,4,8,8] x{more}) => (y) {constants}{{\n"
    "  [norm] h = GroupNormalization<num_groups=2>(x, s, b)\n  [after] y = Relu(h)\n}}"
)
FED = NORMALISED.format(more=", float16[4] s, float16[4] b", constants="")
CONSTANT = NORMALISED.format(more="", constants="<float16[4] s = {1,1,1,1}, float16[4] b = {0,0,0,0}> ")
CALLING = (
    '<ir_version: 10, opset_import: ["" : 22, "local" : 1]>\n'
    "g (float[2,4] x) => (float[2,4] y) {{\n  [call] y = local.Part(x)\n}}\n"
    '<domain: "local", opset_import: ["" : {opset}]>\nPart (a) => (b) {{\n  [one] b = Selu(a)\n}}'
)


@pytest.mark.parametrize("text", [FED, CONSTANT], ids=["fed", "constant"])
def test_group_normalization_output_type_is_inferred(text: str) -> None:
    types = tensor_types(parser.parse_model(text))
    for name in ("h", "y"):
        assert element_of(types[name]) == onnx.TensorProto.FLOAT16
        assert sizes_of(types[name]) == (1, 4, 8, 8)


@pytest.mark.parametrize("opset", [18, 21, 22])
def test_local_function_node_is_probed_with_model_opset(opset: int, tmp_path: Path) -> None:
    onnx.save(parser.parse_model(CALLING.format(opset=opset)), tmp_path / "m.onnx")
    name = "_inlfunc_Part_one"
    case = node_variant(cut_graph(read_onnx(tmp_path / "m.onnx"), {}).with_observed_types({}, {name: ()}), name)
    assert case.node.op_type == "Selu" and case.opsets[""] == 22


SHARED = (
    '<ir_version: 10, opset_import: ["" : 21, "local" : 1]>\n'
    "g (float[2,4] x) => (float[2,4] y) {\n  [a] a = local.First(x)\n  [b] b = local.Second(a)\n"
    "  [wide] c = Cast<to=11>(b)\n  [d] d = local.Second(c)\n  [e] e = local.First_1(d)\n"
    "  [back] y = Cast<to=1>(e)\n}\n"
    '<domain: "local", opset_import: ["" : 21]>\nFirst (a) => (b) {\n  [n] b = Selu(a)\n}\n'
    '<domain: "local", opset_import: ["" : 21]>\nSecond (a) => (b) {\n  [n] b = Abs(a)\n}\n'
    '<domain: "local", opset_import: ["" : 21]>\nFirst_1 (a) => (b) {\n  [n] b = Softsign(a)\n}'
)


@pytest.mark.parametrize(
    ("name", "made", "op_type", "element"),
    [
        ("_inlfunc_First_n", "float32[2,4]", "Selu", onnx.TensorProto.FLOAT),
        ("_inlfunc_Second_n", "float32[2,4]", "Abs", onnx.TensorProto.FLOAT),
        ("_inlfunc_Second_token_0_n", "float64[2,4]", "Abs", onnx.TensorProto.DOUBLE),
        ("_inlfunc_Second_token_0_n_token_3", "float64[2,4]", "Abs", onnx.TensorProto.DOUBLE),
        ("_inlfunc_First_1_n_nchwc", "float64[2,4]", "Softsign", onnx.TensorProto.DOUBLE),
    ],
)
def test_function_nodes_are_distinguished_by_function_and_output_type(
    name: str, made: str, op_type: str, element: int, tmp_path: Path
) -> None:
    onnx.save(parser.parse_model(SHARED), tmp_path / "m.onnx")
    graph = cut_graph(read_onnx(tmp_path / "m.onnx"), {}).with_observed_types({name: (made,)}, {})
    case = node_variant(graph, name)
    assert case.node.op_type == op_type
    assert element_of(case.feeds[0].kind) == element


def test_functions_of_one_name_are_distinguished_by_the_operator_of_the_run(tmp_path: Path) -> None:
    text = (
        '<ir_version: 10, opset_import: ["" : 21, "a" : 1, "b" : 1]>\ng (float[2,4] x) => (float[2,4] y) {\n'
        "  [first] h = a.Act(x)\n  [second] y = b.Act(h)\n}\n"
        '<domain: "a", opset_import: ["" : 21]>\nAct (a) => (b) {\n  [n] b = Sigmoid(a)\n}\n'
        '<domain: "b", opset_import: ["" : 21]>\nAct (a) => (b) {\n  [n] b = Asinh(a)\n}'
    )
    onnx.save(parser.parse_model(text), tmp_path / "m.onnx")
    graph = cut_graph(read_onnx(tmp_path / "m.onnx"), {})
    for name, op_type in (("_inlfunc_Act_n", "Sigmoid"), ("_inlfunc_Act_token_0_n", "Asinh")):
        seen = graph.with_observed_types({name: ("float32[2,4]",)}, {}, {name: op_type})
        assert node_variant(seen, name).node.op_type == op_type
    assert (found := graph.find("_inlfunc_Act_n")) is not None and found.op_type == "Sigmoid", "also without a run"


def test_invalid_split_count_does_not_crash_type_inference() -> None:
    text = '<ir_version: 9, opset_import: ["" : 20]>\ng (int64[4] x) => (a, b, c, d) {\n  {node}\n}'
    split = "[planted] a, b, c, d = Split<num_outputs={count}>(x)"
    legal, illegal = (parser.parse_model(text.replace("{node}", split.replace("{count}", count))) for count in "43")
    assert sizes_of(tensor_types(legal)["a"]) == (1,)
    assert "a" not in tensor_types(illegal)
