"""Graph passes, one per file, each equal to the identity on the values a graph computes. `ORDER` is the order they run
in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from partita.export.passes import (
    expert_weights,
    gather_rows,
    rotary_tables,
    tied_head,
    transposed_weights,
    write_after_read,
)
from partita.export.passes.base import Pass, PassContext
from partita.export.passes.manager import run

if TYPE_CHECKING:
    import onnx_ir as ir

ORDER: tuple[Pass, ...] = (
    rotary_tables.PASS,
    gather_rows.PASS,
    expert_weights.PASS,
    transposed_weights.PASS,
    tied_head.PASS,
    write_after_read.PASS,
)


def run_all(model: ir.Model, context: PassContext) -> dict[str, int]:
    """Run every pass in order; returns how many places each changed. Raises PassError."""
    return run(model, ORDER, context)
