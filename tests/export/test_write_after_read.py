"""A state is one buffer: nobody reads its past after its present has been written."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from partita.export.passes import write_after_read

PAST, PRESENT = "past_key_values.0.recurrent", "present.0.recurrent"


def model(reader_first: bool) -> ir.Model:
    """present = past + new; out = past * new, which no one needs before `present`."""
    past, new = (
        ir.Value(name=name, shape=ir.Shape([2, 3]), type=ir.TensorType(ir.DataType.FLOAT)) for name in (PAST, "new")
    )
    out = ir.node("Mul", inputs=[past, new])
    source = out.outputs[0] if reader_first else past
    present = ir.node("Add", inputs=[source, new])
    for node, name in ((out, "out"), (present, PRESENT)):
        node.outputs[0].name, node.outputs[0].shape = name, ir.Shape([2, 3])
        node.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
    outputs = [out.outputs[0], present.outputs[0]]
    nodes = [out, present] if reader_first else [present, out]
    return ir.Model(ir.Graph([past, new], outputs, nodes=nodes, opset_imports={"": 17}, name="g"), ir_version=10)


def test_a_late_reader_is_waited_for() -> None:
    made = model(reader_first=False)
    assert write_after_read.run(made) == 1
    present = made.graph.outputs[1]
    assert present.name == PRESENT
    producer = present.producer()
    assert producer is not None
    before = {node.op_type for node in write_after_read.upstream(producer)}
    assert {"Add", "Mul"} <= before, "the node that writes has the other reader upstream"
    past, new = np.arange(6, dtype=np.float32).reshape(2, 3), np.full((2, 3), 2, np.float32)
    session = ort.InferenceSession(ir.to_proto(made).SerializeToString(), providers=["CPUExecutionProvider"])
    out, written = session.run(["out", PRESENT], {PAST: past, "new": new})
    assert np.array_equal(np.asarray(out), past * new) and np.array_equal(np.asarray(written), past + new)


def test_twice_is_once() -> None:
    made = model(reader_first=False)
    write_after_read.run(made)
    assert write_after_read.run(made) == 0


def test_readers_upstream_need_nothing() -> None:
    assert write_after_read.run(model(reader_first=True)) == 0
