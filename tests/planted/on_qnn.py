"""Planted causes on QNN's NPU backend in its host emulator; seen with onnxruntime-qnn 2.7.0 on onnxruntime 1.31.1."""

from __future__ import annotations

from typing import Any

from tests.planted.case import Case, Run
from tests.planted.graphs import between, image, operators, swap

SYMBOLIC = between("[planted] p = Sigmoid(h)", shape="N,16")
PADS = operators(
    21,
    "g (float[4,16] x, int64[4] pads) => (float[A,B] y) {\n"
    "  [first] h = Neg(x)\n  [padding] q = Pad(h, pads)\n  [planted] y = Neg(q)\n}",
)
DEFAULT = operators(
    21,
    "g (float[2,6] x, int64[2] s={2,1}) => (float[4,6] y) {\n"
    "  [first] h = Neg(x)\n  [planted] p = Tile(h, s)\n  [last] y = Neg(p)\n}",
)
CLIPPED = operators(
    21,
    "g (float[4,16] x, float low) => (float[4,16] y) {\n"
    "  [first] h = Neg(x)\n  [planted] p = Clip(h, low)\n  [last] y = Neg(p)\n}",
)
BYTES = operators(21, "g (uint8[16,16] x) => (uint8[16,16] y) <uint8[16,16] w> {\n  [planted] y = Add(x, w)\n}")
DOUBLE = operators(
    21,
    "g (double[4,16] x) => (double[4,16] y) <double[16,16] w> {\n  [planted] h = MatMul(x, w)\n  [last] y = Relu(h)\n}",
)
WIDE = operators(
    21, "g (float[2,2,2,2,2,2] x) => (float[2,2,2,2,2,2] y) {\n  [planted] h = Relu(x)\n  [last] y = Sigmoid(h)\n}"
)
THREE = operators(
    21,
    "g (float[4,16] x) => (float[4,16] y) <float[16,16] w> {\n  [first] h = Neg(x)\n"
    '  [planted] p = Einsum<equation="ij,jk,kl->il">(h, w, w)\n  [last] y = Neg(p)\n}',
)
TEXT = operators(21, "g (float[4,16] x) => (string[4,16] y) {\n  [first] h = Relu(x)\n  [planted] y = Cast<to=8>(h)\n}")
PADDED = operators(
    21,
    "g (float[4,16] x) => (float[A,B] y) <int64[4] pads={1,1,1,1}> {\n"
    '  [first] h = Neg(x)\n  [planted] p = Pad<mode="wrap">(h, pads)\n  [last] y = Neg(p)\n}',
)
INDEXED = operators(
    21,
    "g (float[1,4,8,8] x) => (float[1,4,4,4] y, int64[1,4,4,4] i) {\n  [first] h = Neg(x)\n"
    "  [planted] p, i = MaxPool<kernel_shape=[2,2], strides=[2,2]>(h)\n  [last] y = Neg(p)\n}",
)
NOT_INDEXED = operators(
    21,
    "g (float[1,4,8,8] x) => (float[1,4,4,4] y) {\n  [first] h = Neg(x)\n"
    "  [planted] p = MaxPool<kernel_shape=[2,2], strides=[2,2]>(h)\n  [last] y = Neg(p)\n}",
)
DILATED = image("[planted] p = AveragePool<kernel_shape=[2,2], dilations=[2,2]>(h)")
RUNNING = between("[planted] p = CumSum(h, axis)", extra="int64 axis={1}")
VOLUME = operators(
    21,
    "g (float[1,4,8,8,8] x) => (float[A,B,C,D,E] y) <float[4,4,3,3,3] w> {\n"
    "  [planted] h = Conv(x, w)\n  [last] y = Relu(h)\n}",
)
RANKLESS = operators(
    21,
    "g (float[4,16] x) => (float[4,16] y) {\n  [first] h = Relu(x)\n"
    "  [scaler] p = ai.onnx.ml.Scaler<offset=[0.5], scale=[2.0]>(h)\n  [planted] y = Relu(p)\n}",
)


CHIP = {"soc_model": "43"}
"""The chip that the emulator simulates: its NPU computes in float16."""
OTHER_CHIP = {"soc_model": "0"}
"""The one that it simulates by itself: its NPU has no arithmetic for many float operators."""


def qnn(name: str, planted: str, expected: str, model: str, control: str | None, **more: Any) -> Case:
    """A case on QNN whose control is another graph."""
    taken = None if control is None else Run(control, CHIP)
    chip = more.pop("chip", CHIP)
    return Case(f"qnn-{name}", "qnn", "qnn", planted, expected, Run(model, chip), taken, **more)


CASES: tuple[Case, ...] = (
    qnn(
        "symbolic-batch",
        "a symbolic batch size: QNN wants every size fixed",
        "dynamic_shape",
        SYMBOLIC,
        swap(SYMBOLIC, "N,16", "4,16"),
        arguments=("--shape", "N=4"),
    ),
    qnn(
        "sizes-from-an-input",
        "a tensor whose sizes depend on the values of an input",
        "dynamic_shape",
        PADS,
        swap(PADS, ", int64[4] pads) => (float[A,B] y)", ") => (float[A,B] y) <int64[4] pads={1,1,1,1}>"),
    ),
    qnn(
        "rank-unknown",
        "a tensor whose shape the file does not say, as after an operator without shape inference",
        "dynamic_shape",
        RANKLESS,
        swap(RANKLESS, "y) {", "y) <float[4,16] p> {"),
    ),
    qnn(
        "celu",
        "QNN has no Celu",
        "no_kernel_op",
        between("[planted] p = Celu(h)"),
        between("[planted] p = Sigmoid(h)"),
    ),
    qnn(
        "softsign",
        "QNN has no Softsign",
        "no_kernel_op",
        between("[planted] p = Softsign(h)"),
        between("[planted] p = Tanh(h)"),
    ),
    qnn(
        "det",
        "QNN has no Det",
        "no_kernel_op",
        operators(
            21,
            "g (float[2,4,4] x) => (float[2] y) {\n"
            "  [first] h = Neg(x)\n  [planted] p = Det(h)\n  [last] y = Neg(p)\n}",
        ),
        operators(
            21,
            "g (float[2,4,4] x) => (float[2,4,4] y) {\n"
            "  [first] h = Neg(x)\n  [planted] p = Abs(h)\n  [last] y = Neg(p)\n}",
        ),
    ),
    qnn("add-uint8", "Add of plain uint8", "no_kernel_type", BYTES, BYTES.replace("uint8[", "float[")),
    qnn("matmul-double", "MatMul of float64", "no_kernel_type", DOUBLE, DOUBLE.replace("double[", "float[")),
    qnn(
        "cast-to-string",
        "Cast to string",
        "no_kernel_type",
        TEXT,
        swap(swap(TEXT, "to=8", "to=6"), "string[", "int32["),
    ),
    qnn(
        "rank-6",
        "a tensor of rank 6",
        "attribute_unsupported",
        WIDE,
        WIDE.replace("[2,2,2,2,2,2]", "[2,2,2,2,2]"),
    ),
    qnn(
        "clip-limit-from-an-input",
        "Clip whose limit is an input of the graph, not a constant",
        "attribute_unsupported",
        CLIPPED,
        swap(CLIPPED, ", float low) => (float[4,16] y)", ") => (float[4,16] y) <float low={0.0}>"),
    ),
    qnn(
        "tile-by-a-default",
        "Tile whose counts are an initializer that is a graph input, which a caller may override",
        "attribute_unsupported",
        DEFAULT,
        swap(DEFAULT, ", int64[2] s={2,1}) => (float[4,6] y)", ") => (float[4,6] y) <int64[2] s={2,1}>"),
        says="Cannot get shape",
    ),
    qnn(
        "behind-a-default",
        "a node whose sizes follow from such an initializer",
        "dynamic_shape",
        DEFAULT,
        swap(DEFAULT, ", int64[2] s={2,1}) => (float[4,6] y)", ") => (float[4,6] y) <int64[2] s={2,1}>"),
        node="last",
    ),
    qnn(
        "pad-wrap",
        "Pad that wraps around",
        "attribute_unsupported",
        PADDED,
        swap(PADDED, "wrap", "reflect"),
        says="Pad mode only support constant",
    ),
    qnn(
        "average-pool-dilated",
        "AveragePool with dilations",
        "attribute_unsupported",
        DILATED,
        swap(DILATED, ", dilations=[2,2]", ""),
        says="only supports dilations 1",
    ),
    qnn(
        "einsum-of-three",
        "Einsum of three tensors",
        "attribute_unsupported",
        THREE,
        swap(swap(THREE, "ij,jk,kl->il", "ij,jk->ik"), "(h, w, w)", "(h, w)"),
        says="unsupported equation",
    ),
    qnn(
        "maxpool-indices",
        "MaxPool that also gives the places of the maxima",
        "attribute_unsupported",
        INDEXED,
        NOT_INDEXED,
    ),
    qnn(
        "cumsum",
        "CumSum of floats on a chip that has none: finalising the graph fails, without a name; int32 works",
        "no_kernel_type",
        RUNNING,
        RUNNING,
        chip=OTHER_CHIP,
    ),
    qnn(
        "cumsum-neighbour",
        "a node beside it, which goes down with the graph",
        "subgraph_rejected",
        RUNNING,
        RUNNING,
        chip=OTHER_CHIP,
        node="first",
    ),
    qnn(
        "conv-3d",
        "a convolution in three dimensions, which fails in the same way",
        "subgraph_rejected",
        VOLUME,
        VOLUME,
        chip=OTHER_CHIP,
    ),
)
