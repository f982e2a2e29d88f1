"""Planted causes on WebGPU in forms, types and versions of operators; seen with onnxruntime-webgpu 1.27.0."""

from __future__ import annotations

from tests.planted.case import Case
from tests.planted.graphs import between, image, operators, swap
from tests.planted.on_webgpu import webgpu

MASKED = operators(
    21,
    "g (float[1,4,64] x, int32[1,4] m) => (float[1,4,64] y) <float[64,192] w, float[192] b> {\n  [first] h = Neg(x)\n"
    "  [planted] p = com.microsoft.Attention<num_heads=4>(h, w, b, m)\n  [last] y = Neg(p)\n}",
)
CACHED = operators(
    21,
    "g (float[1,4,64] x) => (float[1,4,64] y, float[2,1,4,4,16] k) <float[64,192] w, float[192] b> {\n"
    "  [first] h = Neg(x)\n  [planted] p, k = com.microsoft.Attention<num_heads=4>(h, w, b)\n  [last] y = Neg(p)\n}",
)
ZEROS = operators(
    21,
    "g (float[4,64] x) => (float[4,16] y) <uint8[16,2,16] w, float[32] s, float[32] z> {\n  [first] h = Neg(x)\n"
    "  [planted] p = com.microsoft.MatMulNBits<K=64, N=16, bits=4, block_size=32>(h, w, s, z)\n  [last] y = Neg(p)\n}",
)
SAMPLED = operators(
    20,
    "g (float[1,4,8,8] x, float[1,6,6,2] at) => (float[1,4,6,6] y) {\n"
    "  [first] h = Neg(x)\n  [planted] p = GridSample(h, at)\n  [last] y = Neg(p)\n}",
)
SAMPLED_VOLUME = operators(
    20,
    "g (float[1,4,4,8,8] x, float[1,4,6,6,3] at) => (float[1,4,4,6,6] y) {\n"
    "  [first] h = Neg(x)\n  [planted] p = GridSample(h, at)\n  [last] y = Neg(p)\n}",
)
"""Its version of opset 16 takes images alone: WebGPU claims a volume there and cannot run it."""
RECURRENT = operators(
    21,
    "g (float16[5,2,16] x) => (float16[5,1,2,8] y) <float16[1,32,16] w, float16[1,32,8] r> {\n  [first] h = Neg(x)\n"
    "  [planted] p = LSTM<hidden_size=8>(h, w, r)\n  [last] y = Neg(p)\n}",
)
BOUNDED = between("[planted] p = Clip<min=0.0, max=6.0>(h)", opset=10)
BOUNDED_BY_INPUTS = between("[planted] p = Clip(h, low, high)", extra="float low={0.0}, float high={6.0}", opset=12)
WORDS = operators(
    21,
    "g (uint16[4,16] x) => (float[4,16] y) <float s={0.5}> {\n"
    "  [planted] p = DequantizeLinear(x, s)\n  [last] y = Neg(p)\n}",
)
TRUNCATED = operators(
    21, "g (bfloat16[4,16] x) => (float[4,16] y) {\n  [planted] h = Cast<to=1>(x)\n  [last] y = Neg(h)\n}"
)
PIXELS = operators(
    21,
    "g (uint8[1,3,8,8] x) => (uint8[A,B,C,D] y) <float[4] s={1.0,1.0,2.0,2.0}> {\n"
    '  [planted] y = Resize<mode="nearest">(x, "", s)\n}',
)
BEST = operators(
    21, "g (int64[4,16] x) => (int64[4,2] y, int64[4,2] i) <int64[1] k={2}> {\n  [planted] y, i = TopK(x, k)\n}"
)
SQUARED = operators(
    21,
    "g (float[4,16] x) => (float[4,16] y) <int64 e={2}> {\n"
    "  [first] h = Neg(x)\n  [planted] p = Pow(h, e)\n  [last] y = Neg(p)\n}",
)
EINSUM = operators(21, 'g (int32[4,4] x) => (int32[4,4] y) {\n  [planted] y = Einsum<equation="ij,kj->ik">(x, x)\n}')
PADDED = operators(
    21, "g (bool[4,16] x) => (bool[6,18] y) <int64[4] around={1,1,1,1}> {\n  [planted] y = Pad(x, around)\n}"
)
ANY = operators(
    20, "g (bool[4,16] x) => (bool[4,1] y) <int64[1] axis={1}> {\n  [planted] y = ReduceMax<keepdims=1>(x, axis)\n}"
)
SUMMED = operators(
    21, "g (int32[4,16] x) => (int32[4,16] y) <int64 axis={1}> {\n  [planted] y = CumSum<exclusive=1>(x, axis)\n}"
)
GIVEN = operators(
    21,
    "g (float[4,4] x, float[2,2] a = {1.0,0.0,0.0,1.0}) => (float[4,4] y) {\n"
    "  [first] h = Neg(x)\n  [planted] d = Det(a)\n  [scale] p = Mul(h, d)\n  [last] y = Neg(p)\n}",
)
CONSTANT = swap(
    swap(GIVEN, ", float[2,2] a = {1.0,0.0,0.0,1.0})", ")"), "y) {", "y) <float[2,2] a={1.0,0.0,0.0,1.0}> {"
)
TWO = operators(
    22,
    "g (float[4,16] x) => (float[4,16] y) {\n  [first] h = Neg(x)\n  [tangent] t = Tan(h)\n"
    "  [between] u = Sigmoid(t)\n  [planted] p = PRelu(u, u)\n  [last] y = Neg(p)\n}",
)
BOTH = operators(
    21,
    "g (float[1,4,64] x, float[2,1,4,3,16] past, int32[1,7] m) => (float[1,4,64] y, float[2,1,4,7,16] k)"
    " <float[64,192] w, float[192] b> {\n  [first] h = Neg(x)\n"
    "  [planted] p, k = com.microsoft.Attention<num_heads=4>(h, w, b, m, past)\n  [last] y = Neg(p)\n}",
)
NEITHER = operators(
    21,
    "g (float[1,4,64] x) => (float[1,4,64] y) <float[64,192] w, float[192] b> {\n  [first] h = Neg(x)\n"
    "  [planted] p = com.microsoft.Attention<num_heads=4>(h, w, b)\n  [last] y = Neg(p)\n}",
)
SCATTERED = operators(
    10,
    "g (float[4,16] x) => (float[4,16] y) <int64[1,1] i={0}, float[1,1] u> {\n"
    "  [first] h = Neg(x)\n  [planted] p = Scatter(h, i, u)\n  [last] y = Neg(p)\n}",
)
BLOCKS = operators(
    21,
    "g (float[4,64] x) => (float[4,16] y) <int16[64,16] w, float[2,16] s> {\n  [first] h = Neg(x)\n"
    "  [planted] d = DequantizeLinear<axis=0, block_size=32>(w, s)\n  [mm] p = MatMul(h, d)\n  [last] y = Neg(p)\n}",
)
NORMED = operators(
    17,
    "g (double[4,16] x) => (double[4,16] y) <double two={2.0}, double e={0.00001}, double[16] s, double[16] b> {\n"
    "  [mean] m = ReduceMean<axes=[-1]>(x)\n  [off] d = Sub(x, m)\n  [square] q = Pow(d, two)\n"
    "  [variance] v = ReduceMean<axes=[-1]>(q)\n  [more] u = Add(v, e)\n  [root] r = Sqrt(u)\n"
    "  [over] n = Div(d, r)\n  [scale] t = Mul(n, s)\n  [shift] y = Add(t, b)\n}",
)
POOLED = operators(22, "g (int8[1,4,8,8] x) => (int8[1,4,7,7] y) {\n  [planted] y = MaxPool<kernel_shape=[2,2]>(x)\n}")
AROUND = operators(
    21,
    "g (float[4,16] x, int64[4] around) => (float[A,B] y) {\n"
    "  [first] h = Neg(x)\n  [planted] p = com.microsoft.Pad(h, around)\n  [last] y = Neg(p)\n}",
)
LISTED = operators(
    21,
    "g (float[4,16] x) => (float[4,16] y) <int64 one={1}> {\n  [first] h = Neg(x)\n"
    "  [list] s = SequenceConstruct(h, x)\n  [planted] p = SequenceAt(s, one)\n  [last] y = Neg(p)\n}",
)
NAMES = operators(21, "g (string[4] x) => (string[8] y) {\n  [planted] y = Concat<axis=0>(x, x)\n}")
CAMERA = operators(
    21,
    "g (uint8[1,8,8,3] x) => (float[1,3,8,8] y) <float top={255.0}> {\n  [turn] t = Transpose<perm=[0,3,1,2]>(x)\n"
    "  [planted] f = Cast<to=1>(t)\n  [last] y = Div(f, top)\n}",
)
MAYBE = operators(
    21,
    "g (float[4,16] x) => (float[4,16] y) {\n  [first] h = Neg(x)\n"
    "  [wrap] o = Optional(h)\n  [planted] p = OptionalGetElement(o)\n  [last] y = Neg(p)\n}",
)
UPSAMPLED = image('[planted] p = Upsample<mode="nearest">(h, s)', extra="float[4] s={1.0,1.0,2.0,2.0}", opset=9)
DILATED = image("[planted] p = AveragePool<kernel_shape=[2,2], dilations=[2,2]>(h)")
CASES: tuple[Case, ...] = (
    webgpu(
        "average-pool-dilated",
        "opset 19 bumped AveragePool for its dilations, which no older version has",
        "no_kernel_version",
        DILATED,
        swap(swap(DILATED, ", dilations=[2,2]", ""), '"" : 21', '"" : 18'),
        says="of opset 11 in place of 19 and without dilations=[2,2]",
    ),
    webgpu("concat-strings", "Concat of strings", "no_kernel_type", NAMES, NAMES.replace("string", "float")),
    webgpu(
        "cast-of-a-picture",
        "the bytes of a picture, whose channels are put first and which become floats",
        "no_kernel_type",
        CAMERA,
        CAMERA.replace("uint8", "int32"),
    ),
    webgpu("optional", "WebGPU has no operators of optional values", "no_kernel_op", MAYBE, None),
    webgpu(
        "upsample-9",
        "an operator of old models, in whose place ONNX has Resize since opset 10",
        "no_kernel_op",
        UPSAMPLED,
        swap(swap(UPSAMPLED, "Upsample", "Resize"), '"" : 9', '"" : 10'),
    ),
    webgpu(
        "attention-with-mask",
        "the Attention of com.microsoft with a mask, an optional input",
        "attribute_unsupported",
        MASKED,
        swap(swap(MASKED, ", int32[1,4] m)", ")"), "w, b, m)", "w, b)"),
    ),
    webgpu(
        "attention-with-present",
        "the same with the keys and values of this step, an optional output",
        "attribute_unsupported",
        CACHED,
        swap(swap(CACHED, ", float[2,1,4,4,16] k)", ")"), "p, k =", "p ="),
    ),
    webgpu(
        "matmulnbits-float-zero-points",
        "zero points as floats, where WebGPU has bytes",
        "no_kernel_type",
        ZEROS,
        swap(ZEROS, "float[32] z", "uint8[16] z"),
    ),
    webgpu(
        "grid-sample-20",
        "opset 20 bumped GridSample",
        "no_kernel_version",
        SAMPLED,
        swap(SAMPLED, '"" : 20', '"" : 16'),
    ),
    webgpu(
        "grid-sample-volume",
        "GridSample of rank 5, which no version that WebGPU has can sample",
        "no_kernel_op",
        SAMPLED_VOLUME,
        swap(SAMPLED, '"" : 20', '"" : 16'),
    ),
    webgpu(
        "clip-6",
        "an old model, whose Clip has its bounds as attributes",
        "no_kernel_version",
        BOUNDED,
        BOUNDED_BY_INPUTS,
    ),
    webgpu("lstm-float16", "an LSTM of float16", "no_kernel_type", RECURRENT, RECURRENT.replace("float16", "float")),
    webgpu(
        "lstm-22",
        "opset 22 bumped LSTM",
        "no_kernel_version",
        swap(RECURRENT.replace("float16", "float"), '"" : 21', '"" : 22'),
        RECURRENT.replace("float16", "float"),
    ),
    webgpu(
        "dequantize-uint16",
        "weights or activations of 16 bits",
        "no_kernel_type",
        WORDS,
        swap(WORDS, "uint16", "uint8"),
    ),
    webgpu(
        "cast-bfloat16",
        "Cast from bfloat16",
        "no_kernel_type",
        TRUNCATED,
        swap(TRUNCATED, "bfloat16", "float16"),
    ),
    webgpu(
        "resize-uint8", "Resize of the bytes of a picture", "no_kernel_type", PIXELS, PIXELS.replace("uint8", "float")
    ),
    webgpu(
        "topk-int64",
        "TopK of int64",
        "no_kernel_type",
        BEST,
        swap(BEST, "int64[4,16] x) => (int64", "float[4,16] x) => (float"),
    ),
    webgpu(
        "pow-int64-exponent",
        "a float to the power of an int64: the second of two types",
        "no_kernel_type",
        SQUARED,
        swap(SQUARED, "int64 e", "int32 e"),
    ),
    webgpu("einsum-int32", "Einsum of int32", "no_kernel_type", EINSUM, EINSUM.replace("int32", "float")),
    webgpu("pad-bool", "Pad of a mask of bool", "no_kernel_type", PADDED, PADDED.replace("bool", "float")),
    webgpu("reduce-max-bool", "ReduceMax of bool", "no_kernel_type", ANY, ANY.replace("bool", "int32")),
    webgpu("cumsum-int32", "CumSum of int32", "no_kernel_type", SUMMED, SUMMED.replace("int32", "float")),
    webgpu(
        "constant-that-is-an-input",
        "a Det over an initialiser that the file also lists as an input, so that it is not folded away",
        "no_kernel_op",
        GIVEN,
        CONSTANT,
    ),
    webgpu(
        "two-culprits-version",
        "the first of two culprits: opset 22 bumped Tan",
        "no_kernel_version",
        TWO,
        swap(swap(TWO, '"" : 22', '"" : 21'), "PRelu(u, u)", "Mul(u, u)"),
        node="tangent",
    ),
    webgpu(
        "two-culprits-operator",
        "the second of the two: WebGPU has no PRelu",
        "no_kernel_op",
        TWO,
        swap(swap(TWO, '"" : 22', '"" : 21'), "PRelu(u, u)", "Mul(u, u)"),
    ),
    webgpu(
        "attention-with-mask-and-past",
        "the same Attention with a mask and a past: without either one it is still not taken",
        "attribute_unsupported",
        BOTH,
        NEITHER,
    ),
    webgpu(
        "scatter-9",
        "an operator of old models, which ONNX has under another name since opset 11",
        "no_kernel_op",
        SCATTERED,
        swap(swap(SCATTERED, "Scatter(", "ScatterElements("), '"" : 10', '"" : 11'),
    ),
    webgpu(
        "dequantize-int16-blocks",
        "weights of int16 in blocks; those of four bits become a MatMulNBits",
        "no_kernel_type",
        BLOCKS,
        swap(BLOCKS, "int16", "int4"),
    ),
    webgpu(
        "fused-norm-double",
        "a LayerNormalization of float64, which ONNX Runtime makes of nine nodes",
        "no_kernel_type",
        NORMED,
        NORMED.replace("double", "float"),
        node="scale/LayerNormFusion/",
    ),
    webgpu(
        "maxpool-int8-22",
        "MaxPool of int8 in opset 22, neither of which WebGPU has",
        "no_kernel_type",
        POOLED,
        swap(POOLED.replace("int8", "float"), '"" : 22', '"" : 21'),
    ),
    webgpu(
        "pad-of-com-microsoft",
        "the Pad of com.microsoft, where WebGPU has that of ONNX",
        "no_kernel_op",
        AROUND,
        swap(AROUND, "com.microsoft.Pad", "Pad"),
    ),
    webgpu("sequence-at", "WebGPU has no operators of sequences", "no_kernel_op", LISTED, None),
)
