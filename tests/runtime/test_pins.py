"""Pins: what they match, what is refused, and that ONNX Runtime's real plan keeps to them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

import numpy
import onnx
import pytest

from partita.errors import ProviderError, UsageError
from partita.observations.facts import AssignedNode
from partita.providers.resolve import parse_chain
from partita.runtime import pins
from partita.runtime.ort.session import Opening
from partita.runtime.pins import Marks, Pin, check_pins, marked_model, parse_pins
from tests.conftest import require_dry_run

CHAIN = parse_chain("cuda,cpu")
CUDA, CPU = CHAIN


@pytest.mark.parametrize(
    ("pin", "module", "covered"),
    [
        ("lm_head", "lm_head", True),
        ("layers.0-11", "model.layers.11.mlp.up_proj", True),
        ("layers.0-11", "model.layers.12.mlp.up_proj", False),
        ("layers.1", "model.layers.11", False),
        ("layers.1.mlp", "model.layers.1.mlp", True),
        ("mlp", "model.layers.7.mlp.gate_proj", True),
        ("model.layers.3", "model.layers.3", True),
        ("layers.0-1.self_attn", "model.layers.1.mlp", False),
        ("head", "lm_head", False),
    ],
)
def test_a_pin_matches_whole_parts_of_a_module_path(pin, module, covered):
    assert Pin(CPU, pin).covers(module) is covered


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (["cpu"], "write PROVIDER:MODULE"),
        ([":lm_head"], "write PROVIDER:MODULE"),
        (["cpu:layers..mlp"], "write PROVIDER:MODULE"),
        (["webgpu:lm_head"], r"webgpu is not in the provider chain \(cuda, cpu\)"),
        (["cpu:layers.4-2"], "the range 4-2 runs backwards"),
        (["cpu:lm_head", "cuda:lm_head"], "lm_head is pinned to cpu already"),
    ],
)
def test_pins_that_make_no_sense(texts, words):
    with pytest.raises(UsageError, match=words):
        parse_pins(texts, CHAIN)


def test_a_module_may_be_written_with_slashes_as_in_the_names_of_nodes():
    (pin,) = parse_pins(["cpu:/layers.1/mlp"], CHAIN)
    assert pin.module == "layers.1.mlp" and pin.covers("model.layers.1.mlp.up_proj")


def test_names_of_a_provider_are_as_free_as_in_the_chain():
    assert [pin.text for pin in parse_pins(["CPUExecutionProvider:lm_head", " cuda : layers.0 "], CHAIN)] == [
        "cpu:lm_head",
        "cuda:layers.0",
    ]


def test_a_pin_that_matches_nothing_names_what_there_is(tiny_package):
    with pytest.raises(UsageError, match=r"--pin cpu:lm_hed: no module .* some that exist: lm_head"):
        marked_model(tiny_package() / "model.onnx", [Pin(CPU, "lm_hed")])


def test_a_pin_on_a_file_without_module_paths_says_what_it_needs(tmp_path):
    ports = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [2]) for name in ("x", "y")]
    graph = onnx.helper.make_graph([onnx.helper.make_node("Relu", ["x"], ["y"], name="a")], "g", ports[:1], ports[1:])
    onnx.save(onnx.helper.make_model(graph), tmp_path / "m.onnx")
    with pytest.raises(UsageError, match=r"--pin cpu:a: a pin matches module paths .* and this file has neither"):
        marked_model(tmp_path / "m.onnx", [Pin(CPU, "a")])


def test_two_pins_may_not_claim_one_node(tiny_package):
    with pytest.raises(UsageError, match=r"--pin cpu:layers\.0 and --pin cuda:mlp both claim model\.layers\.0\.mlp"):
        marked_model(tiny_package() / "model.onnx", [Pin(CPU, "layers.0"), Pin(CUDA, "mlp")])


def test_a_pin_within_another_one_of_the_same_provider_is_kept_to_in_either_order(tiny_package):
    pins = [Pin(CPU, "layers.0"), Pin(CPU, "layers.0.mlp")]
    for given in (pins, pins[::-1]):
        _, marks = marked_model(tiny_package() / "model.onnx", given)
        assert marks.pins and all(pin in pins for pin in marks.pins.values())


def test_an_onnxruntime_without_layer_assignment_is_refused(monkeypatch, tiny_package):
    class Old:
        version = "1.26.4"

    monkeypatch.setattr(pins, "ort_build", Old)
    with pytest.raises(ProviderError, match=r"--pin needs ONNX Runtime 1\.27 or newer; 1\.26\.4 would ignore it"):
        pins.pinned_opening(tiny_package() / "model.onnx", Opening(), [Pin(CPU, "lm_head")])


class Placed:
    """A session that has these nodes on these providers, and `unlisted` ones in its plan only."""

    def __init__(self, nodes: dict[str, str], unlisted: tuple[str, ...] = ()) -> None:
        self.nodes, self.plan = nodes, (unlisted,)

    def assigned(self):
        return tuple(AssignedNode(name, "MatMul", "", ep, 0) for name, ep in self.nodes.items())


WEIGHTS = {"w": (4, 4), "b": (4,)}
ON_CPU, ON_CUDA = Pin(CPU, "lm_head"), Pin(CUDA, "lm_head")


def check(session: Placed, pin: Pin, *nodes: str, others: Collection[str] = ()) -> dict[str, str]:
    return check_pins(session, Marks(dict.fromkeys(nodes, pin), frozenset(others)))  # type: ignore[arg-type]


def test_a_pin_that_does_not_hold_is_an_error_with_the_nodes():
    session = Placed({"lm_head/MatMul": "CUDAExecutionProvider", "model/Cast": "CPUExecutionProvider"})
    with pytest.raises(ProviderError, match=r"--pin cpu:lm_head does not hold: 1 of 1 nodes .*: lm_head/MatMul"):
        check(session, ON_CPU, "lm_head/MatMul")
    assert check(session, ON_CUDA, "lm_head/MatMul") == {"lm_head/MatMul": "cuda:lm_head"}
    with pytest.raises(ProviderError, match="none of its nodes is in the plan"):
        check(session, ON_CPU, "gone/MatMul")


def test_a_node_that_the_list_lacks_is_not_on_the_cpu():
    session = Placed({}, unlisted=("lm_head/MatMul",))
    with pytest.raises(ProviderError, match="--pin cpu:lm_head does not hold"):
        check(session, ON_CPU, "lm_head/MatMul")
    assert check(session, ON_CUDA, "lm_head/MatMul")


def test_a_node_that_a_pinned_one_was_fused_into_keeps_the_pin_or_breaks_it():
    """Of a MatMul and an Add, ONNX Runtime 1.31 lists and runs `<MatMul>/MatMulAddFusion` alone."""
    on_cpu, fused = "CPUExecutionProvider", "up/MatMul/MatMulAddFusion"
    kept = check(Placed({fused: on_cpu}), ON_CPU, "up/MatMul", "up/Add")
    assert kept == {fused: "cpu:lm_head", "up/MatMul": "cpu:lm_head"}, "and the Add is in none of the names"
    with pytest.raises(ProviderError, match="1 of 1 nodes are elsewhere: up/MatMul/MatMulAddFusion"):
        check(Placed({fused: "CUDAExecutionProvider"}), ON_CPU, "up/MatMul", "up/Add")
    assert check(Placed({}, unlisted=(fused,)), ON_CUDA, "up/MatMul")[fused] == "cuda:lm_head", "its list may lack it"


def test_what_was_fused_after_the_list_was_made_is_judged_by_its_nodes_in_the_list():
    session = Placed({"act/Sigmoid": "CPUExecutionProvider"}, unlisted=("act/Sigmoid/QuickGeluFusion/",))
    assert check(session, ON_CPU, "act/Sigmoid") == {"act/Sigmoid": "cpu:lm_head"}
    session = Placed({"up/MatMul/First": "CPUExecutionProvider"}, unlisted=("up/MatMul/First/Second",))
    assert check(session, ON_CPU, "up/MatMul") == {"up/MatMul/First": "cpu:lm_head", "up/MatMul": "cpu:lm_head"}


def test_a_node_of_the_file_or_of_a_body_is_not_taken_for_one_that_was_fused_from_a_pinned_node():
    """TensorFlow's `fc/MatMul/ReadVariableOp` is no part of `fc/MatMul`, and a body is placed by itself."""
    session = Placed({"fc/MatMul/Read": "CUDAExecutionProvider", "fc/MatMul/then/MatMul/F": "CUDAExecutionProvider"})
    with pytest.raises(ProviderError, match="none of its nodes is in the plan"):
        check(session, ON_CPU, "fc/MatMul", others=["fc/MatMul/Read", "fc/MatMul/then/MatMul"])


def test_a_module_that_is_one_layer_with_a_bias_can_be_pinned(tmp_path):
    """In ONNX Runtime's own list and plan, with the bodies of the file beside it."""
    from partita.providers.resolve import resolve
    from partita.runtime.chain import open_session
    from partita.runtime.ort.registry import available_ort_names

    node, info = onnx.helper.make_node, onnx.helper.make_tensor_value_info
    body = onnx.helper.make_graph(
        [node("Neg", ["a"], ["n"], name="enc/up/MatMul/Neg")],
        "body",
        [],
        [info("n", onnx.TensorProto.FLOAT, None)],
    )
    graph = onnx.helper.make_graph(
        [
            node("MatMul", ["x", "w"], ["m"], name="enc/up/MatMul"),
            node("Add", ["m", "b"], ["a"], name="enc/up/Add"),
            node("If", ["c"], ["y"], name="enc/pick/If", then_branch=body, else_branch=body),
        ],
        "g",
        [info("x", onnx.TensorProto.FLOAT, [2, 4, 4]), info("c", onnx.TensorProto.BOOL, [])],
        [info("y", onnx.TensorProto.FLOAT, [2, 4, 4])],
        [onnx.numpy_helper.from_array(numpy.ones(shape, numpy.float32), name) for name, shape in WEIGHTS.items()],
    )
    path = tmp_path / "layer.onnx"
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)], ir_version=10), path)
    chain = resolve(parse_chain("cpu"), available_ort_names())
    session = open_session(path, chain, threads=1, observe=True, pins=[Pin(CPU, "enc.up")])
    try:
        assert set(session.pins.values()) == {"cpu:enc.up"}
        listed = {each.name for each in session.assigned() or ()}
        fused = [name for name in session.pins if name not in ("enc/up/MatMul", "enc/up/Add")]
        assert fused and set(fused) <= listed, "the node that runs in the place of both"
        assert "enc/up/MatMul/Neg" not in session.pins
    finally:
        session.close()


def test_a_pin_on_a_provider_that_did_not_start_says_why(tiny_package):
    from partita.providers.resolve import resolve
    from partita.runtime.chain import open_session
    from partita.runtime.ort.registry import available_ort_names

    names = available_ort_names()
    if "CUDAExecutionProvider" not in names or Path("/dev/nvidia0").exists():
        pytest.skip("needs an ONNX Runtime with CUDA on a machine without")
    with pytest.raises(ProviderError, match=r"--pin cuda:lm_head: cuda: library_missing: lib"):
        open_session(
            tiny_package() / "model.onnx", resolve(CHAIN, names), threads=1, observe=False, pins=[Pin(CUDA, "lm_head")]
        )


def test_the_real_plan_keeps_to_a_pin(tiny_package, tmp_path):
    """The CUDA provider over stub libraries: lm_head would go to CUDA, and is pinned to the CPU."""
    require_dry_run()
    package = tiny_package(precision="fp16")

    def cpu_nodes(*options: str) -> set[str]:
        report = tmp_path / "report.json"
        command = [sys.executable, "-m", "partita", "place", str(package), "--provider", "cuda,cpu", "--dry-run"]
        done = subprocess.run(
            [*command, "--report", str(report), *options], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        decode = json.loads(report.read_text())["phases"][-1]
        return {node["name"] for node in decode["nodes"] if node["provider"] == "CPUExecutionProvider"}

    assert not any(name.startswith("lm_head") for name in cpu_nodes())
    assert any(name.startswith("lm_head") for name in cpu_nodes("--pin", "cpu:lm_head"))
