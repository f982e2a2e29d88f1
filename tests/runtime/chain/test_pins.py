"""Pins: matched nodes, rejected pins, and ONNX Runtime's plan."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from onnx import ModelProto, parser

from partita.errors import ProviderError, UsageError
from partita.observations.facts import AssignedNode
from partita.providers.resolve import parse_chain, resolve
from partita.runtime.chain import pins
from partita.runtime.chain.open_chain import open_session
from partita.runtime.chain.pins import Marks, Pin, check_pins, marked_model, parse_pins
from partita.runtime.ort.registry import available_ort_names
from partita.runtime.ort.session_options import Opening

CHAIN = parse_chain("cuda,cpu")
CUDA, CPU = CHAIN
ON_CPU, ON_CUDA = Pin(CPU, "lm_head"), Pin(CUDA, "lm_head")


@pytest.mark.parametrize(
    ("pin", "module", "covered"),
    [
        ("lm_head", "lm_head", True),
        ("layers.0-11", "model.layers.11.mlp.up_proj", True),
        ("layers.0-11", "model.layers.12.mlp.up_proj", False),
        ("layers.1", "model.layers.11", False),
        ("mlp", "model.layers.7.mlp.gate_proj", True),
        ("layers.0-1.self_attn", "model.layers.1.mlp", False),
    ],
)
def test_pin_matches_whole_module_path_components(pin, module, covered):
    assert Pin(CPU, pin).covers(module) is covered


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["cpu"], "write PROVIDER:MODULE"),
        ([":lm_head"], "write PROVIDER:MODULE"),
        (["cpu:layers..mlp"], "write PROVIDER:MODULE"),
        (["webgpu:lm_head"], r"webgpu is not in the provider chain \(cuda, cpu\)"),
        (["cpu:layers.4-2"], "the range 4-2 is descending"),
        (["cpu:lm_head", "cuda:lm_head"], "lm_head is already pinned to cpu"),
    ],
)
def test_invalid_pins_are_usage_errors(texts, message):
    with pytest.raises(UsageError, match=message):
        parse_pins(texts, CHAIN)


def model(text: str) -> ModelProto:
    return parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]>\n{text}')


def test_pins_with_no_or_conflicting_match_are_rejected(tiny_package):
    package = tiny_package() / "model.onnx"
    with pytest.raises(UsageError, match=r"cpu:lm_hed\W+no module .* existing modules: lm_head"):
        marked_model(package, [Pin(CPU, "lm_hed")])
    with pytest.raises(UsageError, match=r"cpu:layers\.0\W+and .*cuda:mlp\W+both match model\.layers\.0\.mlp"):
        marked_model(package, [Pin(CPU, "layers.0"), Pin(CUDA, "mlp")])
    bare = model("g (float[2] x) => (float[2] y) { [a] y = Relu(x) }").SerializeToString()
    with pytest.raises(UsageError, match=r"cpu:a\W+pins match module paths .* this file has neither"):
        marked_model(bare, [Pin(CPU, "a")])
    nested = [Pin(CPU, "layers.0"), Pin(CPU, "layers.0.mlp")]
    for given in (nested, nested[::-1]):
        _, marks = marked_model(package, given)
        assert marks.pins and all(pin in nested for pin in marks.pins.values())


def test_onnxruntime_without_layer_assignment_is_rejected(monkeypatch):
    class Old:
        version = "1.26.4"

    monkeypatch.setattr(pins, "ort_build", Old)
    with pytest.raises(ProviderError, match=r"needs ONNX Runtime 1\.27 or newer; 1\.26\.4 ignores pins"):
        pins.pinned_opening(Path("model.onnx"), Opening(), [ON_CPU])


class Placed:
    """A session that has these nodes on these providers, and `unlisted` ones in its plan only."""

    def __init__(self, nodes: dict[str, str], unlisted: tuple[str, ...] = ()) -> None:
        self.nodes, self.plan = nodes, (unlisted,)

    def assigned(self):
        names = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
        return tuple(AssignedNode(name, "MatMul", "", names[ep], 0) for name, ep in self.nodes.items())


HEAD, UP = "lm_head/MatMul", "up/MatMul"
FUSED = f"{UP}/MatMulAddFusion"
"""ONNX Runtime 1.31 lists and runs this alone of a MatMul and an Add."""


@pytest.mark.parametrize(
    ("session", "nodes", "message"),
    [
        (Placed({HEAD: "cuda", "model/Cast": "cpu"}), [HEAD], "was not honoured: 1 of 1 nodes .*: lm_head/MatMul"),
        (Placed({HEAD: "cuda"}), ["gone/MatMul"], "none of its nodes is in the plan"),
        (Placed({}, unlisted=(HEAD,)), [HEAD], "was not honoured"),
        (Placed({FUSED: "cuda"}), [UP, "up/Add"], f"1 of 1 nodes run on another provider: {FUSED}"),
    ],
    ids=["other provider", "gone", "not listed", "fused"],
)
def test_violated_pin_raises_error_naming_nodes(session, nodes, message):
    marks: Any = Marks(dict.fromkeys(nodes, ON_CPU), frozenset())
    with pytest.raises(ProviderError, match=message):
        check_pins(session, marks)


def test_linear_layer_with_bias_can_be_pinned(tmp_path):
    """Uses ONNX Runtime's own list and plan; the file has subgraphs."""
    made = model("""g (float[2,4,4] x, bool c) => (float[2,4,4] y)
    <float[4,4] w = {1,1,1,1, 1,1,1,1, 1,1,1,1, 1,1,1,1}, float[4] b = {1,1,1,1}> {
      m = MatMul(x, w)
      a = Add(m, b)
      y = If(c) <then_branch = t () => (float[2,4,4] ty) { ty = Neg(a) },
                 else_branch = e () => (float[2,4,4] ey) { ey = Neg(a) }>
    }""")
    for node, name in zip(made.graph.node, ("enc/up/MatMul", "enc/up/Add", "enc/pick/If"), strict=True):
        node.name = name
    for attribute in made.graph.node[2].attribute:
        attribute.g.node[0].name = "enc/up/MatMul/Neg"
    path = tmp_path / "layer.onnx"
    path.write_bytes(made.SerializeToString())
    chain = resolve(parse_chain("cpu"), available_ort_names())
    with closing(open_session(path, chain, threads=1, observe=True, pins=[Pin(CPU, "enc.up")])) as session:
        assert set(session.pins.values()) == {"cpu:enc.up"}
        listed = {each.name for each in session.assigned() or ()}
        fused = [name for name in session.pins if name not in ("enc/up/MatMul", "enc/up/Add")]
        assert fused and set(fused) <= listed
        assert "enc/up/MatMul/Neg" not in session.pins


def test_pin_on_unavailable_provider_error_gives_reason(tiny_package):
    chain = resolve(CHAIN, ["CPUExecutionProvider"])
    with pytest.raises(ProviderError, match=r"cuda:lm_head\W+ cuda: not_in_build"):
        open_session(tiny_package() / "model.onnx", chain, threads=1, observe=False, pins=[ON_CUDA])
