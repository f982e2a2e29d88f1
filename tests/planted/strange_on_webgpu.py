"""Strange graphs and options on WebGPU: names, shapes, types and options that few have; onnxruntime-webgpu 1.27.0."""

from __future__ import annotations

from tests.planted.case import NO_FALLBACK, Case, Run
from tests.planted.graphs import NAMES, between, image, operators, swap
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
BRAIN = operators(21, "g (bfloat16[4,16] x) => (bfloat16[4,16] y) {\n  [planted] y = Relu(x)\n}")
NIBBLES = operators(21, "g (uint4[4] x) => (float[4] y) {\n  [planted] p = Cast<to=1>(x)\n  [last] y = Neg(p)\n}")
PLAIN = between("[planted] p = Sigmoid(h)")
POOLED = image("[planted] p = MaxPool<kernel_shape=[2,2], strides=[2,2], dilations=[2,2]>(h)")
WHERE_MAX = image("[planted] p, at = MaxPool<kernel_shape=[2,2]>(h)", outputs="int64[1,C,H,W] at")
CLEAR = image(
    '[planted] p = Resize<mode="linear", antialias=1>(h, "", sizes)', extra="float[4] sizes={1.0,1.0,0.5,0.5}"
)
WRAPPED = image('[planted] p = Pad<mode="wrap">(h, around)', extra="int64[8] around={0,0,1,1,0,0,1,1}")
VOLUME = operators(
    21,
    "g (float[1,2,4,4,4] x) => (float[1,2,3,3,3] y) {\n  [first] h = Neg(x)\n"
    "  [planted] p = MaxPool<kernel_shape=[2,2,2]>(h)\n  [last] y = Neg(p)\n}",
)
TRAINED = image(
    "[planted] p, m, v = BatchNormalization<training_mode=1>(h, s, b, mean, variance)",
    extra="float[4] s, float[4] b, float[4] mean={0.0,0.0,0.0,0.0}, float[4] variance={1.0,1.0,1.0,1.0}",
)
MEANT = operators(
    21,
    "g (float[4,16] x) => (float[4,16] y, float[4,1] m) <float[16] s> {\n  [first] h = Neg(x)\n"
    "  [planted] p, m = LayerNormalization(h, s)\n  [last] y = Neg(p)\n}",
)
DOTS = operators(
    21,
    "g (float[2,4,8] x, float[2,8,4] z) => (float[2,4,4] y) {\n  [first] h = Neg(x)\n"
    '  [planted] p = Einsum<equation="...ij,...jk->...ik">(h, z)\n  [last] y = Neg(p)\n}',
)
LAST = operators(
    21,
    "g (float[4,16] x) => (int64[1,16] y) {\n  [first] h = Neg(x)\n"
    "  [planted] p = ArgMax<select_last_index=1>(h)\n  [last] y = Identity(p)\n}",
)
SUMMED = operators(
    21,
    "g (float[4,16] x, float[1,16] u) => (float[4,16] y) <int64[1,1] i={0}> {\n  [first] h = Neg(x)\n"
    '  [planted] p = ScatterND<reduction="mul">(h, i, u)\n  [last] y = Neg(p)\n}',
)
BITS = operators(
    21,
    "g (float[1,4,64] x) => (float[1,4,64] y) <uint8[64,2,24] b, float[128] s> {\n  [first] h = Neg(x)\n"
    "  [planted] p = com.microsoft.MatMulNBits<K=64, N=64, bits=3, block_size=32>(h, b, s)\n  [last] y = Neg(p)\n}",
)


def option(
    name: str, planted: str, expected: str, given: dict[str, str], taken: dict[str, str], text: str = PLAIN, **more: str
) -> Case:
    """A case whose cause is the value of an option."""
    return Case(f"webgpu-{name}", "webgpu", "webgpu", planted, expected, Run(text, given), Run(text, taken), **more)  # type: ignore[arg-type]


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
        "the same in a node whose name has everything in it",
        "no_kernel_op",
        NAMED,
        swap(NAMED, "Selu", "Elu"),
        node=NAMES["ODD"],
    ),
    webgpu(
        "twins",
        "the same in a node of the same name as one that WebGPU has",
        "no_kernel_op",
        TWINS,
        swap(TWINS, "Selu", "Elu"),
        node="",
        op_type="Selu",
    ),
    webgpu(
        "twins-in-a-branch",
        "the same, in a branch",
        "no_kernel_op",
        CHOSEN,
        swap(CHOSEN, "Selu", "Elu"),
        node="",
        op_type="Selu",
    ),
    webgpu("xor", "Xor", "no_kernel_op", LOGICAL, swap(LOGICAL, "Xor", "And")),
    webgpu("equal-bool", "Equal of bool", "no_kernel_type", COMPARED, None),
    webgpu("neg-int8", "Neg of int8", "no_kernel_type", SHORT, swap(SHORT, "int8", "float")),
    webgpu("dequantize-float8", "float8 weights", "no_kernel_type", EIGHTHS, swap(EIGHTHS, "float8e4m3fn", "uint8")),
    webgpu("relu-bfloat16", "Relu of bfloat16", "no_kernel_type", BRAIN, swap(BRAIN, "bfloat16", "float16")),
    webgpu("cast-uint4", "Cast from uint4", "no_kernel_type", NIBBLES, swap(NIBBLES, "uint4", "uint32")),
    webgpu(
        "pool-dilated", "MaxPool with dilations", "attribute_unsupported", POOLED, swap(POOLED, ", dilations=[2,2]", "")
    ),
    webgpu("pool-indices", "MaxPool with places", "attribute_unsupported", WHERE_MAX, None),
    webgpu("resize-antialias", "Resize that smooths", "attribute_unsupported", CLEAR, swap(CLEAR, ", antialias=1", "")),
    webgpu("pad-wrap", "Pad that wraps", "attribute_unsupported", WRAPPED, swap(WRAPPED, "wrap", "edge")),
    webgpu("pool-volume", "MaxPool in three dimensions", "attribute_unsupported", VOLUME, None),
    webgpu("batch-norm-training", "BatchNormalization as in training", "attribute_unsupported", TRAINED, None),
    webgpu("layer-norm-mean", "LayerNormalization with mean", "attribute_unsupported", MEANT, None),
    webgpu("einsum-dots", "Einsum with an ellipsis", "attribute_unsupported", DOTS, swap(DOTS, "...", "b")),
    webgpu("argmax-last", "ArgMax of the last", "attribute_unsupported", LAST, swap(LAST, "<select_last_index=1>", "")),
    webgpu(
        "scatter-mul",
        "ScatterND that multiplies",
        "attribute_unsupported",
        SUMMED,
        swap(SUMMED, '<reduction="mul">', ""),
    ),
    webgpu(
        "three-bits",
        "MatMulNBits of three bits",
        "attribute_unsupported",
        BITS,
        swap(swap(BITS, "bits=3", "bits=4"), "2,24", "2,16"),
    ),
    option(
        "layout-unknown",
        "a layout that there is not",
        "option_rejected",
        {"preferredLayout": "CHWN"},
        {"preferredLayout": "NCHW"},
    ),
    option(
        "int64-in-words",
        "a switch that is neither on nor off",
        "option_rejected",
        {"enableInt64": "maybe"},
        {"enableInt64": "1"},
    ),
    option(
        "capture-in-words",
        "a switch that is neither on nor off",
        "option_rejected",
        {"enableGraphCapture": "maybe"},
        {"enableGraphCapture": "0"},
    ),
    option(
        "cache-mode",
        "a cache that there is not",
        "option_rejected",
        {"storageBufferCacheMode": "huge"},
        {"storageBufferCacheMode": "bucket"},
    ),
    option(
        "validation",
        "a mode of validation that there is not",
        "option_rejected",
        {"validationMode": "strict"},
        {"validationMode": "basic"},
    ),
    option(
        "backend",
        "a graphics interface that there is not",
        "option_rejected",
        {"dawnBackendType": "OpenGL"},
        {"dawnBackendType": "Vulkan"},
    ),
    option(
        "power",
        "a preference that there is not",
        "option_rejected",
        {"powerPreference": "max"},
        {"powerPreference": "high-performance"},
    ),
    option(
        "capture-with-a-gap",
        "graph capture of a graph with a node that WebGPU lacks",
        "no_kernel_op",
        {"enableGraphCapture": "1"},
        {"enableGraphCapture": "0"},
        text=SELU,
    ),
)
