"""Planted causes in quantised graphs on QNN's NPU backend, and what becomes of their inputs and outputs."""

from __future__ import annotations

from tests.planted.case import NO_FALLBACK, Case, Run
from tests.planted.graphs import operators, swap
from tests.planted.on_compilers import chain
from tests.planted.on_qnn import CHIP, qnn

THERE_AND_BACK = "[planted] q = QuantizeLinear(h, scale, zero)\n  [back] p = DequantizeLinear(q, scale, zero)"
QUANTISED = chain(THERE_AND_BACK, inputs="float[4,16] x, float scale, uint8 zero", output="float[4,16]")
QUANTISED_FIXED = chain(THERE_AND_BACK, extra="float scale={0.1}, uint8 zero={128}", output="float[4,16]")
SCALE_DEFAULT = swap(
    swap(QUANTISED, "float scale", "float scale={0.1}"),
    ", uint8 zero) => (float[4,16] y)",
    ") => (float[4,16] y) <uint8 zero={128}>",
)
EMBEDDED = operators(21, "g (int64[1,4] x) => (uint8[1,4,16] y) <uint8[32,16] e> {\n  [planted] y = Gather(e, x)\n}")
BLOCKED = chain(
    "[planted] d = DequantizeLinear<axis=0, block_size=16>(w, s)\n  [mul] p = MatMul(h, d)",
    inputs="float[4,32] x",
    extra="int8[32,32] w, float[2,32] s",
)
PACKED = "uint8[64,2,16] b"
STEPS = "float[128] s"
BATCH = "float[1,4,64]"
FEW = "[planted] p = com.microsoft.MatMulNBits<K=64, N=64, bits=4, block_size=32>(h, b, s)"
FEW_FIXED = chain(FEW, inputs=f"{BATCH} x", output=BATCH, extra=f"{PACKED}, {STEPS}")
FEW_FLAT = chain(FEW, inputs="float[4,64] x", output="float[4,64]", extra=f"{PACKED}, {STEPS}")
FEW_WEIGHT = chain(FEW, inputs=f"{BATCH} x, {PACKED}", output=BATCH, extra=STEPS)
FEW_ALL = chain(FEW, inputs=f"{BATCH} x, {PACKED}, {STEPS}", output=BATCH)
BYTES = operators(
    21,
    "g (uint8[4,16] x) => (float[4,16] y) <uint8[16,16] w> {\n  [planted] m = MatMulInteger(x, w)\n"
    "  [cast] c = Cast<to=1>(m)\n  [last] y = Neg(c)\n}",
)
QDQ = operators(
    21,
    "g (float[4,16] x) => (float[4,16] y) <float s={0.1}, uint8 z={1}, uint8[16,16] w> {\n"
    "  [begin] q = QuantizeLinear(x, s, z)\n  [in] d = DequantizeLinear(q, s, z)\n"
    "  [weight] v = DequantizeLinear(w, s, z)\n  [planted] m = MatMul(d, v)\n"
    "  [out] o = QuantizeLinear(m, s, z)\n  [end] y = DequantizeLinear(o, s, z)\n}",
)
SHORT = QDQ.replace("uint8", "int16")
CURVED = swap(QDQ, "MatMul(d, v)", "Celu(d)")
UNFOLDED = swap(QDQ, "MatMul(d, v)", "Mish(d)")
KEPT = {**CHIP, "offload_graph_io_quantization": "0"}
LEFT = {**CHIP, "offload_graph_io_quantization": "1"}

CASES: tuple[Case, ...] = (
    qnn(
        "quantize-by-inputs",
        "QuantizeLinear whose scale and zero point are inputs of the graph",
        "attribute_unsupported",
        QUANTISED,
        QUANTISED_FIXED,
    ),
    qnn(
        "embedding-uint8",
        "a Gather from a quantised table",
        "no_kernel_type",
        EMBEDDED,
        EMBEDDED.replace("uint8[", "float["),
    ),
    qnn("matmul-integer", "QNN has no MatMulInteger", "no_kernel_op", BYTES, None),
    qnn(
        "nbits-of-a-matrix",
        "MatMulNBits of a matrix: QNN wants a batch before it",
        "attribute_unsupported",
        FEW_FLAT,
        FEW_FIXED,
        says="expecting 3D",
    ),
    qnn(
        "nbits-weight-from-an-input",
        "MatMulNBits whose weight is an input of the graph: QNN crashes",
        "attribute_unsupported",
        FEW_WEIGHT,
        FEW_FIXED,
    ),
    qnn(
        "nbits-neighbour",
        "a node beside it, which goes down with the graph",
        "subgraph_rejected",
        FEW_WEIGHT,
        FEW_FIXED,
        node="last",
    ),
    qnn(
        "nbits-all-from-inputs",
        "MatMulNBits whose weight and scales are both inputs of the graph: one as a constant does not help",
        "attribute_unsupported",
        FEW_ALL,
        FEW_FIXED,
    ),
    qnn(
        "quantised-int16",
        "a MatMul between int16, whose group QNN turns down, with uint8 it takes it; it is a MatMul of floats",
        "not_claimed",
        SHORT,
        QDQ,
    ),
    qnn("quantised-celu", "a Celu between quantisations", "no_kernel_op", CURVED, swap(CURVED, "Celu", "Sigmoid")),
    Case(
        "qnn-quantise-output",
        "qnn",
        "qnn",
        "a DequantizeLinear before an output of the graph, which QNN leaves to the CPU by an option",
        "option_needed",
        Run(QDQ, CHIP),
        Run(QDQ, KEPT),
        node="end",
        evidence=("probed",),
    ),
    Case("qnn-whole-quantised", "qnn", "qnn", "the same with the other value", NO_FALLBACK, Run(QDQ, KEPT)),
    Case(
        "qnn-whole-scale-by-default",
        "qnn",
        "qnn",
        "a scale that is a graph input with a default, which QNN reads",
        NO_FALLBACK,
        Run(SCALE_DEFAULT, CHIP),
    ),
    Case(
        "qnn-whole-quantised-mish",
        "qnn",
        "qnn",
        "a Mish between quantisations, which is unfolded",
        NO_FALLBACK,
        Run(UNFOLDED, KEPT),
    ),
)
FURTHER: tuple[Case, ...] = (
    qnn(
        "dequantize-by-inputs",
        "DequantizeLinear whose scale and zero point are inputs of the graph",
        "attribute_unsupported",
        QUANTISED,
        QUANTISED_FIXED,
        node="back",
    ),
    qnn(
        "block-dequantize",
        "a weight that is dequantised in blocks",
        "attribute_unsupported",
        BLOCKED,
        swap(swap(BLOCKED, "<axis=0, block_size=16>", ""), "float[2,32] s", "float s={0.1}"),
    ),
    Case(
        "qnn-quantise-input",
        "qnn",
        "qnn",
        "a QuantizeLinear on an input of the graph, which QNN leaves to the CPU by an option",
        "option_needed",
        Run(QDQ, CHIP),
        Run(QDQ, KEPT),
        node="begin",
        evidence=("probed",),
    ),
    Case(
        "qnn-quantise-input-by-option",
        "qnn",
        "qnn",
        "the same, where the user has asked for it by the option",
        "option_needed",
        Run(QDQ, LEFT),
        Run(QDQ, KEPT),
        node="begin",
    ),
)
"""Cases that took more to be answered; `cases.UNSOLVED` names those that are not."""
