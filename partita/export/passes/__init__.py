"""Graph passes, one per file. `ORDER` is their order. No pass changes the values that a graph computes."""

from __future__ import annotations

from collections.abc import Collection

from partita.errors import UsageError
from partita.export.passes import (
    activations,
    fused_norms,
    head_norms,
    packed_attention,
    rotary_embedding,
    rotary_tables,
    skip_norms,
    transposed_weights,
    views,
    write_after_read,
)
from partita.export.passes.base import Pass

ORDER: tuple[Pass, ...] = (
    rotary_tables.PASS,
    fused_norms.PASS,
    activations.PASS,
    rotary_embedding.PASS,
    views.PASS,
    transposed_weights.PASS,
    head_norms.PASS,
    packed_attention.PASS,
    skip_norms.PASS,
    write_after_read.PASS,
)


def optional() -> tuple[str, ...]:
    """Names of the passes that can be skipped, in their order."""
    return tuple(each.name for each in ORDER if not each.required)


def check_skipped(names: Collection[str]) -> None:
    """Raise UsageError for an unknown pass, or one that cannot be skipped."""
    for name in names:
        if name in optional():
            continue
        needed = any(each.name == name for each in ORDER)
        reason = "without it, graphs may compute wrong values" if needed else "unknown pass"
        raise UsageError(f"`without_pass={name}`: {reason}; choose one of {', '.join(optional())}")
