"""Changed copies of a package's graphs over the same weight file, for the length of one run.

The wide copy of a 16-bit graph computes in float32: every 16-bit value is typed float32, with a Cast after each weight.
It verifies the graph and the rounded weights in two cases. ONNX Runtime's CPU provider has no bfloat16 arithmetic: the
copy runs instead of the package, and the verification records it; `partita verify --provider` verifies the kernels on
a provider that has them. And where rounding alone changes the chosen experts, no tolerance applies: the copy must
match, and the package wherever its experts are the same.

The exact copy of a quantised graph computes products in float32 (`Product.exact`). Fast kernels quantise activations to
8 bits, an error larger than that of most graph defects; the copy is verified with the tolerance of its activations. The
loss by quantised activations is part of the package's quality.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import onnx_ir as ir

from partita.errors import ResourceError
from partita.export.exporters import Replay
from partita.export.quantise.plan import FORMS
from partita.export.verify.known_answer import KnownAnswer, save
from partita.export.verify.quality import OpenScorer, Scorer
from partita.package.folder import KNOWN_ANSWER, WEIGHTS, Manifest, record_file
from partita.package.records import Verification

Result = TypeVar("Result")
EXACT_DETAIL = "products in {} over the quantised weights, without 8-bit activations"
NARROW, WIDE = (ir.DataType.BFLOAT16, ir.DataType.FLOAT16), ir.DataType.FLOAT
WIDE_DETAIL = "float32 arithmetic over the bfloat16 weights, because the CPU provider has no bfloat16 kernels"
PROOF = "float32 arithmetic over the same weights, so that the same experts as in the source model are selected"
Rounded = Callable[[], KnownAnswer | None]
"""The known answer with weights rounded to 16 bits; None where it cannot be computed."""


@contextmanager
def changed_folder(
    folder: Path, manifest: Manifest, change: Callable[[ir.Model], ir.Model]
) -> Iterator[tuple[Path, Manifest]]:
    """Within the block, a folder with the graphs of the package changed by `change`, and its manifest."""
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f"{folder.name}-copy-") as name:
        copy = Path(name)
        switchable = manifest.switchable
        beside_weights = [name for record in switchable for name in (record.file, record.known_answer) if name]
        linked = (WEIGHTS, KNOWN_ANSWER, *beside_weights)
        for shared in linked:
            if not (folder / shared).is_file():  # without --verify there is no known answer
                continue
            try:
                os.link(folder / shared, copy / shared)
            except OSError:  # a file system without hard links, e.g. on a USB stick
                shutil.copyfile(folder / shared, copy / shared)
        files = [graph.file for graph in manifest.graph.files]
        for file in files:
            ir.save(change(ir.load(folder / file)), copy / file)
        kept = tuple(record for record in manifest.files if record.name in linked)
        changed = tuple(record_file(copy, file) for file in files)
        yield copy, manifest.model_copy(update={"files": (*kept, *changed)})


def replay_wide(folder: Path, manifest: Manifest, run: Replay, rounded: Rounded) -> Verification:
    """Replay the known answer on the float32 copy with `run`; `rounded` as for `settled`."""
    result = _verification(
        manifest, lambda its: on_wide(folder, its, run), lambda: on_wide(folder, manifest, run, rounded())
    )
    return result.model_copy(update={"detail": f"{result.detail}; {WIDE_DETAIL}", "converted_copy": WIDE_DETAIL})


def verify_with_copy(folder: Path, manifest: Manifest, run: Replay, rounded: Rounded = lambda: None) -> Verification:
    """The verification of a 16-bit package that may choose among experts.

    Where the package differs and its float32 copy does not, positions where rounding changes the choice are excluded,
    while they are the minority, and the verification records the proof. The copy is compared with `rounded`, or with
    the package's known answer.
    """
    return _verification(manifest, lambda its: run(folder, its), lambda: on_wide(folder, manifest, run, rounded()))


def _verification(
    manifest: Manifest, look: Callable[[Manifest], Verification], prove: Callable[[], Verification]
) -> Verification:
    """The result of `look`; if it differs and `prove` succeeds, the result without the positions of changed choices."""
    found = look(manifest)
    if found.status == "verified":
        return found
    try:
        proved = prove()
    except (ResourceError, MemoryError, OSError):
        raise
    except Exception:  # noqa: BLE001 - without a copy that runs, `found` stands
        return found
    if proved.status != "verified":
        return found
    again = look(manifest.model_copy(update={"verification": proved.model_copy(update={"proof": PROOF})}))
    if again.status != "verified":
        return found
    return again.model_copy(update={"detail": f"{again.detail}; proved by {PROOF}", "proof": PROOF})


@contextmanager
def wide_folder(folder: Path, manifest: Manifest, answer: KnownAnswer | None = None) -> Iterator[tuple[Path, Manifest]]:
    """Within the block, the float32 copy of a package and its manifest; `answer` replaces the known answer."""
    with changed_folder(folder, manifest, _widen) as (copied, changed):
        if answer is not None:
            (copied / KNOWN_ANSWER).unlink()  # a link to the package's
            save(answer, copied)
            files = (record_file(copied, KNOWN_ANSWER) if r.name == KNOWN_ANSWER else r for r in changed.files)
            changed = changed.model_copy(update={"files": tuple(files)})
        yield copied, _widen_manifest(changed)


def on_wide(
    folder: Path, manifest: Manifest, run: Callable[[Path, Manifest], Result], answer: KnownAnswer | None = None
) -> Result:
    """The result of `run` on the float32 copy of a package."""
    with wide_folder(folder, manifest, answer) as copy:
        return run(*copy)


def scoring(open_scorer: OpenScorer) -> OpenScorer:
    """Opens the float32 copy of a package to run windows of tokens."""

    @contextmanager
    def opened(folder: Path, manifest: Manifest) -> Iterator[Scorer]:
        with wide_folder(folder, manifest) as copy, open_scorer(*copy) as scorer:
            yield scorer

    return opened


def _widen(model: ir.Model) -> ir.Model:
    """Retype every 16-bit float of `model` to float32, in place; weights keep their bytes and get a Cast."""
    graph = model.graph
    for value in list(graph.initializers.values()):
        tensor = value.const_value
        if tensor is None or tensor.dtype not in NARROW:
            continue
        if isinstance(tensor, ir.ExternalTensor):
            _cast_behind(graph, value)
        else:
            value.const_value = ir.tensor(tensor.numpy().astype(np.float32), name=value.name)
            value.dtype = WIDE
    for node in graph:
        for output in node.outputs:
            if output.dtype in NARROW:
                output.dtype = WIDE
        _widen_attributes(node)
    for value in graph.inputs:
        if value.dtype in NARROW:
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
    """Retype Cast targets and constants; a weight's own Cast is float32 already."""
    for name in ("to", "output_dtype"):
        target = node.attributes.get(name)
        if target is not None and target.as_int() in NARROW:
            node.attributes[name] = ir.AttrInt64(name, int(WIDE))
    value = node.attributes.get("value")
    if value is not None and value.type == ir.AttributeType.TENSOR and value.as_tensor().dtype in NARROW:
        node.attributes["value"] = ir.AttrTensor("value", ir.tensor(value.as_tensor().numpy().astype(np.float32)))


def _widen_manifest(manifest: Manifest) -> Manifest:
    """The manifest of the copy: states and logits are float32."""
    states = tuple(_wider(state) for state in manifest.graph.states)
    files = tuple(f.model_copy(update={"outputs": tuple(map(_wider, f.outputs))}) for f in manifest.graph.files)
    return manifest.model_copy(update={"graph": manifest.graph.model_copy(update={"states": states, "files": files})})


def _wider(value: Any) -> Any:
    """The record of an input or output of the copy."""
    return value.model_copy(update={"dtype": "float32"}) if value.dtype in ("bfloat16", "float16") else value


def replay_exact(folder: Path, manifest: Manifest, run: Replay) -> Verification:
    """Replay the known answer on the exact copy with `run`, within the tolerance of its activation dtype."""
    assert manifest.packed is not None
    written = [FORMS[manifest.packed.form]]
    if manifest.prefill is not None and manifest.prefill.packed is not None:
        written.append(FORMS[manifest.prefill.packed.form])
    half = manifest.packed.activations == "fp16"
    detail = EXACT_DETAIL.format("float16" if half else "float32")

    def change(model: ir.Model) -> ir.Model:
        for each in written:
            each.product.exact(model)  # changes only the form's own operators
        return model

    with changed_folder(folder, manifest, change) as (copied, changed):
        graph = changed.graph.model_copy(update={"precision": "fp16" if half else "fp32"})
        changed = changed.model_copy(update={"graph": graph})
        result = verify_with_copy(copied, changed, run) if half else run(copied, changed)
    return result.model_copy(update={"detail": f"{result.detail}; {detail}", "converted_copy": detail})
