"""Planted causes on CUDA: operators that it lacks, or the version of; seen with onnxruntime-gpu 1.31.1."""

from __future__ import annotations

from tests.planted.case import Case, Run
from tests.planted.graphs import between, image, operators, swap
from tests.planted.more_on_cuda import ODD_NAMES, PLAIN_NAMES, changed
from tests.planted.on_cuda import cuda


def looped(node: str, opset: int = 21) -> str:
    """A Loop whose body has this node, which reads `s` and makes `so`."""
    return operators(
        opset,
        "g (float[4,16] x, int64 n) => (float[4,16] y) <bool yes={1}> {\n  [first] h = Neg(x)\n"
        "  [loop] p = Loop(n, yes, h)<body = b (int64 i, bool c, float[4,16] s) => (bool co, float[4,16] so) "
        f"{{ co = Identity(c)\n {node} }}>\n  [last] y = Neg(p)\n}}",
    )


DEEP = operators(
    21,
    "g (float[4,16] x, bool c, bool d) => (float[4,16] y) {\n  [first] h = Neg(x)\n"
    "  [outer] p = If(c)<then_branch = t () => (float[4,16] a) { [inner] a = If(d)<"
    "then_branch = u () => (float[4,16] i) { [planted] i = Atan(h) }, "
    "else_branch = v () => (float[4,16] j) { [exp] j = Exp(h) }> }, "
    "else_branch = e () => (float[4,16] b) { [other] b = Neg(h) }>\n  [last] y = Neg(p)\n}",
)
SPECTRUM = operators(
    20,
    "g (float[1,4,16] x) => (float[1,4,9,2] y) <int64 axis={2}, int64[1] ch={3}> {\n  [first] h = Neg(x)\n"
    '  [wide] c = Unsqueeze(h, ch)\n  [planted] p = DFT<onesided=1>(c, "", axis)\n  [last] y = Neg(p)\n}',
)
SPECTRUM_HERE = operators(
    20,
    "g (float[1,4,16] x) => (float[1,4,9,2] y) {\n  [first] h = Neg(x)\n"
    "  [planted] p = com.microsoft.Rfft<normalized=0, onesided=1, signal_ndim=1>(h)\n  [last] y = Neg(p)\n}",
)
DYNAMIC = operators(
    21,
    "g (float[4,16] x) => (float[4,16] y) {\n  [first] h = Neg(x)\n"
    "  [planted] q, s, z = DynamicQuantizeLinear(h)\n  [last] y = DequantizeLinear(q, s, z)\n}",
)
STATIC = operators(
    21,
    "g (float[4,16] x) => (float[4,16] y) <float s, uint8 z={0}> {\n  [first] h = Neg(x)\n"
    "  [planted] q = QuantizeLinear(h, s, z)\n  [last] y = DequantizeLinear(q, s, z)\n}",
)
BITS = operators(
    21,
    "g (int32[4,16] x) => (int32[4,16] y) {\n"
    "  [first] h = Neg(x)\n  [planted] p = BitwiseAnd(h, x)\n  [last] y = Neg(p)\n}",
)
PIECES = operators(
    21,
    "g (float[4,8] x, int64 i) => (float[A,8] y) <int64 two={2}> {\n  [first] h = Neg(x)\n"
    "  [planted] s = SplitToSequence<axis=0>(h, two)\n  [one] a = SequenceAt(s, i)\n  [last] y = Neg(a)\n}",
)
PERHAPS = operators(
    21,
    "g (float[4] x) => (bool y) {\n  [first] h = Neg(x)\n  [planted] o = Optional(h)\n"
    "  [asked] y = OptionalHasElement(o)\n}",
)
DRAWN = operators(
    21,
    "g (float[2,16] x) => (int64[2,1] y) {\n  [first] h = LogSoftmax(x)\n"
    "  [planted] p = Multinomial<dtype=7, sample_size=1>(h)\n  [last] y = Neg(p)\n}",
)
SAVED = "[planted] d = Det(m)\n  p = Mul(h, d)"
MASKED = operators(
    23,
    "g (float[4,16] x) => (float[4,16] y, bool[4,16] m) {\n"
    "  [first] h = Neg(x)\n  [planted] p, m = Dropout(h)\n  [last] y = Neg(p)\n}",
)
EYE = operators(
    22,
    "g (float[16,16] x) => (float[16,16] y) {\n"
    "  [first] h = Neg(x)\n  [planted] e = EyeLike(h)\n  [last] y = MatMul(e, h)\n}",
)
AFTER_CONTRIB = operators(
    22,
    "g (float[4,64] x) => (float[4,32] y) <uint8[32,2,16] w, float[64] s> {\n"
    "  [first] h = com.microsoft.MatMulNBits<K=64, N=32, bits=4, block_size=32>(x, w, s)\n"
    "  [planted] p = Selu(h)\n  [last] y = Neg(p)\n}",
)
POOLED = "[planted] p = MaxPool<kernel_shape=[2,2]>(h)"
BY_COLUMN = "[planted] p, i = MaxPool<kernel_shape=[2,2], storage_order=1>(h)"
LAST_FIRST = {"prefer_nhwc": "1"}
ADDED = operators(
    21,
    "g (uint8[4,16] x) => (uint8[4,16] y) <float s, uint8 z={0}> {\n"
    "  [planted] y = com.microsoft.QLinearAdd(x, s, z, x, s, z, s, z)\n}",
)
OUTSIDE = operators(
    21,
    "g (float[4,16] x, bool c) => (float[4,16] y) {\n  [first] h = Neg(x)\n  [planted] k = Celu(h)\n"
    "  [choice] y = If(c)<then_branch = t () => (float[4,16] a) { [one] a = Sin(k) }, "
    "else_branch = e () => (float[4,16] b) { [two] b = Neg(k) }>\n}",
)
GATHERED = operators(
    21,
    "g (float[4] x, int64 n) => (float[A] y) <bool yes={1}> {\n  [first] h = Neg(x)\n"
    "  [start] e = SequenceConstruct(h)\n  [loop] s = Loop(n, yes, e)<body = b (int64 i, bool c, seq(float[4]) l) => "
    "(bool co, seq(float[4]) o) { co = Identity(c)\n [planted] v = Atan(h)\n [more] o = SequenceInsert(l, v) }>\n"
    "  [join] p = ConcatFromSequence<axis=0>(s)\n  [last] y = Neg(p)\n}",
)

CASES: tuple[Case, ...] = (
    changed(
        "atan-in-a-branch-of-a-branch", "an operator that CUDA lacks, two Ifs deep", "no_kernel_op", DEEP, "Atan", "Sin"
    ),
    changed(
        "cosh-in-a-loop",
        "an operator that CUDA lacks, in the body of a Loop",
        "no_kernel_op",
        looped("[planted] so = Cosh(s)"),
        "Cosh",
        "Cos",
    ),
    cuda(
        "selu-22-in-a-loop",
        "opset 22 bumped Selu, which stands in the body of a Loop",
        "no_kernel_version",
        looped("[planted] so = Selu(s)", 22),
        looped("[planted] so = Selu(s)", 21),
    ),
    cuda("dft", "CUDA has no kernel for DFT", "no_kernel_op", SPECTRUM, SPECTRUM_HERE),
    cuda("dynamic-quantise", "CUDA has no kernel for DynamicQuantizeLinear", "no_kernel_op", DYNAMIC, STATIC),
    changed("bitwise-and", "CUDA has no kernel for BitwiseAnd", "no_kernel_op", BITS, "BitwiseAnd", "Add"),
    changed(
        "multinomial",
        "CUDA has no kernel for Multinomial, with which a graph samples",
        "no_kernel_op",
        DRAWN,
        "Multinomial<dtype=7, sample_size=1>",
        "ArgMax<axis=1>",
    ),
    cuda(
        "lp-pool",
        "CUDA has no kernel for LpPool",
        "no_kernel_op",
        image("[planted] p = LpPool<kernel_shape=[2,2]>(h)"),
        image("[planted] p = AveragePool<kernel_shape=[2,2]>(h)"),
    ),
    cuda(
        "mean-variance-normalisation",
        "a function that the CPU has a kernel for, and CUDA has none",
        "no_kernel_op",
        image("[planted] p = MeanVarianceNormalization(h)"),
        image("[planted] p = LpNormalization<axis=1>(h)"),
    ),
    changed(
        "split-to-sequence",
        "CUDA has no kernel for SplitToSequence, which makes a sequence",
        "no_kernel_op",
        PIECES,
        "SplitToSequence<axis=0>(h, two)",
        "SequenceConstruct(h, x)",
    ),
    cuda("optional", "CUDA has no kernel for Optional, which makes no tensor", "no_kernel_op", PERHAPS, None),
    cuda(
        "unique",
        "CUDA has no kernel for Unique",
        "no_kernel_op",
        image("[planted] u = Unique(h)\n  p = Reshape(u, s)", extra="int64[4] s={1,1,1,-1}"),
        image("[planted] u = Flatten(h)\n  p = Reshape(u, s)", extra="int64[4] s={1,1,1,-1}"),
    ),
    cuda(
        "det-of-a-default",
        "an operator that CUDA lacks, over a weight that is an input as well and so is not constant",
        "no_kernel_op",
        swap(between(SAVED, extra="float[4,4] m"), "[4,16] x)", "[4,16] x, float[4,4] m)"),
        swap(
            between(SAVED.replace("Det(m)", "ReduceSum(m)"), extra="float[4,4] m"),
            "[4,16] x)",
            "[4,16] x, float[4,4] m)",
        ),
    ),
    cuda(
        "dropout-23",
        "opset 22 bumped Dropout; its mask is wanted",
        "no_kernel_version",
        MASKED,
        swap(MASKED, '"" : 23', '"" : 21'),
    ),
    cuda("eye-like-22", "opset 22 bumped EyeLike", "no_kernel_version", EYE, swap(EYE, '"" : 22', '"" : 21')),
    cuda(
        "thresholded-relu-22",
        "opset 22 bumped ThresholdedRelu",
        "no_kernel_version",
        between("[planted] p = ThresholdedRelu(h)", opset=22),
        between("[planted] p = ThresholdedRelu(h)", opset=21),
    ),
    cuda(
        "named-cpu",
        "a node that CUDA lacks, with a name that is a word of the log's",
        "no_kernel_op",
        ODD_NAMES,
        PLAIN_NAMES,
        node="CPU",
    ),
    cuda(
        "named-as-a-copy",
        "a node that CUDA lacks, with the name of a copy",
        "no_kernel_op",
        between("[Memcpy] p = Celu(h)"),
        between("[Memcpy] p = Elu(h)"),
        node="Memcpy",
    ),
    cuda(
        "named-as-a-cast",
        "a node that CUDA lacks, with the name that ONNX Runtime gives to casts",
        "no_kernel_op",
        between("[InsertedPrecisionFreeCast_h] p = Celu(h)"),
        between("[InsertedPrecisionFreeCast_h] p = Elu(h)"),
        node="InsertedPrecisionFreeCast_h",
    ),
    changed(
        "selu-22-after-contrib",
        "opset 22 bumped Selu, which follows an operator whose output ONNX cannot infer",
        "no_kernel_version",
        AFTER_CONTRIB,
        '"" : 22',
        '"" : 21',
    ),
    Case(
        "cuda-max-pool-22-channels-last",
        "main",
        "cuda",
        "opset 22 bumped MaxPool, and the user prefers channels last",
        "no_kernel_version",
        Run(image(POOLED, opset=22), LAST_FIRST, dry_run=True),
        Run(image(POOLED, opset=21), LAST_FIRST, dry_run=True),
    ),
    cuda("q-linear-add", "CUDA has no kernel for QLinearAdd", "no_kernel_op", ADDED, None),
    changed(
        "celu-before-an-if",
        "an operator that CUDA lacks, read by both branches of an If",
        "no_kernel_op",
        OUTSIDE,
        "Celu",
        "Elu",
    ),
    changed(
        "atan-in-a-loop-of-a-sequence",
        "an operator that CUDA lacks, in a Loop that makes a sequence",
        "no_kernel_op",
        GATHERED,
        "Atan",
        "Sin",
    ),
    cuda(
        "max-pool-22-indices",
        "opset 22 bumped MaxPool, whose second output is wanted column by column",
        "no_kernel_version",
        image(BY_COLUMN, outputs="int64[1,4,7,7] i", opset=22),
        image(BY_COLUMN, outputs="int64[1,4,7,7] i"),
    ),
)
