"""The report and the result of a bench as objects, and `partita.place`."""

from __future__ import annotations

import html
import json
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import parser

import partita
from partita.bench.records import Bench
from partita.library import bench as benchmark
from partita.partition_reports import storage
from tests.commands.test_place import press_ctrl_c

RELU = """<ir_version: 10, opset_import: ["": 21]>
g (float[N,4] x) => (float[N,4] y) { [first] h = Relu(x)  [second] y = Sigmoid(h) }"""
GATHER = """<ir_version: 10, opset_import: ["": 21]>
g (float[4] x, int64[1] i) => (float[1] y) { y = Gather(x, i) }"""


@pytest.fixture
def model(tmp_path):
    onnx.save(parser.parse_model(RELU), tmp_path / "m.onnx")
    return tmp_path / "m.onnx"


@pytest.fixture
def report(model):
    return partita.place(model, "cpu", shapes={"x": (2, 4)})


def test_place_reports_provider_of_every_node(report, model, capfd):
    assert {node.name: node.provider for node in report.phases[0].nodes} == dict.fromkeys(
        ("first", "second"), "CPUExecutionProvider"
    )
    assert report.request.options["shape"] == "x=2,4" and report.request.chain_source == "given"
    again = partita.place(model, ["CPUExecutionProvider"], shapes={"N": 2}, runs=1)
    assert again.request.runs == 1
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("process", ["this", "child"])
def test_placement_error_contains_report(tmp_path, process):
    path, values = tmp_path / "m.onnx", tmp_path / "i.npy"
    onnx.save(parser.parse_model(GATHER), path)
    np.save(values, np.array([77], np.int64))
    with pytest.raises(partita.PlacementError) as caught:
        partita.place(path, "cpu", inputs={"i": values}, process=process)
    cause = caught.value.__cause__
    assert caught.value.report.phases[0].nodes and isinstance(cause, partita.PartitaError)
    assert (str(caught.value), caught.value.remedy) == (str(cause), cause.remedy)


@pytest.mark.parametrize("process", ["this", "child"])
def test_ctrl_c_during_place_raises_keyboard_interrupt(model, monkeypatch, process):
    where = "ort.session.Binding.run" if process == "this" else "worker.parent.Worker.wait"

    monkeypatch.setattr(f"partita.runtime.{where}", press_ctrl_c)
    with pytest.raises(KeyboardInterrupt):
        partita.place(model, "cpu", shapes={"x": (2, 4)}, process=process)


# --- the object ------------------------------------------------------------------------------------------------------


def test_report_round_trips_through_file(report, tmp_path):
    report.save(tmp_path / "r.json")
    assert storage.read(tmp_path / "r.json").model_dump() == report.model_dump()
    assert partita.Report.read(tmp_path / "r.json") == report
    with pytest.raises(partita.ReportError):
        report.save(tmp_path / "none" / "r.json")
    with pytest.raises(partita.ReportError):
        partita.Report.read(tmp_path / "none.json")


def test_report_views_are_returned_and_written(report, tmp_path):
    for name, to_text, begins in (
        ("r.html", report.to_html, "<!doctype html>"),
        ("r.md", report.to_markdown, "###"),
        ("r.txt", report.to_text, ""),
    ):
        text = to_text(tmp_path / name)
        assert text == to_text() == (tmp_path / name).read_text("utf-8")
        assert text.lower().startswith(begins) and "\x1b" not in text
    assert html.unescape(report._repr_html_()).count(report.to_html()) == 1


def test_explain_returns_node_or_suggests_matches(report):
    assert report.explain("first").op_type == "Relu"
    with pytest.raises(partita.ArgumentError, match="first"):
        report.explain("s")
    with pytest.raises(partita.ArgumentError, match="no node matches"):
        report.explain("nothing")


def test_check_returns_result_or_raises_check_failed_error(report):
    result = report.check("provider=cpu,share=1", max_copies=0)
    assert result.passed and len(result.outcomes) == 2
    with pytest.raises(partita.CheckFailedError) as caught:
        report.check("provider=cpu,share=1", "op=Relu,nodes>1", max_unexplained=0)
    assert [outcome.met for outcome in caught.value.result.outcomes].count(False) == 1
    assert "nodes>1" in str(caught.value) and isinstance(caught.value, partita.ReportCheckError)
    assert report.check(baseline=report).passed
    for arguments in ((), ("provider=nix,share=1",), ("nonsense",)):
        with pytest.raises(partita.ArgumentError):
            report.check(*arguments)


def test_diff_compares_reports_of_same_model(report, model, tmp_path):
    assert report.diff(partita.place(model, "cpu", shapes={"x": (2, 4)})).same
    onnx.save(parser.parse_model(GATHER), tmp_path / "other.onnx")
    with pytest.raises(partita.ReportError, match="cannot be compared"):
        report.diff(partita.place(tmp_path / "other.onnx", "cpu"))


def test_unknown_device_error_names_argument_and_suggestion(model):
    with pytest.raises(partita.ArgumentError, match="^`device`: unknown device 'h10'; did you mean 'h100'") as caught:
        partita.place(model, "cuda,cpu", dry_run=True, device="h10")
    assert caught.value.remedy is not None and caught.value.remedy.options == ("--device", "h100")


# The measurements of `partita bench` as an object, without output


QUICK: dict[str, Any] = {"rounds": 1, "max_new_tokens": 4}
NO_DEVICE = "cuda,cpu"
"""On a machine without CUDA this is the CPU, under another name."""


def test_bench_compares_two_chains_without_printing(package, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(benchmark, "PAUSE_SECONDS", 0.0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    result = partita.bench(package, [5, 6, 7], [["cuda", "cpu"], "cpu"], reports=tmp_path / "reports", **QUICK)
    first, cpu = result.contenders
    assert (first.name, cpu.name, result.baseline) == (NO_DEVICE, "cpu", "cpu")
    assert (first.status, cpu.rounds, first.same_tokens) == ("measured", 1, True)
    assert result.prompt_tokens == 3 and [len(turn.tokens[0]) for turn in cpu.round_results] == [4, 4]
    assert storage.read(tmp_path / "reports" / "cpu.json").request.chain_source == "given"
    result.save(tmp_path / "bench.json")
    assert Bench.model_validate_json((tmp_path / "bench.json").read_text()) == Bench.model_validate(
        json.loads(result.model_dump_json(by_alias=True))
    )
    assert result.to_text(tmp_path / "bench.txt").startswith(f"{NO_DEVICE} is ") and "tokens/s" in result.to_html()
    assert (tmp_path / "bench.txt").read_text() == result.to_text()
    assert repr(result) == f"<partita.BenchResult: {'; '.join(result.verdict)}>"
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"chains": []}, "`chains` is empty"),
        ({"chains": "cpu", "baseline": "webgpu"}, "`baseline=webgpu`: not among"),
        ({"chains": "cpu", "prompt": ["a", "b"]}, "`prompt` has 2 prompts"),
    ],
)
def test_invalid_bench_arguments_raise_argument_error(package, arguments, says):
    with pytest.raises(partita.ArgumentError) as caught:
        partita.bench(package, **arguments)
    assert says in str(caught.value) and "--" not in str(caught.value)
