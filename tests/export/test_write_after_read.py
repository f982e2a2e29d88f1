"""A state is one buffer: nobody reads its past after its present has been written."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import onnxruntime as ort
import pytest

from partita.export.passes import write_after_read
from partita.package.contract import State
from tests.export.nets import Net, run_passes
from tests.export.test_passes import NOTHING_KNOWN

PAST, PRESENT = "before", "after"

STATE = State(past=PAST, present=PRESENT, layer=0, kind="recurrent", shape=(2, 3), dtype="float32")
STATES = replace(NOTHING_KNOWN, states=(STATE,))


def finished(net: Net, out: ir.Value, present: ir.Value) -> ir.Model:
    """The graph with these two outputs, whose nodes give them under their names."""
    out.name, present.name = "out", PRESENT
    out.type = present.type = ir.TensorType(ir.DataType.FLOAT)
    net.outputs += [out, present]
    return net.model()


def model(reader_first: bool, view: str | None = None) -> ir.Model:
    """present = past + new; out = past * (new + new), which no one needs before `present`; perhaps through a view."""
    net = Net(17)
    past, new = net.input(PAST, [2, 3]), net.input("new", [2, 3])
    seen = net.op(view, past) if view else past
    out = net.op("Mul", seen, net.op("Add", new, new))
    return finished(net, out, net.op("Sub", out if reader_first else past, new))  # ONNX Runtime runs the last first


def turned() -> ir.Model:
    """ONNX Runtime makes the Transpose a part of the product, which then reads the state itself."""
    net = Net(17)
    past, new = net.input(PAST, [2, 3]), net.input("new", [2, 3])
    turned = net.op("Transpose", past, perm=[1, 0])
    out = net.op("Neg", net.op("MatMul", net.op("Add", new, new), turned))
    return finished(net, out, net.op("Sub", past, new))


def run_in_place(
    made: ir.Model, level: ort.GraphOptimizationLevel = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """`out`, and the state after a run with one buffer as past and as present."""
    options = ort.SessionOptions()
    options.graph_optimization_level = level
    model_bytes = ir.to_proto(made).SerializeToString()
    session = ort.InferenceSession(model_bytes, options, providers=["CPUExecutionProvider"])
    state = np.arange(6, dtype=np.float32).reshape(2, 3)
    binding = session.io_binding()
    binding.bind_input(PAST, "cpu", 0, np.float32, [2, 3], state.ctypes.data)
    binding.bind_cpu_input("new", np.full((2, 3), 2, np.float32))
    binding.bind_output("out")
    binding.bind_output(PRESENT, "cpu", 0, np.float32, [2, 3], state.ctypes.data)
    session.run_with_iobinding(binding)
    return np.asarray(binding.get_outputs()[0].numpy()), state


@pytest.mark.parametrize("view", [None, "Identity"])
def test_a_late_reader_is_waited_for(view: str | None) -> None:
    wrong, _ = run_in_place(model(reader_first=False, view=view))
    past = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert not np.array_equal(wrong, past * 4), "ONNX Runtime does not overwrite it: the case shows nothing"
    made = model(reader_first=False, view=view)
    assert run_passes(made, [write_after_read.PASS], STATES) == {"write_after_read": 1}
    producer = made.graph.outputs[1].producer()
    assert producer is not None and made.graph.outputs[1].name == PRESENT
    before = {node.op_type for node in write_after_read.upstream(producer)}
    assert {"Sub", "Mul"} <= before, "the node that writes has the other reader upstream, not just a view"
    out, written = run_in_place(made)
    assert np.array_equal(out, past * 4) and np.array_equal(written, past - 2)


def test_a_reader_that_a_fusion_moves_is_waited_for() -> None:
    wanted = np.full((2, 3), -4, np.float32) @ np.arange(6, dtype=np.float32).reshape(2, 3).T
    wrong, _ = run_in_place(turned(), ort.GraphOptimizationLevel.ORT_ENABLE_ALL)
    assert not np.array_equal(wrong, wanted), "ONNX Runtime does not overwrite it: the case shows nothing"
    made = turned()
    assert run_passes(made, [write_after_read.PASS], STATES) == {"write_after_read": 1}
    out, _ = run_in_place(made, ort.GraphOptimizationLevel.ORT_ENABLE_ALL)
    assert np.array_equal(out, wanted)


def test_readers_upstream_need_nothing() -> None:
    assert run_passes(model(reader_first=True), [write_after_read.PASS], STATES) == {"write_after_read": 0}
