"""The graph as ONNX Runtime runs it, from a second session: what it tells, and that it never harms the run."""

from __future__ import annotations

import tempfile
from dataclasses import replace

import onnx
import onnx.parser
import pytest

from partita.errors import ResourceError
from partita.library.run_report import RequestOptions, join
from partita.runtime.chain.open_chain import chain_entry
from partita.runtime.chain.pins import parse_pins
from partita.runtime.generate.record import run_facts
from partita.runtime.generate.record.run_facts import (
    LIMIT_BYTES,
    add_optimised,
    difference,
    with_captured,
    with_optimised,
)
from partita.runtime.machine import environment
from partita.runtime.ort.session import NativeFailureError
from partita.runtime.place import run_phases as place
from partita.runtime.place.model_file import graph_node
from tests.runtime.place.test_run_phases import placed, where, written

NORM = """g (float[2,4,4] x, float[2,4,4] y) => (float[2,4,4] z)
<float[4] g = {1,1,1,1}, float[4] b = {1,1,1,1}, float two = {2}> {
  [add] s = Add(x, y) [ln] l = LayerNormalization(s, g, b) [pow] z = Pow(l, two)
}"""
"""ONNX Runtime fuses the first two into one node that it names SkipLayerNormalization."""


def session_of(result):
    (session,) = result.facts.sessions
    return session


def asked(folder):
    return RequestOptions("place", folder, ("cpu",), "default", {}, None)


def test_a_fused_node_that_lost_every_name_is_mapped_back(tmp_path):
    result = placed(written(tmp_path / "m.onnx", NORM))
    assert session_of(result).optimised_missing_reason == ""
    assert [node.op_type for node in session_of(result).optimised] == ["SkipLayerNormalization", "Pow"]
    report = join(result.facts, tuple(map(chain_entry, result.resolutions)), environment(), asked(tmp_path))
    replaced = {node.name: (node.op_type, node.replaces) for node in report.phases[0].nodes}
    rows = {row.name: (row.op_type, row.ran_as, row.state) for row in report.phases[0].file_nodes}
    assert rows["ln"] == ("LayerNormalization", ("SkipLayerNormalization",), "executed")
    assert replaced == {
        "SkipLayerNormalization": ("SkipLayerNormalization", ("add", "ln")),
        "pow": ("Pow", ()),
    }
    assert [check for check in report.checks if not check.passed] == [] and report.disagreements == ()


def test_what_nodes_make_is_told_in_the_type_that_they_ran_in(tmp_path):
    """The CPU provider has no kernel for Erf in float16: ONNX Runtime casts before and behind it."""
    result = placed(written(tmp_path / "m.onnx", "g (float16[4] x) => (float16[4] y) { [a] y = Erf(x) }"))
    report = join(result.facts, tuple(map(chain_entry, result.resolutions)), environment(), asked(tmp_path))
    made = [(node.op_type, node.element_type) for node in report.phases[0].nodes]
    assert made == [("Cast", "float32"), ("Erf", "float32"), ("Cast", "float16")]


def test_nodes_that_got_names_of_ours_have_them_in_the_optimised_graph_too(tmp_path):
    path = written(tmp_path / "m.onnx", "g (float[4] x) => (float[4] y) { t = Relu(x) y = Exp(t) }")
    session = session_of(placed(path))
    assert {node.name for node in session.optimised} == {name for stream in session.plan for name in stream}


def test_a_package_has_one_for_each_of_its_sessions(open_runner):
    runner = open_runner(observe=True, static_shapes=True)
    assert place.run_package(runner, 1) is None
    facts = with_optimised(run_facts.run_facts(runner), [entry.session for entry in runner.graphs])
    assert len(facts.sessions) == 2
    for session in facts.sessions:
        planned = {name for stream in session.plan or () for name in stream}
        assert {node.name for node in session.optimised or ()} == planned and planned


def test_pins_hold_in_the_second_session(tmp_path):
    path = written(tmp_path / "m.onnx", NORM)
    model = onnx.load(path)
    model.graph.node[1].metadata_props.add(key="partita.module", value="m.ln")
    onnx.save(model, path)
    result = placed(path, pins=parse_pins(["cpu:m.ln"], where().chain))
    assert session_of(result).optimised is not None, session_of(result).optimised_missing_reason


def test_it_leaves_nothing_on_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    placed(written(tmp_path / "m.onnx", NORM))
    assert [path.name for path in tmp_path.iterdir()] == ["m.onnx"]


def test_a_failure_becomes_a_sentence(tmp_path, monkeypatch):
    def fails(path, active, opening):
        raise NativeFailureError(RuntimeError("no room\nat all"), ())

    monkeypatch.setattr(run_facts, "open_native", fails)
    result = placed(written(tmp_path / "m.onnx", NORM))
    assert result.error is None and session_of(result).optimised is None
    assert "no room at all" in session_of(result).optimised_missing_reason


def test_a_graph_that_was_placed_otherwise_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setattr(run_facts, "read_optimised", lambda session: ((), (("Other", "pow"),)))
    session = session_of(placed(written(tmp_path / "m.onnx", NORM)))
    assert session.optimised is None
    assert "1 node only in the plan of the run, 1 only in its own" in session.optimised_missing_reason


def test_the_order_of_a_plan_does_not_matter_and_a_missing_one_does():
    assert difference((("a", "b"), ("c",)), (("c", "b", "a"),)) == ""
    assert difference((("a",),), (("a", "a"),)) != ""
    assert "no plan" in difference(None, (("a",),))


def test_weights_above_the_limit_are_not_held_once_more(open_runner, monkeypatch):
    monkeypatch.setattr(run_facts, "open_native", lambda *_: pytest.fail("a second session was opened"))
    runner = open_runner(observe=True)
    (facts,) = run_facts.run_facts(runner).sessions
    known = add_optimised(facts, runner.graphs[0].session, LIMIT_BYTES + 1)
    assert known.optimised is None and "256 MiB" in known.optimised_missing_reason


def test_a_provider_that_compiles_has_none(open_runner, monkeypatch):
    monkeypatch.setattr(run_facts, "open_native", lambda *_: pytest.fail("a second session was opened"))
    runner = open_runner(observe=True)
    session, (facts,) = runner.graphs[0].session, run_facts.run_facts(runner).sessions
    (entry,) = session.active
    session.active = (replace(entry, provider=replace(entry.provider, compiles=True)),)
    assert "cpu compiles" in add_optimised(facts, session, 0).optimised_missing_reason


def test_no_second_session_after_memory_ran_out(open_runner, monkeypatch):
    monkeypatch.setattr(run_facts, "open_native", lambda *_: pytest.fail("a second session was opened"))
    runner = open_runner(observe=True)
    facts = run_facts.run_facts(runner)
    error = ResourceError("memory ran out")
    assert place.with_graphs(facts, [runner.graphs[0].session], error) is facts


def test_a_node_reads_what_its_subgraphs_read_around_them():
    text = """g (float x, int64 trips, float around, float outer, bool f) => (float y) {
      [loop] y = Loop(trips, , x) <body = b (int64 i, bool c, float own) => (bool d, float m) {
        d = Identity(c)
        t = Add(own, around)
        m = If(f) <then_branch = t () => (float n) { n = Neg(outer) }, else_branch = e () => (float n) { n = Neg(t) }>
      }>
    }"""
    (node,) = onnx.parser.parse_graph(text).node
    assert with_captured(graph_node(node), node).inputs == ("trips", "", "x", "around", "f", "outer")
