"""Planted causes on CUDA: element types that its kernels lack; seen with onnxruntime-gpu 1.31.1."""

from __future__ import annotations

from typing import Any

from tests.planted.case import Case
from tests.planted.graphs import operators, swap
from tests.planted.on_cuda import cuda


def typed(name: str, planted: str, text: str, wrong: str, right: str, **more: Any) -> Case:
    """A case whose graph text has {t} for a type that CUDA's kernel lacks."""
    opset = more.pop("opset", 21)
    model, control = (operators(opset, text.replace("{t}", kind)) for kind in (wrong, right))
    return cuda(name, planted, "no_kernel_type", model, control, **more)


SCANNED = (
    "g ({t}[5,4] x, int64[1,1] at) => ({t}[5,1] y) {\n"
    "  [scan] y = Scan<num_scan_inputs=1, body = b ({t}[4] s) => ({t}[1] o) { [planted] o = GatherND(s, at) }>(x)\n}"
)
HALVED = (
    "g ({t}[4,16] x, bool c) => ({t}[4,16] y) <{t} least={1}> {\n"
    "  [choice] y = If(c)<then_branch = t () => ({t}[4,16] a) { [planted] a = Clip(x, least) }, "
    "else_branch = e () => ({t}[4,16] b) { [other] b = Neg(x) }>\n}"
)
MASK = "g ({t}[4,16] a, {t}[4,16] b) => (bool[4,16] y) {\n  [planted] y = LessOrEqual(a, b)\n}"
INTEGERS = "g ({t}[4,16] x, {t}[16,8] w) => (int32[4,8] y) {\n  [planted] y = MatMulInteger(x, w)\n}"
GRID = (
    "g ({t}[1,4,8,8] x, {t}[1,4,4,2] at) => ({t}[1,4,4,4] y) {\n"
    "  [first] h = Neg(x)\n  [planted] p = GridSample(h, at)\n  [last] y = Neg(p)\n}"
)
QUANTISED = (
    "g (float[4,16] x) => ({t}[4,16] y) <float s, {t} zero={0}> {\n"
    "  [first] h = Neg(x)\n  [planted] y = QuantizeLinear(h, s, zero)\n}"
)
UNPACKED = operators(21, "g (int4[4] x) => (string[4] y) {\n  [planted] y = Cast<to=8>(x)\n}")
PACKED = operators(21, "g (string[4] x) => (int4[4] y) {\n  [planted] y = Cast<to=22>(x)\n}")
HALF = operators(21, "g (float[4] x) => (float16[4] y) {\n  [planted] y = Cast<to=10>(x)\n}")
LABELS = operators(
    21,
    "g (string[4] x) => (float[4] y) {\n  [planted] p = ai.onnx.ml.LabelEncoder<"
    'keys_strings=["a","b"], values_floats=[0.5,0.7]>(x)\n  [last] y = Neg(p)\n}',
)
AFTER_CONTRIB = (
    "g ({t}[1,4,8,8] x, {t}[1,4,4,2] at) => ({t}[1,4,4,4] y) {\n"
    "  [first] h = com.microsoft.QuickGelu(x)\n  [planted] p = GridSample(h, at)\n  [last] y = Neg(p)\n}"
)
SPARSE = (
    "g ({t}[1,8,64] x, {t}[1,8,64] k, {t}[1,8,64] v, {t}[1,4,64,16] pk, {t}[1,4,64,16] pv, int32[1,2] rows, "
    "int32[1,1] columns, int32[1] total, int32[1] lengths)"
    " => ({t}[1,8,64] y, {t}[1,4,64,16] nk, {t}[1,4,64,16] nv) {\n  [first] q = Neg(x)\n"
    "  [planted] a, nk, nv = com.microsoft.SparseAttention<num_heads=4, kv_num_heads=4, sparse_block_size=64>"
    "(q, k, v, pk, pv, rows, columns, total, lengths)\n  [last] y = Neg(a)\n}"
)
QUANTISED_ATTENTION = (
    "g ({t}[1,4,64] x) => (float[1,4,64] y) <{t}[64,192] w, float[192] b, float s, float ws> {\n"
    "  [planted] p = com.microsoft.QAttention<num_heads=4>(x, w, b, s, ws)\n  [last] y = Neg(p)\n}"
)
LOADED = (
    "g (float[4,16] x) => (float[4,16] y) <{t}[16,16] w, float s> {\n  [first] h = Neg(x)\n"
    "  [planted] d = DequantizeLinear(w, s)\n  [last] y = MatMul(h, d)\n}"
)
WORDS = (
    "g ({t}[4] x) => ({t}[4] y) <int64 zero={0}> {\n"
    "  [planted] s = SequenceConstruct(x, x)\n  [last] y = SequenceAt(s, zero)\n}"
)
UNNAMED = operators(
    21,
    "g (float[4,16] x, int64[4,16] i) => (int64[1,16] y, int64[1,16] z) {\n"
    "  h = Neg(x)\n  a = ArgMax(h)\n  b = ArgMax(i)\n  y = Neg(a)\n  z = Neg(b)\n}",
)
BATCHED = GRID.replace("1,4,8,8", "N,4,H,W").replace("1,4,4,2", "N,P,Q,2").replace("1,4,4,4", "N,4,P,Q")
BY_ATTRIBUTE = operators(
    21,
    "g (float[4,4] x) => (int16[4,4] y) <float s> {\n"
    "  [first] h = Neg(x)\n  [planted] y = QuantizeLinear<output_dtype=5>(h, s)\n}",
)
DYNAMIC = operators(
    21,
    "g (float[4,16] x) => (float[4,8] y) <uint8[16,8] w, uint8 wz={1}, float ws> {\n  [first] h = Neg(x)\n"
    "  [dynamic] a, s, z = DynamicQuantizeLinear(h)\n  [product] m = MatMulInteger(a, w, z, wz)\n"
    "  [cast] c = Cast<to=1>(m)\n  [both] t = Mul(s, ws)\n  [scaled] p = Mul(c, t)\n  [last] y = Neg(p)\n}",
)
STATIC = swap(DYNAMIC, "[dynamic] a, s, z = DynamicQuantizeLinear(h)", "[dynamic] a = QuantizeLinear(h, s, z)").replace(
    "float ws>", "float ws, float s, {t} z={0}>"
)

NORMALISED = GRID.replace("[first] h = Neg(x)", "[first] h = GroupNormalization<num_groups=2>(x, s, b)").replace(
    "{\n  [first]", "<{t}[4] s, {t}[4] b> {\n  [first]"
)

CASES: tuple[Case, ...] = (
    typed("gather-nd-int32-in-a-scan", "GatherND of int32, in the body of a Scan", SCANNED, "int32", "int64"),
    typed("clip-int32-in-a-branch", "Clip of int32, in the branch of an If", HALVED, "int32", "int64"),
    typed("grid-sample-half", "GridSample of float16", GRID, "float16", "float", opset=20),
    typed("less-or-equal-uint8", "LessOrEqual, a function, of uint8", MASK, "uint8", "int32"),
    typed("quantise-int16", "QuantizeLinear to int16", QUANTISED, "int16", "int8"),
    cuda(
        "strings-from-int4", "Cast to string from a type that it does not read either", "no_kernel_type", UNPACKED, HALF
    ),
    typed(
        "matmul-integer-uint8", "MatMulInteger of uint8, which dynamic quantisation makes", INTEGERS, "uint8", "int8"
    ),
    typed(
        "dequantise-int32",
        "DequantizeLinear of an int32, as biases have it",
        "g ({t}[4,16] x) => (float[4,16] y) <float s> {\n"
        "  [planted] p = DequantizeLinear(x, s)\n  [last] y = Neg(p)\n}",
        "int32",
        "int8",
    ),
    typed(
        "pad-tokens",
        "Pad of int64, as token ids are",
        "g ({t}[1,8] x) => ({t}[A,B] y) <int64[4] by={0,0,0,4}, {t} with={0}> {\n  [planted] y = Pad(x, by, with)\n}",
        "int64",
        "bool",
    ),
    typed(
        "argmax-tokens",
        "ArgMax of int64, as the end of a text is looked for",
        "g ({t}[1,8] x) => (int64[1] y) {\n  [planted] p = ArgMax<axis=1, keepdims=0>(x)\n  [last] y = Neg(p)\n}",
        "int64",
        "float",
    ),
    typed(
        "mean-of-int64",
        "ReduceMean of int64",
        "g ({t}[4,16] x) => ({t}[4,1] y) <int64[1] axes={1}> {\n"
        "  [first] h = Neg(x)\n  [planted] y = ReduceMean(h, axes)\n}",
        "int64",
        "int32",
    ),
    typed(
        "any-of-bool",
        "ReduceMax of bool, which is how any() is written",
        "g ({t}[4,16] x) => ({t}[4,1] y) <int64[1] axes={1}> {\n  [planted] y = ReduceMax(x, axes)\n}",
        "bool",
        "int32",
    ),
    typed(
        "einsum-int64",
        "Einsum of int64",
        "g ({t}[2,4,8] x, {t}[2,8,4] z) => ({t}[2,4,4] y) {\n"
        '  [planted] p = Einsum<equation="bij,bjk->bik">(x, z)\n  [last] y = Neg(p)\n}',
        "int64",
        "float",
    ),
    typed(
        "where-int8",
        "Where of int8",
        "g (bool[4,16] c, {t}[4,16] x, {t}[4,16] z) => ({t}[4,16] y) {\n  [planted] y = Where(c, x, z)\n}",
        "int8",
        "uint8",
    ),
    typed(
        "identity-strings",
        "an Identity of strings",
        "g ({t}[4] x) => ({t}[4] y) {\n  [planted] y = Identity(x)\n}",
        "string",
        "int64",
    ),
    typed(
        "numbers-from-strings",
        "Cast from string",
        "g ({t}[4] x) => (float[4] y) {\n  [planted] p = Cast<to=1>(x)\n  [last] y = Neg(p)\n}",
        "string",
        "int32",
    ),
    cuda(
        "int4-from-strings",
        "Cast from string to int4, both of which CUDA's kernel lacks",
        "no_kernel_type",
        PACKED,
        HALF,
    ),
    typed(
        "grid-sample-half-after-contrib",
        "the same after an operator whose output type ONNX cannot infer",
        AFTER_CONTRIB,
        "float16",
        "float",
        opset=20,
    ),
    typed(
        "grid-sample-half-batched",
        "GridSample of float16, with sizes that only a run knows",
        BATCHED,
        "float16",
        "float",
        opset=20,
        arguments=tuple(word for size in ("N=1", "H=8", "W=8", "P=4", "Q=4") for word in ("--shape", size)),
    ),
    cuda(
        "grid-sample-half-by-long-name",
        "GridSample of float16, where the file calls the domain ai.onnx",
        "no_kernel_type",
        '<ir_version: 10, opset_import: ["ai.onnx" : 20]>\n' + GRID.replace("{t}", "float16"),
        '<ir_version: 10, opset_import: ["ai.onnx" : 20]>\n' + GRID.replace("{t}", "float"),
    ),
    typed(
        "matmul-integer-mixed",
        "MatMulInteger of uint8 by int8",
        "g ({t}[4,16] x, int8[16,8] w) => (int32[4,8] y) {\n  [planted] y = MatMulInteger(x, w)\n}",
        "uint8",
        "int8",
    ),
    cuda(
        "dynamic-quantised-product",
        "the product of a dynamically quantised layer, between nodes of which CUDA has some",
        "no_kernel_type",
        DYNAMIC,
        STATIC.replace("{t}", "int8").replace("uint8", "int8"),
        node="product",
    ),
    typed(
        "clip-int32-above",
        "Clip of int32 whose lower bound is left out",
        'g ({t}[4,16] x) => ({t}[4,16] y) <{t} high={5}> {\n  [planted] y = Clip(x, "", high)\n}',
        "int32",
        "int64",
    ),
    typed(
        "weights-int16",
        "weights in int16 that the graph dequantises, which is not done before a run",
        LOADED,
        "int16",
        "int8",
    ),
    typed(
        "sparse-attention-float", "SparseAttention has CUDA kernels for 16-bit floats only", SPARSE, "float", "float16"
    ),
    typed("q-attention-uint8", "QAttention of uint8", QUANTISED_ATTENTION, "uint8", "int8"),
    typed("sequence-of-strings", "a sequence of strings", WORDS, "string", "int64"),
    typed(
        "concat-strings",
        "Concat of strings",
        "g ({t}[4] x) => ({t}[8] y) {\n  [planted] y = Concat<axis=0>(x, x)\n}",
        "string",
        "int64",
    ),
    cuda(
        "argmax-unnamed-of-two",
        "one of two nodes without names, of which CUDA takes the other",
        "no_kernel_type",
        UNNAMED,
        swap(UNNAMED, "int64[4,16] i", "float[4,16] i"),
        node="",
        op_type="ArgMax",
    ),
    typed(
        "tokens-from-text",
        "Cast of strings to int64",
        "g ({t}[4] x) => (int64[4] y) {\n  [planted] p = Cast<to=7>(x)\n  [last] y = Neg(p)\n}",
        "string",
        "float",
    ),
)

FURTHER: tuple[Case, ...] = (
    cuda(
        "label-encoder-strings",
        "a LabelEncoder with keys of strings; the attribute with the keys has another name in every type",
        "no_kernel_type",
        LABELS,
        swap(swap(LABELS, "string[", "int64["), 'keys_strings=["a","b"]', "keys_int64s=[1,2]"),
    ),
    cuda(
        "quantise-int16-by-attribute",
        "QuantizeLinear to int16, which an attribute says in place of a zero point",
        "attribute_unsupported",
        BY_ATTRIBUTE,
        swap(swap(BY_ATTRIBUTE, "output_dtype=5", "output_dtype=3"), "int16", "int8"),
    ),
    typed(
        "grid-sample-half-after-group-norm",
        "GridSample of float16 after GroupNormalization",
        NORMALISED,
        "float16",
        "float",
    ),
)
"""Cases that took more to be answered; `cases.UNSOLVED` names those that are not."""
