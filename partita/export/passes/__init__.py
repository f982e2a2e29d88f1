"""Graph passes, one per file, each equal to the identity on the values a graph computes. `ORDER` is the order they run
in.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx_ir as ir

ORDER = ("rotary_tables", "gather_rows", "expert_weights", "transposed_weights", "tied_head", "write_after_read")
"""File names of the passes. Each exposes `run(model) -> int`, the number of places it changed."""


def run_all(model: ir.Model) -> dict[str, int]:
    """Run every pass in order; returns how many places each changed."""
    counts: dict[str, int] = {}
    for name in ORDER:
        run: Callable[[ir.Model], int] = importlib.import_module(f"{__name__}.{name}").run
        counts[name] = run(model)
    return counts
