"""`partita place`: the verb through its options, on the CPU and in dry runs of CUDA; limits, errors, exit codes."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from partita.commands import place as verb
from partita.commands.chain_options import ChainOptions
from partita.commands.place_options import PlaceOptions, from_json
from partita.errors import GenerationError, PackageError, PartitaError, ProviderError, ReportError, UsageError
from partita.partition_reports.limits import Limits
from partita.partition_reports.views import json as json_view
from partita.providers.cuda_dry_run import standins
from tests.contract import models
from tests.partition_reports.test_dry_run import times_in

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"


def place(model: Path, provider: str | None = "cpu", **changes) -> int:
    where = ChainOptions(provider=provider, threads=1, provider_options=changes.pop("options", ()))
    return verb.run(PlaceOptions(model=model, where=where, **changes))


@pytest.fixture
def island(tmp_path):
    """Three nodes, of which no provider but the CPU takes the second."""
    return models.island(tmp_path / "island.onnx")


def report_of(path: Path):
    return json_view.read(path)


def times_of_the_run(path: Path) -> list[str]:
    """Every time in a report but what the experiments took, which is time of this machine in a dry run too."""
    return [name for name in times_in(json.loads(path.read_text())) if not name.startswith(".probing.")]


# --- this machine --------------------------------------------------------------------------------------------------


def test_the_report_is_printed_and_written(island, tmp_path, capsys):
    assert place(island, report=tmp_path / "r.json") == 0
    out, err = capsys.readouterr()
    assert "3 of 3 nodes on CPUExecutionProvider in run" in out.splitlines()[0]
    assert "island.onnx: 3 nodes, opset ai.onnx 21, ai.onnx.ml 3" in out and "x float32[4,16]" in out
    assert f"report: {tmp_path / 'r.json'}" in err
    report = report_of(tmp_path / "r.json")
    assert report.request.verb == "place" and report.request.runs == 3
    assert [check.name for check in report.checks if not check.passed] == []
    assert report.phases[0].observed_runs == 3 and report.model and report.model.inputs[0].shape == (4, 16)


def test_json_is_the_report_and_nothing_else(island, capsys):
    assert place(island, as_json=True, runs=1) == 0
    content = json.loads(capsys.readouterr().out)
    assert (content["schema"], content["package"], content["totals"]) == ("partita.report/1", None, None)
    assert content["phases"][0]["observed_runs"] == 1


def test_a_package_has_its_two_phases_and_its_cache(tiny_package_folder, tmp_path, capsys):
    assert place(tiny_package_folder, report=tmp_path / "r.json") == 0
    report = report_of(tmp_path / "r.json")
    assert [phase.name for phase in report.phases] == ["prefill", "decode"]
    assert report.package and report.cache and report.model is None and report.totals is None
    assert "cache in place" in capsys.readouterr().out
    assert [check.name for check in report.checks if not check.passed] == []


@pytest.fixture(scope="session")
def tiny_package_folder(tiny_checkpoint, exported) -> Path:
    return exported(tiny_checkpoint("llama"))


def test_a_provider_that_is_left_out_is_said(island, tmp_path, capsys):
    assert place(island, "openvino,cpu", report=tmp_path / "r.json") == 0
    assert "note: OpenVINOExecutionProvider is not used: not_in_build" in capsys.readouterr().err
    report = report_of(tmp_path / "r.json")
    assert {entry.reason for entry in report.fallbacks} == {"not_in_build"} and len(report.fallbacks) == 3


def test_an_exceeded_limit_ends_with_3_after_the_report(island, tmp_path, capsys):
    with pytest.raises(ProviderError, match="--max-cpu-nodes 2: 3 nodes on CPUExecutionProvider in run") as caught:
        place(island, "openvino,cpu", limits=Limits(2), report=tmp_path / "r.json")
    assert caught.value.exit_code == 3
    assert "EXCEEDED --max-cpu-nodes 2" in capsys.readouterr().out
    assert len(report_of(tmp_path / "r.json").exceeded) == 1
    assert place(island, "openvino,cpu", limits=Limits(3, 0, 0)) == 0


def test_a_run_that_fails_is_an_error_after_the_report(tmp_path, capsys):
    node = helper.make_node("Add", ["x", "z"], ["y"], name="add")
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [size]) for name, size in (("x", "a"), ("z", "b"))]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    graph = helper.make_graph([node], "g", inputs, outputs)
    path = tmp_path / "m.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path)
    with pytest.raises(GenerationError, match="a run on generated inputs failed"):
        place(path, shapes=("a=2", "b=3"), report=tmp_path / "r.json")
    assert [node.name for node in report_of(tmp_path / "r.json").phases[0].nodes] == ["add"]


# --- bad input -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("changes", "says"), [
    ({"runs": 0}, "--runs is 0"),
    ({"runs": 10**6}, "--runs is 1000000"),
    ({"device": "h100"}, "--device is part of a dry run"),
    ({"graph_capture": True}, "--graph-capture is part of a dry run"),
    ({"provider": None, "dry_run": True}, "--dry-run needs --provider cuda"),
    ({"provider": "cpu", "dry_run": True}, "--dry-run is for CUDA"),
    ({"provider": "cpu,cuda", "dry_run": True}, "--dry-run is for CUDA"),
    ({"provider": "cuda", "dry_run": True, "device": "h1000"}, "unknown device 'h1000'; did you mean"),
    ({"limits": Limits(-1)}, "--max-cpu-nodes is -1"),
    ({"limits": Limits(1)}, "contradicts --provider"),
    ({"provider": "nosuch"}, "unknown provider 'nosuch'"),
    ({"shapes": ("z=1",)}, "'z' is neither an input"),
    ({"shapes": ("x=1,2,3",)}, "takes 2 sizes, not 3"),
])  # fmt: skip
def test_options_that_make_no_sense(island, changes, says):
    with pytest.raises(UsageError, match=says):
        place(island, **changes)


def test_a_shape_for_a_package_is_a_usage_error(tiny_package_folder):
    with pytest.raises(UsageError, match="--shape is for ONNX files"):
        place(tiny_package_folder, shapes=("x=1",))


@pytest.mark.parametrize("name", ["none.onnx", "folder", "broken.onnx"])
def test_what_is_no_model(tmp_path, name):
    (tmp_path / "folder").mkdir()
    (tmp_path / "broken.onnx").write_bytes(b"not a model")
    with pytest.raises(PackageError, match=name) as caught:
        place(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_a_place_where_no_report_can_be_written(island, tmp_path):
    with pytest.raises(ReportError, match="does not exist"):
        place(island, report=tmp_path / "none" / "r.json")


def test_options_survive_the_way_to_a_child(island, tmp_path):
    where = ChainOptions("cuda,cpu", ("cuda.device_id=0",), (), ("cpu:lm_head",), 2)
    options = PlaceOptions(island, where, ("x=4,16",), 2, tmp_path / "r.json", True, Limits(1, 2, 3), True, "l4", True)
    there = from_json(json.loads(json.dumps(options.to_json())))
    assert there.where == where and there.limits == options.limits and there.model == island.resolve()
    assert (there.shapes, there.runs, there.device, there.graph_capture) == (("x=4,16",), 2, "l4", True)


# --- dry runs ------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("stand_ins")
def test_a_dry_run_places_copies_explains_and_has_no_time(island, tmp_path, capsys):
    code = place(island, "cuda,cpu", dry_run=True, device="L4", graph_capture=True, report=tmp_path / "r.json")
    assert code == 0
    assert capsys.readouterr().out.startswith("DRY RUN: no NVIDIA L4 was used.")
    report = report_of(tmp_path / "r.json")
    (phase,) = report.phases
    assert {node.name: node.provider for node in phase.nodes if "/" in node.name} == {
        "first/MatMul": CUDA, "island/Scaler": CPU, "last/MatMul": CUDA,
    }  # fmt: skip
    copies = {(copy.kind, copy.tensor or copy.name): (copy.direction, copy.bytes_per_run) for copy in phase.copies}
    assert copies == {
        ("memcpy_node", "h"): ("device_to_host", 256), ("memcpy_node", "s"): ("host_to_device", 256),
        ("session_input", "x"): ("host_to_device", 256), ("session_output", "y"): ("device_to_host", 256),
    }  # fmt: skip
    (fallback,) = report.fallbacks
    # CUDA logs that it has no kernel, and not whether operator, version or type is missing: that takes experiments.
    assert (fallback.node, fallback.reason, fallback.evidence_kind) == ("island/Scaler", "no_kernel_op", "probed")
    assert "CUDA kernel not found in registries for Op type: Scaler" in fallback.evidence
    assert fallback.trials and not any(trial.outcome == "taken" for trial in fallback.trials)
    assert list(times_of_the_run(tmp_path / "r.json")) == []
    assert [check.name for check in report.checks if not check.passed] == []
    played = report.dry_run
    assert played and (played.device, played.compute_capability, played.multiprocessors) == ("l4", "8.9", 58)
    assert played.graph_capture
    (verdict,) = played.graph_capture
    assert not verdict.accepted and "graph capture" in verdict.evidence
    assert {node.node for node in verdict.blocking} == {"Memcpy", "Memcpy_token_0", "island/Scaler"}


@pytest.mark.usefixtures("stand_ins")
def test_a_model_that_cuda_takes_whole_would_be_captured(tmp_path):
    model = models.matmul_relu(tmp_path / "m.onnx")
    limits = Limits(0, 0, 512)
    assert place(model, "cuda", dry_run=True, graph_capture=True, limits=limits, report=tmp_path / "r.json") == 0
    report = report_of(tmp_path / "r.json")
    assert report.dry_run and report.dry_run.device == "h100"
    assert [(v.accepted, v.blocking) for v in report.dry_run.graph_capture or ()] == [(True, ())]
    with pytest.raises(ProviderError, match="--max-copy-bytes-per-token 511: 512 bytes in 2 copies"):
        place(model, "cuda", dry_run=True, limits=Limits(max_copy_bytes_per_token=511))


@pytest.mark.usefixtures("stand_ins")
def test_limits_gate_cuda_placement_without_a_gpu(island, tmp_path):
    with pytest.raises(ProviderError) as caught:
        place(island, "cuda,cpu", dry_run=True, limits=Limits(0, 1), report=tmp_path / "r.json")
    assert caught.value.exit_code == 3
    assert "--max-cpu-nodes 0: 1 node on CPUExecutionProvider in run: island/Scaler (Scaler)" in str(caught.value)
    assert "--max-copies 1: 2 Memcpy nodes" in str(caught.value)
    assert len(report_of(tmp_path / "r.json").exceeded) == 2


@pytest.mark.usefixtures("stand_ins")
def test_cuda_alone_is_refused_with_the_nodes(island):
    with pytest.raises(ProviderError) as caught:
        place(island, "cuda", dry_run=True)
    assert "1 node" in str(caught.value) and "Scaler" in str(caught.value)
    assert "island/Scaler" in caught.value.details and "no_kernel_op" in caught.value.details


@pytest.mark.usefixtures("stand_ins")
def test_sizes_that_depend_on_values_are_unknown_and_exceed_a_limit_on_bytes(tmp_path):
    nodes = [
        helper.make_node("Relu", ["x"], ["a"], name="relu"),
        helper.make_node("NonZero", ["a"], ["i"], name="nonzero"),
        helper.make_node("Cast", ["i"], ["y"], name="cast", to=TensorProto.FLOAT),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [4, 4])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, "found"])
    graph = helper.make_graph(nodes, "g", [x], [y])
    path = tmp_path / "m.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path)
    with pytest.raises(ProviderError, match="the size of 1 copy is unknown: y"):
        place(path, "cuda,cpu", dry_run=True, limits=Limits(max_copy_bytes_per_token=10**6), report=tmp_path / "r.json")
    assert place(path, "cuda,cpu", dry_run=True, graph_capture=True, report=tmp_path / "r.json") == 0
    played = report_of(tmp_path / "r.json").dry_run
    assert played and played.graph_capture and not played.graph_capture[0].accepted
    assert [entry.node for entry in played.graph_capture[0].blocking] == ["nonzero"]
    assert "the run that captures would fail: 1 node (the host reads" in played.graph_capture[0].evidence
    sizes = {node.name: node.output_bytes for node in report_of(tmp_path / "r.json").phases[0].nodes}
    assert sizes["relu"] == 64 and sizes["nonzero"] is None


@pytest.mark.usefixtures("stand_ins")
def test_a_dry_run_whose_run_fails_still_places(tmp_path):
    """The shape of Reshape comes from the device, where everything is zero."""
    nodes = [
        helper.make_node("Relu", ["x"], ["a"], name="relu"),
        helper.make_node("ReduceMax", ["a"], ["m"], name="max", keepdims=0),
        helper.make_node("Cast", ["m"], ["c"], name="cast", to=TensorProto.INT64),
        helper.make_node("Unsqueeze", ["c", "zero"], ["s"], name="unsqueeze"),
        helper.make_node("Reshape", ["a", "s"], ["y"], name="reshape"),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [4, 4])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n"])
    graph = helper.make_graph(nodes, "g", [x], [y], [numpy_helper.from_array(np.array([0]), "zero")])
    path = tmp_path / "m.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path)
    assert place(path, "cuda,cpu", dry_run=True, report=tmp_path / "r.json") == 0
    report = report_of(tmp_path / "r.json")
    assert {node.provider for node in report.phases[0].nodes if node.op_type == "Relu"} == {CUDA}
    assert any("says nothing about the model" in note for note in report.notes)
    assert all(copy.bytes_per_run is None for copy in report.phases[0].copies if copy.kind != "session_input")
    assert list(times_of_the_run(tmp_path / "r.json")) == []


@pytest.mark.usefixtures("stand_ins")
def test_control_flow_keeps_a_graph_from_being_captured(tmp_path):
    def info(name, kind=TensorProto.FLOAT, shape=(4, 4)):
        return helper.make_tensor_value_info(name, kind, shape)

    bodies = {
        f"{word}_branch": helper.make_graph([helper.make_node(op, ["x"], [word])], word, [], [info(word)])
        for word, op in (("then", "Relu"), ("else", "Neg"))
    }
    node = helper.make_node("If", ["flag"], ["y"], name="choice", **bodies)
    graph = helper.make_graph([node], "g", [info("flag", TensorProto.BOOL, ()), info("x")], [info("y")])
    path = tmp_path / "m.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path)
    assert place(path, "cuda,cpu", dry_run=True, graph_capture=True, report=tmp_path / "r.json") == 0
    played = report_of(tmp_path / "r.json").dry_run
    assert played and played.graph_capture
    assert not played.graph_capture[0].accepted and "control flow" in played.graph_capture[0].evidence
    assert [entry.node for entry in played.graph_capture[0].blocking] == ["choice"]


@pytest.mark.usefixtures("stand_ins")
def test_a_dry_run_of_a_package(tiny_package_folder, tmp_path):
    code = place(tiny_package_folder, "cuda,cpu", dry_run=True, graph_capture=True, report=tmp_path / "r.json")
    report = report_of(tmp_path / "r.json")
    assert code == 0 and [phase.name for phase in report.phases] == ["prefill", "decode"]
    on_cpu = {node.op_type for phase in report.phases for node in phase.nodes if node.provider == CPU}
    assert on_cpu == {"GroupQueryAttention"}, "CUDA has no float32 kernel for it"
    assert {(entry.reason, entry.evidence_kind) for entry in report.fallbacks} == {("no_kernel_type", "probed")}
    assert all("with float16" in entry.evidence for entry in report.fallbacks)
    assert {entry.phase for entry in report.fallbacks} == {"prefill", "decode"}
    assert all(copy.bytes_per_run for copy in report.phases[1].copies if copy.kind == "memcpy_node")
    assert all(copy.tensor for copy in report.phases[1].copies if copy.kind == "memcpy_node")
    assert list(times_of_the_run(tmp_path / "r.json")) == []
    assert report.package and report.cache and report.cache.states > 0
    assert [check.name for check in report.checks if not check.passed] == []


@pytest.mark.usefixtures("stand_ins")
def test_an_error_in_the_child_is_the_error_it_was(tmp_path):
    broken = tmp_path / "broken.onnx"
    broken.write_bytes(b"not a model")
    with pytest.raises(PackageError, match="broken.onnx"):
        place(broken, "cuda", dry_run=True)
    dynamic = models.matmul_relu(tmp_path / "m.onnx")
    with pytest.raises(UsageError, match="neither an input"):
        place(dynamic, "cuda", dry_run=True, shapes=("nosuch=1",))
    with pytest.raises(PartitaError):
        place(dynamic, "cuda", dry_run=True, options=("cuda.device_id=17",))


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize(("number", "name"), [(signal.SIGABRT, "SIGABRT"), (signal.SIGSEGV, "SIGSEGV")])
def test_a_child_that_crashes_is_a_finding(island, tmp_path, monkeypatch, number, name):
    module = tmp_path / "crashing_child.py"
    module.write_text(
        "import os, sys\nsys.stderr.write('terminate called in the provider\\n')\nsys.stderr.flush()\n"
        f"os.kill(os.getpid(), {int(number)})\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(verb, "CHILD", "crashing_child")
    with pytest.raises(ProviderError) as caught:
        place(island, "cuda", dry_run=True)
    message = str(caught.value)
    assert "initialisation_failed" in message and name in message and "terminate called in the provider" in message


@pytest.mark.usefixtures("stand_ins")
def test_nothing_is_left_in_the_temporary_folder(island, tmp_path, monkeypatch):
    folder = tmp_path / "temp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    assert place(island, "cuda,cpu", dry_run=True, graph_capture=True) == 0
    assert place(island) == 0
    (tmp_path / "crashing_child.py").write_text(
        "import os, tempfile\ntempfile.mkdtemp(prefix='partita-')\nos.kill(os.getpid(), 6)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(verb, "CHILD", "crashing_child")
    with pytest.raises(ProviderError, match="SIGABRT"):
        place(island, "cuda", dry_run=True)
    assert list(folder.iterdir()) == []


@pytest.mark.usefixtures("stand_ins")
def test_a_child_that_hangs_is_a_finding(island, tmp_path, monkeypatch):
    (tmp_path / "hanging_child.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(verb, "CHILD", "hanging_child")
    monkeypatch.setattr(verb, "DRY_RUN_SECONDS", 1.0)
    with pytest.raises(ProviderError, match="no answer within 1 s"):
        place(island, "cuda", dry_run=True)


@pytest.mark.usefixtures("stand_ins")
def test_a_child_without_the_stand_ins_refuses(island, monkeypatch):
    monkeypatch.setattr(standins, "child_environment", lambda *_: dict(os.environ))
    with pytest.raises(ProviderError, match="not started as a dry run"):
        place(island, "cuda", dry_run=True)


@pytest.mark.usefixtures("stand_ins")
def test_no_compiler_is_said(island, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "fresh"))
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(ProviderError, match="needs a C compiler"):
        place(island, "cuda", dry_run=True)


def test_weights_beside_the_model_are_named(tmp_path, capsys):
    weight = numpy_helper.from_array(np.ones((4, 4), np.float32), "w")
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [4, 4]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Add", ["x", "w"], ["y"])], "g", ports[:1], ports[1:], [weight])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.save(
        model, tmp_path / "m.onnx", save_as_external_data=True, location="m.data", size_threshold=0
    )  # fmt: skip
    assert place(tmp_path / "m.onnx") == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "weights in m.data" in out and "1 node without a name in the file" in out
