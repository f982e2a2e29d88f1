"""Verify packed weights without the rounding of activations: replay a twin whose products are computed in float32.

At accuracy level 4 MatMulNBits rounds what it multiplies to 8 bits, which costs more than any mistake in a graph would
have to. The twin is the exported graph at level 0, over the very weight file of the package. It proves the graph, and
how the weights are packed, within the tolerance of float32; what the rounding costs is part of the package's quality.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx_ir as ir

from partita.export import twins
from partita.export.quantisation.operators import DOMAIN, MATMUL
from partita.package import Manifest, Verification

DETAIL = "products in float32 over the packed weights, without the 8-bit activations of the fast kernels"
EXACT_LEVEL = 0


def replay(folder: Path, manifest: Manifest, run: Callable[[Path, Manifest], Verification]) -> Verification:
    """Replay the known answer on the twin with `run`, within the tolerance of float32."""

    def exactly(twin: Path, changed: Manifest) -> Verification:
        graph = changed.graph.model_copy(update={"precision": "fp32"})
        return run(twin, changed.model_copy(update={"graph": graph}))

    result = twins.beside(folder, manifest, _exact, exactly)
    return result.model_copy(update={"detail": f"{result.detail}; {DETAIL}", "twin": DETAIL})


def _exact(model: ir.Model) -> ir.Model:
    """Every product of packed weights at the level that rounds no activations, in place."""
    for node in model.graph:
        if node.op_type == MATMUL and node.domain == DOMAIN:
            node.attributes["accuracy_level"] = ir.AttrInt64("accuracy_level", EXACT_LEVEL)
    return model
