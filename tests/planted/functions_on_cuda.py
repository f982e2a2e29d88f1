"""Planted causes on CUDA within functions and among sizes; seen with onnxruntime-gpu 1.31.1."""

from __future__ import annotations

from tests.planted.around_on_cuda import budgeted
from tests.planted.case import Case
from tests.planted.graphs import between, image, operators, swap
from tests.planted.more_on_cuda import changed
from tests.planted.on_cuda import cuda


def calling(call: str, body: str, *, opset: int = 21, own: int = 21) -> str:
    """A graph that calls functions of the file; `own`: the opset that these import."""
    domain = f'<domain: "local", opset_import: ["" : {own}, "local" : 1]>'
    text = between(call, opset=opset).replace('"com.microsoft"', '"local" : 1, "com.microsoft"')
    return "\n".join([text, *(f"{domain}\n{function}" for function in body.split("\n\n"))])


def given(text: str, name: str, steps: tuple[str, ...], kind: str = "int64[A]") -> str:
    """The graph with the steps that work out `name` taken out, which is an input then."""
    for step in steps:
        text = swap(text, step, "")
    return swap(text, ") =>", f", {kind} {name}) =>")


PART = "[planted] p = local.Part(h)"
DEEP = calling(
    PART,
    "Part (a) => (c) {\n  [one] b = Sin(a)\n  [two] c = local.Deep(b)\n}\n\nDeep (a) => (c) { [deep] c = Asin(a) }",
)
AGAIN = calling(
    "[once] q = local.Part(h)\n  [planted] p = local.Part(q)",
    "Part (a) => (c) {\n  [one] b = Sinh(a)\n  [two] c = Mul(a, b)\n}",
)
BRANCHED = calling(
    PART,
    "Part (a) => (c) {\n  s = ReduceSum<keepdims=0>(a)\n  z = Constant<value=float{0.0}>()\n  k = Greater(s, z)\n"
    "  [one] c = If(k)<then_branch = t () => (d) { [inner] d = Acos(a) }, "
    "else_branch = e () => (f) { [other] f = Neg(a) }>\n}",
)
PASSED = calling(
    "[planted] p = local.Part<axis=1>(h)",
    "Part <axis> (a) => (c) {\n  [one] b = ArgMax<axis: int = @axis, select_last_index=1>(a)\n  f = Cast<to=1>(b)\n"
    "  [two] c = Mul(a, f)\n}",
)
CLIPPED = calling(
    PART,
    "Part (a) => (c) {\n  i = Cast<to=6>(a)\n  z = Constant<value=int32{1}>()\n  [one] b = Clip(i, z)\n"
    "  [two] c = Cast<to=1>(b)\n}",
)
SELU = "Part (a) => (c) {\n  [one] b = Selu(a)\n  [two] c = Mul(a, b)\n}"
MAPPED = operators(
    18,
    "g (float[4] x) => (float[A] y) {\n  [first] h = Neg(x)\n  [pair] o = SequenceConstruct(h, x)\n"
    "  [planted] m = SequenceMap<body = b (float[4] e) => (float[4] f) { [inner] f = Tan(e) }>(o)\n"
    "  [join] p = ConcatFromSequence<axis=0>(m)\n  [last] y = Neg(p)\n}",
)
SIZED = operators(
    18,
    "g (seq(float[N]) x) => (seq(int64[1]) y) {\n"
    "  [map] y = SequenceMap<body = b (float[N] e) => (int64[1] f) { [inner] f = Shape(e) }>(x)\n}",
)
WARPED = image(
    "[planted] at = AffineGrid(t, s)\n  p = GridSample(h, at)",
    inputs="float[1,2,3] t",
    extra="int64[4] s={1,4,3,1}, int64[4] v={1,3,1,2}",
    opset=20,
)
UPSCALED = operators(
    21,
    "g (float[1,4,H,W] x, float[1,4,P,Q] o) => (float[1,4,A,B] y)"
    " <int64[1] zero={0}, int64[1] two={2}, int64[1] four={4}> {\n  [first] h = Neg(x)\n"
    "  [one] s = Shape(h)\n  [head] a = Slice(s, zero, two)\n  [other] t = Shape(o)\n"
    "  [tail] b = Slice(t, two, four)\n  [planted] n = Concat<axis=0>(a, b)\n"
    '  [up] p = Resize<mode="linear">(h, "", "", n)\n  [last] y = Neg(p)\n}',
)
EXPANDED = operators(
    21,
    "g (float[N,4] x) => (float[A,B] y) <int64[2] any={-1,4}, int64[2] ones={1,1}> {\n  [first] h = Sigmoid(x)\n"
    "  [sizes] n = Shape(h)\n  [same] e = Equal(n, any)\n  [planted] w = Where(e, ones, n)\n"
    "  [wide] p = Expand(h, w)\n  [last] y = Neg(p)\n}",
)
BEST = operators(
    21,
    "g (float[N,16] x) => (float[A,16] y, int64[A,16] i) <int64[1] zero={0}, int64[1] ten={10}> {\n"
    "  [first] h = Neg(x)\n  [sizes] s = Shape(h)\n  [rows] n = Gather(s, zero)\n  [planted] k = Min(n, ten)\n"
    "  [top] y, i = TopK<axis=0>(h, k)\n}",
)
POSITIONS = operators(
    21,
    "g (int64[B,S] x) => (float[A] y) <int64 zero={0}, int64 one={1}> {\n  [sizes] s = Shape(x)\n"
    "  [length] n = Gather(s, one)\n  [planted] m = Add(n, one)\n  [count] r = Range(zero, m, one)\n"
    "  [last] y = Cast<to=1>(r)\n}",
)
AVERAGED = operators(
    21,
    "g (float[N,16] x) => (float[A,16] y) {\n"
    "  [size] n = Size(x)\n  [number] f = Cast<to=1>(n)\n  [planted] y = Div(x, f)\n}",
)
NORMAL = image("p = GroupNormalization<num_groups=2>(h, s, b)", extra="float[4] s, float[4] b")
CROPPED = image("p = CenterCropPad<axes=[2,3]>(h, s)", extra="int64[2] s={10,6}", opset=18)
CALLED = calling(
    "[choice] p = If(c)<then_branch = t () => (float[4,16] a) { [call] a = local.Part(h) }, "
    "else_branch = e () => (float[4,16] b) { [other] b = Neg(h) }>",
    "Part (a) => (c) {\n  [one] b = Asin(a)\n  [two] c = Mul(a, b)\n}",
).replace("[4,16] x)", "[4,16] x, bool c)")
REPEATED = calling(
    PART,
    "Part (a) => (c) {\n  n = Constant<value=int64{2}>()\n  k = Constant<value=bool{1}>()\n"
    "  [one] c = Loop(n, k, a)<body = t (i, q, s) => (r, u) { r = Identity(q)\n [inner] u = Asin(s) }>\n}",
)
OLD_CLIP = swap(CLIPPED, '"local", opset_import: ["" : 21', '"local", opset_import: ["" : 18')
CROPPED_THERE = operators(
    21,
    "g (float[1,1,8,8] x, bool c) => (float[1,1,A,B] y) <int64[2] s={10,6}> {\n  [first] h = Neg(x)\n"
    "  [choice] p = If(c)<then_branch = t () => (float[1,1,D,E] a) { [crop] a = CenterCropPad<axes=[2,3]>(h, s) }, "
    "else_branch = e () => (float[1,1,F,G] b) { [other] b = Neg(h) }>\n  [last] y = Neg(p)\n}",
)
LOOPED_SIZES = operators(
    21,
    "g (float[N,4] x, int64 n) => (float[A,B] y)"
    " <bool yes={1}, int64 zero={0}, int64[1] axis={0}, int64[1] rest={-1}> {\n  [first] h = Neg(x)\n"
    "  [loop] p = Loop(n, yes, h)<body = b (int64 i, bool c, float[P,Q] s) => (bool co, float[R,S] so) "
    "{ co = Identity(c)\n [sizes] k = Shape(s)\n [planted] g = Gather(k, zero)\n [wide] u = Unsqueeze(g, axis)\n"
    " [join] t = Concat<axis=0>(u, rest)\n [view] r = Reshape(s, t)\n so = Sin(r) }>\n  [last] y = Neg(p)\n}",
)
ODD_SIZES = operators(
    21,
    "g (float[N,4] x) => (float[A,B] y) <int64 zero={0}, int64[1] axis={0}, int64[1] rest={-1}> {\n"
    "  [first] h = Neg(x)\n  [sizes] k = Shape(h)\n  [rows] g = Gather(k, zero)\n"
    "  [planted] o = BitwiseOr(g, zero)\n  [wide] u = Unsqueeze(o, axis)\n  [join] t = Concat<axis=0>(u, rest)\n"
    "  [view] r = Reshape(h, t)\n  [last] y = Neg(r)\n}",
)
SQUARED = (
    calling(
        "[once] q = local.Part(h)\n  [planted] p = local.Part(q)",
        "Part (a) => (c) {\n  [one] b = MatMul(a, a)\n  [two] c = MatMul(b, a)\n}",
    )
    .replace("4,16", "256,256")
    .replace("16,16", "256,256")
)

CASES: tuple[Case, ...] = (
    changed(
        "function-two-deep",
        "an operator that CUDA lacks, in a function that a function calls",
        "no_kernel_op",
        DEEP,
        "Asin",
        "Sin",
        node="_inlfunc_Deep_deep",
    ),
    changed(
        "function-called-twice",
        "an operator that CUDA lacks, in the second call of a function",
        "no_kernel_op",
        AGAIN,
        "Sinh",
        "Sin",
        node="_inlfunc_Part_token_0_one",
    ),
    changed(
        "function-attribute",
        "an attribute that CUDA lacks, in a function that is given another one",
        "attribute_unsupported",
        PASSED,
        "select_last_index=1",
        "select_last_index=0",
        node="_inlfunc_Part_one",
    ),
    cuda(
        "function-clip-int32",
        "Clip of int32, a type that only the function knows",
        "no_kernel_type",
        CLIPPED,
        CLIPPED.replace("to=6", "to=7").replace("int32{1}", "int64{1}"),
        node="_inlfunc_Part_one",
    ),
    changed(
        "sequence-map",
        "an operator that CUDA lacks, in the body of a SequenceMap, which is unfolded",
        "no_kernel_op",
        MAPPED,
        "Tan(",
        "Sin(",
        node="inner",
    ),
    changed(
        "affine-grid",
        "a function that the CPU has a kernel for, and CUDA has none",
        "no_kernel_op",
        WARPED,
        "AffineGrid(t, s)",
        "Reshape(t, v)",
    ),
    cuda(
        "group-norm-sizes",
        "sizes that the unfolded GroupNormalization works out",
        "cpu_preferred",
        NORMAL,
        None,
        node="",
        op_type="Concat",
    ),
    cuda(
        "centre-crop-sizes",
        "sizes that the unfolded CenterCropPad works out",
        "cpu_preferred",
        CROPPED,
        None,
        node="",
        op_type="Max",
    ),
    cuda(
        "resize-sizes",
        "the sizes of a Resize, put together of two shapes",
        "cpu_preferred",
        UPSCALED,
        given(
            given(UPSCALED, "a", ("  [head] a = Slice(s, zero, two)\n", "  [one] s = Shape(h)\n"), "int64[2]"),
            "b",
            ("  [tail] b = Slice(t, two, four)\n", "  [other] t = Shape(o)\n"),
            "int64[2]",
        ),
        arguments=("--shape", "H=8", "--shape", "W=8", "--shape", "P=16", "--shape", "Q=16"),
    ),
    cuda(
        "expand-sizes",
        "the sizes of an Expand, chosen by a Where as exporters write it",
        "cpu_preferred",
        EXPANDED,
        given(EXPANDED, "n", ("  [sizes] n = Shape(h)\n",), "int64[2]"),
        arguments=("--shape", "N=2"),
    ),
    cuda(
        "top-k-sizes",
        "the k of a TopK, which a size limits",
        "cpu_preferred",
        BEST,
        given(BEST, "n", ("  [rows] n = Gather(s, zero)\n", "  [sizes] s = Shape(h)\n"), "int64[1]"),
        arguments=("--shape", "N=4"),
    ),
    cuda(
        "position-ids",
        "the length of the input, counted one further",
        "cpu_preferred",
        POSITIONS,
        given(POSITIONS, "n", ("  [length] n = Gather(s, one)\n", "  [sizes] s = Shape(x)\n"), "int64"),
        arguments=("--shape", "B=1", "--shape", "S=8"),
    ),
    cuda(
        "divided-by-its-size",
        "a Div of an input, which is on the CPU yet, by a number that is there as well",
        "cpu_preferred",
        AVERAGED,
        given(AVERAGED, "n", ("  [size] n = Size(x)\n",), "int64"),
        arguments=("--shape", "N=4"),
    ),
    cuda(
        "sizes-in-a-loop",
        "sizes computed from a Shape in the body of a Loop",
        "cpu_preferred",
        LOOPED_SIZES,
        None,
        arguments=("--shape", "N=2"),
    ),
    cuda(
        "lacking-among-sizes",
        "an operator that CUDA lacks, among sizes that stay on the CPU",
        "no_kernel_op",
        ODD_SIZES,
        None,
        arguments=("--shape", "N=2"),
    ),
    budgeted(
        "over-budget-in-a-function",
        800,
        "a budget that is used up in the second call of a function",
        "over_budget",
        SQUARED,
        SQUARED,
        node="_inlfunc_Part_token_0_two",
    ),
)

FURTHER: tuple[Case, ...] = (
    changed(
        "function-with-a-branch",
        "an operator that CUDA lacks, in the branch of an If in a function",
        "no_kernel_op",
        BRANCHED,
        "Acos",
        "Cos",
        node="_inlfunc_Part_inner",
    ),
    cuda(
        "function-of-21-in-22",
        "a function for opset 21, which ONNX Runtime reads as of the model's opset 22",
        "no_kernel_version",
        calling(PART, SELU, opset=22, own=21),
        calling(PART, SELU),
        node="_inlfunc_Part_one",
    ),
    changed(
        "function-in-a-branch",
        "a function with an operator that CUDA lacks, called in the branch of an If",
        "no_kernel_op",
        CALLED,
        "Asin",
        "Sin",
        node="_inlfunc_Part_one",
    ),
    changed(
        "function-with-a-loop",
        "an operator that CUDA lacks, in the body of a Loop in a function",
        "no_kernel_op",
        REPEATED,
        "Asin",
        "Sin",
        node="_inlfunc_Part_inner",
    ),
    cuda(
        "function-of-18-clip-int32",
        "Clip of int32, in a function for an older opset than the model's",
        "no_kernel_type",
        OLD_CLIP,
        OLD_CLIP.replace("to=6", "to=7").replace("int32{1}", "int64{1}"),
        node="_inlfunc_Part_one",
    ),
    cuda(
        "centre-crop-sizes-in-a-branch",
        "sizes that a CenterCropPad in the branch of an If works out",
        "cpu_preferred",
        CROPPED_THERE,
        None,
        node="",
        op_type="Max",
    ),
    cuda(
        "sequence-map-of-an-input",
        "sizes of the entries of an input for which no values can be made: nothing runs in the loop of the SequenceMap",
        "cpu_preferred",
        SIZED,
        swap(swap(SIZED, "int64[1]", "float[N]"), "Shape(e)", "Neg(e)"),
        node="",
        op_type="SequenceInsert",
    ),
)
"""Cases that took more to be answered; `cases.UNSOLVED` names those that are not."""
