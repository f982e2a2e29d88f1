"""What can be chosen of a row of logits without the others: its likeliest token, or the largest, to draw among.

Each can be written in several forms, models of one to three nodes; which is right on a device, `choosing` tries. ONNX
says nothing of NaN, and providers differ: WebGPU's ReduceMax leaves it out, its ReduceSum does not (ONNX Runtime 1.27).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from partita import dtypes
from partita.runtime import selection
from partita.runtime.sampling import MOST_DRAWN

Row = npt.NDArray[np.float32]
"""[vocab]."""
MAX, SUM = "ReduceMax", "ReduceSum"
"""What gives a figure that is finite only where all logits are, or where the largest is and the others are below it."""
TAKEN = 64
"""As many are taken, so that those that equal the last one are among them, unless there are more of these."""
OPSET, IR_VERSION = 14, 8


@dataclass(frozen=True, slots=True)
class Choice:
    """What is chosen."""

    name: str
    forms: tuple[str, ...]
    """Operators, the first of which chooses."""
    taken: int
    """Places of a row that come to the host."""
    count: int
    """Of them are wanted at most, and all that equal the last."""
    on_host: Callable[[Row], object]
    """What the host does with all of them."""


LIKELIEST = Choice("the likeliest token", (f"ArgMax, {MAX}", f"ArgMax, {SUM}", "TopK"), 1, 1, lambda row: row.argmax())
LARGEST = Choice(
    "the largest logits",
    (f"TopK, {MAX}", f"TopK, {SUM}"),
    TAKEN,
    MOST_DRAWN,
    lambda row: selection.largest(row, MOST_DRAWN),
)


def figure_dtype(form: str, dtype: str) -> str:
    """The dtype of a form's figure for logits of `dtype`: a sum of float16 would overflow."""
    return "float32" if SUM in form else dtype


def keeps_axis(form: str) -> bool:
    """Whether places have an axis of their own, as those of TopK do."""
    return form.startswith("TopK")


def choice_model(choice: Choice, form: str, dtype: str, rank: int) -> bytes:
    """A model that reads `logits` of a rank, and gives `places`, `figure`, and for TopK `values` of its last axis."""
    import onnx
    from onnx import helper

    integer, element = onnx.TensorProto.INT64, dtypes.named(dtype).number
    constants = [
        helper.make_tensor("count", integer, [1], [choice.taken]),
        helper.make_tensor("last", integer, [1], [-1]),
    ]
    if keeps_axis(form):
        nodes = [helper.make_node("TopK", ["logits", "count"], ["values", "places"])]
    else:
        nodes = [helper.make_node("ArgMax", ["logits"], ["places"], axis=-1, keepdims=0)]
    if MAX in form:
        nodes.append(helper.make_node(MAX, ["logits"], ["figure"], axes=[-1], keepdims=0))
    elif SUM in form:
        nodes.append(helper.make_node("Cast", ["logits"], ["wide"], to=onnx.TensorProto.FLOAT))
        nodes.append(helper.make_node(SUM, ["wide", "last"], ["figure"], keepdims=0))
    else:
        nodes.append(helper.make_node("Squeeze", ["values", "last"], ["figure"]))
    read = {name for node in nodes for name in node.input}
    sizes: list[Any] = [f"d{axis}" for axis in range(rank - 1)]
    taken = [*sizes, choice.taken] if keeps_axis(form) else sizes
    outputs = [
        helper.make_tensor_value_info("places", integer, taken),
        helper.make_tensor_value_info("figure", dtypes.named(figure_dtype(form, dtype)).number, sizes),
    ]
    if keeps_axis(form):
        outputs.append(helper.make_tensor_value_info("values", element, taken))
    graph = helper.make_graph(
        nodes,
        "choice",
        [helper.make_tensor_value_info("logits", element, [*sizes, "vocab"])],
        outputs,
        [constant for constant in constants if constant.name in read],
    )
    opsets = [helper.make_opsetid("", OPSET)]
    return bytes(helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION).SerializeToString())
