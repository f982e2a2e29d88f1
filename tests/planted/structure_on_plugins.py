"""Planted causes on the plugins in types, branches and neighbours; seen with onnxruntime-ep-openvino 1.8.1."""

from __future__ import annotations

from tests.planted.case import NO_FALLBACK, Case, Run
from tests.planted.graphs import OPSET, between, image, operators, swap
from tests.planted.on_plugins import plugin

EIGHTHS = operators(
    21,
    "g (float8e4m3fnuz[4,16] x) => (float[4,16] y) <float s={0.5}> {\n"
    "  [planted] p = DequantizeLinear(x, s)\n  [last] y = Neg(p)\n}",
)
NUMBERS = operators(
    21, "g (string[4] x) => (float8e4m3fnuz[4] y) {\n  [first] h = Identity(x)\n  [planted] y = Cast<to=18>(h)\n}"
)
WORDS = operators(21, "g (string[4] x) => (bool[4] y) {\n  [planted] p = Equal(x, x)\n  [last] y = Not(p)\n}")
BRANCHED = operators(
    21,
    "g (float[4,16] x, bool c) => (float[4,16] y) <int64[4] around={0,0,0,0}> {\n  [first] h = Neg(x)\n"
    '  [branch] p = If(c)<then_branch = t () => (float[4,16] a) { [planted] a = Pad<mode="wrap">(h, around) }, '
    "else_branch = e () => (float[4,16] b) { [other] b = Abs(h) }>\n  [last] y = Neg(p)\n}",
)
FAST = operators(
    21,
    "g (float[4,16] x, bool c) => (float[4,16] y) {\n  [first] h = Neg(x)\n"
    "  [branch] p = If(c)<then_branch = t () => (float[4,16] a) { [planted] a = com.microsoft.FastGelu(h) }, "
    "else_branch = e () => (float[4,16] b) { [other] b = Abs(h) }>\n  [last] y = Neg(p)\n}",
)
WINDOWS = operators(
    21,
    "g (float[1,16,25] x) => (float[1,4,6,6] y) <int64[2] size={6,6}, int64[2] block={2,2}> {\n"
    "  [first] h = Neg(x)\n  [planted] p = Col2Im(h, size, block)\n  [last] y = Neg(p)\n}",
)
EXPERTS = operators(
    21,
    "g (float[4,64] x, float[4,4] r) => (float[4,64] y) <float[4,64,64] v, float[4,64,64] w> {\n  [first] h = Neg(x)\n"
    '  [planted] p = com.microsoft.MoE<k=2, activation_type="relu">(h, r, v, "", w)\n  [last] y = Neg(p)\n}',
)
TWO = operators(
    21,
    "g (float[4,16] x, bool[4,16] c) => (float[4,16] y) <int64[4] around={0,0,0,0}> {\n  [first] h = Neg(x)\n"
    '  [planted] a = Pad<mode="wrap">(h, around)\n  [middle] b = Abs(a)\n'
    "  [gelu] d = com.microsoft.FastGelu(b)\n  [last] y = Neg(d)\n}",
)
NEITHER = swap(swap(TWO, "wrap", "edge"), "com.microsoft.FastGelu", "Gelu")
LOCAL = f'<domain: "local", opset_import: ["" : {OPSET}]>'
LEAK = swap(between("[planted] p = local.Leak<slope=0.2>(h)"), '"com.microsoft"', '"local" : 1, "com.microsoft"') + (
    f"\n{LOCAL}\nLeak <slope> (a) => (c) {{\n  [one] c = LeakyRelu<alpha : float = @slope>(a)\n}}"
)
SQUARE = operators(
    21,
    "g (float[4,4] x) => (float[4,4] y) <float[4,4] a> {\n"
    "  [first] h = Neg(x)\n  [planted] d = Det(a)\n  [scale] p = Mul(h, d)\n  [last] y = Neg(p)\n}",
)
CASES: tuple[Case, ...] = (
    plugin(
        "dequantize-fnuz",
        "float8 of a kind that the plugin does not know",
        "no_kernel_type",
        EIGHTHS,
        swap(EIGHTHS, "float8e4m3fnuz", "float8e4m3fn"),
    ),
    plugin(
        "cast-string-to-fnuz",
        "a Cast from a type and to a type that the plugin does not cast",
        "no_kernel_type",
        NUMBERS,
        swap(swap(swap(NUMBERS, "string", "float"), "float8e4m3fnuz", "float16"), "to=18", "to=10"),
    ),
    plugin("equal-strings", "Equal of strings", "no_kernel_type", WORDS, swap(WORDS, "string", "int32")),
    plugin(
        "fast-gelu-in-a-branch",
        "an operator that the plugin lacks, in a branch of an If",
        "no_kernel_op",
        FAST,
        None,
    ),
    plugin(
        "fast-gelu-in-a-branch-if",
        "the If of that branch: the plugin takes an If whose bodies it has",
        "attribute_unsupported",
        FAST,
        swap(FAST, "com.microsoft.FastGelu", "Gelu"),
        node="branch",
    ),
    plugin(
        "fast-gelu-in-a-branch-neighbour",
        "a node in the other branch, which stays with the If",
        "not_claimed",
        FAST,
        None,
        node="other",
    ),
    plugin(
        "pad-wrap-in-a-branch-neighbour",
        "a node beside an If with a Pad in a mode that the plugin claims and does not know",
        "subgraph_rejected",
        BRANCHED,
        swap(BRANCHED, "wrap", "edge"),
        node="first",
        says="the smallest part that fails alone is branch",
    ),
    plugin("col2im", "the plugin has no Col2Im", "no_kernel_op", WINDOWS, None),
    plugin("mixture-of-experts", "the plugin's CPU device has no MoE", "no_kernel_op", EXPERTS, None),
    plugin(
        "mixed-culprits-rejected",
        "a Pad that it claims and does not know, before an operator that it lacks",
        "attribute_unsupported",
        TWO,
        NEITHER,
    ),
    plugin("mixed-culprits-neighbour", "a node between them", "subgraph_rejected", TWO, NEITHER, node="middle"),
    Case(
        "plugins-webgpu-without-a-device",
        "plugins",
        "webgpu",
        "the WebGPU plugin, which wants a real GPU, on a machine without one",
        "device_missing",
        Run(between("[planted] p = HardSigmoid(h)")),
    ),
    plugin(
        "function-with-attribute", "a function of the file, an attribute of which is passed on", NO_FALLBACK, LEAK, None
    ),
    plugin(
        "dropout-of-nothing",
        "a Dropout in training mode that drops nothing",
        NO_FALLBACK,
        between("[planted] p = Dropout(h, none, yes)", extra="float none={0.0}, bool yes={1}"),
        None,
    ),
    plugin("constant-det", "an operator that the plugin lacks, over an initialiser", NO_FALLBACK, SQUARE, None),
    plugin(
        "group-norm-18",
        "a GroupNormalization of opset 18",
        NO_FALLBACK,
        image("[planted] p = GroupNormalization<num_groups=2>(h, s, b)", extra="float[2] s, float[2] b", opset=18),
        None,
    ),
)
FURTHER: tuple[Case, ...] = (
    plugin(
        "pad-wrap-in-a-branch",
        "a Pad in a mode that it does not know, in a branch of an If",
        "attribute_unsupported",
        BRANCHED,
        None,
    ),
    plugin(
        "mixed-culprits-lacking",
        "the operator that it lacks, behind the other",
        "subgraph_rejected",
        TWO,
        NEITHER,
        node="gelu",
    ),
)
"""Cases that took more to be answered; `cases.UNSOLVED` names those that are not."""
