"""`--cache window`: layers with sliding-window attention cache only the window (GroupQueryAttention).

The operator drops positions outside the window; positions and cursors do not change. A sequence longer than the window
cannot be rewound, so the full cache is the default.
"""

from __future__ import annotations

import onnx_ir as ir

from partita.errors import ProviderError
from partita.export.graph.element_types import to_ir
from partita.export.options import WINDOW, ExportOptions
from partita.export.target import Question, Target

OPERATOR, DOMAIN = "GroupQueryAttention", "com.microsoft"
OPSET, IR_VERSION = 21, 10
HEADS, KV_HEADS, SIZE, ROWS = 4, 2, 64, 16
"""Sizes of the probed node."""


def ask(options: ExportOptions, target: Target | None) -> None:
    """Raise ProviderError where the target is not known to support a window cache or the node. Nothing is written yet.

    Without a target the package is for the CPU provider.
    """
    if options.cache != WINDOW or target is None:
        return
    said = f"`cache={WINDOW}`: {target.provider}"
    rest = "nothing was written; omit it, or choose another `target`, e.g. cpu"
    if not target.rolls:
        raise ProviderError(
            f"{said} is not known to support a window cache ({OPERATOR} with sliding_window_cache); {rest}"
        )
    if target.takes is not None and not target.takes([question(options.computing.dtype)])[0]:
        raise ProviderError(f"{said} has no kernel of {OPERATOR} with sliding_window_cache here; {rest}")


def question(dtype: str) -> Question:
    """A model of one such node in `dtype`, and the sizes of its inputs."""
    sizes: dict[str, tuple[int, ...]] = {"query": (1, 1, HEADS * SIZE)}
    sizes |= dict.fromkeys(("key", "value"), (1, 1, KV_HEADS * SIZE))
    sizes |= dict.fromkeys(("past_key", "past_value"), (1, KV_HEADS, ROWS, SIZE))
    kinds = dict.fromkeys(sizes, to_ir(dtype))
    sizes |= {"last": (1,), "total": ()}
    kinds |= dict.fromkeys(("last", "total"), ir.DataType.INT32)
    given = [
        ir.Value(name=name, shape=ir.Shape(list(shape)), type=ir.TensorType(kinds[name]))
        for name, shape in sizes.items()
    ]
    numbers = {
        "num_heads": HEADS,
        "kv_num_heads": KV_HEADS,
        "local_window_size": ROWS,
        "sliding_window_cache": 1,
    }
    node = ir.Node(
        DOMAIN,
        OPERATOR,
        given,
        attributes=[ir.AttrInt64(name, number) for name, number in numbers.items()],
        num_outputs=3,
        name="asked",
    )
    for output, name in zip(node.outputs, ("output", "present_key", "present_value"), strict=True):
        output.name = name
    graph = ir.Graph(given, node.outputs, nodes=[node], opset_imports={"": OPSET, DOMAIN: 1}, name="asked")
    return bytes(ir.to_proto(ir.Model(graph, ir_version=IR_VERSION)).SerializeToString()), sizes
