"""Graph passes, one per file, each equal to the identity on the values a graph computes. `ORDER` is the order they run
in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from partita.export.passes import (
    activations,
    expert_weights,
    fused_norms,
    gather_rows,
    head_norms,
    packed_attention,
    rotary_attention,
    rotary_embedding,
    rotary_tables,
    skip_norms,
    tied_head,
    transposed_weights,
    views,
    write_after_read,
)
from partita.export.passes.asking import rewritten
from partita.export.passes.base import Pass, PassContext
from partita.export.passes.manager import run
from partita.export.target import TakesEach

if TYPE_CHECKING:
    import onnx_ir as ir

ORDER: tuple[Pass, ...] = (
    rotary_tables.PASS,
    gather_rows.PASS,
    fused_norms.PASS,
    activations.PASS,
    rotary_attention.PASS,
    rotary_embedding.PASS,
    views.PASS,
    expert_weights.PASS,
    transposed_weights.PASS,
    tied_head.PASS,
    head_norms.PASS,
    packed_attention.PASS,
    skip_norms.PASS,
    write_after_read.PASS,
)


def run_all(model: ir.Model, context: PassContext, takes: TakesEach | None) -> tuple[ir.Model, dict[str, int]]:
    """Run every pass in order on a copy; returns it, and how many places each changed. Raises PassError.

    takes: asks the provider that the package is for about nodes; None when nobody can be asked.
    """
    return rewritten(model, context, lambda copy, told: run(copy, ORDER, told), takes)
