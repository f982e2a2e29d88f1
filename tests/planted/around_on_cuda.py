"""Planted causes on CUDA that lie around a node: pins, budgets, nodes of the runtime, a second culprit."""

from __future__ import annotations

from typing import Any

from tests.planted.case import Case, Run
from tests.planted.graphs import between, operators, swap
from tests.planted.more_on_cuda import changed
from tests.planted.on_cuda import SHAPES, STACK, VISION, cuda

LAYERS = operators(
    21,
    "g (float[4,16] x) => (float[4,16] y) {\n  [__layers__0__act] a = Sigmoid(x)\n"
    "  [__layers__1__act] b = Tanh(a)\n  [__layers__2__planted] c = Erf(b)\n  [__layers__3__act] y = Sigmoid(c)\n}",
)
CELU = swap(between("[head__planted] p = Celu(h)"), "[last]", "[tail__last]")
SPENT = swap(STACK, "[planted] y = MatMul(b, w3)", "[third] c = MatMul(b, w3)\n  [planted] y = Acosh(c)")
BLANK = swap(STACK, "[planted] y = MatMul(b, w3)", "y = Gemm(b, w3)")
CONVOLVED = operators(
    21,
    "g (float[1,64,4] x) => (float[1,64,4] y) <float[64,64,9] u, float[64,64,9] v, float[64,64,9] w> {\n"
    "  [first] a = Conv<pads=[4,4]>(x, u)\n  [second] b = Conv<pads=[4,4]>(a, v)\n"
    "  [planted] y = Conv<pads=[4,4]>(b, w)\n}",
)
BOTH = between("[celu] q = Celu(h)\n  [selu] p = Selu(q)", opset=22)
EQUALS = operators(
    21,
    "g (float[4,16] x, int64[4,16] i) => (int64[1,16] y, int64[1,16] z) {\n  [first] h = Neg(x)\n"
    "  [number] a = ArgMax(i)\n  [order] b = ArgMax<select_last_index=1>(h)\n"
    "  [one] y = Neg(a)\n  [two] z = Neg(b)\n}",
)
ONE_WITH_BOTH = operators(
    21, "g (int64[4,16] x) => (int64[1,16] y) {\n  [planted] p = ArgMax<select_last_index=1>(x)\n  [last] y = Neg(p)\n}"
)


def budgeted(name: str, kilobytes: int, planted: str, expected: str, text: str, control: str, **more: Any) -> Case:
    """A case with a budget of device memory; its control has none."""
    run = Run(text, {"memory_budget_kb": str(kilobytes)}, dry_run=True)
    return Case(f"cuda-{name}", "main", "cuda", planted, expected, run, Run(control, dry_run=True), **more)


PINNED_IF = operators(
    21,
    "g (float[4,16] x, bool c) => (float[4,16] y) {\n  [first] h = Neg(x)\n"
    "  [head__planted] p = If(c)<then_branch = t () => (float[4,16] a) { [one] a = Sin(h) }, "
    "else_branch = e () => (float[4,16] b) { [two] b = Exp(h) }>\n  [tail__last] y = Neg(p)\n}",
)
PINNED_CONV = operators(
    21,
    "g (float[1,4,8] x) => (float[1,4,8] y) <float[4,4,1] w> {\n  [first] h = Neg(x)\n"
    "  [head__conv] m = Conv(h, w)\n  [head__relu] p = Relu(m)\n  [tail__last] y = Neg(p)\n}",
)

SPENT_THERE = operators(
    21,
    "g (float[256,256] x, bool c) => (float[256,256] y)"
    " <float[256,256] u, float[256,256] v, float[256,256] w> {\n  [first] a = MatMul(x, u)\n"
    "  [second] b = MatMul(a, v)\n  [choice] y = If(c)<"
    "then_branch = t () => (float[256,256] d) { [planted] d = MatMul(b, w) }, "
    "else_branch = e () => (float[256,256] f) { [other] f = Neg(b) }>\n}",
)

CASES: tuple[Case, ...] = (
    cuda(
        "blocks-inserted",
        "a ReorderInput that ONNX Runtime puts before the CPU's pooling in blocks of channels",
        "runtime_inserted",
        operators(22, VISION.replace("[C", "[64")),
        None,
        node="",
        op_type="ReorderInput",
    ),
    cuda(
        "pinned-range",
        "the user pins a range of layers to the CPU",
        "pinned_by_user",
        LAYERS,
        LAYERS,
        node="/layers/2/planted",
        arguments=("--pin", "cpu:layers.1-2"),
        plain=False,
    ),
    cuda(
        "pinned-and-lacking",
        "the user pins a node to the CPU that CUDA lacks",
        "pinned_by_user",
        CELU,
        swap(CELU, "Celu", "Elu"),
        node="head/planted",
        arguments=("--pin", "cpu:head"),
    ),
    cuda(
        "lacking-beside-a-pin",
        "the user pins another node to the CPU than the one that CUDA lacks",
        "no_kernel_op",
        CELU,
        swap(CELU, "Celu", "Elu"),
        node="head/planted",
        arguments=("--pin", "cpu:tail"),
    ),
    cuda(
        "pinned-sizes",
        "the user pins a computation of sizes to the CPU, which is there anyway",
        "pinned_by_user",
        swap(SHAPES, "[planted]", "[sizes__planted]"),
        None,
        node="sizes/planted",
        arguments=("--shape", "N=2", "--pin", "cpu:sizes"),
    ),
    budgeted(
        "over-budget-convolutions",
        300,
        "a budget of device memory that the first of three convolutions uses up",
        "over_budget",
        CONVOLVED,
        CONVOLVED,
    ),
    budgeted(
        "over-budget-unnamed",
        1000,
        "a budget that is used up before a node without a name",
        "over_budget",
        BLANK,
        BLANK,
        node="",
        op_type="Gemm",
    ),
    budgeted(
        "lacking-after-the-budget",
        1000,
        "an operator that CUDA lacks, behind the end of a budget",
        "no_kernel_op",
        SPENT,
        swap(SPENT, "Acosh", "Sin"),
    ),
    cuda(
        "celu-of-two",
        "an operator that CUDA lacks, beside one whose version it lacks",
        "no_kernel_op",
        BOTH,
        swap(BOTH, "Celu", "Sigmoid"),
        node="celu",
    ),
    cuda(
        "selu-of-two",
        "opset 22 bumped Selu, which stands beside an operator that CUDA lacks",
        "no_kernel_version",
        BOTH,
        swap(BOTH, '"" : 22', '"" : 21'),
        node="selu",
    ),
    changed(
        "argmax-number-of-two",
        "ArgMax of int64, beside one that wants the last of equals",
        "no_kernel_type",
        EQUALS,
        "int64[4,16] i",
        "float[4,16] i",
        node="number",
    ),
    changed(
        "argmax-order-of-two",
        "ArgMax that wants the last of equals, beside one of int64",
        "attribute_unsupported",
        EQUALS,
        "<select_last_index=1>",
        "",
        node="order",
    ),
    cuda(
        "argmax-number-and-order",
        "ArgMax of int64 that wants the last of equals: neither change is enough",
        "no_kernel_type",
        ONE_WITH_BOTH,
        swap(swap(ONE_WITH_BOTH, "<select_last_index=1>", ""), "int64[4,16] x", "float[4,16] x"),
    ),
    cuda(
        "pinned-if",
        "the user pins an If to the CPU",
        "pinned_by_user",
        PINNED_IF,
        PINNED_IF,
        node="head/planted",
        arguments=("--pin", "cpu:head"),
        plain=False,
    ),
    cuda(
        "pinned-and-fused",
        "the user pins two nodes to the CPU, which it fuses",
        "pinned_by_user",
        PINNED_CONV,
        None,
        node="",
        op_type="FusedConv",
        arguments=("--pin", "cpu:head"),
        plain=False,
    ),
    budgeted(
        "over-budget-in-a-branch",
        700,
        "a budget that is used up in the branch of an If",
        "over_budget",
        SPENT_THERE,
        SPENT_THERE,
    ),
    budgeted(
        "over-budget-after-a-branch",
        700,
        "the same budget, which the branch has used before",
        "over_budget",
        SPENT_THERE,
        SPENT_THERE,
        node="second",
    ),
)
