"""Planted causes on the OpenVINO plugin in attributes and inputs; seen with onnxruntime-ep-openvino 1.8.1."""

from __future__ import annotations

from tests.planted.case import Case
from tests.planted.graphs import image, operators, swap
from tests.planted.on_plugins import plugin

PACKED = operators(
    21,
    "g (float[4,64] x, uint8[16,2,16] w, uint8[16] z) => (float[4,16] y) <float[32] s> {\n  [first] h = Neg(x)\n"
    "  [planted] p = com.microsoft.MatMulNBits<K=64, N=16, bits=4, block_size=32>(h, w, s, z)\n  [last] y = Neg(p)\n}",
)
BOTH_CONSTANT = swap(
    swap(PACKED, ", uint8[16,2,16] w, uint8[16] z)", ")"), "[32] s", "[32] s, uint8[16,2,16] w, uint8[16] z"
)
WEIGHT_GIVEN = swap(swap(PACKED, ", uint8[16] z)", ")"), "[32] s", "[32] s, uint8[16] z")
ZEROS_GIVEN = swap(swap(PACKED, ", uint8[16,2,16] w,", ","), "[32] s", "[32] s, uint8[16,2,16] w")
VALUES = ",".join(["1"] * 512)
DEFAULT = operators(
    21,
    f"g (float[4,64] x, uint8[16,2,16] w = {{{VALUES}}}) => (float[4,16] y) <float[32] s> {{\n  [first] h = Neg(x)\n"
    "  [planted] p = com.microsoft.MatMulNBits<K=64, N=16, bits=4, block_size=32>(h, w, s)\n  [last] y = Neg(p)\n}",
)
NO_DEFAULT = swap(swap(DEFAULT, f", uint8[16,2,16] w = {{{VALUES}}}", ""), "[32] s", "[32] s, uint8[16,2,16] w")
TABLE = operators(
    21,
    "g (int64[1,4] i, uint8[100,32] w) => (float[1,4,64] y) <float[100,2] s> {\n"
    "  [planted] p = com.microsoft.GatherBlockQuantized<bits=4, block_size=32, quantize_axis=1>(w, i, s)\n"
    "  [last] y = Neg(p)\n}",
)
ROTATED = operators(
    21,
    "g (float[1,4,4,16] x, int64[1,4] at) => (float[1,4,4,16] y) <float[64,8] c, float[64,8] s> {\n"
    "  [first] h = Neg(x)\n  [planted] p = com.microsoft.RotaryEmbedding(h, at, c, s)\n  [last] y = Neg(p)\n}",
)
PARTLY = swap(
    swap(ROTATED, "RotaryEmbedding", "RotaryEmbedding<interleaved=0, num_heads=4, rotary_embedding_dim=8>"),
    "<float[64,8] c, float[64,8] s>",
    "<float[64,4] c, float[64,4] s>",
)
SPECTRUM = operators(
    21,
    "g (float[1,64,1] x) => (float[A,B,C,D] y) <int64 step={16}, float[32] w, int64 length={32}> {\n"
    "  [first] h = Neg(x)\n  [planted] p = STFT(h, step, w, length)\n  [last] y = Neg(p)\n}",
)
STEPPED = swap(swap(SPECTRUM, "1] x)", "1] x, int64 step)"), "int64 step={16}, ", "")
FRAMED = swap(swap(STEPPED, "int64 step)", "int64 step, int64 length)"), ", int64 length={32}", "")
SYMMETRIC = image(
    '[planted] p = Resize<mode="linear", coordinate_transformation_mode="half_pixel_symmetric">(h, "", s)',
    extra="float[4] s={1.0,1.0,0.5,0.5}",
)
ASPECT = image(
    '[planted] p = Resize<mode="linear", axes=[2,3], keep_aspect_ratio_policy="not_larger">(h, "", "", s)',
    extra="int64[2] s={4,6}",
)
BATCHED = image('[planted] p = Resize<mode="nearest">(h, "", s)', extra="float[4] s={2.0,1.0,2.0,2.0}")
RECURRENT = operators(
    21,
    "g (float[5,2,16] x) => (float[5,1,2,8] y) <float[1,8,16] w, float[1,8,8] r> {\n  [first] h = Neg(x)\n"
    '  [planted] p = RNN<activations=["Softsign"], hidden_size=8>(h, w, r)\n  [last] y = Neg(p)\n}',
)
GATED = operators(
    21,
    "g (float[5,2,16] x) => (float[5,1,2,8] y) <float[1,32,16] w, float[1,32,8] r> {\n  [first] h = Neg(x)\n"
    '  [planted] p = LSTM<activations=["HardSigmoid", "Tanh", "Tanh"], hidden_size=8>(h, w, r)\n  [last] y = Neg(p)\n}',
)
VOLUME = operators(
    20,
    "g (float[1,4,4,8,8] x, float[1,4,6,6,3] at) => (float[1,4,4,6,6] y) {\n"
    "  [first] h = Neg(x)\n  [planted] p = GridSample(h, at)\n  [last] y = Neg(p)\n}",
)
PICTURE = swap(swap(swap(VOLUME, "[1,4,4,8,8]", "[1,4,8,8]"), "[1,4,6,6,3]", "[1,6,6,2]"), "[1,4,4,6,6]", "[1,4,6,6]")
BLOCKS = operators(
    21,
    "g (float[4,16] x) => (uint8[4,16] y) <float[4,2] s> {\n"
    "  [first] h = Neg(x)\n  [planted] y = QuantizeLinear<axis=1, block_size=8>(h, s)\n}",
)
WIDENED = operators(
    21,
    "g (float[4,16] x, int64[1] axes) => (float[A,B,C] y) {\n"
    "  [first] h = Neg(x)\n  [planted] p = Unsqueeze(h, axes)\n  [last] y = Neg(p)\n}",
)
CASES: tuple[Case, ...] = (
    plugin(
        "matmulnbits-weight-given",
        "a packed weight that is an input, as with a LoRA adapter",
        "attribute_unsupported",
        WEIGHT_GIVEN,
        BOTH_CONSTANT,
        says="accepting only a constant as a B input",
    ),
    plugin(
        "matmulnbits-zero-points-given",
        "zero points that are an input",
        "attribute_unsupported",
        ZEROS_GIVEN,
        BOTH_CONSTANT,
        says="accepting only a constant as a zero_points",
    ),
    plugin(
        "matmulnbits-both-given",
        "weight and zero points that are inputs: both have to be constant",
        "attribute_unsupported",
        PACKED,
        BOTH_CONSTANT,
    ),
    plugin(
        "matmulnbits-weight-overridable",
        "a packed weight that the file also lists as an input, so that it is not constant",
        "attribute_unsupported",
        DEFAULT,
        NO_DEFAULT,
        says="accepting only a constant as a B input",
    ),
    plugin(
        "rotary-without-interleaved",
        "a RotaryEmbedding without an attribute that has a default, and that the plugin requires",
        "attribute_unsupported",
        ROTATED,
        swap(ROTATED, "RotaryEmbedding", "RotaryEmbedding<interleaved=0>"),
    ),
    plugin(
        "stft-of-any-length",
        "an STFT of a signal whose length the file does not say",
        "dynamic_shape",
        swap(SPECTRUM, "[1,64,1]", "[1,N,1]"),
        SPECTRUM,
        arguments=("--shape", "N=64"),
    ),
    plugin(
        "stft-two-sided",
        "an STFT with both halves of the spectrum",
        "attribute_unsupported",
        swap(SPECTRUM, "STFT(", "STFT<onesided=0>("),
        SPECTRUM,
    ),
    plugin(
        "resize-not-larger",
        "Resize that keeps the aspect ratio, which the plugin does not",
        "attribute_unsupported",
        ASPECT,
        swap(ASPECT, "not_larger", "stretch"),
    ),
    plugin(
        "rnn-softsign",
        "an RNN with an activation that the plugin does not know",
        "attribute_unsupported",
        RECURRENT,
        swap(RECURRENT, "Softsign", "Relu"),
    ),
    plugin(
        "lstm-hard-sigmoid-neighbour",
        "a node beside an LSTM with an activation that the plugin does not compile",
        "subgraph_rejected",
        GATED,
        swap(GATED, "HardSigmoid", "Sigmoid"),
        node="last",
    ),
    plugin(
        "unsqueeze-axes-given",
        "an Unsqueeze whose axes are an input, so that the rank is not known",
        "attribute_unsupported",
        WIDENED,
        swap(swap(WIDENED, ", int64[1] axes)", ")"), "y) {", "y) <int64[1] axes={0}> {"),
    ),
)
FURTHER: tuple[Case, ...] = (
    plugin(
        "gather-quantized-table-given",
        "a quantised table of embeddings that is an input",
        "attribute_unsupported",
        TABLE,
        swap(swap(TABLE, ", uint8[100,32] w)", ")"), "[100,2] s", "[100,2] s, uint8[100,32] w"),
        says="'data' must be a constant",
    ),
    plugin(
        "rotary-of-a-part",
        "a RotaryEmbedding of half of each head",
        "attribute_unsupported",
        PARTLY,
        swap(ROTATED, "RotaryEmbedding", "RotaryEmbedding<interleaved=0, num_heads=4>"),
    ),
    plugin(
        "stft-without-length",
        "an STFT whose window is given and whose frame length is left to follow from it",
        "attribute_unsupported",
        swap(SPECTRUM, "step, w, length", "step, w"),
        SPECTRUM,
        says="The length of window input must be equal to frame_length",
    ),
    plugin(
        "stft-step-given",
        "an STFT whose step is an input",
        "attribute_unsupported",
        STEPPED,
        SPECTRUM,
        says="frame_step input must be a scalar or Shape{1} constant",
    ),
    plugin(
        "stft-step-and-length-given",
        "an STFT whose step and frame length are inputs: both have to be constant",
        "attribute_unsupported",
        FRAMED,
        SPECTRUM,
    ),
    plugin(
        "resize-symmetric",
        "Resize with coordinates that the plugin does not know",
        "attribute_unsupported",
        SYMMETRIC,
        swap(SYMMETRIC, "half_pixel_symmetric", "align_corners"),
        says="half_pixel_symmetric - this type of coordinate transformation mode is not supported",
    ),
    plugin(
        "resize-batch",
        "Resize of the first axis, by a constant",
        "attribute_unsupported",
        BATCHED,
        swap(BATCHED, "{2.0,1.0", "{1.0,1.0"),
    ),
    plugin(
        "grid-sample-volume",
        "GridSample of rank 5: data and grid have another rank together",
        "attribute_unsupported",
        VOLUME,
        PICTURE,
    ),
    plugin(
        "quantize-blocks-without-zero-point",
        "QuantizeLinear in blocks, with the zero point left out",
        "attribute_unsupported",
        BLOCKS,
        swap(swap(BLOCKS, "[4,2] s>", "[4,2] s, uint8[4,2] z>"), "(h, s)", "(h, s, z)"),
    ),
)
"""Cases that took more to be answered; `cases.UNSOLVED` names those that are not."""
