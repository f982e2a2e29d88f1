"""Verify quantised weights without quantised activations.

Fast kernels quantise activations to 8 bits, an error larger than that of most graph defects. The exact copy of the
graph computes products in float32 over the same weight file (`Product.exact`), and is verified with the tolerance of
its activations. The loss by quantised activations is part of the package's quality.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx_ir as ir

from partita.export.quantise.forms import form
from partita.export.verify import twins, wide_twin
from partita.package.folder import Manifest
from partita.package.records import Verification

DETAIL = "products in {} over the quantised weights, without 8-bit activations"


def replay(folder: Path, manifest: Manifest, run: Callable[[Path, Manifest], Verification]) -> Verification:
    """Replay the known answer on the exact copy with `run`, within the tolerance of its activation dtype."""
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
            each.product.exact(model)  # changes only the form's own operators
        return model

    result = twins.beside(folder, manifest, change, exactly)
    return result.model_copy(update={"detail": f"{result.detail}; {detail}", "twin": detail})
