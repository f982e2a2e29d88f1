"""Verify a bfloat16 graph where no bfloat16 kernels exist: replay a twin that computes in float32.

ONNX Runtime's CPU provider has bfloat16 kernels for data movement only. The twin is the exported graph with every
bfloat16 value typed float32 and a Cast behind each weight, over the very weight file of the package. It proves the
graph and the rounded weights; it cannot prove the arithmetic of a bfloat16 kernel, and the verification says so.
`partita verify --provider` does that on a provider that has such kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import onnx_ir as ir

from partita.export import twins
from partita.package import Manifest
from partita.package_records import Verification

if TYPE_CHECKING:
    from partita.export.quality import OpenScorer, Scorer

NARROW, WIDE = ir.DataType.BFLOAT16, ir.DataType.FLOAT
DETAIL = "float32 arithmetic over the bfloat16 weights, as the CPU provider has no bfloat16 kernels"
Result = TypeVar("Result")


def replay(folder: Path, manifest: Manifest, run: Callable[[Path, Manifest], Verification]) -> Verification:
    """Replay the known answer on the twin with `run`."""
    result = beside(folder, manifest, run)
    return result.model_copy(update={"detail": f"{result.detail}; {DETAIL}", "twin": DETAIL})


def beside(folder: Path, manifest: Manifest, run: Callable[[Path, Manifest], Result]) -> Result:
    """Build the twin of every graph beside the package, and give it to `run`."""
    return twins.beside(folder, manifest, _widen, lambda twin, changed: run(twin, _widen_manifest(changed)))


def scoring(open_scorer: OpenScorer) -> OpenScorer:
    """Opens the twin of a package to read windows of tokens, by what opens a package."""

    @contextmanager
    def opened(folder: Path, manifest: Manifest) -> Iterator[Scorer]:
        with (
            twins.made(folder, manifest, _widen) as (twin, changed),
            open_scorer(twin, _widen_manifest(changed)) as scorer,
        ):
            yield scorer

    return opened


def _widen(model: ir.Model) -> ir.Model:
    """Retype every bfloat16 value of `model` to float32, in place; weights keep their bytes and get a Cast."""
    graph = model.graph
    for value in list(graph.initializers.values()):
        tensor = value.const_value
        if tensor is None or tensor.dtype != NARROW:
            continue
        if isinstance(tensor, ir.ExternalTensor):
            _cast_behind(graph, value)
        else:
            value.const_value = ir.tensor(tensor.numpy().astype(np.float32), name=value.name)
            value.dtype = WIDE
    for node in graph:
        for output in node.outputs:
            if output.dtype == NARROW:
                output.dtype = WIDE
        _widen_attributes(node)
    for value in graph.inputs:
        if value.dtype == NARROW:
            value.dtype = WIDE
    return model


def _cast_behind(graph: ir.Graph, weight: ir.Value) -> None:
    uses = weight.uses()  # before the Cast becomes one of them
    cast = ir.node("Cast", inputs=[weight], attributes={"to": int(WIDE)}, name=f"{weight.name}/Cast")
    cast.outputs[0].name = f"{weight.name}.float32"
    cast.outputs[0].dtype, cast.outputs[0].shape = WIDE, weight.shape
    graph.insert_before(graph[0], cast)
    for use in uses:
        use.node.replace_input_with(use.idx, cast.outputs[0])


def _widen_attributes(node: ir.Node) -> None:
    """Cast targets and constant values; a weight's own Cast already says float32."""
    target = node.attributes.get("to")
    if target is not None and target.as_int() == int(NARROW):
        node.attributes["to"] = ir.AttrInt64("to", int(WIDE))
    value = node.attributes.get("value")
    if value is not None and value.type == ir.AttributeType.TENSOR and value.as_tensor().dtype == NARROW:
        node.attributes["value"] = ir.AttrTensor("value", ir.tensor(value.as_tensor().numpy().astype(np.float32)))


def _widen_manifest(manifest: Manifest) -> Manifest:
    """The manifest of the twin: states and logits are float32."""
    states = tuple(s.model_copy(update={"dtype": "float32"}) for s in manifest.graph.states)
    files = tuple(
        f.model_copy(update={"outputs": tuple(o.model_copy(update={"dtype": "float32"}) for o in f.outputs)})
        for f in manifest.graph.files
    )
    return manifest.model_copy(update={"graph": manifest.graph.model_copy(update={"states": states, "files": files})})
