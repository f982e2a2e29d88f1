"""Planted causes on WebGPU, which computes on the CPU here; seen with onnxruntime-webgpu 1.27.0."""

from __future__ import annotations

from typing import Any

from tests.planted.case import Case, Run
from tests.planted.graphs import between, image, operators, swap

WHOLE = operators(
    21,
    "g (int32[16,16] x) => (int32[16,16] y) {\n"
    "  [first] h = Add(x, x)\n  [planted] p = MatMul(h, h)\n  [last] y = Add(p, p)\n}",
)
CHOICE = operators(
    21,
    "g (bool[4,16] c, int64[4,16] a, int64[4,16] b) => (int64[4,16] y) {\n  [planted] y = Where(c, a, b)\n}",
)
COUNT = operators(
    21, "g (int64 n) => (int64[A] y) <int64 zero={0}, int64 one={1}> {\n  [planted] y = Range(zero, n, one)\n}"
)
DOUBLE = operators(21, "g (double[4,16] x) => (double[4,16] y) {\n  [planted] y = Softmax(x)\n}")
BOTH_TYPES = operators(21, "g (double[4,16] x) => (uint8[4,16] y) {\n  [planted] y = Cast<to=2>(x)\n}")
TRUNCATE = operators(
    21, "g (float[4,16] x) => (int64[4,16] y) {\n  [first] h = Relu(x)\n  [planted] y = Cast<to=7>(h)\n}"
)
PAST = operators(
    21,
    "g (float[1,4,64] x, float[2,1,4,3,16] past) => (float[1,4,64] y, float[2,1,4,7,16] present)"
    " <float[64,192] w, float[192] b> {\n  [first] h = Neg(x)\n"
    '  [planted] p, present = com.microsoft.Attention<num_heads=4, unidirectional=1>(h, w, b, "", past)\n'
    "  [last] y = Neg(p)\n}",
)
NO_PAST = operators(
    21,
    "g (float[1,4,64] x) => (float[1,4,64] y) <float[64,192] w, float[192] b> {\n  [first] h = Neg(x)\n"
    "  [planted] p = com.microsoft.Attention<num_heads=4, unidirectional=1>(h, w, b)\n  [last] y = Neg(p)\n}",
)
SHAPES = operators(
    21,
    "g (float[N,4,16] x) => (float[A,B] y) <int64[1] from={0}, int64[1] to={1}, int64[1] rest={-1}> {\n"
    "  [first] h = Sigmoid(x)\n  [shape] s = Shape(h)\n  [planted] n = Slice(s, from, to)\n"
    "  [join] t = Concat<axis=0>(n, rest)\n  [view] v = Reshape(h, t)\n  [last] y = Relu(v)\n}",
)
LAYOUT = image("[conv] p = Conv(h, w)", extra="float[4,4,3,3] w", opset=25)
WINDOW = operators(21, "g (int64 n) => (float[A] y) {\n  [planted] h = HannWindow(n)\n  [last] y = Neg(h)\n}")
HARD = operators(22, "g (float[4,16] x) => (float[4,16] y) {\n  a = Neg(x)\n  b = HardSwish(a)\n  y = Neg(b)\n}")
PLAIN = between("[planted] p = Sigmoid(h)")


def webgpu(name: str, planted: str, expected: str, model: str, control: str | None, **more: Any) -> Case:
    """A case on WebGPU whose control is another graph."""
    taken = None if control is None else Run(control)
    return Case(f"webgpu-{name}", "webgpu", "webgpu", planted, expected, Run(model), taken, **more)


CASES: tuple[Case, ...] = (
    webgpu(
        "selu",
        "WebGPU has no kernel for Selu",
        "no_kernel_op",
        between("[planted] p = Selu(h)"),
        between("[planted] p = Elu(h)"),
    ),
    webgpu(
        "lrn",
        "WebGPU has no kernel for LRN",
        "no_kernel_op",
        image("[planted] p = LRN<size=3>(h)"),
        image("[planted] p = Softmax<axis=1>(h)"),
    ),
    webgpu(
        "hann-window",
        "WebGPU has no kernel for HannWindow",
        "no_kernel_op",
        WINDOW,
        None,
        arguments=(),
    ),
    webgpu(
        "average-pool-19",
        "opset 19 bumped AveragePool; WebGPU's kernels end before",
        "no_kernel_version",
        image("[planted] p = AveragePool<kernel_shape=[2,2]>(h)", opset=21),
        image("[planted] p = AveragePool<kernel_shape=[2,2]>(h)", opset=18),
    ),
    webgpu(
        "sin-22",
        "opset 22 bumped Sin",
        "no_kernel_version",
        between("[planted] p = Sin(h)", opset=22),
        between("[planted] p = Sin(h)", opset=21),
    ),
    webgpu(
        "conv-transpose-22",
        "opset 22 bumped ConvTranspose",
        "no_kernel_version",
        image("[planted] p = ConvTranspose(h, w)", extra="float[4,4,3,3] w", opset=22),
        image("[planted] p = ConvTranspose(h, w)", extra="float[4,4,3,3] w", opset=21),
    ),
    webgpu(
        "hard-swish-22-unnamed",
        "HardSwish is unfolded into HardSigmoid, which opset 22 bumped; no node has a name",
        "no_kernel_version",
        HARD,
        swap(HARD, '"" : 22', '"" : 21'),
        node="",
        op_type="HardSigmoid",
    ),
    webgpu("matmul-int32", "MatMul of int32", "no_kernel_type", WHOLE, WHOLE.replace("int32[", "float[")),
    webgpu("softmax-double", "Softmax of float64", "no_kernel_type", DOUBLE, DOUBLE.replace("double[", "float[")),
    webgpu("where-int64", "Where of int64", "no_kernel_type", CHOICE, CHOICE.replace("int64[", "int32[")),
    webgpu(
        "range-int64",
        "Range of int64",
        "option_needed",
        COUNT,
        operators(
            21, "g (int32 n) => (int32[A] y) <int32 zero={0}, int32 one={1}> {\n  [planted] y = Range(zero, n, one)\n}"
        ),
    ),
    webgpu(
        "cast-to-int64",
        "Cast to int64, unless its kernels for int64 are asked for",
        "option_needed",
        TRUNCATE,
        swap(swap(TRUNCATE, "to=7", "to=6"), "int64[", "int32["),
    ),
    webgpu(
        "cast-double-to-uint8",
        "Cast from float64 to uint8, both of which WebGPU does not cast, though it casts other types",
        "no_kernel_type",
        BOTH_TYPES,
        swap(swap(swap(BOTH_TYPES, "double[", "float["), "to=2", "to=6"), "uint8[", "int32["),
        says="float32 to int32",
    ),
    webgpu(
        "attention-with-past",
        "the Attention of com.microsoft with a past, an optional input",
        "attribute_unsupported",
        PAST,
        NO_PAST,
    ),
    webgpu(
        "shape-int64",
        "int64 arithmetic on a shape: WebGPU has no Slice of int64",
        "no_kernel_type",
        SHAPES,
        None,
        arguments=("--shape", "N=2"),
    ),
    webgpu(
        "layout-transpose-25",
        "a Transpose that ONNX Runtime puts around a Conv, in an opset whose Transpose WebGPU lacks",
        "runtime_inserted",
        LAYOUT,
        None,
        node="Transpose",
    ),
    Case(
        "webgpu-forced-to-the-cpu",
        "webgpu",
        "webgpu",
        "the user's option names the node as one for the CPU",
        "pinned_by_user",
        Run(PLAIN, {"forceCpuNodeNames": "planted"}),
        Run(PLAIN),
    ),
)
