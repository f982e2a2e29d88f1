"""Graphs all of whose work CUDA does, or that is done before a run, though parts of them look as if they fell back."""

from __future__ import annotations

from typing import Any

from tests.planted.case import NO_FALLBACK, Case, Run
from tests.planted.functions_on_cuda import BRANCHED, PART, SELU, calling
from tests.planted.graphs import between, image, operators
from tests.planted.on_cuda import STACK, cuda
from tests.planted.operators_on_cuda import looped


def whole(name: str, planted: str, text: str, **more: Any) -> Case:
    """A case of which nothing is to be said to have fallen back."""
    return cuda(name, planted, NO_FALLBACK, text, None, **more)


CONSTANT = (
    "Part (a) => (c) {\n  k = Constant<value=float[2,2]{1.0,2.0,3.0,4.0}>()\n"
    "  [one] d = Det(k)\n  [two] c = Mul(a, d)\n}"
)
HEADS = "bfloat16[1,4,8,16]"
SOFT_CAPPED = operators(
    24,
    f"g ({HEADS} q, {HEADS} k, {HEADS} v) => ({HEADS} y, bfloat16[1,4,8,8] qk) {{\n  [first] h = Neg(q)\n"
    '  [planted] p, "", "", qk = Attention<softcap=30.0, qk_matmul_output_mode=1>(h, k, v)\n  [last] y = Neg(p)\n}',
)
CACHE = "bfloat16[1,2,16,16]"
QUERY = operators(
    21,
    f"g (bfloat16[1,1,64] x, bfloat16[1,1,32] k, bfloat16[1,1,32] v, {CACHE} pk, {CACHE} pv, int32[1] s, int32 t)"
    f" => (bfloat16[1,1,64] y, {CACHE} nk, {CACHE} nv) <bfloat16[16,8] c, bfloat16[16,8] r, bfloat16[4] sink> {{\n"
    "  [first] q = Neg(x)\n  [planted] a, nk, nv = com.microsoft.GroupQueryAttention<num_heads=4, kv_num_heads=2, "
    'do_rotary=1, softcap=30.0, local_window_size=4>(q, k, v, pk, pv, s, t, c, r, "", "", sink)\n'
    "  [last] y = Neg(a)\n}",
)
BRANCHES = operators(
    21,
    "g (float[4,16] x, bool c, bool d) => (float[4,16] y) {\n  [first] h = Neg(x)\n"
    "  [outer] p = If(c)<then_branch = t () => (float[4,16] a) { [inner] a = If(d)<"
    "then_branch = u () => (float[4,16] i) { [planted] i = Sin(h) }, "
    "else_branch = v () => (float[4,16] j) { [exp] j = Exp(h) }> }, "
    "else_branch = e () => (float[4,16] b) { [other] b = Neg(h) }>\n  [last] y = Neg(p)\n}",
)
DECIDED = operators(
    21,
    "g (float[4,16] x) => (float[4,16] y) <int64 one={1}, int64 four={4}> {\n  [first] h = Neg(x)\n"
    "  [sizes] s = Shape(h)\n  [width] n = Gather(s, one)\n  [narrow] c = Less(n, four)\n"
    "  [choice] p = If(c)<then_branch = t () => (float[4,16] a) { [planted] a = Asin(h) }, "
    "else_branch = e () => (float[4,16] b) { [other] b = Sin(h) }>\n  [last] y = Neg(p)\n}",
)
SCANNED = operators(
    21,
    "g (float[5,4] x, float[4] z) => (float[5,4] y, float[4] last) {\n  [first] h = Neg(x)\n"
    "  [scan] last, y = Scan<num_scan_inputs=1, body = b (float[4] s, float[4] t) => (float[4] so, float[4] o) "
    "{ [planted] so = Add(s, t)\n o = Mul(so, t) }>(z, h)\n}",
)
MAPPED = operators(
    18,
    "g (float[4] x) => (float[A] y) {\n  [first] h = Neg(x)\n  [pair] o = SequenceConstruct(h, x)\n"
    "  [planted] m = SequenceMap<body = b (float[4] e) => (float[4] f) { [inner] f = Sin(e) }>(o)\n"
    "  [join] p = ConcatFromSequence<axis=0>(m)\n  [last] y = Neg(p)\n}",
)
LOSS = operators(
    21,
    "g (float[4,16] x, int32[4] l) => (float y, float[4,16] lp) <float[16] w> {\n  [first] h = Neg(x)\n"
    "  [planted] p, lp = SoftmaxCrossEntropyLoss<ignore_index=0>(h, l, w)\n  [last] y = Neg(p)\n}",
)
COIN = operators(
    22, "g (float[4] x) => (bool[4] y) {\n  [first] s = Sigmoid(x)\n  [planted] y = Bernoulli<dtype=9, seed=1.0>(s)\n}"
)
CAST_LIKE = operators(
    21, "g (float[4] x, float16[4] k) => (float16[4] y) {\n  [planted] h = CastLike(x, k)\n  [last] y = Neg(h)\n}"
)
FILTERS = operators(
    17,
    "g (float[1,9] x) => (float[1,8] y)"
    " <int64 a={8}, int64 d={16}, int64 r={8192}, float low={0.0}, float high={4096.0}> {\n"
    "  [planted] m = MelWeightMatrix(a, d, r, low, high)\n  [last] y = MatMul(x, m)\n}",
)
WINDOW = operators(
    17, "g (float[16] x) => (float[16] y) <int64 n={16}> {\n  [planted] w = HannWindow(n)\n  [last] y = Mul(x, w)\n}"
)
REQUANTISED = between(
    "[planted] q, s, z = DynamicQuantizeLinear(c)\n  d = DequantizeLinear(q, s, z)\n  p = Mul(h, d)",
    extra="float[4,16] c",
)
CHOSEN = operators(
    21,
    "g (float[4,16] x) => (float[A,16] y) <bool[4] m={1,0,1,0}> {\n  [first] h = Neg(x)\n"
    "  [planted] n = NonZero(m)\n  [turned] t = Transpose(n)\n  [last] y = GatherND(h, t)\n}",
)
WORDS = operators(
    21,
    'g (float[4,16] x) => (float[4,16] y) {\n  c = Constant<value_strings=["a", "b"]>()\n'
    "  [planted] s = Shape(c)\n  [number] f = Cast<to=1>(s)\n  [sum] n = ReduceSum(f)\n  [last] y = Mul(x, n)\n}",
)
WARPED = image(
    "[planted] at = AffineGrid(t, s)\n  p = GridSample(h, at)",
    extra="float[1,2,3] t, int64[4] s={1,4,8,8}",
    opset=20,
)
DEFAULT = operators(
    21,
    "g (float[4,16] x, float[16,16] w, int64[2] s) => (float[A,B] y) <float[16,16] w, int64[2] s={8,8}> {\n"
    "  [first] h = MatMul(x, w)\n  [planted] p = Reshape(h, s)\n  [last] y = Neg(p)\n}",
)
DEFAULT_SIZE = operators(
    21,
    "g (float[4,16] x, float[8,4] k) => (float[A,B] y)"
    " <float[8,4] k, int64[1] rest={-1}, int64[1] zero={0}, int64[1] one={1}> {\n  [first] h = Neg(x)\n"
    "  [sizes] s = Shape(k)\n  [planted] n = Slice(s, zero, one)\n  [join] t = Concat<axis=0>(n, rest)\n"
    "  [view] p = Reshape(h, t)\n  [last] y = Neg(p)\n}",
)
NORMALISED = operators(
    21,
    "g (float[1,4,8,8] x) => (float[1,4,8,8] y)"
    " <float[4,4,1,1] w, float[4] s, float[4] b, float[4] m, float[4] v> {\n"
    "  [conv] h = Conv(x, w)\n  [planted] p = BatchNormalization(h, s, b, m, v)\n  [last] y = Relu(p)\n}",
)

MISH = operators(
    21,
    "g (float[4,16] x, bool c) => (float[4,16] y) {\n  [first] h = Neg(x)\n"
    "  [choice] p = If(c)<then_branch = t () => (float[4,16] a) { [planted] a = Mish(h) }, "
    "else_branch = e () => (float[4,16] b) { [other] b = Neg(h) }>\n  [last] y = Neg(p)\n}",
)
PASSED = operators(21, "g (float[4] x) => (float[4] y, float[2] w) <float[2] w> {\n  [planted] y = Sigmoid(x)\n}")

REPLACED = (
    between("[planted] p = com.microsoft.FastGelu(h)")
    + '\n<domain: "com.microsoft", opset_import: ["" : 21]>\n'
    + "FastGelu (a) => (c) {\n  [one] b = Asin(a)\n  [two] c = Mul(a, b)\n}"
)

CASES: tuple[Case, ...] = (
    whole(
        "mish-double",
        "Mish, a function that ONNX Runtime unfolds into three others",
        operators(21, "g (double[4] x) => (double[4] y) {\n  [first] h = Neg(x)\n  [planted] y = Mish(h)\n}"),
    ),
    whole(
        "swish-24",
        "Swish, a function whose unfolding has a function in it",
        between("[planted] p = Swish<alpha=1.5>(h)", opset=24),
    ),
    whole("cross-entropy", "SoftmaxCrossEntropyLoss of int32 labels, which becomes two dozen nodes", LOSS),
    whole("bernoulli", "Bernoulli, which becomes a RandomUniformLike and a comparison", COIN),
    whole("cast-like", "CastLike, which becomes a Cast", CAST_LIKE),
    whole("sequence-map-of-sin", "SequenceMap, which becomes a Loop", MAPPED),
    whole("mel-filters", "a MelWeightMatrix, which CUDA lacks, over constants", FILTERS),
    whole("hann-window", "a HannWindow, which CUDA lacks, of a constant length", WINDOW),
    whole("weight-quantised-in-the-graph", "a DynamicQuantizeLinear, which CUDA lacks, over a weight", REQUANTISED),
    whole("rows-by-a-constant-mask", "rows chosen with the NonZero of a constant", CHOSEN),
    whole("number-of-words", "the Shape of constant strings, which CUDA does not touch", WORDS),
    whole("constant-grid", "an AffineGrid, which CUDA lacks, over constants", WARPED),
    whole(
        "if-by-a-known-shape",
        "an If that a fixed shape decides, with an operator that CUDA lacks in the other branch",
        DECIDED,
    ),
    whole("if-in-an-if", "two Ifs, one in the other, all of whose nodes CUDA has", BRANCHES),
    whole("loop", "a Loop all of whose body CUDA has", looped("[planted] so = Cos(s)")),
    whole("scan", "a Scan all of whose body CUDA has", SCANNED),
    whole(
        "function-of-22-in-21",
        "a function for opset 22, whose Selu CUDA lacks, which is read as of the model's opset 21",
        calling(PART, SELU, opset=21, own=22),
    ),
    whole(
        "function-of-constants",
        "a function with an operator that CUDA lacks, over a constant",
        calling(
            PART,
            CONSTANT,
        ),
    ),
    whole(
        "function-twice",
        "a function of the file that is called twice",
        calling(
            "[once] q = local.Part(h)\n  [planted] p = local.Part(q)",
            "Part (a) => (c) {\n  [one] b = Sigmoid(a)\n  [two] c = Mul(a, b)\n}",
        ),
    ),
    whole("defaults", "a weight and a shape that the caller may replace", DEFAULT),
    whole(
        "size-of-a-default",
        "the size of a weight that the caller may replace, but not by one of another size",
        DEFAULT_SIZE,
    ),
    whole("conv-and-norm", "a BatchNormalization that goes into the Conv before it", NORMALISED),
    whole(
        "attention-24",
        "Attention of opset 24 in bfloat16, with a soft cap and the product of queries and keys",
        SOFT_CAPPED,
    ),
    whole("gqa-bfloat16", "GroupQueryAttention in bfloat16 with rotation, window, soft cap and sinks", QUERY),
    whole(
        "pinned-to-the-provider",
        "a pin to the provider that has the node anyway",
        between("[head__planted] p = Sigmoid(h)"),
        arguments=("--pin", "cuda:head"),
    ),
    Case(
        "cuda-within-budget",
        "main",
        "cuda",
        "a budget of device memory that all layers fit in",
        NO_FALLBACK,
        Run(STACK, {"memory_budget_kb": "100000"}, dry_run=True),
    ),
    Case(
        "cuda-channels-last",
        "main",
        "cuda",
        "a Conv and pooling, with channels last as the user's option has it",
        NO_FALLBACK,
        Run(
            image("[conv] c = Conv(h, w)\n  [planted] p = MaxPool<kernel_shape=[2,2]>(c)", extra="float[4,4,3,3] w"),
            {"prefer_nhwc": "1"},
            dry_run=True,
        ),
    ),
    whole("mish-in-a-branch", "Mish, which ONNX Runtime unfolds, in the branch of an If", MISH),
    whole(
        "function-with-a-whole-branch",
        "a function with an If, all of whose nodes CUDA has",
        BRANCHED.replace("Acos", "Cos"),
    ),
    whole("weight-as-output", "a weight that is an output of the graph", PASSED),
    whole(
        "function-of-a-known-name", "a function with the name of an operator that CUDA has, which goes first", REPLACED
    ),
)
