"""Planted causes on QNN's NPU backend in types, bodies and functions, and several in one graph."""

from __future__ import annotations

from tests.planted.case import Case
from tests.planted.graphs import between, image, operators, swap
from tests.planted.on_compilers import chain
from tests.planted.on_qnn import OTHER_CHIP, qnn

ROTATED = chain(
    "[planted] p = com.microsoft.RotaryEmbedding(h, at, c, s)",
    inputs="float[1,4,2,16] x, int64[1,2] at",
    output="float[1,4,2,16]",
    extra="float[8,8] c, float[8,8] s",
    opset=24,
)
HEADS = chain(
    "[planted] p = com.microsoft.MultiHeadAttention<num_heads=4>(h, h, h)",
    inputs="float[1,4,32] x",
    output="float[1,4,32]",
    opset=24,
)
CHOSEN = swap(
    between(
        "[planted] p = If(c)<then_branch = t () => (float[4,16] a) { [then] a = Relu(h) }, "
        "else_branch = e () => (float[4,16] b) { [else] b = Celu(h) }>"
    ),
    "(float[4,16] x)",
    "(float[4,16] x, bool c)",
)
PRODUCT = chain("[planted] p = ReduceProd(h, axis)", output="float[4,1]", extra="int64[1] axis={1}")
BOTH_TYPES = operators(21, "g (int8[4,16] x) => (double[4,16] y) {\n  [planted] y = Cast<to=11>(x)\n}")
PICKED = operators(
    21,
    "g (int64[4,16] x) => (int64[1,16] y) <int64[1] i={0}> {\n  [first] h = Transpose(x)\n  [back] u = Transpose(h)\n"
    "  [planted] y = Gather(u, i)\n}",
)
DOUBLES = operators(
    21,
    "g (double[4,16] x, double[4,16] z, bool[4,16] c) => (double[16,4] y) {\n  [planted] h = Where(c, x, z)\n"
    "  [last] y = Transpose(h)\n}",
)
SEQUENCE = chain("[planted] s = SequenceConstruct(h, h)\n  [join] p = ConcatFromSequence<axis=0>(s)")
NONZERO = operators(21, "g (float[4,16] x) => (int64[2,M] y) {\n  [first] h = Neg(x)\n  [planted] y = NonZero(h)\n}")
AROUND = chain(
    "[size] s = Size(h)\n  [more] c = Greater(s, few)\n"
    "  [planted] p = If(c)<then_branch = t () => (float[4,16] a) { [then] a = Relu(h) }, "
    "else_branch = e () => (float[4,16] b) { [else] b = Celu(h) }>",
    extra="int64 few={10}",
)
UNUSED = chain("[planted] d = Celu(h)\n  [used] p = Relu(h)")
GROUPED = chain(
    "[planted] p = GroupNormalization<num_groups=2>(h, s, b)",
    inputs="float[1,4,8,8] x",
    output="float[1,4,8,8]",
    extra="float[4] s, float[4] b",
)
SLASHED = operators(
    21,
    "g (float[4,16] x, float[4,16] z) => (float[4,16] y, float[4,16] q) {\n"
    "  [__decoder__mlp__planted] y = Sigmoid(x)\n  [__decoder__head__last] q = Relu(z)\n}",
)
TWICE = operators(
    21,
    "g (float[4,16] x) => (float[4,16] y, float[4,16] z) <int64 axis={1}> {\n  [first] h = Neg(x)\n"
    "  [planted] y = CumSum(h, axis)\n  [middle] m = Relu(h)\n  [other] z = CumSum(m, axis)\n}",
)

LOCAL = (
    between("[planted] p = local.Norm(h, s)", extra="float[4,16] s").replace('"com.m', '"local" : 1, "com.m')
    + '\n<domain: "local", opset_import: ["" : 21]>\nNorm (a, s) => (c) {\n'
    "  [one] b = LayerNormalization<axis=0>(a, s)\n  [two] c = Sigmoid(b)\n}"
)
REPEATED = operators(
    18,
    "g (float[4] x, int64 n) => (float[4] y) <bool yes={1}> {\n  [first] h = Neg(x)\n"
    "  [loop] p = Loop(n, yes, h)<body = b (int64 i, bool q, float[4] s) => (bool co, float[4] so) "
    "{ [keep] co = Identity(q)\n [planted] so = Relu(s) }>\n  [last] y = Neg(p)\n}",
)
MAPPED = operators(
    18,
    "g (seq(float[4]) x) => (seq(float[4]) y) {\n"
    "  [map] y = SequenceMap<body = b (float[4] e) => (float[4] f) { [planted] f = Relu(e) }>(x)\n}",
)
UNROLLED = operators(
    18,
    "g (float[4] x, int64 n) => (float[4] y) {\n  [first] h = Neg(x)\n  [planted] p = Relu(h)\n  [last] y = Neg(p)\n}",
)
CENTRED = image("[planted] p = CenterCropPad<axes=[2,3]>(h, to)", extra="int64[2] to={4,4}", opset=18)

CASES: tuple[Case, ...] = (
    qnn(
        "rotary-contrib",
        "RotaryEmbedding of the contrib operators: QNN has ONNX's own alone",
        "no_kernel_op",
        ROTATED,
        swap(ROTATED, "com.microsoft.RotaryEmbedding(h, at, c, s)", "RotaryEmbedding(h, c, s, at)"),
        says="com.microsoft.RotaryEmbedding",
    ),
    qnn(
        "multi-head-attention",
        "QNN has no MultiHeadAttention",
        "no_kernel_op",
        HEADS,
        swap(HEADS, "com.microsoft.MultiHeadAttention<num_heads=4>", "Attention<q_num_heads=4, kv_num_heads=4>"),
    ),
    qnn(
        "sequence",
        "a sequence of tensors",
        "no_kernel_op",
        SEQUENCE,
        None,
    ),
    qnn(
        "if-branch",
        "an If one of whose branches has a Celu",
        "attribute_unsupported",
        CHOSEN,
        swap(CHOSEN, "Celu", "Neg"),
        says="If branch op",
    ),
    qnn("if-branch-culprit", "the Celu in the branch", "no_kernel_op", CHOSEN, None, node="else"),
    qnn("if-branch-neighbour", "the Relu in the other branch", "not_claimed", CHOSEN, None, node="then"),
    qnn(
        "if-around",
        "a node before an If and before what decides it, which stays outside: QNN gives up the whole graph",
        "not_claimed",
        AROUND,
        swap(AROUND, "Size(h)", "Size(x)"),
        node="first",
    ),
    qnn(
        "in-a-loop",
        "a Relu in the body of a Loop: QNN takes nothing there",
        "not_claimed",
        REPEATED,
        UNROLLED,
        says="together with loop (Loop), in whose body it is, it does not claim it",
    ),
    qnn(
        "of-any-size-in-a-loop",
        "the same with sizes that are not fixed: to fix them would not help there",
        "not_claimed",
        swap(REPEATED, "float[4] s) => (bool co, float[4] so)", "float[N] s) => (bool co, float[N] so)"),
        UNROLLED,
        says="and not in the body of a Loop",
    ),
    qnn(
        "in-a-sequence-map",
        "a Relu in the body of a SequenceMap, which is unfolded into a Loop",
        "not_claimed",
        MAPPED,
        UNROLLED,
        says="together with map (SequenceMap), in whose body it is, it does not claim it",
    ),
    qnn("unused", "a Celu whose result nobody reads", "no_kernel_op", UNUSED, swap(UNUSED, "Celu", "Sigmoid")),
    qnn(
        "cast-both-types",
        "Cast from a type that QNN does not read to one that it does not write",
        "no_kernel_type",
        BOTH_TYPES,
        swap(swap(BOTH_TYPES, "int8[", "int32["), "double[", "float[").replace("to=11", "to=1"),
    ),
    qnn(
        "gather-int64",
        "a Gather from int64 values",
        "no_kernel_type",
        PICKED,
        PICKED.replace("int64[4,16]", "int32[4,16]").replace("int64[1,16]", "int32[1,16]"),
    ),
    qnn(
        "pinned-module",
        "the user pins a module within a module to the CPU",
        "pinned_by_user",
        SLASHED,
        SLASHED,
        node="/decoder/mlp/planted",
        arguments=("--pin", "cpu:decoder.mlp"),
        plain=False,
    ),
    qnn(
        "two-culprits",
        "one of two CumSum of floats on a chip that has none",
        "no_kernel_type",
        TWICE,
        TWICE,
        chip=OTHER_CHIP,
    ),
    qnn("two-culprits-other", "the other one", "no_kernel_type", TWICE, TWICE, chip=OTHER_CHIP, node="other"),
    qnn(
        "two-culprits-neighbour",
        "a node between the two",
        "subgraph_rejected",
        TWICE,
        TWICE,
        chip=OTHER_CHIP,
        node="middle",
    ),
    qnn(
        "local-function",
        "LayerNormalization over all axes, in a function of the file",
        "attribute_unsupported",
        LOCAL,
        swap(swap(LOCAL, "axis=0", "axis=-1"), "float[4,16] s", "float[16] s"),
        node="",
        op_type="LayerNormalization",
    ),
    qnn(
        "function-unfolded",
        "the Pad that is left of a CenterCropPad, its sizes computed from a Shape",
        "attribute_unsupported",
        CENTRED,
        None,
        node="",
        op_type="Pad",
    ),
)
FURTHER: tuple[Case, ...] = (
    qnn(
        "behind-group-norm",
        "a node after a GroupNormalization of whose result the file says no shape",
        "dynamic_shape",
        GROUPED,
        swap(GROUPED, "float[4] b>", "float[4] b, float[1,4,8,8] p>"),
        node="last",
    ),
    qnn(
        "nonzero-count",
        "NonZero, whose result has as many columns as there are: QNN takes it when the file gives a number",
        "dynamic_shape",
        NONZERO,
        swap(NONZERO, "[2,M]", "[2,64]"),
    ),
    qnn(
        "reduce-prod",
        "the NPU has no ReduceProd",
        "no_kernel_op",
        PRODUCT,
        swap(PRODUCT, "ReduceProd", "ReduceSum"),
        says="ReduceProd operator not supported by HTP",
    ),
    qnn(
        "where-double",
        "a Where of float64, over which QNN fails",
        "no_kernel_type",
        DOUBLES,
        DOUBLES.replace("double[", "float["),
    ),
)
"""Cases that took more to be answered; `cases.UNSOLVED` names those that are not."""
