"""A change that helps a node alone and not where it is: providers that take nothing in bodies of control flow."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import onnx
import onnxruntime as ort
import pytest
from onnx import parser

from partita.diagnosis.probe_verdict import conclusions
from partita.providers.resolve import Resolution, known_providers
from partita.runtime.lab.exploration import Subject, explore, explore_surroundings
from partita.runtime.lab.graph import Graph, cut_graph
from partita.runtime.lab.laboratory import Answer, Cache, Lab, Turn
from partita.runtime.lab.surroundings import holder_of, in_a_body
from partita.runtime.lab.variant import NODE, node_variant
from partita.runtime.onnx_model import read_onnx

LOOPED = (
    '<ir_version: 10, opset_import: ["" : 21]>\n'
    "g (float[N,4] x, int64 n, bool c) => (float[N,4] y) <float[4] w = {1,2,3,4}> {\n"
    "  [loop] y = Loop(n, c, x)<body = b (int64 i, bool q, float[N,4] s) => (bool co, float[N,4] so) "
    "{ [keep] co = Identity(q)\n [inner] so = Mul(s, w) }>\n}"
)


class Fussy(Lab):
    """Takes what has fixed sizes, and in bodies only what it is told to."""

    def __init__(self, *, in_bodies: bool) -> None:
        resolution = Resolution(known_providers()["qnn"], "active")
        super().__init__(resolution, Cache(None), time.monotonic() + 60)
        self.in_bodies = in_bodies

    def try_all(
        self, models: Sequence[onnx.ModelProto], *, one_node: bool = True, turns: Sequence[Turn] = ()
    ) -> list[Answer | None]:
        return [self.answer(model) for model in models]

    def answer(self, model: onnx.ModelProto) -> Answer:
        main = any(node.name == NODE for node in model.graph.node)
        sizes = [size for port in model.graph.input for size in port.type.tensor_type.shape.dim]
        fixed = all(size.HasField("dim_value") for size in sizes)
        return Answer("taken" if fixed and (main or self.in_bodies) else "left", "")


@pytest.fixture
def graph(tmp_path: Path) -> Graph:
    onnx.save(parser.parse_model(LOOPED), tmp_path / "m.onnx")
    return cut_graph(read_onnx(tmp_path / "m.onnx"), {"x": (2, 4)})


def explored(graph: Graph, *, in_bodies: bool) -> Subject:
    lab, subject = Fussy(in_bodies=in_bodies), Subject(node_variant(graph, "inner"), [(0, "inner")])
    explore([subject], lab)
    explore_surroundings([subject], lambda *_: (), {(0, "inner"): holder_of(graph, "inner")}, lab)
    return subject


def test_a_change_that_does_not_help_in_a_body_is_not_the_cause(graph: Graph) -> None:
    (shown,) = conclusions(explored(graph, in_bodies=False).probe("inner"))
    assert shown.code == "not_claimed" and "in a main graph, and not in the body of a Loop; unchanged" in shown.evidence


def test_a_node_that_is_taken_as_it_is_is_tried_in_a_body_as_it_is(tmp_path: Path) -> None:
    onnx.save(parser.parse_model(LOOPED.replace("float[N,4]", "float[2,4]")), tmp_path / "m.onnx")
    subject = explored(cut_graph(read_onnx(tmp_path / "m.onnx"), {}), in_bodies=False)
    (shown,) = conclusions(subject.probe("inner"))
    said = "the provider accepts it; together with an Identity, both in the body of a Loop, it does not claim it"
    assert shown.code == "not_claimed" and shown.evidence.endswith(said)


@pytest.mark.parametrize("kind", ["If", "Loop", "Scan"])
def test_the_model_is_legal_and_has_the_node_in_a_body(graph: Graph, kind: str) -> None:
    model = in_a_body(node_variant(graph, "inner"), kind)
    (holder,) = model.graph.node
    names = [node.name for attribute in holder.attribute for node in attribute.g.node]
    assert NODE in names and len(names) == 2
    options = ort.SessionOptions()
    options.log_severity_level = 4
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    assert len(session.get_outputs()) == 1
