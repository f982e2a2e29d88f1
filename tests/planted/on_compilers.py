"""Graphs that QNN, OpenVINO or both have all of, as exporters write them: a fallback that is reported is invented."""

from __future__ import annotations

from tests.planted.case import NO_FALLBACK, Case, Run
from tests.planted.graphs import OPSET, between, image, operators, swap
from tests.planted.on_openvino import openvino
from tests.planted.on_qnn import CHIP


def chain(
    planted: str, *, inputs: str = "float[4,16] x", output: str = "float[A,B]", extra: str = "", opset: int = OPSET
) -> str:
    """Neg, what is planted, Neg: `planted` reads `h` and makes `p`."""
    weights = f" <{extra}>" if extra else ""
    return operators(
        opset,
        f"g ({inputs}) => ({output} y){weights} {{\n  [first] h = Neg(x)\n  {planted}\n  [last] y = Neg(p)\n}}",
    )


TARGETS: tuple[tuple[str, dict[str, str]], ...] = (("qnn", CHIP), ("openvino", {}))
"""Environment and provider, of one name; and options."""
GRAPHS: dict[str, tuple[str, str]] = {
    "mel-weights": (
        "the filters of a mel spectrum, which are made from constants",
        operators(
            OPSET,
            "g (float[1,9] x) => (float[1,4] y) <int64 bins={4}, int64 size={16}, int64 rate={8000}, float low={0.0},"
            " float high={4000.0}> {\n  [planted] m = MelWeightMatrix(bins, size, rate, low, high)\n"
            "  [mul] p = MatMul(x, m)\n  [last] y = Log(p)\n}",
        ),
    ),
    "window": (
        "a HannWindow of a constant size",
        chain(
            "[planted] m = HannWindow(size)\n  [mul] p = Mul(h, m)",
            inputs="float[1,64] x",
            extra="int64 size={64}",
        ),
    ),
    "causal-mask": (
        "a mask that ConstantOfShape and Trilu make",
        between(
            "[ones] o = ConstantOfShape<value=float[1] {1.0}>(s)\n  [planted] m = Trilu(o, above)\n"
            "  [mul] p = Mul(h, m)",
            extra="int64[2] s={4,16}, int64 above={1}",
        ),
    ),
    "positions": (
        "positions that a Range over constants makes",
        between(
            "[planted] r = Range(from, to, step)\n  [cast] f = Cast<to=1>(r)\n  [mul] p = Mul(h, f)",
            extra="int64 from={0}, int64 to={16}, int64 step={1}",
        ),
    ),
    "upsample": (
        "a Resize to twice the size, computed from the shape as torch writes it",
        image(
            "[planted] s = Shape<start=2>(h)\n  [twice] t = Mul(s, two)\n  [join] b = Concat<axis=0>(head, t)\n"
            '  [size] p = Resize<mode="nearest", nearest_mode="floor">(h, "", "", b)',
            extra="int64 two={2}, int64[2] head={1,4}",
        ),
    ),
    "pads": (
        "a Pad whose sizes are put together from constants",
        image(
            "[planted] z = ConstantOfShape<value=int64[1] {0}>(n)\n"
            "  [join] c = Concat<axis=0>(z, one, one, z, one, one)"
            "\n  [pad] p = Pad(h, c)",
            extra="int64[1] n={2}, int64[1] one={1}",
        ),
    ),
    "expand": (
        "torch's expand: a Where over a shape",
        between(
            "[shape] s = Shape(h)\n  [same] e = Equal(s, m)\n  [planted] t = Where(e, s, s)\n"
            "  [expand] q = Expand(b, t)\n  [mul] p = Mul(h, q)",
            extra="float[1,16] b, int64[2] m={-1,-1}",
        ),
    ),
    "dead-branch": (
        "an If that is decided, with an operator that neither has in the branch not taken",
        chain(
            "[planted] p = If(yes)<then_branch = t () => (float[4,16] a) { [then] a = Relu(h) }, "
            "else_branch = e () => (float[4,16] b) { [else] b = com.microsoft.FastGelu(h) }>",
            extra="bool yes={1}",
        ),
    ),
    "bias-by-default": (
        "a bias that is a graph input with a default",
        operators(
            OPSET,
            "g (float[4,4] x, float[4] b={0.5,0.25,1.0,2.0}) => (float[4,4] y) <float[4,4] w> {\n"
            "  [first] h = MatMul(x, w)\n  [planted] p = Add(h, b)\n  [last] y = Relu(p)\n}",
        ),
    ),
    "cast-like": (
        "CastLike, which is a function, to float16 and back",
        between(
            "[there] c = CastLike(h, half)\n  [planted] p = CastLike(c, whole)",
            extra="float16[1] half, float[1] whole",
        ),
    ),
    "gated-half": (
        "a gated layer of a decoder in float16",
        operators(
            OPSET,
            "g (float16[1,4,32] x) => (float16[1,4,32] y) <float16[32] s, float16[32,32] w> {\n"
            "  [norm] h = SimplifiedLayerNormalization(x, s)\n  [up] q = MatMul(h, w)\n  [act] a = Sigmoid(q)\n"
            "  [planted] g = Mul(q, a)\n  [down] d = MatMul(g, w)\n  [last] y = Add(x, d)\n}",
        ),
    ),
    "lstm-states": (
        "an LSTM with all three of its outputs",
        operators(
            OPSET,
            "g (float[4,2,8] x) => (float[4,1,2,8] y, float[1,2,8] s, float[1,2,8] c)"
            " <float[1,32,8] w, float[1,32,8] r, float[1,64] b> {\n  [first] h = Neg(x)\n"
            "  [planted] p, s, c = LSTM<hidden_size=8>(h, w, r, b)\n  [last] y = Neg(p)\n}",
        ),
    ),
    "four-bits": (
        "MatMulNBits with zero points",
        chain(
            "[planted] p = com.microsoft.MatMulNBits<K=64, N=64, bits=4, block_size=32>(h, b, s, z)",
            inputs="float[1,4,64] x",
            output="float[1,4,64]",
            extra="uint8[64,2,16] b, float[128] s, uint8[64] z",
        ),
    ),
    "quantised-conv": (
        "a convolution between QuantizeLinear and DequantizeLinear, its weights quantised by channel",
        image(
            "[before] q = QuantizeLinear(h, s, z)\n  [in] d = DequantizeLinear(q, s, z)\n"
            "  [weight] v = DequantizeLinear<axis=0>(w, ws, wz)\n  [planted] m = Conv(d, v)\n"
            "  [out] o = QuantizeLinear(m, s, z)\n  [after] p = DequantizeLinear(o, s, z)",
            extra="float s={0.1}, uint8 z={128}, int8[4,4,3,3] w, float[4] ws={0.1,0.1,0.1,0.1}, int8[4] wz={0,0,0,0}",
        ),
    ),
}
CHOSEN = swap(
    between(
        "[planted] p = If(c)<then_branch = t () => (float[4,16] a) { [then] a = Relu(h) }, "
        "else_branch = e () => (float[4,16] b) { [else] b = com.microsoft.FastGelu(h) }>"
    ),
    "(float[4,16] x)",
    "(float[4,16] x, bool c)",
)
SYMBOLIC = chain(
    "[shape] s = Shape<start=0, end=1>(h)\n  [join] c = Concat<axis=0>(s, rest)\n  [planted] p = Reshape(h, c)",
    inputs="float[N,16] x",
    extra="int64[1] rest={-1}",
)
OPENVINO: dict[str, tuple[str, str]] = {
    "chosen": ("an If with a branch that OpenVINO does not have by itself, and takes in a body", CHOSEN),
    "topk-by-default": (
        "TopK whose count is a graph input with a default",
        chain("[planted] p, i = TopK(h, k)", inputs="float[4,16] x, int64[1] k={2}", output="float[4,2]"),
    ),
    "boxes": (
        "NonMaxSuppression, whose result has as many rows as there are",
        operators(
            OPSET,
            "g (float[1,6,4] x, float[1,1,6] s) => (int64[M,3] y) <int64 most={3}> {\n"
            "  [first] h = Neg(x)\n  [planted] y = NonMaxSuppression(h, s, most)\n}",
        ),
    ),
    "skip-rms": (
        "a SkipSimplifiedLayerNormalization that gives the sum as well",
        operators(
            OPSET,
            "g (float[1,4,16] x) => (float[1,4,16] y, float[1,4,16] t) <float[16] s> {\n  [first] h = Neg(x)\n"
            '  [planted] p, "", "", t = com.microsoft.SkipSimplifiedLayerNormalization(h, h, s)\n'
            "  [last] y = Neg(p)\n}",
        ),
    ),
}

CASES = tuple(
    Case(f"{provider}-whole-{name}", provider, provider, planted, NO_FALLBACK, Run(text, options))
    for provider, options in TARGETS
    for name, (planted, text) in GRAPHS.items()
) + (
    openvino(
        "whole-symbolic",
        "a Reshape by a symbolic batch size",
        NO_FALLBACK,
        SYMBOLIC,
        None,
        arguments=("--shape", "N=4"),
    ),
    *(openvino(f"whole-{name}", planted, NO_FALLBACK, text, None) for name, (planted, text) in OPENVINO.items()),
)
