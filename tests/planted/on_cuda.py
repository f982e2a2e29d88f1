"""Planted causes on CUDA, placed over stub libraries; seen with onnxruntime-gpu 1.31.1."""

from __future__ import annotations

from typing import Any

from tests.planted.case import Case, Run
from tests.planted.graphs import between, image, operators, swap

RECURRENT = (
    "g (float[5,2,16] x) => (float[5,1,2,8] y) <float[1,{gates},16] w, float[1,{gates},8] r, float[1,{biases}] b> {{\n"
    "  [first] h = Neg(x)\n  [planted] p = {operator}(h, w, r, b)\n  [last] y = Neg(p)\n}}"
)
QUERY = (
    "g ({t}[1,1,64] x, {t}[1,1,32] k, {t}[1,1,32] v, {t}[1,2,16,16] pk, {t}[1,2,16,16] pv, int32[1] s, int32 t)"
    " => ({t}[1,1,64] y, {t}[1,2,16,16] nk, {t}[1,2,16,16] nv) {{\n"
    "  [first] q = Neg(x)\n"
    "  [planted] a, nk, nv = com.microsoft.GroupQueryAttention<num_heads=4, kv_num_heads=2>(q, k, v, pk, pv, s, t)\n"
    "  [last] y = Neg(a)\n}}"
)
LSTM = operators(21, RECURRENT.format(gates=32, biases=64, operator="LSTM<hidden_size=8, clip=3.0>"))
GRU = operators(21, RECURRENT.format(gates=24, biases=48, operator="GRU<hidden_size=8, linear_before_reset=0>"))
TRANSPOSED = image(
    "[planted] p = ConvTranspose<kernel_shape=[3,3], pads=[0,0,1,1], strides=[2,2]>(h, w)", extra="float[4,4,3,3] w"
)
LAST_INDEX = operators(
    21,
    "g (float[4,16] x) => (int64[1,16] y) {\n  [first] h = Neg(x)\n"
    "  [planted] p = ArgMax<select_last_index=1>(h)\n  [last] y = Neg(p)\n}",
)
SHAPES = operators(
    21,
    "g (float[N,4,16] x) => (float[A,B] y) <int64 zero={0}, int64[1] axis={0}, int64 four={4}, int64[1] rest={-1}> {\n"
    "  [first] h = Sigmoid(x)\n  [shape] s = Shape(h)\n  [planted] n = Gather<axis=0>(s, zero)\n"
    "  [rows] m = Mul(n, four)\n  [wide] mw = Unsqueeze(m, axis)\n  [join] t = Concat<axis=0>(mw, rest)\n"
    "  [view] v = Reshape(h, t)\n  [last] y = Relu(v)\n}",
)
VISION = (
    "g (float[1,3,32,32] x) => (float[1,10] y) <float[C,3,3,3] w1, float[C] b1, float[C,10] w2, float[10] b2> {\n"
    "  a = Conv<pads=[1,1,1,1]>(x, w1, b1)\n  b = Relu(a)\n  c = MaxPool<kernel_shape=[2,2], strides=[2,2]>(b)\n"
    "  d = GlobalAveragePool(c)\n  e = Flatten(d)\n  y = Gemm(e, w2, b2)\n}"
)
NARROW, WIDE = VISION.replace("[C", "[4"), VISION.replace("[C", "[64")
BODY = operators(
    21,
    "g (float[4,16] x, bool c) => (float[4,16] y) <float[16,16] w> {\n  [first] h = MatMul(x, w)\n"
    "  [branch] p = If(c)<then_branch = t () => (float[4,16] a) { [planted] a = Asin(h) }, "
    "else_branch = e () => (float[4,16] b) { [other] b = Neg(h) }>\n  [last] y = Relu(p)\n}",
)
TEXT = operators(21, "g (float[4,16] x) => (string[4,16] y) {\n  [first] h = Relu(x)\n  [planted] y = Cast<to=8>(h)\n}")
WORDS = operators(
    21,
    "g (float[4] a, float[4] b) => (bool[4] y) {\n  [first] p = Cast<to=8>(a)\n  [second] q = Cast<to=8>(b)\n"
    "  [planted] y = Equal(p, q)\n}",
)
HALVES = operators(
    21,
    "g (float16[4,16] x) => (float16[4,16] y) {\n"
    "  [first] h = Sigmoid(x)\n  [asin] p = Asin(h)\n  [last] y = Relu(p)\n}",
)
TRAINED = operators(
    21,
    "g (float[1,4,8,8] x) => (float[1,4,8,8] y, float[4] nm, float[4] nv)"
    " <float[4] s, float[4] b, float[4] m, float[4] v> {\n  [first] h = Neg(x)\n"
    "  [planted] p, nm, nv = BatchNormalization<training_mode=1>(h, s, b, m, v)\n  [last] y = Neg(p)\n}",
)
STACK = operators(
    21,
    "g (float[4,256] x) => (float[4,256] y) <float[256,256] w1, float[256,256] w2, float[256,256] w3> {\n"
    "  [first] a = MatMul(x, w1)\n  [second] b = MatMul(a, w2)\n  [planted] y = MatMul(b, w3)\n}",
)
WHOLE = operators(
    21,
    "g (int64[16,16] x) => (int64[16,16] y) {\n"
    "  [first] h = Add(x, x)\n  [planted] p = MatMul(h, h)\n  [last] y = Add(p, p)\n}",
)
BYTES = operators(21, "g (uint8[4,16] x) => (uint8[8,32] y) <int64[2] r={2,2}> {\n  [planted] y = Tile(x, r)\n}")
TREE = between("[planted] p = ai.onnx.ml.Scaler<offset=[0.5], scale=[2.0]>(h)", extra="float[4,16] p")
PINNED = swap(between("[head__planted] p = Sigmoid(h)"), "[last]", "[tail__last]")


def cuda(name: str, planted: str, expected: str, model: str, control: str | None, **more: Any) -> Case:
    """A case on CUDA whose control is another graph."""
    taken = None if control is None else Run(control, dry_run=True)
    return Case(f"cuda-{name}", "main", "cuda", planted, expected, Run(model, dry_run=True), taken, **more)


CASES: tuple[Case, ...] = (
    cuda(
        "celu",
        "CUDA has no kernel for Celu at all",
        "no_kernel_op",
        between("[planted] p = Celu(h)"),
        between("[planted] p = Elu(h)"),
    ),
    cuda(
        "ml-scaler",
        "CUDA has no kernel for Scaler, of ai.onnx.ml",
        "no_kernel_op",
        TREE,
        between("[planted] p = Sigmoid(h)"),
    ),
    cuda(
        "asin-in-a-branch",
        "CUDA has no kernel for Asin, which stands in the body of an If",
        "no_kernel_op",
        BODY,
        swap(BODY, "Asin", "Sin"),
    ),
    cuda(
        "maxpool-22",
        "opset 22 bumped MaxPool; CUDA's kernels end before",
        "no_kernel_version",
        image("[planted] p = MaxPool<kernel_shape=[2,2]>(h)", opset=22),
        image("[planted] p = MaxPool<kernel_shape=[2,2]>(h)", opset=21),
    ),
    cuda(
        "elu-24",
        "opset 22 bumped Elu, the model has opset 24",
        "no_kernel_version",
        between("[planted] p = Elu(h)", opset=24),
        between("[planted] p = Elu(h)", opset=21),
    ),
    cuda(
        "instance-norm-22",
        "opset 22 bumped InstanceNormalization",
        "no_kernel_version",
        image("[planted] p = InstanceNormalization(h, s, b)", extra="float[4] s, float[4] b", opset=22),
        image("[planted] p = InstanceNormalization(h, s, b)", extra="float[4] s, float[4] b", opset=21),
    ),
    cuda(
        "sign-12",
        "an old model: CUDA's kernel for Sign begins with opset 13",
        "no_kernel_version",
        between("[planted] p = Sign(h)", opset=12),
        between("[planted] p = Sign(h)", opset=13),
    ),
    cuda(
        "vision-net-unnamed",
        "a convolutional net as exporters write it, without node names, in opset 22",
        "no_kernel_version",
        operators(22, NARROW),
        operators(21, NARROW),
        node="",
        op_type="MaxPool",
    ),
    cuda(
        "vision-net-in-blocks",
        "the same with 64 channels, which the CPU computes in blocks, between two reorderings",
        "no_kernel_version",
        operators(22, WIDE),
        operators(21, WIDE),
        node="",
        op_type="MaxPool",
    ),
    cuda(
        "gqa-fp32",
        "GroupQueryAttention has CUDA kernels for 16-bit floats only",
        "no_kernel_type",
        operators(21, QUERY.format(t="float")),
        operators(21, QUERY.format(t="float16")),
    ),
    cuda(
        "matmul-int64",
        "MatMul of int64",
        "no_kernel_type",
        WHOLE,
        WHOLE.replace("int64[", "float["),
    ),
    cuda("tile-uint8", "Tile of uint8", "no_kernel_type", BYTES, BYTES.replace("uint8[", "float[")),
    cuda("equal-strings", "Equal of strings", "no_kernel_type", WORDS, WORDS.replace("to=8", "to=10")),
    cuda(
        "cast-to-string",
        "Cast to string: the type that CUDA's kernel does not make",
        "no_kernel_type",
        TEXT,
        swap(swap(TEXT, "to=8", "to=10"), "string[", "float16["),
    ),
    cuda("lstm-clip", "an LSTM with clip", "attribute_unsupported", LSTM, swap(LSTM, ", clip=3.0", "")),
    cuda(
        "gru-reset",
        "a GRU that multiplies by the reset gate first",
        "attribute_unsupported",
        GRU,
        swap(GRU, "linear_before_reset=0", "linear_before_reset=1"),
        evidence=("probed",),
        says="with linear_before_reset=1 in place of linear_before_reset=0",
    ),
    cuda(
        "gru-reset-by-default",
        "the same without the attribute, which has the value that CUDA does not take by default",
        "attribute_unsupported",
        swap(GRU, ", linear_before_reset=0", ""),
        swap(GRU, "linear_before_reset=0", "linear_before_reset=1"),
        evidence=("probed",),
        says="with linear_before_reset=1 in place of linear_before_reset=0",
    ),
    cuda(
        "conv-transpose-asymmetric",
        "ConvTranspose with unequal padding",
        "attribute_unsupported",
        TRANSPOSED,
        swap(TRANSPOSED, "pads=[0,0,1,1]", "pads=[1,1,1,1]"),
    ),
    cuda(
        "argmax-last-index",
        "ArgMax that wants the last of equal maxima",
        "attribute_unsupported",
        LAST_INDEX,
        swap(LAST_INDEX, "select_last_index=1", "select_last_index=0"),
    ),
    cuda(
        "batch-norm-training",
        "BatchNormalization in training mode, which CUDA claims and then does not construct",
        "attribute_unsupported",
        TRAINED,
        swap(swap(TRAINED, "<training_mode=1>", ""), "p, nm, nv =", "p =").replace(", float[4] nm, float[4] nv", ""),
    ),
    cuda(
        "shape-arithmetic",
        "sizes computed from a Shape, which ONNX Runtime keeps on the CPU",
        "cpu_preferred",
        SHAPES,
        None,
        arguments=("--shape", "N=2"),
    ),
    cuda(
        "shape-arithmetic-end",
        "the last step of the same arithmetic",
        "cpu_preferred",
        SHAPES,
        None,
        node="join",
        arguments=("--shape", "N=2"),
    ),
    cuda(
        "pinned",
        "the user pins the node's module to the CPU",
        "pinned_by_user",
        PINNED,
        PINNED,
        node="head/planted",
        arguments=("--pin", "cpu:head"),
        plain=False,
    ),
    cuda(
        "inserted-cast",
        "a Cast that ONNX Runtime puts before a float16 node which only the CPU has, in float32",
        "runtime_inserted",
        HALVES,
        None,
        node="InsertedPrecisionFreeCast_h",
    ),
    Case(
        "cuda-over-budget",
        "main",
        "cuda",
        "a budget of device memory that two of three equal layers use up",
        "over_budget",
        Run(STACK, {"memory_budget_kb": "1000"}, dry_run=True),
        Run(STACK, dry_run=True),
    ),
)
