"""Strange graphs on CUDA: names, shapes and types that few models have; seen with onnxruntime-gpu 1.31.1."""

from __future__ import annotations

from tests.planted.case import NO_FALLBACK, Case, Run
from tests.planted.graphs import NAMES, between, operators, swap
from tests.planted.on_cuda import cuda

CELU = between("[planted] p = Celu(h)")
NOTHING = operators(
    21, "g (float[0,16] x) => (float[0,16] y) {\n  [first] h = Neg(x)\n  [planted] p = Celu(h)\n  [last] y = Neg(p)\n}"
)
SCALAR = operators(
    21, "g (float x) => (float y) {\n  [first] h = Neg(x)\n  [planted] p = Celu(h)\n  [last] y = Neg(p)\n}"
)
NINE = operators(
    21,
    "g (float[1,2,1,2,1,2,1,2,1] x) => (float[1,2,1,2,1,2,1,2,1] y) {\n"
    "  [first] h = Neg(x)\n  [planted] p = Celu(h)\n  [last] y = Neg(p)\n}",
)
NAMED = swap(CELU, "[planted]", "[ODD]")
LONG = swap(CELU, "[planted]", "[LONG]")
TWINS = swap(swap(CELU, "[planted]", "[twin_A]"), "[first]", "[twin_B]")
INNER_TWIN = operators(
    21,
    "g (float[4,16] x, bool c) => (float[4,16] y) {\n  [first] h = Neg(x)\n"
    "  [planted] q = If(c)<then_branch = t () => (float[4,16] a) { [same] a = Celu(h) }, "
    "else_branch = e () => (float[4,16] b) { [other] b = Neg(h) }>\n  [same] p = Abs(q)\n  [last] y = Neg(p)\n}",
)
UNREAD = operators(
    21,
    "g (float[4,16] x) => (float[4,16] y) {\n  [first] y = Neg(x)\n  [planted] p = Celu(x)\n}",
)
SURE = operators(
    21,
    "g (float[4,16] x) => (float[4,16] y) <bool no={0}, int32 low={1}> {\n  [first] h = Neg(x)\n"
    "  [choice] p = If(no)<then_branch = t () => (float[4,16] a) { [other] a = Clip(h) }, else_branch = e () => "
    "(float[4,16] c) { [whole] i = Cast<to=6>(h)\n [planted] d = Clip(i, low)\n [back] c = Cast<to=1>(d) }>\n"
    "  [last] y = Neg(p)\n}",
)
BYTES = operators(
    21, "g (float[4] x) => (float8e4m3fnuz[4] y) {\n  [first] h = Neg(x)\n  [planted] y = Cast<to=18>(h)\n}"
)
OPEN = operators(
    21,
    "g (float[N,M] x) => (float[N,M] y) {\n  [first] h = Neg(x)\n  [planted] p = Celu(h)\n  [last] y = Neg(p)\n}",
)
PASSED = operators(21, "g (float[4] x) => (float[4] x, float[4] y) {\n  [first] y = Neg(x)\n}")
PLAIN = between("[planted] p = Sigmoid(h)")
CAPTURED = operators(
    21,
    "g (float[4,16] x, int64 n, bool c) => (float[4,16] y) {\n  [first] h = Neg(x)\n"
    "  [loop] p = Loop(n, c, x)<body = b (int64 i, bool ci, float[4,16] a) => (bool co, float[4,16] o) "
    "{ [go] co = Identity(ci)\n  [choice] o = If(ci)<then_branch = t () => (float[4,16] d) { [planted] s = Celu(h)\n"
    "  [sum] d = Add(s, a) }, else_branch = e () => (float[4,16] f) { [deep] f = Abs(a) }> }>\n  [last] y = Neg(p)\n}",
)


CAPTURE = {"enable_cuda_graph": "1"}


def captured(name: str, planted: str, expected: str, **more: str) -> Case:
    """A case with a Celu in a graph that the user wants captured, for which every node has to be on CUDA."""
    run, taken = (Run(text, CAPTURE, dry_run=True) for text in (CELU, swap(CELU, "Celu", "Elu")))
    return Case(f"cuda-{name}", "main", "cuda", planted, expected, run, taken, **more)  # type: ignore[arg-type]


CASES: tuple[Case, ...] = (
    captured("capture-with-a-gap", "an operator that CUDA lacks, in a graph to be captured", "no_kernel_op"),
    captured(
        "capture-with-a-gap-neighbour",
        "a node beside it: no node is on CUDA then",
        "subgraph_rejected",
        node="first",
        says="graph capture",
    ),
    cuda(
        "celu-of-nothing",
        "an operator that CUDA lacks, over a tensor without elements",
        "no_kernel_op",
        NOTHING,
        swap(NOTHING, "Celu", "Elu"),
    ),
    cuda(
        "celu-of-a-number",
        "an operator that CUDA lacks, over a tensor of rank 0",
        "no_kernel_op",
        SCALAR,
        swap(SCALAR, "Celu", "Elu"),
    ),
    cuda(
        "celu-of-rank-9",
        "an operator that CUDA lacks, over a tensor of rank 9",
        "no_kernel_op",
        NINE,
        swap(NINE, "Celu", "Elu"),
    ),
    cuda(
        "oddly-named",
        "an operator that CUDA lacks, in a node whose name has everything in it that is not a letter",
        "no_kernel_op",
        NAMED,
        swap(NAMED, "Celu", "Elu"),
        node=NAMES["ODD"],
    ),
    cuda(
        "long-named",
        "an operator that CUDA lacks, in a node with a name of 1,203 letters",
        "no_kernel_op",
        LONG,
        swap(LONG, "Celu", "Elu"),
        node=NAMES["LONG"],
    ),
    cuda(
        "two-of-a-name",
        "an operator that CUDA lacks, in a node of the same name as one that CUDA has",
        "no_kernel_op",
        TWINS,
        None,
        node="",
        op_type="Celu",
        plain=False,
    ),
    cuda("twins-in-a-branch", "the same, in a branch", "no_kernel_op", INNER_TWIN, None, node="", op_type="Celu"),
    cuda(
        "unread",
        "an operator that CUDA lacks, whose result nobody reads",
        "no_kernel_op",
        UNREAD,
        swap(UNREAD, "Celu", "Elu"),
    ),
    cuda(
        "cast-to-fnuz",
        "Cast to a float8 that CUDA has not",
        "no_kernel_type",
        BYTES,
        swap(swap(BYTES, "to=18", "to=10"), "float8e4m3fnuz", "float16"),
    ),
    cuda(
        "celu-of-any-size",
        "an operator that CUDA lacks, over a tensor whose sizes the user gives",
        "no_kernel_op",
        OPEN,
        swap(OPEN, "Celu", "Elu"),
        arguments=("--shape", "N=3", "--shape", "M=5"),
    ),
    cuda(
        "int32-in-a-branch-that-is-always-taken",
        "a type that CUDA lacks, in the branch that ONNX Runtime puts in the place of its If",
        "no_kernel_type",
        SURE,
        swap(swap(SURE, "to=6", "to=7"), "int32 low", "int64 low"),
        node="_if_else_branch_Clip",
    ),
    cuda("passed-on", "an input that is an output as well", NO_FALLBACK, PASSED, None),
    cuda(
        "celu-of-what-is-around",
        "an operator that CUDA lacks, in a branch in a Loop, over what neither of them makes",
        "no_kernel_op",
        CAPTURED,
        swap(CAPTURED, "Celu", "Elu"),
    ),
)
