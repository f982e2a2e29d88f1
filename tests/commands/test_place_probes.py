"""`partita place` with probes of fallback nodes over stub CUDA libraries, and models that cannot be placed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

from tests.contract.commands import Done, execute, refused

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
HEAD = '<ir_version: 10, opset_import: ["" : 22, "ai.onnx.ml" : 3, "own" : 1]>\n'
PLANTED = (
    "g (float[1,4,8,8] x, int64[4,4] i, float[4,16] z) => (float[1,4,4,4] y, int64[4,4] j, int64[1,16] k) {\n"
    "  [first] a = Neg(x)\n  [version] b = MaxPool<kernel_shape=[2,2], strides=[2,2]>(a)\n  [operator] c = Celu(b)\n"
    "  [last] y = Neg(c)\n  [type] j = MatMul(i, i)\n  [before] r = Neg(z)\n"
    "  [attribute] k = ArgMax<select_last_index=1>(r)\n}"
)
"""Nodes whose cause only an experiment tells: what CUDA of ONNX Runtime 1.31 logs of the last is vague."""
CODES = {
    "version": "no_kernel_version",
    "operator": "no_kernel_op",
    "type": "no_kernel_type",
    "attribute": "attribute_unsupported",
}
PROBED = ("version", "operator", "type", "attribute")
Place = Callable[..., Done]


@pytest.fixture
def nothing_known(tmp_path: Path, stand_ins: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of its own, without answers at first; the stub libraries are those of all tests."""
    (tmp_path / "answers").mkdir()
    stand_ins.mkdir(exist_ok=True)
    (tmp_path / "answers" / stand_ins.name).symlink_to(stand_ins)
    monkeypatch.setenv("PARTITA_CACHE_DIR", str(tmp_path / "answers"))


def write(path: Path, text: str) -> Path:
    onnx.save(parser.parse_model(HEAD + text), path)
    return path


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    return write(tmp_path / "planted.onnx", PLANTED)


@pytest.fixture
def place(tmp_path: Path, stand_ins: Path) -> Place:
    """Run `partita place` in a dry run; it must not show a traceback, whatever happens.

    What is known from one test is known in the next, as it is for a user.
    """

    def command(model: Path, *arguments: object, provider: str = "cuda,cpu", **extra: str) -> Done:
        options = ("--provider", provider, "--dry-run", "--runs", 1, *arguments)
        done = execute("-m", "partita", "place", model, *options, folder=tmp_path, **extra)
        assert "Traceback" not in done.out + done.err, done
        return done

    return command


def content(done: Done) -> dict[str, Any]:
    assert done.code == 0, done
    failed = [check["name"] for check in done.json["checks"] if not check["passed"]]
    assert failed == [], done
    return done.json


def reasons(report: dict[str, Any]) -> dict[str, str]:
    return {entry["node"]: entry["reason"] for entry in report["fallbacks"]}


# --- what experiments tell -----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("nothing_known")
def test_probes_identify_each_fallback_cause(place, planted):
    report = content(place(planted, "--json"))
    assert reasons(report) == CODES
    found = {entry["node"]: entry for entry in report["fallbacks"]}
    for name in PROBED:
        assert found[name]["evidence_kind"] == "probed" and found[name]["missing_probes"] == ""
        first = found[name]["variants"][0]
        assert (first["factor"], first["outcome"], first["cached"]) == ("as_is", "rejected", False)
        assert taken(found[name]["variants"]) == (name != "operator")
    assert "with MaxPool of opset 12" in found["version"]["evidence"]
    assert "float32" in found["type"]["evidence"] and "in place of int64" in found["type"]["evidence"]
    probing = report["probing"]
    assert (
        probing["experiments"] > 10 and probing["cached"] == probing["crashes"] == 0 and probing["missing_probes"] == []
    )
    assert probing["seconds"] <= probing["budget_seconds"] == 120
    a_second_run_knows_the_answers(place, planted, report)


def a_second_run_knows_the_answers(place, planted, first):
    second = content(place(planted, "--json"))
    assert second["probing"]["experiments"] == 0
    assert second["probing"]["cached"] == first["probing"]["experiments"]
    assert second["probing"]["seconds"] < first["probing"]["seconds"]
    assert all(trial["cached"] for entry in second["fallbacks"] for trial in entry["variants"])
    assert [(e["node"], e["reason"], e["evidence"]) for e in first["fallbacks"]] == [
        (e["node"], e["reason"], e["evidence"]) for e in second["fallbacks"]
    ]
    assert content(place(planted, "--json", "--device", "l4"))["probing"]["cached"] == 0, "of another device"


# --- crashes -------------------------------------------------------------------------------------------------------


def taken(trials: list[dict[str, Any]]) -> bool:
    return any(trial["outcome"] == "supported" for trial in trials)


# --- bad input, with nodes that fall back --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("graph", "told"),
    [
        (
            "g (bfloat16[4] x) => (bfloat16[4] y) { [n] y = Sigmoid(x) }",
            "CPUExecutionProvider: no_kernel_type: with float32, float16 or float64 in place of bfloat16 the provider",
        ),
        (
            "g (float[2,8,8,4] x, float[4] s, float[4] b) => (float[2,8,8,4] y) {"
            " [n] y = com.microsoft.GroupNorm<groups=2, activation=0>(x, s, b) }",
            "CPUExecutionProvider: no_kernel_op: tested in isolation, the provider does not support it",
        ),
        (
            "g (int16[4] x, int16 low, int16 high) => (int16[4] y) { [n] y = Clip(x, low, high) }",
            "is in the function of node 'n' (Clip); CPUExecutionProvider: no_kernel_type: with float32",
        ),
    ],
    ids=["type", "operator", "node of a function"],
)
def test_node_without_any_kernel_is_rejected_with_cause(tmp_path, graph, told):
    onnx.save(parser.parse_model(HEAD.replace('"own"', '"com.microsoft"') + graph), tmp_path / "m.onnx")
    done = execute("-m", "partita", "place", tmp_path / "m.onnx", "--provider", "cpu", folder=tmp_path)
    refused(done, told, code=3)
    assert done.err.count("Could not find an implementation") == 1


@pytest.mark.parametrize(("kind", "says"), [("seq(float[4])", "x is a sequence"), ("int4[4]", "x is a tensor of int4")])
def test_model_with_ungeneratable_inputs_is_placed_but_not_run(place, tmp_path, kind, says):
    path = tmp_path / "m.onnx"
    text = f"g ({kind} x, float[4] z) => (float[4] y) {{\n  [n] y = Celu(z)\n}}"
    onnx.save(parser.parse_model(HEAD + text), path)
    report = content(place(path, "--json"))
    (phase,) = report["phases"]
    assert phase["nodes"] and phase["observed_runs"] == 0 and [row["node"] for row in report["fallbacks"]] == ["n"]
    assert any("not run" in note and says in note for note in report["notes"])
    assert all(check["passed"] for check in report["checks"])


@pytest.mark.usefixtures("nothing_known")
def test_probes_use_external_data_and_missing_data_is_rejected(place, tmp_path):
    text = "g (int64[16,16] x) => (int64[16,16] y) { [type] y = MatMul(x, w) }"
    model = parser.parse_model(HEAD + text)
    model.graph.initializer.append(numpy_helper.from_array(np.ones((16, 16), np.int64), "w"))
    path, data = tmp_path / "m.onnx", tmp_path / "m.data"
    onnx.save(model, path, save_as_external_data=True, location="m.data", size_threshold=0)
    assert reasons(content(place(path, "--json"))) == {"type": "no_kernel_type"}
    data.write_bytes(b"short")
    refused(place(path), "m.onnx", code=1)
    data.unlink()
    refused(place(path), "m.onnx", code=1)
