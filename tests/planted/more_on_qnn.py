"""More planted causes on QNN's NPU backend: forms of operators that it turns down, and its own words for them."""

from __future__ import annotations

from tests.planted.case import Case
from tests.planted.graphs import between, image, operators, swap
from tests.planted.on_compilers import chain
from tests.planted.on_qnn import qnn

SIZES = "float[4] sizes={1.0,1.0,2.0,2.0}"
MARGINS = "int64[8] pads={0,0,1,1,0,0,1,1}"
SCALED = between("[planted] p = Gemm<alpha=0.5>(h, v)", extra="float[16,16] v")
NORMED = between("[planted] p = LayerNormalization<axis=0>(h, s)", extra="float[4,16] s")
MEANT = operators(
    21,
    "g (float[4,16] x) => (float[4,16] y, float[4,1] m) <float[16] s> {\n  [first] h = Neg(x)\n"
    "  [planted] p, m = LayerNormalization(h, s)\n  [last] y = Neg(p)\n}",
)
SCATTERED = operators(
    21,
    "g (float[4,16] x) => (float[4,16] y) <int64[4,1] i, float[4,1] u> {\n  [first] h = Add(x, x)\n"
    '  [planted] p = ScatterElements<axis=1, reduction="mul">(h, i, u)\n  [last] y = Add(p, p)\n}',
)
RUNNING = between("[planted] p = CumSum<exclusive=1>(h, axis)", extra="int64 axis={1}")
CROPPED = image(
    '[planted] p = Resize<mode="linear", coordinate_transformation_mode="tf_crop_and_resize">(h, region, sizes)',
    extra=f"{SIZES}, float[8] region={{0.0,0.0,0.1,0.1,1.0,1.0,0.9,0.9}}",
)
NEAREST = image(
    '[planted] p = Resize<mode="nearest", coordinate_transformation_mode="asymmetric">(h, "", sizes)', extra=SIZES
)
ENLARGED = '[planted] p = Resize<mode="nearest", nearest_mode="floor">(h, "", sizes)'
SAMPLED = image('[planted] p = GridSample<mode="cubic">(h, grid)', inputs="float[1,8,8,2] grid")
NORMAL = image(
    "[planted] p = BatchNormalization(h, s, b, mean, variance)",
    extra="float[4] s, float[4] b",
    inputs="float[4] mean, float[4] variance",
)
NORMAL_FIXED = image(
    "[planted] p = BatchNormalization(h, s, b, mean, variance)",
    extra="float[4] s, float[4] b, float[4] mean={0.0,0.0,0.0,0.0}, float[4] variance={1.0,1.0,1.0,1.0}",
)
TRAINED = swap(swap(NORMAL_FIXED, "p = Batch", "p, m, v = Batch"), "tion(h", "tion<training_mode=1>(h")
SPREAD = image("[planted] p = ConvTranspose<dilations=[2,2]>(h, w)", extra="float[4,4,3,3] w")
FILLED = image("[planted] p = Pad(h, pads, fill)", extra=MARGINS, inputs="float fill")
FILLED_FIXED = image("[planted] p = Pad(h, pads, fill)", extra=f"{MARGINS}, float fill={{0.5}}")
FILLED_BY_INPUTS = image("[planted] p = Pad(h, pads, fill)", inputs="int64[8] pads, float fill")
SIDED = image('[planted] p = Pad(h, pads, "", axes)', extra="int64[4] pads={1,1,1,1}, int64[2] axes={2,3}")
SLICED = chain("[planted] p = Slice(h, from, to)", inputs="float[4,16] x, int64[2] to", extra="int64[2] from={0,0}")
RECURRENT = chain(
    "[planted] p = LSTM<hidden_size=8, clip=1.0>(h, w, r)",
    inputs="float[4,2,8] x",
    output="float[4,1,2,8]",
    extra="float[1,32,8] w, float[1,32,8] r",
)
OUTER = chain('[planted] p = Einsum<equation="i,j->ij">(h, z)', inputs="float[4] x, float[4] z", output="float[4,4]")
SUMMED = chain('[planted] p = Einsum<equation="ij->i">(h)', output="float[4]")
BEST = operators(
    21,
    "g (float[4,16] x) => (int64[4,1] y) {\n"
    "  [first] h = Neg(x)\n  [planted] y = ArgMax<axis=1, select_last_index=1>(h)\n}",
)
TOP = chain("[planted] p, i = TopK(h, k)", inputs="float[4,16] x, int64[1] k", output="float[4,K]")
TOP_BY_DEFAULT = swap(swap(TOP, "int64[1] k)", "int64[1] k={2})"), "[4,K]", "[4,2]")
TOP_FIXED = swap(swap(TOP, ", int64[1] k)", ")"), "[4,K] y)", "[4,2] y) <int64[1] k={2}>")
TOP_9 = chain("[planted] p, i = TopK<k=2>(h)", opset=9, output="float[4,2]")
LONELY = between("[planted] p = Max(h)")
COUNTED = operators(
    21,
    "g (int32 n) => (int32[M] y) <int32 a={0}, int32 b={1}> {\n  [planted] q = Range(a, n, b)\n  [last] y = Neg(q)\n}",
)

CASES: tuple[Case, ...] = (
    qnn(
        "gemm-scaled",
        "a Gemm with a factor",
        "attribute_unsupported",
        SCALED,
        swap(SCALED, "<alpha=0.5>", ""),
        says="only support alpha",
    ),
    qnn(
        "layer-norm-first-axis",
        "LayerNormalization over all axes",
        "attribute_unsupported",
        NORMED,
        swap(swap(NORMED, "<axis=0>", ""), "float[4,16] s", "float[16] s"),
        says="along the last axis",
    ),
    qnn(
        "layer-norm-mean",
        "LayerNormalization that also gives the mean",
        "attribute_unsupported",
        MEANT,
        swap(swap(MEANT, ", float[4,1] m)", ")"), "p, m", "p"),
        says="1 output",
    ),
    qnn(
        "scatter-elements-mul",
        "ScatterElements that multiplies floats: it multiplies int32",
        "no_kernel_type",
        SCATTERED,
        SCATTERED.replace("float[", "int32["),
    ),
    qnn(
        "cumsum-exclusive",
        "CumSum that leaves out the element itself",
        "attribute_unsupported",
        RUNNING,
        swap(RUNNING, "<exclusive=1>", ""),
        says="exclusive",
    ),
    qnn(
        "resize-crop",
        "Resize that crops",
        "attribute_unsupported",
        CROPPED,
        swap(swap(CROPPED, "tf_crop_and_resize", "half_pixel"), "region, sizes)", '"", sizes)'),
        says="tf_crop_and_resize",
    ),
    qnn(
        "resize-nearest-pair",
        "Resize with a pair of attributes: without either it would run",
        "attribute_unsupported",
        NEAREST,
        swap(NEAREST, ', coordinate_transformation_mode="asymmetric"', ""),
        says="combination",
    ),
    qnn(
        "resize-by-a-default",
        "Resize by scales that are a graph input with a default: its sizes follow from them, unless they are given",
        "dynamic_shape",
        image(ENLARGED, inputs=SIZES),
        image(ENLARGED, extra=SIZES),
    ),
    qnn(
        "grid-sample-cubic",
        "GridSample with cubic interpolation",
        "attribute_unsupported",
        SAMPLED,
        swap(SAMPLED, "cubic", "linear"),
        says="mode cubic",
    ),
    qnn(
        "batch-norm-statistics",
        "BatchNormalization whose mean and variance are both inputs of the graph",
        "attribute_unsupported",
        NORMAL,
        NORMAL_FIXED,
        says="dynamic mean",
    ),
    qnn(
        "batch-norm-training",
        "BatchNormalization as in training, with three outputs",
        "attribute_unsupported",
        TRAINED,
        NORMAL_FIXED,
        says="1 output",
    ),
    qnn(
        "conv-transpose-dilated",
        "ConvTranspose with dilations",
        "attribute_unsupported",
        SPREAD,
        swap(SPREAD, "<dilations=[2,2]>", ""),
        says="dilation",
    ),
    qnn(
        "pad-fill-from-an-input",
        "Pad with a value that is an input of the graph",
        "attribute_unsupported",
        FILLED,
        FILLED_FIXED,
        says="dynamic constant_value",
    ),
    qnn(
        "pad-both-from-inputs",
        "Pad whose sizes and value are both inputs: one alone as a constant does not help",
        "attribute_unsupported",
        FILLED_BY_INPUTS,
        FILLED_FIXED,
    ),
    qnn(
        "pad-axes",
        "Pad that names its axes, as it can from opset 18",
        "attribute_unsupported",
        SIDED,
        image("[planted] p = Pad(h, pads)", extra=MARGINS),
        says="support axes",
    ),
    qnn(
        "slice-end-from-an-input",
        "Slice up to where an input says",
        "attribute_unsupported",
        SLICED,
        swap(SLICED, ", int64[2] to) => (float[A,B] y) <", ") => (float[A,B] y) <int64[2] to={4,8}, "),
    ),
    qnn(
        "lstm-clipped",
        "an LSTM that limits its values",
        "attribute_unsupported",
        RECURRENT,
        swap(RECURRENT, ", clip=1.0", ""),
        says="non-default clip",
    ),
    qnn(
        "einsum-outer",
        "Einsum as an outer product",
        "attribute_unsupported",
        OUTER,
        chain(
            '[planted] p = Einsum<equation="ij,jk->ik">(h, z)',
            inputs="float[4,1] x, float[1,4] z",
            output="float[4,4]",
        ),
        says="unsupported equation",
    ),
    qnn(
        "einsum-of-one",
        "Einsum of one tensor",
        "attribute_unsupported",
        SUMMED,
        None,
        says="at least 2 inputs",
    ),
    qnn(
        "max-of-one",
        "Max of one tensor",
        "attribute_unsupported",
        LONELY,
        swap(LONELY, "Max(h)", "Max(h, h)"),
        says="at least 2 inputs",
    ),
    qnn(
        "argmax-last",
        "ArgMax that takes the last of equal maxima",
        "attribute_unsupported",
        BEST,
        swap(BEST, ", select_last_index=1", ""),
        says="select_last_index",
    ),
    qnn(
        "topk-count-from-an-input",
        "TopK whose count is an input",
        "attribute_unsupported",
        TOP,
        TOP_FIXED,
    ),
    qnn(
        "topk-count-by-default",
        "TopK whose count is a graph input with a default",
        "attribute_unsupported",
        TOP_BY_DEFAULT,
        TOP_FIXED,
    ),
)
FURTHER: tuple[Case, ...] = (
    qnn(
        "range-to-an-input",
        "a Range up to an input: QNN's is one over constants",
        "attribute_unsupported",
        COUNTED,
        None,
        says="must be constant initializers",
    ),
    qnn(
        "topk-9",
        "TopK of opset 9, whose count is an attribute and not an input",
        "no_kernel_version",
        TOP_9,
        swap(swap(TOP_9, '"" : 9', '"" : 11'), "y) {", "y) <int64[1] k={2}> {").replace("<k=2>(h)", "(h, k)"),
    ),
    qnn(
        "behind-a-count",
        "a node after it, whose sizes follow from the count",
        "dynamic_shape",
        TOP,
        TOP_FIXED,
        node="last",
    ),
)
"""Cases that took more to be answered; `cases.UNSOLVED` names those that are not."""
