"""What is known of a session that was opened and is not run: what a refusal speaks of."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from onnx import parser

from partita.diagnosis.refusal import refused_nodes
from partita.observations.records import ChainEntry
from partita.providers.resolve import Resolution, known_providers, parse_chain, resolve
from partita.runtime.chain import open_chain
from partita.runtime.chain.open_chain import open_session, opened_facts
from partita.runtime.ort.errors import NoKernelError
from partita.runtime.ort.registry import available_ort_names
from partita.runtime.ort.session import NativeFailureError
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


def test_a_node_that_no_provider_has_is_that_of_the_first_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the provider that is left out, the CPU provider names the first node that it does not have itself."""
    unplaced = RuntimeError("Exception: Provider type for Conv node with name 'conv' is not set.")
    lacking = type("NotImplemented", (Exception,), {})(
        "Could not find an implementation for BiasAdd(1) node with name 'b'"
    )
    attempts = iter((unplaced, lacking))

    def fail(*_: object) -> None:
        raise NativeFailureError(next(attempts), ())

    for name, found in (
        ("_open_quiet", fail),
        ("register_plugins", tuple),
        ("by_experiment", lambda _, failure: failure),
    ):
        monkeypatch.setattr(open_chain, name, found)
    chain = tuple(Resolution(known_providers()[name], "active") for name in ("webgpu", "cpu"))
    with pytest.raises(NoKernelError, match="WebGpuExecutionProvider, CPUExecutionProvider cannot run it") as raised:
        open_session(Path("m.onnx"), chain, threads=1, observe=False)
    assert raised.value.node == "conv"
