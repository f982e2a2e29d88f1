"""Strange graphs and options on OpenVINO, its plugin and QNN: names, shapes, types and options that few have."""

from __future__ import annotations

from tests.planted.case import NO_FALLBACK, Case, Run
from tests.planted.graphs import NAMES, between, operators, swap
from tests.planted.on_openvino import openvino
from tests.planted.on_plugins import plugin
from tests.planted.on_qnn import CHIP, qnn

PLAIN = between("[planted] p = Sigmoid(h)")
CELU = between("[planted] p = Celu(h)")
BITS = (
    between("[planted] p = BitwiseNot(h)", kind="int32").replace("MatMul(x, w)", "Neg(x)").replace("Relu(p)", "Abs(p)")
)
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
    "g (bool[4] x, bool[4] z) => (bool[4] y) {\n  [first] h = Not(x)\n  [planted] p = Xor(h, z)\n  [last] y = Not(p)\n}",
)
BRAIN = operators(
    21,
    "g (bfloat16[4,16] x) => (bfloat16[4,16] y) {\n  [first] h = Relu(x)\n  [planted] p = Sigmoid(h)\n"
    "  [last] y = Relu(p)\n}",
)
HALVES = swap(BRAIN, "bfloat16", "float16")
WHOLE = operators(
    21,
    "g (int64[4,16] x) => (int64[4,16] y) {\n  [first] h = Neg(x)\n  [planted] p = Mul(h, h)\n  [last] y = Neg(p)\n}",
)
SHORT = operators(
    21,
    "g (int16[4,16] x) => (int16[4,16] y) {\n  [first] h = Add(x, x)\n  [planted] p = Mod(h, x)\n  [last] y = Add(p, x)\n}",
)
CAPTURED = operators(
    21,
    "g (float[4,16] x, int64 n, bool c) => (float[4,16] y) {\n  [first] h = Neg(x)\n"
    "  [loop] p = Loop(n, c, x)<body = b (int64 i, bool ci, float[4,16] a) => (bool co, float[4,16] o) "
    "{ [go] co = Identity(ci)\n  [planted] s = Celu(h)\n  [sum] o = Add(s, a) }>\n  [last] y = Neg(p)\n}",
)
SPLIT = operators(
    21,
    "g (float[4,16] x) => (float[4,16] y) {\n  [first] h = Neg(x)\n  [planted] s = SplitToSequence<axis=0>(h)\n"
    "  [join] p = ConcatFromSequence<axis=0>(s)\n  [last] y = Neg(p)\n}",
)
PASSED = operators(
    21, "g (float[4,16] x) => (float[4,16] x, float[4,16] y) {\n  [first] h = Neg(x)\n  [last] y = Abs(h)\n}"
)
LAYERS = swap(
    swap(between("[model__layers__3__mlp__planted] p = Sigmoid(h)"), "[last]", "[model__norm__last]"),
    "[first]",
    "[model__layers__2__mlp__first]",
)


def option(
    environment: str,
    provider: str,
    name: str,
    planted: str,
    expected: str,
    given: dict[str, str],
    taken: dict[str, str],
    text: str = PLAIN,
) -> Case:
    """A case whose cause is the value of an option."""
    always = CHIP if provider == "qnn" else {}
    return Case(
        f"{environment}-{name}",
        environment,
        provider,
        planted,
        expected,
        Run(text, {**always, **given}),
        Run(text, {**always, **taken}),
    )


CASES: tuple[Case, ...] = (
    openvino(
        "empty",
        "a tensor without elements",
        "attribute_unsupported",
        NOTHING,
        swap(NOTHING, "float[0,16]", "float[2,16]"),
    ),
    openvino(
        "oddly-named",
        "an operator it lacks in a node whose name has everything in it",
        "no_kernel_op",
        swap(NAMED, "Celu", "com.microsoft.FastGelu"),
        NAMED,
        node=NAMES["ODD"],
    ),
    openvino(
        "twins",
        "an operator it lacks, in a node of the same name as another",
        "no_kernel_op",
        swap(TWINS, "Celu", "com.microsoft.FastGelu"),
        TWINS,
        node="",
        op_type="FastGelu",
    ),
    openvino("rank-7", "Transpose of rank 7", NO_FALLBACK, SEVEN, None),
    openvino("xor", "Xor", NO_FALLBACK, LOGICAL, None),
    openvino("sigmoid-bfloat16", "bfloat16", "no_kernel_type", BRAIN, HALVES),
    openvino("mul-int64", "int64", NO_FALLBACK, WHOLE, None),
    openvino("mod-int16", "Mod of int16", "no_kernel_type", SHORT, swap(SHORT, "int16", "int32")),
    openvino("split-to-sequence", "a sequence", "no_kernel_op", SPLIT, None),
    openvino("captured", "an operator over what is around a loop", NO_FALLBACK, CAPTURED, None),
    openvino("passed-on", "an input that is an output", NO_FALLBACK, PASSED, None),
    option(
        "openvino",
        "openvino",
        "device-unknown",
        "a device that there is not",
        "option_rejected",
        {"device_type": "TOASTER"},
        {"device_type": "CPU"},
    ),
    option(
        "openvino",
        "openvino",
        "threads-in-words",
        "a number of threads in words",
        "option_rejected",
        {"num_of_threads": "many"},
        {"num_of_threads": "2"},
    ),
    option(
        "openvino",
        "openvino",
        "precision",
        "a precision that the device has not",
        "option_rejected",
        {"precision": "FP17"},
        {"precision": "FP32"},
    ),
    option(
        "openvino",
        "openvino",
        "unknown-option",
        "an option that it does not know",
        "option_rejected",
        {"fast": "1"},
        {},
    ),
    option(
        "openvino",
        "openvino",
        "priority",
        "a priority that there is not",
        "option_rejected",
        {"model_priority": "URGENT"},
        {"model_priority": "HIGH"},
    ),
    option(
        "openvino",
        "openvino",
        "config-missing",
        "a file that there is not",
        "option_rejected",
        {"load_config": "/nonexistent/config.json"},
        {},
    ),
    option(
        "openvino",
        "openvino",
        "streams",
        "streams below zero",
        "option_rejected",
        {"num_streams": "-1"},
        {"num_streams": "1"},
    ),
    option(
        "openvino",
        "openvino",
        "hetero",
        "a chain of devices of one",
        NO_FALLBACK,
        {"device_type": "HETERO:CPU"},
        {"device_type": "CPU"},
    ),
    option(
        "openvino",
        "openvino",
        "hetero-npu",
        "a chain with a device that is not there",
        "device_missing",
        {"device_type": "HETERO:NPU,CPU"},
        {"device_type": "HETERO:CPU"},
    ),
    plugin(
        "empty",
        "a tensor without elements",
        "attribute_unsupported",
        NOTHING,
        swap(NOTHING, "float[0,16]", "float[2,16]"),
    ),
    plugin(
        "oddly-named",
        "an operator it lacks in a node whose name has everything in it",
        "no_kernel_op",
        swap(NAMED, "Celu", "com.microsoft.FastGelu"),
        NAMED,
        node=NAMES["ODD"],
    ),
    plugin(
        "twins",
        "an operator it lacks, in a node of the same name as another",
        "no_kernel_op",
        swap(TWINS, "Celu", "com.microsoft.FastGelu"),
        TWINS,
        node="",
        op_type="FastGelu",
    ),
    plugin("sigmoid-bfloat16", "bfloat16", "no_kernel_type", BRAIN, HALVES),
    option(
        "plugins", "openvino", "unknown-option", "an option that it does not know", "option_rejected", {"fast": "1"}, {}
    ),
    option(
        "plugins",
        "openvino",
        "threads-in-words",
        "threads in words",
        "option_rejected",
        {"num_of_threads": "many"},
        {"num_of_threads": "2"},
    ),
    option(
        "plugins",
        "openvino",
        "precision",
        "a precision that there is not",
        "option_rejected",
        {"precision": "FP17"},
        {"precision": "FP32"},
    ),
    qnn(
        "empty",
        "a tensor without elements",
        "attribute_unsupported",
        NOTHING,
        swap(NOTHING, "float[0,16]", "float[2,16]"),
    ),
    qnn("sigmoid-scalar", "a tensor of rank 0", NO_FALLBACK, SCALAR, None),
    qnn(
        "oddly-named",
        "an operator it lacks in a node whose name has everything in it",
        "no_kernel_op",
        NAMED,
        swap(NAMED, "Celu", "Elu"),
        node=NAMES["ODD"],
    ),
    qnn(
        "twins",
        "an operator it lacks, in a node of the same name as another",
        "no_kernel_op",
        TWINS,
        swap(TWINS, "Celu", "Elu"),
        node="",
        op_type="Celu",
    ),
    qnn("rank-7", "Transpose of rank 7", "attribute_unsupported", SEVEN, FOUR),
    qnn("xor", "Xor", "no_kernel_op", LOGICAL, swap(LOGICAL, "Xor", "And")),
    qnn("sigmoid-bfloat16", "bfloat16", "no_kernel_type", BRAIN, HALVES),
    qnn("mul-int64", "Mul of int64", "no_kernel_type", WHOLE, swap(WHOLE, "int64", "int32")),
    qnn("captured", "an operator over what is around a loop, which QNN has not", "no_kernel_op", CAPTURED, None),
    qnn("passed-on", "an input that is an output", NO_FALLBACK, PASSED, None),
    qnn(
        "pinned-layer",
        "a pin of a layer by its number",
        "pinned_by_user",
        LAYERS,
        LAYERS,
        node="model/layers/3/mlp/planted",
        arguments=("--pin", "cpu:layers.3"),
    ),
    option(
        "qnn",
        "qnn",
        "performance",
        "a mode of performance that there is not",
        "option_rejected",
        {"htp_performance_mode": "ludicrous"},
        {"htp_performance_mode": "burst"},
    ),
    option(
        "qnn", "qnn", "architecture", "an architecture that there is not", "option_rejected", {"htp_arch": "12"}, {}
    ),
    option("qnn", "qnn", "chip-in-words", "a chip in words", "option_rejected", {"soc_model": "snapdragon"}, {}),
    option("qnn", "qnn", "unknown-option", "an option that it does not know", "option_rejected", {"fast": "1"}, {}),
    option(
        "qnn",
        "qnn",
        "no-fp16",
        "floats, where the NPU is not to compute in float16",
        "option_needed",
        {"enable_htp_fp16_precision": "0"},
        {"enable_htp_fp16_precision": "1"},
    ),
    option(
        "qnn",
        "qnn",
        "profiling",
        "a level of profiling that there is not",
        "option_rejected",
        {"profiling_level": "lots"},
        {"profiling_level": "off"},
    ),
    option(
        "qnn",
        "qnn",
        "gpu-backend",
        "the backend of a GPU that is not there",
        "library_missing",
        {"backend_type": "gpu"},
        {"backend_type": "htp"},
    ),
)
