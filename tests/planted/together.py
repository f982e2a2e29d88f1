"""Planted causes that only an experiment of another kind shows: two things at once, sizes that the run does not have.

An option of the provider beside something of the node, nodes that read constants alone, sizes that are zero in the run,
sizes of outputs that the file may declare, attributes with another name for every type.
"""

from __future__ import annotations

from tests.planted.case import Case, Run
from tests.planted.graphs import operators, swap
from tests.planted.on_compilers import chain
from tests.planted.on_cuda import cuda
from tests.planted.on_qnn import CHIP, qnn

KEPT = {**CHIP, "offload_graph_io_quantization": "0"}
LAST = operators(
    21,
    "g (float[4,16] x, float scale, uint8 zero) => (float[4,16] y) <float s={0.1}, uint8 z={128}> {\n"
    "  [first] h = Neg(x)\n  [down] q = QuantizeLinear(h, s, z)\n  [planted] y = DequantizeLinear(q, scale, zero)\n}",
)
LAST_FIXED = swap(swap(LAST, ", float scale, uint8 zero)", ")"), "(q, scale, zero)", "(q, s, z)")
CAST = operators(25, "g (int64[4,16] x) => (float[4,16] y) {\n  [planted] p = Cast<to=1>(x)\n  [last] y = Neg(p)\n}")
WEIGHT = chain(
    "[planted] d = DequantizeLinear(w, s)\n  [mul] p = MatMul(h, d)",
    inputs="float[4,32] x, float s",
    extra="int8[32,32] w",
)
REPEATED = chain(
    "[tile] q = Tile(h, times)\n  [planted] p = Sigmoid(q)", inputs="float[4,16] x, int64[2] times", output="float[A,B]"
)
BOXES = operators(
    21,
    "g (float[1,6,4] boxes, float[1,1,6] scores) => (int64[N,3] y)"
    " <int64 most={3}, float over={0.5}, float least={0.1}> {\n"
    "  [first] b = Neg(boxes)\n  [planted] y = NonMaxSuppression(b, scores, most, over, least)\n}",
)
COUNTS = operators(
    21,
    "g (int64[4] x) => (string[4] y) {\n  [first] h = Neg(x)\n  [planted] y = ai.onnx.ml.LabelEncoder<"
    'keys_int64s=[1,2], values_strings=["a","b"]>(h)\n}',
)

CASES: tuple[Case, ...] = (
    Case(
        "qnn-dequantize-by-inputs-at-the-end",
        "qnn",
        "qnn",
        "DequantizeLinear before an output, whose scale is an input: QNN wants an option and a constant",
        "attribute_unsupported",
        Run(LAST, CHIP),
        Run(LAST_FIXED, KEPT),
        says="qnn.offload_graph_io_quantization=0 in place of",
    ),
    Case(
        "webgpu-cast-25-int64",
        "webgpu",
        "webgpu",
        "Cast of opset 25 from int64: WebGPU wants an older one, and an option for int64",
        "no_kernel_version",
        Run(CAST),
        Run(swap(CAST, '"" : 25', '"" : 24'), {"enableInt64": "1"}),
        says="webgpu.enableInt64=1 in place of",
    ),
    qnn(
        "weight-by-a-scale",
        "a constant weight whose scale is an input: with a constant in its place the node has no input left",
        "attribute_unsupported",
        WEIGHT,
        swap(swap(WEIGHT, ", float s)", ")"), "int8[32,32] w", "int8[32,32] w, float s={0.1}"),
    ),
    qnn(
        "behind-a-tile",
        "a node after a Tile whose counts are an input, which are zero in the run",
        "dynamic_shape",
        REPEATED,
        swap(swap(REPEATED, ", int64[2] times)", ")"), "y) {", "y) <int64[2] times={1,1}> {"),
    ),
    qnn(
        "boxes-that-are-left",
        "NonMaxSuppression, whose result has as many rows as boxes are left: QNN takes it when the file gives a number",
        "dynamic_shape",
        BOXES,
        swap(BOXES, "[N,3]", "[3,3]"),
    ),
    cuda(
        "label-encoder-to-strings",
        "a LabelEncoder to strings; the attribute with the values has another name in every type",
        "no_kernel_type",
        COUNTS,
        swap(swap(COUNTS, "(string[4] y)", "(float[4] y)"), 'values_strings=["a","b"]', "values_floats=[0.5,0.7]"),
    ),
)
