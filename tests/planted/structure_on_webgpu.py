"""Planted causes on WebGPU in functions, subgraphs, pins and nodes of ONNX Runtime's own; onnxruntime-webgpu 1.27.0."""

from __future__ import annotations

from tests.planted.case import NO_FALLBACK, Case, Run
from tests.planted.graphs import OPSET, between, image, operators, swap
from tests.planted.on_webgpu import LAYOUT, webgpu

GROUPED = operators(
    21,
    "g (float[1,4,8,8] x) => (float[1,4,8,8] y) <float[4] s, float[4] b> {\n"
    "  [first] h = Neg(x)\n  [norm] p = GroupNormalization<num_groups=2>(h, s, b)\n  [last] y = Neg(p)\n}",
)
CROPPED = image("[crop] p = CenterCropPad(h, s)", extra="int64[4] s={1,4,4,4}")
LIKE = operators(
    21, "g (float[4] x, int64[4] t) => (int64[4] y) {\n  [first] h = Neg(x)\n  [like] y = CastLike(h, t)\n}"
)
LOSS = operators(
    21,
    "g (float[4,16] x, int32[4] t) => (float y) {\n"
    "  [first] h = Neg(x)\n  [loss] p = SoftmaxCrossEntropyLoss(h, t)\n  [last] y = Neg(p)\n}",
)
LOCAL = f'<domain: "local", opset_import: ["" : {OPSET}]>'
HEADER = '"local" : 1, "com.microsoft"'
TWICE = (
    swap(between("[once] q = local.Part(h)\n  [again] p = local.Part(q)"), '"com.microsoft"', HEADER)
    + f"\n{LOCAL}\nPart (a) => (c) {{\n  [one] b = Round(a)\n  [two] c = Mul(a, b)\n}}"
)
OUTER = swap(LOCAL, "[", '["local" : 1, ')
NESTED = swap(between("[planted] p = local.Outer(h)"), '"com.microsoft"', HEADER) + (
    f"\n{OUTER}\nOuter (a) => (c) {{\n  [one] b = local.Inner(a)\n  [two] c = Mul(a, b)\n}}"
    f"\n{LOCAL}\nInner (a) => (c) {{\n  [deep] c = Mish(a)\n}}"
)
NAMESAKES = swap(between("[once] q = local.First(h)\n  [again] p = local.Second(q)"), '"com.microsoft"', HEADER) + (
    f"\n{LOCAL}\nFirst (a) => (c) {{\n  [n] b = Round(a)\n  [m] c = Mul(a, b)\n}}"
    f"\n{LOCAL}\nSecond (a) => (c) {{\n  [n] b = Cast<to=11>(a)\n  [m] d = Sqrt(b)\n  [o] c = Cast<to=1>(d)\n}}"
)
NAMELESS = swap(between("[once] q = local.Part(h)\n  [again] p = local.Part(q)"), '"com.microsoft"', HEADER) + (
    f"\n{LOCAL}\nPart (a) => (c) {{\n  b = Cast<to=11>(a)\n  d = Sqrt(b)\n  c = Cast<to=1>(d)\n}}"
)
BRANCHED = operators(
    21,
    "g (float[4,16] x, bool c) => (float[4,16] y) {\n  [first] h = Neg(x)\n"
    "  [branch] p = If(c)<then_branch = t () => (float[4,16] a) { [inner] a = If(c)<then_branch = t2 () => "
    "(float[4,16] d) { [planted] d = Round(h) }, else_branch = e2 () => (float[4,16] f) { [deep] f = Abs(h) }> }, "
    "else_branch = e () => (float[4,16] b) { [other] b = Exp(h) }>\n  [last] y = Neg(p)\n}",
)
SCANNED = operators(
    21,
    "g (float[4,16] x, float[5,4,16] z) => (float[4,16] y, float[5,4,16] w) {\n  [first] h = Neg(x)\n"
    "  [planted] p, w = Scan(h, z)<num_scan_inputs = 1, body = b (float[4,16] a, float[4,16] i) => "
    "(float[4,16] o, float[4,16] q) { [step] o = Add(a, i)\n  [out] q = Sigmoid(o) }>\n  [last] y = Neg(p)\n}",
)
LOOPED = operators(
    21,
    "g (float[4,16] x, int64 n, bool c) => (float[4,16] y) {\n  [first] h = Neg(x)\n"
    "  [loop] p = Loop(n, c, h)<body = b (int64 i, bool ci, float[4,16] a) => (bool co, float[4,16] o) "
    "{ [go] co = Not(ci)\n  [planted] o = Softsign(a) }>\n  [last] y = Neg(p)\n}",
)
HALVES = operators(
    21,
    "g (float16[4,16] x) => (float16[4,16] y) {\n"
    "  [first] h = Sigmoid(x)\n  [odd] p = Softsign(h)\n  [last] y = Relu(p)\n}",
)
LAYERS = swap(
    swap(between("[__model__layers__self_attn__planted] p = Sigmoid(h)"), "[last]", "[__model__norm__last]"),
    "[first]",
    "[__model__embed__first]",
)
MEL = operators(
    21,
    "g (float[4,129] x) => (float[4,20] y) <int64 n={20}, int64 d={256}, int64 rate={16000}, float low={0.0}, "
    "float high={8000.0}> {\n  [first] h = Neg(x)\n  [planted] m = MelWeightMatrix(n, d, rate, low, high)\n"
    "  [filter] p = MatMul(h, m)\n  [last] y = Neg(p)\n}",
)
WINDOWED = operators(
    21,
    "g (float[4,32] x) => (float[4,32] y) <int64 n={32}> {\n"
    "  [first] h = Neg(x)\n  [planted] w = BlackmanWindow(n)\n  [mul] p = Mul(h, w)\n  [last] y = Neg(p)\n}",
)
CARRIED = operators(
    21,
    "g (int64[4] x, int64 n, bool c) => (int64[4] y) {\n"
    "  [loop] y = Loop(n, c, x)<body = b (int64 i, bool ci, int64[4] a) => (bool co, int64[4] o) "
    "{ [go] co = Not(ci)\n  [planted] o = Identity(a) }>\n}",
)
PASSED = CARRIED.replace("int64[4]", "float[4]")
QUANTISED = operators(
    21,
    "g (float[4,16] x) => (float[16,4] y) <float s={0.5}, uint8 z={128}> {\n  [first] h = Neg(x)\n"
    "  [planted] q = QuantizeLinear(h, s, z)\n  [wide] d = DequantizeLinear(q, s, z)\n"
    "  [turn] t = Transpose(d)\n  [last] y = Neg(t)\n}",
)
WEIGHTED = operators(
    21,
    "g (float[4,64] x) => (float[4,16] y) <int4[64,16] w, float[2,16] s> {\n  [first] h = Neg(x)\n"
    "  [planted] d = DequantizeLinear<axis=0, block_size=32>(w, s)\n  [mm] p = MatMul(h, d)\n  [last] y = Neg(p)\n}",
)
THROWN = between(
    "[choice] p = If(c)<then_branch = t () => (float[4,16] a) { [dice] a = Bernoulli(h) }, "
    "else_branch = e () => (float[4,16] b) { [other] b = Neg(h) }>"
).replace("x)", "x, bool c)", 1)

CASES: tuple[Case, ...] = (
    webgpu(
        "group-norm-unfolded",
        "an int64 division in what ONNX Runtime unfolds a GroupNormalization into",
        "no_kernel_type",
        GROUPED,
        None,
        node="",
        op_type="Div",
    ),
    webgpu(
        "center-crop-unfolded",
        "a Max in what ONNX Runtime unfolds a CenterCropPad into; WebGPU has none",
        "no_kernel_op",
        CROPPED,
        None,
        node="",
        op_type="Max",
    ),
    webgpu(
        "loss-unfolded",
        "a LogSoftmax in what ONNX Runtime unfolds a SoftmaxCrossEntropyLoss into; WebGPU has none",
        "no_kernel_op",
        LOSS,
        None,
        node="",
        op_type="LogSoftmax",
    ),
    webgpu(
        "bernoulli-unfolded",
        "a RandomUniformLike in what ONNX Runtime unfolds a Bernoulli into; WebGPU has none",
        "no_kernel_op",
        between("[draw] p = Bernoulli(h)"),
        between("[draw] p = Sigmoid(h)"),
        node="",
        op_type="RandomUniformLike",
    ),
    webgpu(
        "local-function-twice",
        "a Round in the second of two calls of a function of the file",
        "no_kernel_op",
        TWICE,
        swap(TWICE, "Round", "Floor"),
        node="_inlfunc_Part_token_0_one",
    ),
    webgpu(
        "round-two-branches-deep",
        "a Round in a branch of an If in a branch of an If",
        "no_kernel_op",
        BRANCHED,
        swap(BRANCHED, "Round", "Floor"),
    ),
    webgpu("loop", "WebGPU has no Loop, whatever stands in its body", "no_kernel_op", LOOPED, None, node="loop"),
    webgpu(
        "group-norm-unfolded-concat",
        "a Concat of int64 in what ONNX Runtime unfolds a GroupNormalization into",
        "no_kernel_type",
        GROUPED,
        None,
        node="",
        op_type="Concat",
    ),
    webgpu("scan", "WebGPU has no Scan", "no_kernel_op", SCANNED, None),
    webgpu(
        "softsign-in-a-loop",
        "a Softsign in the body of a Loop, neither of which WebGPU has",
        "no_kernel_op",
        LOOPED,
        swap(LOOPED, "Softsign", "Tanh"),
    ),
    Case(
        "webgpu-forced-to-the-cpu-among-others",
        "webgpu",
        "webgpu",
        "the user's option names two nodes, by names with slashes",
        "pinned_by_user",
        Run(LAYERS, {"forceCpuNodeNames": "/model/norm/last\n/model/layers/self_attn/planted"}),
        Run(LAYERS),
        node="/model/layers/self_attn/planted",
    ),
    webgpu(
        "pinned-below",
        "the user pins a module two levels down to the CPU",
        "pinned_by_user",
        LAYERS,
        LAYERS,
        node="/model/layers/self_attn/planted",
        arguments=("--pin", "cpu:model.layers.self_attn"),
        plain=False,
    ),
    webgpu(
        "swish-24",
        "a Swish, which ONNX Runtime unfolds into what WebGPU has",
        NO_FALLBACK,
        between("[planted] p = Swish<alpha=1.5>(h)", opset=24),
        None,
    ),
    webgpu(
        "nested-functions", "a function of the file that calls another, which has a Mish", NO_FALLBACK, NESTED, None
    ),
    webgpu(
        "functions-with-nodes-of-one-name",
        "a Cast to float64 in a function, by the name of a node in another function",
        "no_kernel_type",
        NAMESAKES,
        swap(NAMESAKES, "to=11", "to=10"),
        node="_inlfunc_Second_n",
    ),
    webgpu(
        "functions-with-nodes-of-one-name-operator",
        "that node, whose operator WebGPU lacks",
        "no_kernel_op",
        NAMESAKES,
        swap(NAMESAKES, "Round", "Floor"),
        node="_inlfunc_First_n",
    ),
    webgpu(
        "function-of-nodes-without-a-name",
        "float64 in a function whose nodes have no names",
        "no_kernel_type",
        NAMELESS,
        swap(NAMELESS, "to=11", "to=10"),
        node="",
        op_type="Sqrt",
    ),
    webgpu(
        "loop-around-what-webgpu-lacks",
        "a Loop, which WebGPU lacks, around a node that it lacks as well",
        "no_kernel_op",
        LOOPED,
        None,
        node="loop",
        says="for Op type: Loop",
    ),
    webgpu(
        "dead-branch",
        "an If whose constant condition leaves out the branch with what WebGPU lacks",
        NO_FALLBACK,
        between(
            "[planted] p = If(no)<then_branch = t () => (float[4,16] a) { [then] a = Celu(h) }, "
            "else_branch = e () => (float[4,16] b) { [else] b = Abs(h) }>",
            extra="bool no={0}",
        ),
        None,
    ),
    webgpu("mel-filters", "a MelWeightMatrix of constants, as a model of speech has it", NO_FALLBACK, MEL, None),
    webgpu("window", "a window of a constant size", NO_FALLBACK, WINDOWED, None),
    webgpu(
        "causal-mask",
        "a mask that is made from constants by operators that WebGPU lacks",
        NO_FALLBACK,
        between("[planted] t = Trilu<upper=0>(ones)\n  z = Cast<to=1>(t)\n  p = MatMul(z, h)", extra="int64[4,4] ones"),
        None,
    ),
    webgpu(
        "one-hot-table",
        "a OneHot of constants",
        NO_FALLBACK,
        between(
            "[planted] o = OneHot(i, d, v)\n  p = MatMul(h, o)", extra="int64[16] i, int64 d={16}, float[2] v={0.0,1.0}"
        ),
        None,
    ),
    webgpu(
        "positions",
        "rows of a table by int64 positions that are constant",
        NO_FALLBACK,
        between(
            "[planted] r = Range(zero, four, one)\n  e = Gather(table, r)\n  p = Add(h, e)",
            extra="int64 zero={0}, int64 four={4}, int64 one={1}, float[16,16] table",
        ),
        None,
    ),
    webgpu(
        "cast-like-unfolded",
        "a CastLike to uint8, which ONNX Runtime unfolds into a Cast",
        "no_kernel_type",
        swap(LIKE, "int64[4] t) => (int64", "uint8[4] t) => (uint8"),
        swap(LIKE, "int64[4] t) => (int64", "int32[4] t) => (int32"),
        node="",
        op_type="Cast",
    ),
    webgpu(
        "cast-like-to-int64-unfolded",
        "a CastLike to int64, for which WebGPU has an option",
        "option_needed",
        LIKE,
        swap(LIKE, "int64[4] t) => (int64", "int32[4] t) => (int32"),
        node="",
        op_type="Cast",
        evidence=("probed",),
    ),
    webgpu(
        "identity-in-a-loop",
        "an Identity of int64 that hands on what a Loop carries",
        "no_kernel_type",
        CARRIED,
        PASSED,
    ),
    webgpu("quantize", "WebGPU has DequantizeLinear and no QuantizeLinear", "no_kernel_op", QUANTISED, None),
    webgpu(
        "inserted-quantize",
        "a QuantizeLinear that ONNX Runtime puts behind a Transpose of what was quantised before",
        "runtime_inserted",
        QUANTISED,
        None,
        node="t_q",
    ),
    webgpu(
        "inserted-cast",
        "a Cast that ONNX Runtime puts before a float16 node which only the CPU has, in float32",
        "runtime_inserted",
        HALVES,
        None,
        node="InsertedPrecisionFreeCast_h",
        # It is put in after the providers have taken their nodes, and the list of 1.27 is of before.
        plain=False,
    ),
    Case(
        "webgpu-forced-inside-a-function",
        "webgpu",
        "webgpu",
        "the user's option names a node by the name that it has once its function is unfolded",
        "pinned_by_user",
        Run(swap(TWICE, "Round", "Floor"), {"forceCpuNodeNames": "_inlfunc_Part_one"}),
        Run(swap(TWICE, "Round", "Floor")),
        node="_inlfunc_Part_one",
        says="Force CPU execution for node: _inlfunc_Part_one",
    ),
    Case(
        "webgpu-layout-kept",
        "webgpu",
        "webgpu",
        "a Conv in opset 25, whose layout the user's option keeps, so that no Transpose is put in",
        NO_FALLBACK,
        Run(LAYOUT, {"preferredLayout": "NCHW"}),
    ),
    webgpu("weights-of-4-bits", "weights that become those of a MatMulNBits", NO_FALLBACK, WEIGHTED, None),
)
FURTHER: tuple[Case, ...] = (
    webgpu(
        "bernoulli-in-a-branch",
        "the RandomUniformLike of a Bernoulli that ONNX Runtime unfolds in the branch of an If",
        "no_kernel_op",
        THROWN,
        None,
        node="",
        op_type="RandomUniformLike",
    ),
    webgpu(
        "pinned-below-without-a-slash",
        "the user pins a module two levels down, where names begin without a slash, as in a model from TensorFlow",
        "pinned_by_user",
        LAYERS.replace("[__", "["),
        LAYERS.replace("[__", "["),
        node="model/layers/self_attn/planted",
        arguments=("--pin", "cpu:model.layers.self_attn"),
        plain=False,
    ),
)
"""Cases that took more to be answered; `cases.UNSOLVED` names those that are not."""
