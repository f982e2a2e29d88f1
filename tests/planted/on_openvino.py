"""Planted causes on OpenVINO's CPU device; seen with onnxruntime-openvino 1.24.1."""

from __future__ import annotations

from typing import Any

from tests.planted.case import Case, Run
from tests.planted.graphs import image, operators, swap

GROUPED = operators(
    21,
    "g (float[1,1,64] x, float[1,1,32] k, float[1,1,32] v, float[1,2,16,16] pk, float[1,2,16,16] pv, int32[1] s,"
    " int32 t) => (float[1,1,64] y, float[1,2,16,16] nk, float[1,2,16,16] nv) {\n"
    "  [planted] y, nk, nv = com.microsoft.GroupQueryAttention<num_heads=4, kv_num_heads=2>(x, k, v, pk, pv, s, t)\n}",
)
ATTENTION = operators(
    24,
    "g (float[1,4,2,16] x) => (float[1,4,2,16] y) {\n"
    "  [first] h = Neg(x)\n  [planted] p = Attention(h, h, h)\n  [last] y = Neg(p)\n}",
)
NORMED = operators(
    24,
    "g (float[4,16] x) => (float[4,16] y) <float[16] s> {\n"
    "  [first] h = Neg(x)\n  [planted] p = RMSNormalization(h, s)\n  [last] y = Neg(p)\n}",
)
DOUBLE = operators(
    21,
    "g (double[4,16] x) => (double[4,16] y) <double[16,16] w> {\n  [planted] h = MatMul(x, w)\n  [last] y = Relu(h)\n}",
)
UNSIGNED = operators(21, "g (uint64[4,16] x) => (uint64[4,16] y) {\n  [planted] y = Add(x, x)\n}")
RUNNING = operators(21, "g (double[4,16] x) => (double[4,16] y) <int64 axis={1}> {\n  [planted] y = CumSum(x, axis)\n}")
TEXT = operators(21, "g (float[4,16] x) => (string[4,16] y) {\n  [first] h = Relu(x)\n  [planted] y = Cast<to=8>(h)\n}")
SMALLER = image(
    '[planted] p = Resize<mode="linear", antialias=1>(h, "", sizes)', extra="float[4] sizes={1.0,1.0,0.5,0.5}"
)
PADDED = operators(
    21,
    "g (float[4,16] x) => (float[A,B] y) <int64[4] pads={1,1,1,1}> {\n"
    '  [first] h = Neg(x)\n  [planted] p = Pad<mode="wrap">(h, pads)\n  [last] y = Neg(p)\n}',
)
SCATTERED = operators(
    21,
    "g (float[4,16] x, float[1,16] u) => (float[4,16] y) <int64[1,1] i={0}> {\n"
    '  [first] h = Neg(x)\n  [planted] p = ScatterND<reduction="mul">(h, i, u)\n  [last] y = Neg(p)\n}',
)
SCALAR = operators(
    21, "g (float x) => (float y) {\n  [first] h = Relu(x)\n  [planted] p = Sigmoid(h)\n  [last] y = Tanh(p)\n}"
)
LOOPED = operators(
    21,
    "g (float[4,16] x, int64 n, bool c) => (float[4,16] y) {\n  [first] h = Relu(x)\n"
    "  [planted] p = Loop(n, c, h)<body = b (int64 i, bool ci, float[4,16] a) => (bool co, float[4,16] o) "
    "{ [go] co = Identity(ci)\n  [step] o = Sigmoid(a) }>\n  [last] y = Neg(p)\n}",
)
STRAIGHT = operators(
    21,
    "g (float[4,16] x, int64 n, bool c) => (float[4,16] y) {\n"
    "  [first] h = Relu(x)\n  [planted] p = Sigmoid(h)\n  [last] y = Neg(p)\n}",
)
RANKLESS = operators(
    21,
    "g (float[4,16] x) => (float[4,16] y) {\n  [first] h = Relu(x)\n"
    "  [scaler] p = ai.onnx.ml.Scaler<offset=[0.5], scale=[2.0]>(h)\n  [planted] q = Relu(p)\n  [last] y = Sigmoid(q)\n"
    "}",
)
POOLED = image("[planted] p = GlobalLpPool(h)").replace("float[1,4,8,8] x", "float[1,N,8,8] x")
BEST = operators(
    21,
    "g (float[4,16] x) => (float[4,2] y, int64[4,2] i) <int64[1] k={2}, float[4,16] h> {\n"
    "  [gap] h = ai.onnx.ml.Scaler<offset=[0.5], scale=[2.0]>(x)\n  [planted] y, i = TopK(h, k)\n}",
)
BEST_IN_COMPANY = swap(BEST, "ai.onnx.ml.Scaler<offset=[0.5], scale=[2.0]>(x)", "Neg(x)")
ALONE = operators(
    21,
    "g (float[4,16] x) => (float[4,16] y) <float[16,16] w> {\n  [planted] h = MatMul(x, w)\n"
    "  [nan] c = IsNaN(h)\n  [cast] p = Cast<to=1>(c)\n  [last] y = Relu(p)\n}",
)
IN_COMPANY = swap(ALONE, "[nan] c = IsNaN(h)", "[more] m = Sigmoid(h)\n  [nan] c = IsNaN(m)")


def openvino(name: str, planted: str, expected: str, model: str, control: str | None, **more: Any) -> Case:
    """A case on OpenVINO whose control is another graph."""
    taken = None if control is None else Run(control)
    return Case(f"openvino-{name}", "openvino", "openvino", planted, expected, Run(model), taken, **more)


CASES: tuple[Case, ...] = (
    openvino("gqa", "OpenVINO's CPU device has no GroupQueryAttention", "no_kernel_op", GROUPED, None),
    openvino(
        "unique",
        "OpenVINO has no Unique",
        "no_kernel_op",
        operators(21, "g (float[16] x) => (float[A] y) {\n  [planted] p = Unique(x)\n  [last] y = Neg(p)\n}"),
        operators(21, "g (float[16] x) => (float[16] y) {\n  [planted] p = Abs(x)\n  [last] y = Neg(p)\n}"),
    ),
    openvino(
        "rms-norm-24",
        "this version knows no RMSNormalization",
        "no_kernel_op",
        NORMED,
        swap(swap(NORMED, "RMSNormalization", "LayerNormalization"), '"" : 24', '"" : 21'),
    ),
    openvino(
        "attention-24",
        "it claims Attention and then finds that it has no such operation",
        "no_kernel_op",
        ATTENTION,
        swap(ATTENTION, "Attention(h, h, h)", "Abs(h)"),
    ),
    openvino(
        "attention-24-neighbour",
        "a node beside it, which goes down with the graph",
        "subgraph_rejected",
        ATTENTION,
        swap(ATTENTION, "Attention(h, h, h)", "Abs(h)"),
        node="last",
    ),
    openvino("matmul-double", "MatMul of float64", "no_kernel_type", DOUBLE, DOUBLE.replace("double[", "float[")),
    openvino("add-uint64", "Add of uint64", "no_kernel_type", UNSIGNED, UNSIGNED.replace("uint64[", "int64[")),
    openvino("cumsum-double", "CumSum of float64", "no_kernel_type", RUNNING, RUNNING.replace("double[", "float[")),
    openvino(
        "cast-to-string",
        "Cast to string",
        "no_kernel_type",
        TEXT,
        swap(swap(TEXT, "to=8", "to=6"), "string[", "int32["),
    ),
    openvino(
        "resize-antialias",
        "Resize that smooths",
        "attribute_unsupported",
        SMALLER,
        swap(SMALLER, ", antialias=1", ""),
    ),
    openvino(
        "scalar",
        "Sigmoid of a tensor of rank 0",
        "attribute_unsupported",
        SCALAR,
        SCALAR.replace("float ", "float[1] "),
    ),
    openvino(
        "pad-wrap",
        "Pad in a mode that it claims and then does not know",
        "attribute_unsupported",
        PADDED,
        swap(PADDED, "wrap", "reflect"),
    ),
    openvino(
        "scatter-mul",
        "ScatterND with a reduction that it claims and then does not know",
        "attribute_unsupported",
        SCATTERED,
        swap(SCATTERED, '<reduction="mul">', ""),
    ),
    openvino(
        "scatter-mul-neighbour",
        "a node beside it, which goes down with the graph",
        "subgraph_rejected",
        SCATTERED,
        swap(SCATTERED, '<reduction="mul">', ""),
        node="first",
    ),
    openvino(
        "loop",
        "a Loop between other nodes: its body is compiled first, and then it is unknown",
        "subgraph_rejected",
        LOOPED,
        STRAIGHT,
    ),
    openvino(
        "rank-unknown",
        "a tensor whose rank the file does not say, as after an operator without shape inference",
        "dynamic_shape",
        RANKLESS,
        swap(RANKLESS, "y) {", "y) <float[4,16] p> {"),
    ),
    openvino(
        "alone-before-a-gap",
        "a single node between the input and a node that OpenVINO lacks: it takes two, not one",
        "not_claimed",
        ALONE,
        IN_COMPANY,
    ),
    openvino(
        "topk-after-a-gap",
        "a TopK with no other node in its part: OpenVINO has it, and takes it only in company",
        "not_claimed",
        BEST,
        BEST_IN_COMPANY,
    ),
    openvino(
        "global-pool-of-any-depth",
        "a GlobalLpPool over a symbolic number of channels, which is claimed and then cannot be read",
        "dynamic_shape",
        POOLED,
        swap(POOLED, "[1,N,8,8]", "[1,4,8,8]"),
        arguments=("--shape", "N=4"),
    ),
)
