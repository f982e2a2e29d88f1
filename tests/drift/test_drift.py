"""`partita drift`: results, notes on omitted comparisons, and one-line errors for bad input."""

from __future__ import annotations

import io
import json
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import parser
from rich.console import Console

import partita
from partita.cli import run
from partita.drift import comparison, sides
from partita.drift.comparison import Settings, deviation
from partita.drift.measure import measure
from partita.drift.records import Drift
from partita.drift.sides import GraphRun, Side, Step, file_step, package_steps
from partita.errors import GenerationError
from partita.foreign.folder import Choice, open_folder
from partita.partition_reports.render.show import load_view
from partita.providers.resolve import parse_chain
from partita.runtime.place.onnx_model import read_onnx
from tests.conftest import Exported, TinyCheckpoint
from tests.drift.faults import Fault, plant
from tests.drift.planted import compare
from tests.foreign.conftest import SAMPLES
from tests.views import print_text

HEAD = '<ir_version: 10, opset_import: ["" : 21]>\n'
PLAIN = "g (float[2,8] x) => (float[2,8] y) <float[8,8] w> { [a] h = MatMul(x, w) [b] p = Relu(h) [c] y = Add(p, x) }"
HUGE = """g (float[2,8] x) => (float[2,8] y) { [s] s = Constant<value = int64[3] {1048576, 1048576, 8}>()
  [z] z = ReduceMax<keepdims=0>(x) [h] h = Expand(z, s) [r] r = ReduceMax<keepdims=0>(h) [y] y = Add(x, r) }"""
"""A tensor of 32 TiB."""
PLAIN_SETTINGS = Settings()
GENAI = SAMPLES / "genai-fp32-cpu"


def saved(text: str, path: Path) -> Path:
    """A graph with random weights, in a folder of its own."""
    proto = parser.parse_model(HEAD + text)
    rng = np.random.default_rng(1)
    for port in proto.graph.value_info:
        shape = [size.dim_value for size in port.type.tensor_type.shape.dim]
        proto.graph.initializer.append(onnx.numpy_helper.from_array(rng.random(shape, np.float32), port.name))
    del proto.graph.value_info[:]
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(proto, path)
    return path


def both(before: str, after: str, folder: Path, settings: Settings = PLAIN_SETTINGS) -> Drift:
    """Two graphs of the same structure, compared on the CPU; the second is the tested one."""
    one, two = saved(before, folder / "one" / "m.onnx"), saved(after, folder / "two" / "m.onnx")
    model = read_onnx(one)
    shapes = {port.name: tuple(size for size in port.shape or () if isinstance(size, int)) for port in model.inputs}
    steps = [file_step(model, shapes, {})]
    cpu = parse_chain("cpu")
    return measure("m.onnx", Side(two.parent, cpu), Side(one.parent, cpu), steps, settings)


def text_of(found: Drift, width: int = 80) -> str:
    stream = io.StringIO()
    print_text(found, "partita.drift.records", Console(file=stream, width=width, color_system=None))
    return stream.getvalue()


def test_wrong_operator_is_located_despite_later_differences(tmp_path: Path) -> None:
    found = both(PLAIN, PLAIN.replace("Relu", "Sigmoid"), tmp_path)
    assert (found.first_node, found.basis) == ("b", "alone")
    by_name = {node.name: node for node in found.nodes or found.layers}
    assert by_name["b"].exceeds_tolerance and found.outputs.exceeds_tolerance


def test_text_fits_80_columns_and_shows_the_growth(tmp_path: Path) -> None:
    fault = Fault("genai-fp32-cpu", "x", "/model/layers.0/mlp/up_proj/MatMul", scale=2.0)
    found = compare(GENAI, plant(GENAI, fault, tmp_path / "faulty"))
    text = text_of(found)
    assert max(map(len, text.splitlines())) <= 80
    assert "first node over tolerance on cpu against cpu" in " ".join(text.split())
    assert "error in the whole graph, by layer: " in text and "█" in text
    page = load_view("html", "partita.drift.records").to_text(found)
    marks = ('<rect class="over"', '<line class="limit"', f"<title>{found.layers[0].name}: ")
    assert page.count("<rect ") == len(found.layers) and all(mark in page for mark in marks)
    assert found.pin_trials == ()  # both sides run on the same provider


def test_free_running_changes_the_error_of_a_fault_in_a_state(tmp_path: Path) -> None:
    fault = Fault("genai-fp32-cpu", "x", "/model/layers.0/attn/qkv_proj/MatMul", scale=1.01)
    faulty = plant(GENAI, fault, tmp_path / "faulty")
    cpu = parse_chain("cpu")
    steps = package_steps(Side(GENAI, cpu), open_folder(GENAI, Choice()))
    states = {}
    for own in (False, True):
        found = measure("m", Side(faulty, cpu), Side(GENAI, cpu), steps[1:], Settings(free_running=own))
        states[own] = [layer.error for layer in found.layers]
        assert found.steps == (steps[1].name, steps[-1].name)
    assert states[True] != states[False]


def test_memory_limit_does_not_change_the_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = PLAIN.replace("Relu", "Sigmoid")
    whole = both(PLAIN, changed, tmp_path)
    monkeypatch.setattr(comparison, "free_bytes", lambda: 1)
    small = both(PLAIN, changed, tmp_path)
    assert (small.first_node, small.layers) == (whole.first_node, whole.layers)


@pytest.mark.parametrize(("node", "fault"), [("a", "Abs(x)"), ("b", "Sigmoid(h)")])
def test_tensors_that_cannot_be_read_are_noted_and_faults_are_found(
    node: str, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenVINO cannot run some graphs with further outputs."""

    def run_graph(side: Side, step: Step, model: bytes | None, outputs: Sequence[str] | None) -> GraphRun:
        if side.folder.name == "two" and "h" in (outputs or ()):
            raise GenerationError("output names mismatch")
        return original(side, step, model, outputs)

    original = sides.run_graph
    monkeypatch.setattr(sides, "run_graph", run_graph)
    graph = "g (float[2,8] x) => (float[2,8] y) { [a] h = Neg(x) [b] p = Relu(h) [c] y = Add(p, x) }"
    correct = both(graph, graph, tmp_path, Settings(by_node=True))
    assert correct.is_within and [entry.error for entry in correct.nodes] == [None, 0, 0]
    wrong = graph.replace("Neg(x)" if node == "a" else "Relu(h)", fault)
    found = both(graph, wrong, tmp_path, Settings(by_node=True))
    assert (found.first_node, found.basis) == (node, "alone")
    assert found.notes[-1] == correct.notes[-1] == "1 tensor not read on cpu (h): output names mismatch"
    assert "  a  0.0e+00  -  b  " in "  ".join(text_of(correct).split())


LIMITS = {
    "a tap of a sequence": (
        """g (float[2,8] x) => (float[2,8] y) { [split] s = SplitToSequence<axis=0>(x)
        [join] j = ConcatFromSequence<axis=0>(s) [last] y = {}(j) }""",
        "not compared: 1 tensor of type seq(tensor(float)) (s)",
    ),
    "a sequence output": (
        "g (float[2,8] x) => (seq(float[2,8]) s, float[2,8] y) { [o] s = SequenceConstruct(x) [last] y = {}(x) }",
        "not compared: 1 tensor of type seq(tensor(float)) (s)",
    ),
    "an optional": (
        "g (float[2,8] x) => (float[2,8] y) { [o] q = Optional(x) [p] p = OptionalGetElement(q) [last] y = {}(p) }",
        "not compared: 1 tensor of type optional(tensor(float)) (q)",
    ),
    "a random operator": (
        "g (float[2,8] x) => (float[2,8] y) { [noise] n = RandomNormalLike(x) [z] z = Mul(n, x) [last] y = {}(x) }",
        "1 node with random outputs not compared (noise)",
    ),
    "control flow": (
        """g (float[2,8] x, bool c) => (float[2,8] y) { [last] y = If(c)<then_branch = t () => (float[2,8] u)
        { [inner] u = {}(x) }, else_branch = e () => (float[2,8] v2) { [other] v2 = {}(x) }> }""",
        "control-flow nodes compared as a whole, not the nodes of their subgraphs: If 1",
    ),
}


@pytest.mark.parametrize(("graph", "note"), LIMITS.values(), ids=[*LIMITS])
def test_uncompared_parts_are_noted_and_other_faults_are_found(graph: str, note: str, tmp_path: Path) -> None:
    plain = graph.replace("{}", "Neg")
    found = both(plain, plain, tmp_path, Settings(by_node=True))
    assert note in [text.partition(";")[0] for text in found.notes] and found.is_within
    found = both(plain, graph.replace("{}", "Abs"), tmp_path, Settings(by_node=True))
    assert found.first_node == "last"


def test_different_output_sizes_are_a_difference(tmp_path: Path) -> None:
    graph = "g (float[4] x) => (float[N] y) { [a] k = {}(x) [b] i = Cast<to=9>(k) [c] y = Compress(x, i) }"
    found = both(graph.replace("{}", "Relu"), graph.replace("{}", "Abs"), tmp_path)
    assert found.first_node == "a" and found.outputs.error is None and found.outputs.infinite


def test_deviation_handles_masks_outliers_and_integers() -> None:
    ones = np.ones((32, 32), np.float32)
    masked = np.where(np.eye(32) > 0, -np.inf, ones).astype(np.float32)
    outlier = ones.copy()
    outlier[0, 0] = 1e4
    assert deviation(ones, ones) == deviation(masked, masked) == 0.0
    assert deviation(ones * np.float32(1.5), ones) == pytest.approx(0.5)
    assert deviation(masked, ones) == deviation(ones[:2], ones) == float("inf")
    wrong = outlier.copy()
    wrong[3, 3] = 2.0
    assert deviation(wrong, outlier) > 0.1, "a large activation must not hide other errors"
    eight = np.arange(4, dtype=np.int8)
    assert (deviation(eight + np.int8(1), eight), deviation(eight + np.int8(2), eight)) == (0.0, 1.0)
    assert deviation(np.array([True]), np.array([False])) == 1.0


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["missing.onnx", "--provider", "cpu", "--against", "openvino"], 1, "missing.onnx: no such file"),
        (["MODEL", "--provider", "gpu"], 2, "did you mean"),
        (["MODEL", "--provider", "cpu"], 2, "both sides are cpu"),
        (["MODEL", "--provider", "cpu", "--against", "open"], 2, "--against: unknown provider"),
        (["MODEL", "--provider", "cpu", "--against", "openvino", "--tolerance", "2"], 2, "--tolerance is 2.0"),
        (["MODEL", "--provider", "cpu", "--against", "./no-venv"], 2, "neither a provider chain, a virtual"),
        (["MODEL", "--provider", "cpu", "--against", "original"], 2, "is a file, which runs no text"),
        (["MODEL", "--provider", "cpu", "--against", "PYTHON", "--shape", "q=1"], 2, "neither an input nor a symbolic"),
        (["FOLDER", "--provider", "cpu", "--against", "PYTHON", "--shape", "q=1"], 2, "is for ONNX files"),
        (["MODEL", "--provider", "cpu", "--against", "PYTHON", "--variant", "q4"], 2, "only for foreign folders"),
        (["MODEL", "--provider", "cpu", "--against", "BARE"], 1, "No module named 'numpy'; it needs Python 3.11"),
        (["HUGE", "--provider", "cpu", "--against", "PYTHON"], 1, "huge.onnx: out of memory during a run"),
        (["FOLDER", "--provider", "cpu", "--against", "original"], 1, "name the folder of the checkpoint"),
    ],
)
def test_bad_input_prints_a_single_line(
    words: list[str], code: int, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    venv.create(tmp_path / "bare", with_pip=False)
    named = {"MODEL": str(saved(PLAIN, tmp_path / "m.onnx")), "FOLDER": str(GENAI), "PYTHON": sys.executable}
    named |= {"HUGE": str(saved(HUGE, tmp_path / "huge.onnx")), "BARE": str(tmp_path / "bare")}
    assert run(["drift", *(named.get(word, word) for word in words)]) == code
    err = capsys.readouterr().err.strip().splitlines()
    assert len(err) == 1 and message in err[0], err


def test_comparison_without_nodes_on_provider_exits_3(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No Linux build of ONNX Runtime contains CoreML."""
    model = saved(PLAIN, tmp_path / "m.onnx")
    assert run(["drift", str(model), "--provider", "coreml,cpu"]) == 3
    assert "nothing was compared on coreml: not_in_build" in capsys.readouterr().err


def test_reference_can_be_another_environment(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = saved(PLAIN, tmp_path / "m.onnx")
    assert run(["drift", str(model), "--provider", "cpu", "--against", sys.executable, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == "partita.drift/1" and found["against"].startswith("cpu in ")
    assert found["outputs"]["error"] == 0.0 and len({*found["versions"]}) == 1
    again = partita.drift(model, "cpu", against=sys.executable)
    assert again.is_within and [layer.name for layer in again.layers] == [entry["name"] for entry in found["layers"]]


def test_layers_of_dequantised_weights_have_larger_tolerance(
    exported: Exported, tiny_checkpoint: TinyCheckpoint
) -> None:
    """ONNX Runtime may fuse DequantizeLinear and MatMul into a MatMulNBits that rounds its input to 8 bits."""
    folder = exported(tiny_checkpoint("llama"), precision="int4", attention="primitives")
    found = compare(folder, folder)
    tolerances = {layer.name: layer.tolerance for layer in found.layers}
    assert tolerances["model.layers.0"] == 0.1 and tolerances["model.norm"] == 1e-4
