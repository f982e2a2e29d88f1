"""Planted causes on the OpenVINO plugin; seen with onnxruntime-ep-openvino 1.8.1 on onnxruntime 1.31.1."""

from __future__ import annotations

from typing import Any

from tests.planted.case import Case, Run
from tests.planted.graphs import operators, swap
from tests.planted.on_openvino import GROUPED, NORMED, PADDED, RANKLESS, TEXT

DETERMINANT = operators(
    21,
    "g (float[2,4,4] x) => (float[2] y) {\n  [first] h = Neg(x)\n  [planted] p = Det(h)\n  [last] y = Neg(p)\n}",
)
NO_DETERMINANT = operators(
    21,
    "g (float[2,4,4] x) => (float[2,4,4] y) {\n  [first] h = Neg(x)\n  [planted] p = Abs(h)\n  [last] y = Neg(p)\n}",
)
TWO_PADDED = operators(
    21,
    "g (float[4,16] x) => (float[4,20] y) <int64[4] p = {0, 1, 0, 1}> {\n"
    '  [planted] a = Pad<mode="wrap">(x, p)\n  [middle] b = Relu(a)\n'
    '  [second] y = Pad<mode="wrap">(b, p)\n}',
)


def plugin(name: str, planted: str, expected: str, model: str, control: str | None, **more: Any) -> Case:
    """A case on the OpenVINO plugin whose control is another graph."""
    taken = None if control is None else Run(control)
    return Case(f"plugins-{name}", "plugins", "openvino", planted, expected, Run(model), taken, **more)


CASES: tuple[Case, ...] = (
    plugin("gqa", "the plugin's CPU device has no GroupQueryAttention", "no_kernel_op", GROUPED, None),
    plugin("det", "the plugin has no Det", "no_kernel_op", DETERMINANT, NO_DETERMINANT),
    plugin(
        "rms-norm-24",
        "the plugin has no RMSNormalization",
        "no_kernel_op",
        NORMED,
        swap(swap(NORMED, "RMSNormalization", "LayerNormalization"), '"" : 24', '"" : 21'),
    ),
    plugin(
        "pad-wrap",
        "Pad in a mode that it claims and then does not know",
        "attribute_unsupported",
        PADDED,
        swap(PADDED, "wrap", "reflect"),
    ),
    plugin(
        "pad-wrap-neighbour",
        "a node beside it, which goes down with the graph",
        "subgraph_rejected",
        PADDED,
        swap(PADDED, "wrap", "reflect"),
        node="first",
    ),
    plugin(
        "two-culprits-first",
        "a Pad in a mode that it claims and then does not know, and further on another one",
        "attribute_unsupported",
        TWO_PADDED,
        TWO_PADDED.replace("wrap", "reflect"),
    ),
    plugin(
        "two-culprits-second",
        "the second of the two, which the graph does not get as far as",
        "attribute_unsupported",
        TWO_PADDED,
        TWO_PADDED.replace("wrap", "reflect"),
        node="second",
    ),
    plugin(
        "two-culprits-neighbour",
        "a node between them, which goes down with the graph",
        "subgraph_rejected",
        TWO_PADDED,
        TWO_PADDED.replace("wrap", "reflect"),
        node="middle",
        says="which fail without it, and the provider opens the graph without them",
    ),
    plugin(
        "cast-to-string",
        "Cast to string, which is claimed and then cannot be compiled",
        "no_kernel_type",
        TEXT,
        swap(swap(TEXT, "to=8", "to=6"), "string[", "int32["),
    ),
    plugin(
        "rank-unknown",
        "a tensor whose rank the file does not say, as after an operator without shape inference",
        "dynamic_shape",
        RANKLESS,
        swap(RANKLESS, "y) {", "y) <float[4,16] p> {"),
    ),
)
