"""Strange graphs and options on WebGPU: names, shapes, types and options that few have; onnxruntime-webgpu 1.27.0."""

from __future__ import annotations

from tests.planted.case import NO_FALLBACK, Case, Run
from tests.planted.graphs import NAMES, between, operators, swap
from tests.planted.on_webgpu import webgpu

SELU = between("[planted] p = Selu(h)")
NOTHING = operators(
    21, "g (float[0,16] x) => (float[0,16] y) {\n  [first] h = Neg(x)\n  [planted] p = Selu(h)\n  [last] y = Neg(p)\n}"
)
SCALAR = operators(
    21, "g (float x) => (float y) {\n  [first] h = Neg(x)\n  [planted] p = Selu(h)\n  [last] y = Neg(p)\n}"
)
NAMED = swap(SELU, "[planted]", "[ODD]")
TWINS = swap(swap(SELU, "[planted]", "[twin_A]"), "[first]", "[twin_B]")
CHOSEN = operators(
    21,
    "g (float[4,16] x, bool c) => (float[4,16] y) {\n  [first] h = Neg(x)\n"
    "  [planted] q = If(c)<then_branch = t () => (float[4,16] a) { [same] a = Selu(h) }, "
    "else_branch = e () => (float[4,16] b) { [other] b = Neg(h) }>\n  [same] p = Abs(q)\n  [last] y = Neg(p)\n}",
)
LOGICAL = operators(21, "g (bool[4] x, bool[4] z) => (bool[4] y) {\n  [first] h = Not(x)\n  [planted] y = Xor(h, z)\n}")
COMPARED = operators(
    21, "g (bool[4] x, bool[4] z) => (bool[4] y) {\n  [first] h = Not(x)\n  [planted] y = Equal(h, z)\n}"
)
SHORT = operators(21, "g (int8[4] x) => (int8[4] y) {\n  [planted] y = Neg(x)\n}")
EIGHTHS = operators(
    21,
    "g (float8e4m3fn[4,16] x) => (float[4,16] y) <float s={0.5}> {\n"
    "  [planted] p = DequantizeLinear(x, s)\n  [last] y = Neg(p)\n}",
)
NIBBLES = operators(21, "g (uint4[4] x) => (float[4] y) {\n  [planted] p = Cast<to=1>(x)\n  [last] y = Neg(p)\n}")
PLAIN = between("[planted] p = Sigmoid(h)")
EQUAL = operators(
    21, "g (float[4] x, float[4] z) => (bool[4] y) {\n  [first] h = Neg(x)\n  [planted] y = Equal(h, z)\n}"
)
OLD = operators(
    6, "g (float[4,16] x) => (float[4,16] y) {\n  [first] h = Neg(x)\n  [planted] p = Elu(h)\n  [last] y = Neg(p)\n}"
)
CAPTURE = {"enableGraphCapture": "1"}


def captured(name: str, planted: str, expected: str, text: str, control: str, **more: str) -> Case:
    """A case in which the user asks for graph capture, which wants every node on WebGPU."""
    run, taken = Run(text, CAPTURE), Run(control, CAPTURE)
    return Case(f"webgpu-{name}", "webgpu", "webgpu", planted, expected, run, taken, **more)  # type: ignore[arg-type]


WHOLE_BRANCH = operators(
    21,
    "g (int64[4,16] x, float[4,16] z) => (float[4,16] y) <bool yes={1}, int64[4,16] w> {\n"
    "  [choice] p = If(yes)<then_branch = t () => (float[4,16] a) { [inner] b = Mul(x, w)\n "
    " [back] a = Cast<to=1>(b) }, else_branch = e () => (float[4,16] c) { [other] c = Mul(z, z) }>\n"
    "  [last] y = Neg(p)\n}",
)

CASES: tuple[Case, ...] = (
    webgpu(
        "selu-of-nothing",
        "an operator that WebGPU lacks, over a tensor without elements",
        "no_kernel_op",
        NOTHING,
        swap(NOTHING, "Selu", "Elu"),
    ),
    webgpu("selu-of-a-number", "the same over a tensor of rank 0", "no_kernel_op", SCALAR, swap(SCALAR, "Selu", "Elu")),
    webgpu(
        "oddly-named",
        "the same in a node whose name has everything in it that is not a letter",
        "no_kernel_op",
        NAMED,
        swap(NAMED, "Selu", "Elu"),
        node=NAMES["ODD"],
    ),
    webgpu(
        "two-of-a-name",
        "the same in a node of the same name as one that WebGPU has",
        "no_kernel_op",
        TWINS,
        None,
        node="",
        op_type="Selu",
        plain=False,
    ),
    webgpu(
        "name-of-one-around",
        "the same in a branch, by the name of a node outside of it",
        "no_kernel_op",
        CHOSEN,
        None,
        node="",
        op_type="Selu",
    ),
    webgpu("xor", "WebGPU has no Xor, and And", "no_kernel_op", LOGICAL, swap(LOGICAL, "Xor", "And")),
    webgpu("equal-bool", "Equal of bool", "no_kernel_type", COMPARED, EQUAL),
    webgpu("neg-int8", "Neg of int8", "no_kernel_type", SHORT, swap(SHORT, "int8", "float")),
    webgpu("dequantize-float8", "weights in float8", "no_kernel_type", EIGHTHS, swap(EIGHTHS, "float8e4m3fn", "uint8")),
    webgpu("cast-uint4", "Cast from uint4", "no_kernel_type", NIBBLES, swap(NIBBLES, "uint4", "uint32")),
    captured(
        "capture-with-a-gap",
        "an operator that WebGPU lacks, in a graph that the user wants captured",
        "no_kernel_op",
        SELU,
        swap(SELU, "Selu", "Elu"),
    ),
    captured(
        "capture-with-a-gap-neighbour",
        "a node beside it: no node is on WebGPU then",
        "subgraph_rejected",
        SELU,
        swap(SELU, "Selu", "Elu"),
        node="first",
        says="graph capture",
    ),
    Case(
        "webgpu-whole-captured",
        "webgpu",
        "webgpu",
        "a graph that the user wants captured, and that WebGPU has",
        NO_FALLBACK,
        Run(PLAIN, CAPTURE),
    ),
    webgpu(
        "int64-in-a-branch-that-is-always-taken",
        "a type that WebGPU lacks, in the branch that ONNX Runtime puts in the place of its If",
        "no_kernel_type",
        WHOLE_BRANCH,
        WHOLE_BRANCH.replace("int64", "int32"),
        node="_if_then_branch_Mul",
    ),
    webgpu(
        "opset-6",
        "an opset for which ONNX Runtime cannot change layouts, so that WebGPU gets no node",
        "version_mismatch",
        OLD,
        swap(OLD, '"" : 6', '"" : 7'),
    ),
)
