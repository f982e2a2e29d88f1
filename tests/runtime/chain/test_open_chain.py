"""What is known of a session that was opened and is not run: what a refusal speaks of."""

from __future__ import annotations

from pathlib import Path

import onnx
from onnx import parser

from partita.diagnosis.refusal import refused_nodes
from partita.observations.records import ChainEntry
from partita.providers.resolve import parse_chain, resolve
from partita.runtime.chain.open_chain import open_session, opened_facts
from partita.runtime.ort.registry import available_ort_names
from partita.runtime.place.onnx_model import read_onnx

NAMELESS = """<ir_version: 10, opset_import: ["" : 21]>
g (float[2,4] x, bool c) => (float[2,4] y) {
  h = Relu (x)
  y = If (c) <
    then_branch = t () => (float[2,4] a) { a = Asin (h) },
    else_branch = e () => (float[2,4] b) { b = Neg (h) }
  >
}"""


def test_a_refusal_knows_nodes_without_a_name_by_those_that_they_were_given(tmp_path: Path) -> None:
    proto = parser.parse_model(NAMELESS)
    proto.graph.node[0].metadata_props.add(key="partita.module", value="model.act")
    onnx.save(proto, tmp_path / "m.onnx")
    model = read_onnx(tmp_path / "m.onnx")
    chain = resolve(parse_chain("cpu"), available_ort_names())
    session = open_session(model.path, chain, threads=1, observe=True, model=model.to_bytes())
    facts = opened_facts(model.path, session, chain)
    session.close()
    assert [node.name for node in facts.graph] == ["Relu_0", "If_1"]
    assert [node.name for node in facts.inner] == ["Asin_2", "Neg_3"]
    rows = refused_nodes(facts, (ChainEntry(provider="CUDAExecutionProvider", status="active"),))
    assert ("Relu_0", "model.act") in [(row.node, row.module) for row in rows]
