"""More planted causes on OpenVINO's CPU device: forms of operators, its own errors, and functions that are unfolded."""

from __future__ import annotations

from tests.planted.case import Case
from tests.planted.graphs import OPSET, between, image, operators, swap
from tests.planted.on_compilers import chain
from tests.planted.on_openvino import openvino

SIZES = "float[4] sizes={1.0,1.0,2.0,2.0}"
MARGINS = "int64[8] pads={0,0,1,1,0,0,1,1}"
SAMPLED = image("[planted] p = GridSample(h, grid)", inputs="float[1,8,8,2] grid", opset=20)
TRAINED = image(
    "[planted] p, m, v = BatchNormalization<training_mode=1>(h, s, b, mean, variance)",
    extra="float[4] s, float[4] b, float[4] mean={0.0,0.0,0.0,0.0}, float[4] variance={1.0,1.0,1.0,1.0}",
)
SIDED = image('[planted] p = Pad(h, pads, "", axes)', extra="int64[4] pads={1,1,1,1}, int64[2] axes={2,3}")
FILLED = image("[planted] p = Pad(h, pads, fill)", extra=MARGINS, inputs="float fill")
CUBIC = image('[planted] p = Resize<mode="cubic", exclude_outside=1>(h, "", sizes)', extra=SIZES)
CROPPED = image(
    '[planted] p = Resize<mode="linear", coordinate_transformation_mode="tf_crop_and_resize">(h, region, sizes)',
    extra=f"{SIZES}, float[8] region={{0.0,0.0,0.1,0.1,1.0,1.0,0.9,0.9}}",
)
MEANT = operators(
    17,
    "g (float[4,16] x) => (float[4,16] y, float[4,1] m) <float[16] s> {\n  [first] h = Neg(x)\n"
    "  [planted] p, m = LayerNormalization(h, s)\n  [last] y = Neg(p)\n}",
)
SKIPPED = "[planted] p = com.microsoft.SkipLayerNormalization(h, h, s)"
PACKED = "uint8[64,2,16] b"
STEPS = "float[128] s"
BATCH = "float[1,4,64]"
FEW = "[planted] p = com.microsoft.MatMulNBits<K=64, N=64, bits=4, block_size=32>(h, b, s)"
FEW_FIXED = chain(FEW, inputs=f"{BATCH} x", output=BATCH, extra=f"{PACKED}, {STEPS}")
FEW_WEIGHT = chain(FEW, inputs=f"{BATCH} x, {PACKED}", output=BATCH, extra=STEPS)
FEW_ALL = chain(FEW, inputs=f"{BATCH} x, {PACKED}, {STEPS}", output=BATCH)
DYNAMIC = chain(
    "[planted] p = com.microsoft.DynamicQuantizeMatMul(h, w, s, z, b)",
    output="float[4,16]",
    extra="float s={0.1}, uint8[16,16] w, uint8 z={1}, float[16] b",
)
PICKED = operators(
    OPSET,
    "g (bfloat16[4,16] x) => (bfloat16[1,16] y) <int64[1] i={0}> {\n  [first] h = Transpose(x)\n"
    "  [back] u = Transpose(h)\n  [planted] y = Gather(u, i)\n}",
)
DOUBLES = operators(
    OPSET,
    "g (double[4,16] x, bool[4,16] c) => (double[4,16] y) {\n  [first] h = Transpose(x)\n  [back] u = Transpose(h)\n"
    "  [planted] y = Where(c, u, x)\n}",
)
BITS = operators(
    OPSET,
    "g (int32[4,16] x, int32[4,16] z) => (int32[4,16] y) {\n"
    "  [first] h = Neg(x)\n  [planted] p = BitwiseAnd(h, z)\n  [last] y = Neg(p)\n}",
)
FRAMES = chain(
    "[planted] p = STFT(h, hop, window)",
    inputs="float[1,64] x",
    output="float[1,F,9,2]",
    extra="int64 hop={8}, float[16] window",
)
SPECTRUM = chain(
    "[planted] p = DFT<onesided=1>(h, size, axis)",
    inputs="float[1,64,1] x",
    output="float[1,F,2]",
    extra="int64 size={64}, int64 axis={1}",
)
ROTATED = chain(
    "[planted] p = RotaryEmbedding(h, c, s, at)",
    inputs="float[1,4,2,16] x, int64[1,2] at",
    output="float[1,4,2,16]",
    extra="float[8,8] c, float[8,8] s",
    opset=24,
)
BLOCKS = operators(
    OPSET,
    "g (int64[1,4] x) => (float[1,4,32] y) <uint8[32,16] e, float[32,1] s> {\n"
    "  [planted] p = com.microsoft.GatherBlockQuantized<bits=4, block_size=32>(e, x, s)\n"
    "  [more] q = Sigmoid(p)\n  [last] y = Neg(q)\n}",
)
SUMS = operators(
    OPSET,
    "g (float[4,16] x) => (float[16] f, float[4,16] y) <float[16] s> {\n  [first] h = Neg(x)\n"
    "  [planted] f, q = Scan<num_scan_inputs=1, body = b (float[16] a, float[16] n) => (float[16] o, float[16] z) "
    "{ [add] o = Add(a, n)\n [id] z = Identity(o) }>(s, h)\n  [last] y = Neg(q)\n}",
)
SEQUENCE = chain(
    "[planted] s = SequenceConstruct(h, h)\n  [join] p = ConcatFromSequence<axis=0>(s)", extra="float[8,16] p"
)
TWO = operators(
    OPSET,
    "g (float[4,16] x, float[1,16] u) => (float[4,16] y) <int64[1,1] i={0}, float[16] s> {\n  [first] h = Neg(x)\n"
    '  [planted] p = ScatterND<reduction="add">(h, i, u)\n  [middle] q = Sigmoid(p)\n'
    "  [other] r, m = LayerNormalization(q, s)\n  [join] t = Add(r, m)\n  [last] y = Neg(t)\n}",
)
NEITHER = swap(swap(swap(TWO, '<reduction="add">', ""), "r, m =", "r ="), "Add(r, m)", "Add(r, q)")
MISH = between("[planted] p = Mish(h)")
WRITTEN_OUT = between("s = Softplus(h)\n  t = Tanh(s)\n  p = Mul(h, t)")
CENTRED = image("[planted] p = CenterCropPad<axes=[2,3]>(h, to)", extra="int64[2] to={4,4}", opset=18)
DICE = between("[planted] p = Bernoulli(h)")
LOCAL = (
    between("[planted] p = local.Exact(h)").replace('"com.m', '"local" : 1, "com.m')
    + '\n<domain: "local", opset_import: ["" : 21]>\nExact (a) => (d) {\n'
    "  [one] b = Cast<to=11>(a)\n  [two] c = Exp(b)\n  [three] d = Cast<to=1>(c)\n}"
)
CONVOLVED = operators(
    OPSET,
    "g (uint8[1,4,8,8] x) => (float[1,4,6,6] y) <float s={0.1}, uint8 z={1}, uint8[4,4,3,3] w> {\n"
    "  [planted] q = QLinearConv(x, s, z, w, s, z, s, z)\n  [back] d = DequantizeLinear(q, s, z)\n"
    "  [last] y = Neg(d)\n}",
)
MULTIPLIED = operators(
    OPSET,
    "g (uint8[4,16] x) => (float[4,16] y) <float s={0.1}, uint8 z={1}, uint8[16,16] w> {\n"
    "  [planted] q = QLinearMatMul(x, s, z, w, s, z, s, z)\n  [back] d = DequantizeLinear(q, s, z)\n"
    "  [last] y = Neg(d)\n}",
)
AROUND = chain(
    "[size] s = Size(h)\n  [more] c = Greater(s, few)\n"
    "  [planted] p = If(c)<then_branch = t () => (float[4,16] a) { [then] a = Relu(h) }, "
    "else_branch = e () => (float[4,16] b) { [else] b = Sigmoid(h) }>",
    extra="int64 few={10}",
)
POOLED = operators(
    OPSET,
    "g (float[1,16,8,8] x) => (float[1,16,7,7] y) {\n  [planted] p = MaxPool<kernel_shape=[2,2]>(x)\n"
    "  [nan] c = IsNaN(p)\n  [cast] d = Cast<to=1>(c)\n  [last] y = Relu(d)\n}",
)
GROUPED = chain(
    "[planted] p = GroupNormalization<num_groups=2>(h, s, b)",
    inputs="float[1,4,8,8] x",
    output="float[1,4,8,8]",
    extra="float[4] s, float[4] b",
)

CASES: tuple[Case, ...] = (
    openvino(
        "grid-sample-20",
        "GridSample of opset 20, whose mode goes by another name",
        "no_kernel_version",
        SAMPLED,
        swap(SAMPLED, '"" : 20', '"" : 16'),
    ),
    openvino(
        "batch-norm-training",
        "BatchNormalization as in training, with three outputs",
        "attribute_unsupported",
        TRAINED,
        swap(swap(TRAINED, "p, m, v", "p"), "<training_mode=1>", ""),
        says="training",
    ),
    openvino(
        "layer-norm-mean",
        "LayerNormalization that also gives the mean",
        "attribute_unsupported",
        MEANT,
        swap(swap(MEANT, ", float[4,1] m)", ")"), "p, m", "p"),
    ),
    openvino(
        "nbits-weight-from-an-input",
        "MatMulNBits whose weight is an input of the graph",
        "attribute_unsupported",
        FEW_WEIGHT,
        FEW_FIXED,
        says="only a constant as a B input",
    ),
    openvino(
        "nbits-all-from-inputs",
        "MatMulNBits whose weight and scales are inputs of the graph",
        "attribute_unsupported",
        FEW_ALL,
        FEW_FIXED,
    ),
    openvino(
        "pad-fill-from-an-input",
        "Pad with a value that is an input of the graph",
        "attribute_unsupported",
        FILLED,
        image("[planted] p = Pad(h, pads, fill)", extra=f"{MARGINS}, float fill={{0.5}}"),
    ),
    openvino(
        "resize-exclude-outside",
        "a cubic Resize that leaves out what is outside",
        "attribute_unsupported",
        CUBIC,
        swap(CUBIC, ", exclude_outside=1", ""),
    ),
    openvino(
        "resize-crop",
        "Resize that crops",
        "attribute_unsupported",
        CROPPED,
        swap(swap(CROPPED, "tf_crop_and_resize", "half_pixel"), "region, sizes)", '"", sizes)'),
    ),
    openvino("gather-bfloat16", "Gather of bfloat16", "no_kernel_type", PICKED, PICKED.replace("bfloat16[", "float[")),
    openvino("where-double", "Where of float64", "no_kernel_type", DOUBLES, DOUBLES.replace("double[", "float[")),
    openvino("bitwise-and", "BitwiseAnd", "no_kernel_op", BITS, swap(BITS, "BitwiseAnd", "Mul")),
    openvino("stft", "a spectrogram", "no_kernel_op", FRAMES, None),
    openvino("dft", "a Fourier transform", "no_kernel_op", SPECTRUM, None),
    openvino(
        "rotary-24",
        "RotaryEmbedding of ONNX",
        "no_kernel_op",
        ROTATED,
        swap(ROTATED, "RotaryEmbedding(h, c, s, at)", "Abs(h)"),
    ),
    openvino("gather-blocks", "a Gather from a table quantised in blocks", "no_kernel_op", BLOCKS, None),
    openvino("qlinear-matmul", "a QLinearMatMul", "no_kernel_op", MULTIPLIED, None),
    openvino("scan", "a Scan; what is in its body is claimed", "no_kernel_op", SUMS, None),
    openvino("sequence", "a sequence of tensors", "no_kernel_op", SEQUENCE, None),
    openvino(
        "behind-a-sequence",
        "a tensor out of a sequence, whose rank the file does not say",
        "dynamic_shape",
        swap(SEQUENCE, " <float[8,16] p>", ""),
        SEQUENCE,
        node="last",
    ),
    openvino(
        "two-culprits",
        "a ScatterND that adds, in a graph with another culprit",
        "attribute_unsupported",
        TWO,
        NEITHER,
        says="reduction",
    ),
    openvino(
        "two-culprits-other",
        "the LayerNormalization that also gives the mean",
        "attribute_unsupported",
        TWO,
        NEITHER,
        node="other",
    ),
    openvino("two-culprits-neighbour", "a node between", "subgraph_rejected", TWO, NEITHER, node="middle"),
    openvino(
        "if-around",
        "an If that reads what its condition is made from, by a node that stays outside: the graph gets a cycle",
        "subgraph_rejected",
        AROUND,
        swap(AROUND, "Size(h)", "Size(x)"),
    ),
    openvino(
        "mish-unfolded",
        "the Softplus of a Mish that ONNX Runtime unfolds: not looked at again, as it is beside other nodes",
        "not_claimed",
        MISH,
        WRITTEN_OUT,
        node="",
        op_type="Softplus",
    ),
    openvino(
        "crop-pad-unfolded",
        "the Pad of a CenterCropPad that ONNX Runtime unfolds",
        "not_claimed",
        CENTRED,
        None,
        node="",
        op_type="Pad",
    ),
    openvino(
        "bernoulli-unfolded",
        "the RandomUniformLike of a Bernoulli that ONNX Runtime unfolds",
        "no_kernel_op",
        DICE,
        None,
        node="",
        op_type="RandomUniformLike",
    ),
    openvino(
        "local-function",
        "an Exp of float64 in a function of the file",
        "no_kernel_type",
        LOCAL,
        swap(LOCAL, "to=11", "to=10"),
        node="",
        op_type="Exp",
    ),
)
FURTHER: tuple[Case, ...] = (
    openvino(
        "behind-group-norm",
        "a node after a GroupNormalization of whose result the file says no shape",
        "dynamic_shape",
        GROUPED,
        swap(GROUPED, "float[4] b>", "float[4] b, float[1,4,8,8] p>"),
        node="last",
    ),
    openvino(
        "skip-layer-norm-of-a-matrix",
        "SkipLayerNormalization of a matrix: OpenVINO wants a batch before it",
        "attribute_unsupported",
        between(SKIPPED, extra="float[16] s"),
        between(SKIPPED, extra="float[16] s", shape="1,4,16"),
    ),
    openvino(
        "pad-axes",
        "Pad that names its axes, as it can from opset 18",
        "attribute_unsupported",
        SIDED,
        image("[planted] p = Pad(h, pads)", extra=MARGINS),
    ),
    openvino(
        "dynamic-matmul-no-zero",
        "DynamicQuantizeMatMul with a bias and without its optional zero point",
        "attribute_unsupported",
        swap(DYNAMIC, "s, z, b)", 's, "", b)'),
        DYNAMIC,
        says="b_zero_point",
    ),
    openvino(
        "dynamic-matmul-neither",
        "DynamicQuantizeMatMul without either, on which OpenVINO crashes",
        "attribute_unsupported",
        swap(DYNAMIC, "s, z, b)", "s)"),
        DYNAMIC,
    ),
    openvino(
        "qlinear-conv",
        "a QLinearConv, which the CPU gives another layout and a new name",
        "no_kernel_op",
        CONVOLVED,
        None,
        node="planted_token_1",
        plain_node="planted",
    ),
    openvino(
        "pool-alone-in-blocks",
        "a MaxPool with no other node in its part, which the CPU then computes in blocks of channels, by another name",
        "not_claimed",
        POOLED,
        swap(POOLED, "[nan] c = IsNaN(p)", "[more] m = Sigmoid(p)\n  [nan] c = IsNaN(m)"),
        node="p_nchwc",
        plain_node="planted",
    ),
)
"""Cases that took more to be answered; `cases.UNSOLVED` names those that are not."""
