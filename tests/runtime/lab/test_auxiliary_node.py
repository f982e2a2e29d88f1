"""What stands beside a node for a provider that compiles: a way in, and outputs only where the model has them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime as ort
from onnx import TensorProto, parser

from partita.runtime.lab.graph import cut_proto
from partita.runtime.lab.variant import AFTER, AUXILIARY, NODE, Variant, node_variant, variant_model, zeros


def case_of(text: str) -> Variant:
    model = parser.parse_model('<ir_version: 10, opset_import: ["" : 21]>\n' + text)
    return node_variant(cut_proto(model, Path(), {}), "n")


def test_a_node_of_constants_alone_has_company_with_an_input_of_its_own():
    """Some providers open no graph without an input."""
    text = "g (float[4] x) => (float[4] y) <float[4] w = {1, 2, 3, 4}> {\n  [n] v = Abs(w)\n  [m] y = Mul(x, v)\n}"
    model = variant_model(case_of(text), auxiliary=True)
    assert [(node.name, node.op_type) for node in model.graph.node] == [
        (AUXILIARY, "Neg"),
        (NODE, "Abs"),
        (AFTER, "Neg"),
    ]
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (port,) = session.get_inputs()
    assert [each.tolist() for each in session.run(None, {port.name: np.ones(1, np.float32)})] == [
        [-1, -2, -3, -4],
        [-1],
    ]


def test_an_output_that_other_nodes_read_is_no_output_beside_company():
    """QNN leaves a DequantizeLinear before an output of the graph to the CPU."""
    inner = "g (uint8[4] x, float s) => (float[4] y) {\n  [n] v = DequantizeLinear(x, s)\n  [m] y = Neg(v)\n}"
    last = "g (uint8[4] x, float s) => (float[4] y) {\n  [n] y = DequantizeLinear(x, s)\n}"
    ports = []
    for text in (inner, last):
        case = case_of(text)
        data, scale = case.feeds
        scale = replace(scale, constant=zeros("i1", TensorProto.FLOAT, ()))
        model = variant_model(replace(case, feeds=(data, scale)), auxiliary=True)
        ports.append([port.name for port in model.graph.output])
    assert ports == [[AUXILIARY], ["o0", AUXILIARY]]
