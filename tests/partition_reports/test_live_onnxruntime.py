"""Facts taken from ONNX Runtime on the spot: what it writes today is what the report's builder expects."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.partition_reports.samples import (
    CPU,
    failed,
    phase_of,
    report_of,
    run_facts,
    session_facts,
)

SHAPE = (1, 64, 64)


def control_flow_model() -> bytes:
    """x -> If(x * x then relu, else -x) -> Loop(doubles) -> Sqrt, with nodes named as an export names them."""
    from onnx import TensorProto, checker, helper

    def tensor(name, kind=TensorProto.FLOAT, shape=SHAPE):
        return helper.make_tensor_value_info(name, kind, shape)

    square = helper.make_node("Mul", ["x", "x"], ["t"], name="m.then/Mul")
    relu = helper.make_node("Relu", ["t"], ["then_out"], name="m.then/Relu")
    then = helper.make_graph([square, relu], "then", [], [tensor("then_out")])
    negate = helper.make_node("Neg", ["x"], ["else_out"], name="m.else/Neg")
    otherwise = helper.make_graph([negate], "else", [], [tensor("else_out")])
    double = helper.make_node("Add", ["v", "v"], ["v2"], name="m.loop/Add")
    keep = helper.make_node("Identity", ["c"], ["c2"], name="m.loop/Identity")
    flag, count = tensor("flag", TensorProto.BOOL, ()), tensor("n", TensorProto.INT64, ())
    ins = [tensor("i", TensorProto.INT64, ()), tensor("c", TensorProto.BOOL, ()), tensor("v")]
    body = helper.make_graph([double, keep], "body", ins, [tensor("c2", TensorProto.BOOL, ()), tensor("v2")])
    nodes = [
        helper.make_node("If", ["flag"], ["y"], name="m/If", then_branch=then, else_branch=otherwise),
        helper.make_node("Loop", ["n", "flag", "y"], ["w"], name="m/Loop", body=body),
        helper.make_node("Sqrt", ["w"], ["z"], name="m/Sqrt"),
    ]
    graph = helper.make_graph(nodes, "g", [flag, count, tensor("x")], [tensor("z")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    checker.check_model(model)
    return model.SerializeToString()


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """One prefill run through the then branch, two decode runs through both."""
    import onnxruntime

    from partita.observations.facts import AssignedNode, NodeEvent, RunWindow

    folder = tmp_path_factory.mktemp("run")
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.node_partition_config_file", str(folder / "plan.json"))
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    options.enable_profiling = True
    options.profile_file_prefix = str(folder / "profile")
    session = onnxruntime.InferenceSession(control_flow_model(), options, providers=[CPU])
    phases = ("prefill", "decode", "decode")
    for flag in (True, False, True):
        session.run(None, {"flag": np.array(flag), "n": np.array(3), "x": np.ones(SHAPE, np.float32)})
    written = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
    profile = sorted(written, key=lambda entry: entry["ts"])
    starts = [entry for entry in profile if entry["name"] == "model_run"]
    runs, events = [], []
    for number, (phase, start) in enumerate(zip(phases, starts, strict=True)):
        runs.append(RunWindow(number, phase, 1, start["ts"], start["dur"]))
        inside = [e for e in profile if e["cat"] == "Node" and 0 <= e["ts"] - start["ts"] <= start["dur"]]
        for order, entry in enumerate(inside):
            about, name = entry["args"], entry["name"].removesuffix("_kernel_time")
            size, shapes = int(about["output_size"]), tuple(map(str, about["output_type_shape"]))
            fields = (about["op_name"], about["provider"], entry["ts"], entry["dur"], size, shapes)
            events.append(NodeEvent(number, order, name, *fields))
    assigned = tuple(
        AssignedNode(node.name, node.op_type, node.domain, part.ep_name, number)
        for number, part in enumerate(session.get_provider_graph_assignment_info())
        for node in part.get_nodes()
    )
    plan = json.loads((folder / "plan.json").read_text(encoding="utf-8"))["streams"]
    facts = session_facts(
        plan=tuple(tuple(stream) for stream in plan), assigned=assigned, events=tuple(events), runs=tuple(runs)
    )
    assert any(entry.name == "m.loop/Add" for entry in events), "bodies are profiled"
    return report_of(run_facts(facts))


def test_everything_adds_up(report):
    assert failed(report) == []
    assert report.conflicts == ()


def test_bodies_are_part_of_their_node_and_not_nodes_of_their_own(report):
    for name in ("prefill", "decode"):
        assert [node.name for node in phase_of(report, name).nodes] == ["m/If", "m/Loop", "m/Sqrt"]
    check = next(check for check in report.checks if "every executed node" in check.name)
    assert "5 more ran in control-flow subgraphs" in check.detail


def test_bytes_are_what_the_tensors_hold(report):
    sizes = {node.name: node.output_bytes for node in phase_of(report, "decode").nodes}
    assert sizes == dict.fromkeys(("m/If", "m/Loop", "m/Sqrt"), 64 * 64 * 4)
