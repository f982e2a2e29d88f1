"""Planted causes on CUDA: forms of an operator that it lacks; seen with onnxruntime-gpu 1.31.1."""

from __future__ import annotations

from typing import Any

from tests.planted.case import Case
from tests.planted.graphs import image, operators, swap
from tests.planted.on_cuda import LSTM, cuda


def changed(name: str, planted: str, expected: str, text: str, old: str, new: str, **more: Any) -> Case:
    """A case whose control has other words in one place."""
    return cuda(name, planted, expected, text, swap(text, old, new), **more)


def recurrent(operator: str, gates: int, inputs: str = "") -> str:
    """A recurrent operator over a sequence of five; its attributes go after hidden_size."""
    return operators(
        21,
        f"g (float[5,2,16] x) => (float[5,1,2,8] y) <float[1,{gates * 8},16] w, float[1,{gates * 8},8] r, "
        f"float[1,{gates * 16}] b, float[1,2,8] z, float[1,24] holes> {{\n  [first] h = Neg(x)\n"
        f"  [planted] p = {operator}(h, w, r, b{inputs})\n  [last] y = Neg(p)\n}}",
    )


PEEPHOLES = recurrent("LSTM<hidden_size=8>", 4, ', "", z, z, holes')
HELD = swap(PEEPHOLES, "float[5,2,16] x)", "float[5,2,16] x, float[1,24] holes)")
COUPLED = recurrent("LSTM<hidden_size=8, input_forget=1>", 4)
TWICE = recurrent("LSTM<hidden_size=8, clip=3.0, input_forget=1>", 4)
SQUASHED = recurrent('RNN<hidden_size=8, activations=["Sigmoid"]>', 1)
HARDENED = recurrent('GRU<hidden_size=8, linear_before_reset=1, activations=["HardSigmoid","Tanh"]>', 3)
FUSED = operators(
    21,
    "g (float[1,4,8] x) => (float[1,4,8] y) <float[4,4,1] w> {\n  [first] h = Neg(x)\n"
    '  [planted] p = com.microsoft.FusedConv<activation="LeakyRelu", activation_params=[0.1]>(h, w)\n'
    "  [last] y = Neg(p)\n}",
)
SAME = image('[planted] p = ConvTranspose<auto_pad="SAME_UPPER", strides=[2,2]>(h, w)', extra="float[4,4,3,3] w")
LAST_OF_EQUALS = operators(
    21,
    "g (float[4,16] x, bool c) => (int64[1,16] y) {\n  [first] h = Neg(x)\n"
    "  [choice] p = If(c)<then_branch = t () => (int64[1,16] a) { [planted] a = ArgMin<select_last_index=1>(h) }, "
    "else_branch = e () => (int64[1,16] b) { [other] b = ArgMin(h) }>\n  [last] y = Neg(p)\n}",
)

HALF_CLIPPED = LSTM.replace("float[", "float16[")
TWO_LEAKY = swap(
    swap(
        FUSED,
        "[last] y = Neg(p)",
        '[mid] r = Sigmoid(p)\n  [other] q = com.microsoft.FusedConv<activation="Tanh">(r, w)\n  [last] y = Neg(q)',
    ),
    "[planted]",
    "[one]",
)
TWO_RELU = TWO_LEAKY.replace("LeakyRelu", "Relu").replace("Tanh", "Relu")
ODD_NAMES = image(
    '[CPU] q = LpPool<kernel_shape=[2,2]>(h)\n  [node] p = ConvTranspose<auto_pad="SAME_UPPER", strides=[2,2]>(q, w)',
    extra="float[4,4,3,3] w",
)
PLAIN_NAMES = swap(swap(ODD_NAMES, "LpPool", "AveragePool"), 'auto_pad="SAME_UPPER", ', "")
HELD_BRANCH = operators(
    21,
    "g (float[1,4,8] x, bool c) => (float[1,4,8] y) <float[4,4,1] w> {\n  [first] h = Neg(x)\n"
    "  [choice] p = If(c)<then_branch = t () => (float[1,4,8] a) { [planted] a = com.microsoft.FusedConv<"
    'activation="LeakyRelu", activation_params=[0.1]>(h, w) }, '
    "else_branch = e () => (float[1,4,8] b) { [other] b = Neg(h) }>\n  [last] y = Neg(p)\n}",
)

LEAKY = image(
    '[planted] p = com.microsoft.FusedConv<activation="LeakyRelu", activation_params=[0.1]>(h, w)',
    extra="float[4,4,1,1] w",
)
BLOCKS = image(
    '[one] q = com.microsoft.FusedConv<activation="LeakyRelu", activation_params=[0.1]>(h, w)\n'
    "  [pool] o = MaxPool<kernel_shape=[2,2]>(q)\n"
    '  [planted] r = com.microsoft.FusedConv<activation="Tanh">(o, v)\n  [more] p = Sigmoid(r)',
    extra="float[16,4,1,1] w, float[16,16,1,1] v",
)
OLD_HELD = swap(
    swap(PEEPHOLES, "ir_version: 10", "ir_version: 3").replace('"" : 21', '"" : 8'),
    "float[5,2,16] x)",
    "float[5,2,16] x, float[1,32,16] w, float[1,32,8] r, float[1,64] b, float[1,2,8] z, float[1,24] holes)",
)

CASES: tuple[Case, ...] = (
    changed(
        "lstm-peepholes",
        "an LSTM with an optional input that CUDA's lacks",
        "attribute_unsupported",
        PEEPHOLES,
        ', "", z, z, holes',
        "",
    ),
    changed(
        "lstm-peepholes-by-default",
        "the same where the file has a default for an input of the graph",
        "attribute_unsupported",
        HELD,
        ", z, z, holes",
        ", z, z",
    ),
    changed(
        "lstm-coupled",
        "an LSTM with coupled gates",
        "attribute_unsupported",
        COUPLED,
        "input_forget=1",
        "input_forget=0",
    ),
    changed(
        "lstm-coupled-and-clip",
        "two attributes, each of which is one too many",
        "attribute_unsupported",
        TWICE,
        ", clip=3.0, input_forget=1",
        "",
    ),
    changed(
        "rnn-sigmoid",
        "an RNN with an activation that cuDNN lacks",
        "attribute_unsupported",
        SQUASHED,
        "Sigmoid",
        "Tanh",
    ),
    changed(
        "gru-hard-sigmoid",
        "a GRU with an activation that cuDNN lacks",
        "attribute_unsupported",
        HARDENED,
        "HardSigmoid",
        "Sigmoid",
    ),
    changed(
        "fused-conv-leaky",
        "a fused convolution with an activation that CUDA claims and then does not construct",
        "attribute_unsupported",
        FUSED,
        "LeakyRelu",
        "Relu",
    ),
    changed(
        "conv-transpose-same",
        "ConvTranspose that works out its padding itself",
        "attribute_unsupported",
        SAME,
        'auto_pad="SAME_UPPER", ',
        "",
        evidence=("logged",),
        says="auto_pad",
    ),
    changed(
        "argmin-last-in-a-branch",
        "ArgMin that wants the last of equal minima, in the branch of an If",
        "attribute_unsupported",
        LAST_OF_EQUALS,
        "select_last_index=1",
        "select_last_index=0",
    ),
    changed(
        "lstm-half-clip",
        "an LSTM with clip in float16, which the CPU then computes in float32",
        "attribute_unsupported",
        HALF_CLIPPED,
        ", clip=3.0",
        "",
    ),
    changed(
        "fused-conv-elsewhere",
        "a node that CUDA has, in a graph that it does not open for another node",
        "subgraph_rejected",
        FUSED,
        "LeakyRelu",
        "Relu",
        node="first",
    ),
    cuda(
        "fused-conv-one-of-two",
        "two nodes that CUDA claims and then does not construct: the first",
        "attribute_unsupported",
        TWO_LEAKY,
        TWO_RELU,
        node="one",
    ),
    cuda(
        "fused-conv-other-of-two",
        "two nodes that CUDA claims and then does not construct: the second",
        "attribute_unsupported",
        TWO_LEAKY,
        TWO_RELU,
        node="other",
    ),
    cuda(
        "named-node",
        "a node with an attribute too many, with a name that is a word of the log's",
        "attribute_unsupported",
        ODD_NAMES,
        PLAIN_NAMES,
        node="node",
        says="auto_pad",
    ),
    changed(
        "lstm-peepholes-of-2017",
        "a file of the oldest kind, all of whose weights are inputs as well",
        "attribute_unsupported",
        OLD_HELD,
        ', "", z, z, holes',
        "",
    ),
)

FURTHER: tuple[Case, ...] = (
    cuda(
        "fused-conv-leaky-in-blocks",
        "the same of an image, which the CPU then computes in blocks of channels, by another name",
        "attribute_unsupported",
        LEAKY,
        LEAKY.replace("LeakyRelu", "Relu"),
        node="p_nchwc",
        plain_node="planted",
    ),
    cuda(
        "fused-conv-tanh-in-blocks",
        "the second of two fused nodes and a pooling between, all of which the CPU computes in blocks of channels",
        "attribute_unsupported",
        BLOCKS,
        BLOCKS.replace("LeakyRelu", "Relu").replace("Tanh", "Relu"),
        node="r_nchwc",
        plain_node="planted",
    ),
    changed(
        "fused-conv-leaky-in-a-branch",
        "the same in the branch of an If",
        "attribute_unsupported",
        HELD_BRANCH,
        "LeakyRelu",
        "Relu",
    ),
)
"""Cases that took more to be answered; `cases.UNSOLVED` names those that are not."""
