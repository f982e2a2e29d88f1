"""Strange graphs and options on OpenVINO, its plugin and QNN: names, shapes, types and options that few have."""

from __future__ import annotations

from typing import Any

from tests.planted.case import NO_FALLBACK, Case, Run
from tests.planted.graphs import NAMES, between, operators, swap
from tests.planted.on_openvino import openvino
from tests.planted.on_plugins import plugin
from tests.planted.on_qnn import CHIP, qnn

PLAIN = between("[planted] p = Sigmoid(h)")
CELU = between("[planted] p = Celu(h)")
NOTHING = operators(
    21,
    "g (float[0,16] x) => (float[0,16] y) {\n  [first] h = Neg(x)\n  [planted] p = Sigmoid(h)\n  [last] y = Neg(p)\n}",
)
SCALAR = operators(
    21, "g (float x) => (float y) {\n  [first] h = Neg(x)\n  [planted] p = Sigmoid(h)\n  [last] y = Neg(p)\n}"
)
NAMED = swap(CELU, "[planted]", "[ODD]")
TWINS = swap(swap(CELU, "[planted]", "[twin_A]"), "[first]", "[twin_B]")
SEVEN = operators(
    21,
    "g (float[1,2,1,2,1,2,4] x) => (float[4,2,1,2,1,2,1] y) {\n  [first] h = Neg(x)\n"
    "  [planted] p = Transpose<perm=[6,1,2,3,4,5,0]>(h)\n  [last] y = Neg(p)\n}",
)
FOUR = swap(
    SEVEN,
    "float[1,2,1,2,1,2,4] x) => (float[4,2,1,2,1,2,1] y)",
    "float[1,2,2,4] x) => (float[4,2,2,1] y)",
).replace("[6,1,2,3,4,5,0]", "[3,1,2,0]")
LOGICAL = operators(
    21,
    "g (bool[4] x, bool[4] z) => (bool[4] y) {\n  [first] h = Not(x)\n"
    "  [planted] p = Xor(h, z)\n  [last] y = Not(p)\n}",
)
WHOLE = operators(
    21,
    "g (int64[4,16] x) => (int64[4,16] y) {\n  [first] h = Neg(x)\n  [planted] p = Mul(h, h)\n  [last] y = Neg(p)\n}",
)
FLOATS = swap(WHOLE, "int64", "float")
SHORT = operators(
    21,
    "g (int16[4,16] x) => (int16[4,16] y) {\n  [first] h = Add(x, x)\n"
    "  [planted] p = Mod(h, x)\n  [last] y = Add(p, x)\n}",
)
CAPTURED = operators(
    21,
    "g (float[4,16] x, int64 n, bool c) => (float[4,16] y) {\n  [first] h = Neg(x)\n"
    "  [loop] p = Loop(n, c, x)<body = b (int64 i, bool ci, float[4,16] a) => (bool co, float[4,16] o) "
    "{ [go] co = Identity(ci)\n  [planted] s = Celu(h)\n  [sum] o = Add(s, a) }>\n  [last] y = Neg(p)\n}",
)
PASSED = operators(
    21, "g (float[4,16] x) => (float[4,16] x, float[4,16] y) {\n  [first] h = Neg(x)\n  [last] y = Abs(h)\n}"
)

RANKLESS = operators(21, "g (float[] x) => (float[] y) {\n  [first] h = Neg(x)\n  [planted] y = Sigmoid(h)\n}")
UNRANKED = ("--shape", "x=4,16")


def option(provider: str, name: str, planted: str, given: dict[str, str], taken: dict[str, str], **more: Any) -> Case:
    """A case whose cause is the value of an option with which the provider starts, and takes nothing."""
    run, control = Run(PLAIN, given), Run(PLAIN, taken)
    return Case(f"{provider}-{name}", provider, provider, planted, "option_needed", run, control, **more)


CASES: tuple[Case, ...] = (
    openvino(
        "oddly-named",
        "an operator that it lacks, in a node whose name has everything in it that is not a letter",
        "no_kernel_op",
        swap(NAMED, "Celu", "com.microsoft.FastGelu"),
        NAMED,
        node=NAMES["ODD"],
    ),
    openvino(
        "two-of-a-name",
        "the same in a node with the name of another",
        "no_kernel_op",
        swap(TWINS, "Celu", "com.microsoft.FastGelu"),
        None,
        node="",
        op_type="FastGelu",
        plain=False,
    ),
    openvino(
        "empty",
        "a tensor without elements, which OpenVINO does not take",
        "attribute_unsupported",
        NOTHING,
        swap(NOTHING, "float[0,16]", "float[2,16]"),
    ),
    openvino("whole-rank-7", "a Transpose of rank 7", NO_FALLBACK, SEVEN, None),
    openvino("whole-xor", "Xor and Not of bool", NO_FALLBACK, LOGICAL, None),
    openvino("whole-int64", "arithmetic of int64", NO_FALLBACK, WHOLE, None),
    openvino("whole-int16", "arithmetic of int16", NO_FALLBACK, SHORT, None),
    openvino("whole-loop-around", "a Loop whose body reads what is around it", NO_FALLBACK, CAPTURED, None),
    openvino(
        "passed-on",
        "a graph with an input that is an output as well, for which OpenVINO's part has two things of one name",
        "subgraph_rejected",
        PASSED,
        swap(PASSED, "(float[4,16] x, float[4,16] y) {", "(float[4,16] y) {"),
        node="first",
    ),
    option(
        "openvino",
        "device-unknown",
        "a device that there is not, with which OpenVINO starts and takes nothing",
        {"device_type": "TOASTER"},
        {"device_type": "CPU"},
    ),
    plugin(
        "oddly-named",
        "an operator that it lacks, in a node whose name has everything in it that is not a letter",
        "no_kernel_op",
        swap(NAMED, "Celu", "com.microsoft.FastGelu"),
        NAMED,
        node=NAMES["ODD"],
    ),
    qnn(
        "empty",
        "a tensor without elements, which QNN does not take",
        "attribute_unsupported",
        NOTHING,
        swap(NOTHING, "float[0,16]", "float[2,16]"),
    ),
    qnn("whole-number", "a tensor of rank 0", NO_FALLBACK, SCALAR, None),
    qnn(
        "oddly-named",
        "an operator that it lacks, in a node whose name has everything in it that is not a letter",
        "no_kernel_op",
        NAMED,
        swap(NAMED, "Celu", "Elu"),
        node=NAMES["ODD"],
    ),
    qnn(
        "two-of-a-name",
        "the same in a node with the name of another",
        "no_kernel_op",
        TWINS,
        None,
        node="",
        op_type="Celu",
        plain=False,
    ),
    qnn("rank-7", "a Transpose of rank 7", "attribute_unsupported", SEVEN, FOUR),
    qnn("whole-xor", "Xor and Not of bool", NO_FALLBACK, LOGICAL, None),
    qnn("neg-int64", "Neg of int64, beside a Mul of it that QNN has", "no_kernel_type", WHOLE, FLOATS, node="first"),
    qnn(
        "loop-around",
        "an operator over what is around a Loop, neither of which QNN has",
        "no_kernel_op",
        CAPTURED,
        None,
    ),
    openvino(
        "input-of-any-rank",
        "an input of unknown rank: OpenVINO needs the rank, not the sizes",
        "dynamic_shape",
        RANKLESS,
        RANKLESS.replace("float[]", "float[N,M]"),
        says="with a known rank in place of an unknown rank",
        arguments=UNRANKED,
    ),
    qnn(
        "input-of-any-rank",
        "an input of unknown rank: QNN needs its sizes, too",
        "dynamic_shape",
        RANKLESS,
        RANKLESS.replace("float[]", "float[4,16]"),
        says="with all sizes fixed",
        arguments=UNRANKED,
    ),
    qnn("whole-passed-on", "an input that is an output as well", NO_FALLBACK, PASSED, None),
    option(
        "openvino",
        "device-empty",
        "a device without a name",
        {"device_type": ""},
        {"device_type": "CPU"},
    ),
    option(
        "qnn",
        "device-7",
        "a device by a number that there is not, with which QNN starts and takes nothing",
        {"device_id": "7", **CHIP},
        CHIP,
    ),
    option(
        "qnn",
        "chip-unknown",
        "a chip by a number that there is not, with which QNN starts and takes nothing",
        {"soc_model": "99999"},
        CHIP,
    ),
    option(
        "qnn",
        "gpu-backend",
        "the backend of a GPU that is not there, with which QNN starts and takes nothing",
        {"backend_type": "gpu", **CHIP},
        CHIP,
        plain=False,
    ),
)
