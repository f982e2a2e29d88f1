"""Verify packed weights without the rounding of activations: replay a twin whose products are computed in float32.

The fast kernels round what they multiply to 8 bits, which costs more than any mistake in a graph would have to. The
twin is the exported graph without that rounding, over the very weight file of the package: each form says how. It
proves the graph, and how the weights are packed, within the tolerance of its activations; what the rounding costs is
part of the package's quality.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx_ir as ir

from partita.export.quantise.forms import form
from partita.export.verify import twins, wide_twin
from partita.package.folder import Manifest
from partita.package.records import Verification

DETAIL = "products in {} over the packed weights, without the 8-bit activations of the fast kernels"


def replay(folder: Path, manifest: Manifest, run: Callable[[Path, Manifest], Verification]) -> Verification:
    """Replay the known answer on the twin with `run`, within the tolerance of what the graph computes in."""
    assert manifest.packed is not None
    written = [form(manifest.packed.form)]
    if manifest.prefill is not None and manifest.prefill.packed is not None:
        written.append(form(manifest.prefill.packed.form))
    half = manifest.packed.activations == "fp16"
    detail = DETAIL.format("float16" if half else "float32")

    def exactly(twin: Path, changed: Manifest) -> Verification:
        graph = changed.graph.model_copy(update={"precision": "fp16" if half else "fp32"})
        changed = changed.model_copy(update={"graph": graph})
        return wide_twin.settled(twin, changed, run) if half else run(twin, changed)

    def change(model: ir.Model) -> ir.Model:
        for each in written:
            each.product.exact(model)  # which changes no operators but its own
        return model

    result = twins.beside(folder, manifest, change, exactly)
    return result.model_copy(update={"detail": f"{result.detail}; {detail}", "twin": detail})
