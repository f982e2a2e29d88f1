"""Runs of an unpublished package: the smoke run, the replay on the target, and runs of changed copies of its graphs.

The smoke run opens the graph and runs a prompt chunk and one token. A lowering that fails or computes wrong results is
set aside. The caller passes the runtime's functions, because this folder may not import it.

A changed copy has the same weight file, for the length of one run. The wide copy of a 16-bit graph computes in float32:
every 16-bit value is typed float32, with a Cast after each weight. It verifies the graph and the rounded weights in two
cases. ONNX Runtime's CPU provider has no bfloat16 arithmetic: the copy runs instead of the package, and the
verification records it; `partita verify --provider` verifies the kernels on a provider that has them. And where
rounding alone changes the chosen experts, no tolerance applies: the copy must match, and the package wherever its
experts are the same.

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

from partita.errors import GenerationError, ParityError, PartitaError, ProviderError, ResourceError
from partita.export.progress import stage
from partita.export.quantise.plan import FORMS
from partita.export.target import Smoke, Target
from partita.export.verify import known_answer
from partita.export.verify.quality import OpenScorer, Scorer
from partita.export.work import Replay, Work, add_note
from partita.package.folder import KNOWN_ANSWER, WEIGHTS, Manifest, record_file
from partita.package.known_answer import KnownAnswer, save
from partita.package.records import SmokeRecord, Verification

Result = TypeVar("Result")
CPU = "cpu"
BY_REPLAY = "the known answer was replayed on it"
BY_QUALITY = "its quality was measured on it"
COPY_RAN = "its float32 copy ran"
LONGEST = 400
EXACT_DETAIL = "products in {} over the quantised weights, without 8-bit activations"
NARROW, WIDE = (ir.DataType.BFLOAT16, ir.DataType.FLOAT16), ir.DataType.FLOAT
WIDE_DETAIL = "float32 arithmetic over the bfloat16 weights, because the CPU provider has no bfloat16 kernels"
PROOF = "float32 arithmetic over the same weights, so that the same experts as in the source model are selected"
Rounded = Callable[[], KnownAnswer | None]
"""The known answer with weights rounded to 16 bits; None where it cannot be computed."""


class RejectedError(PartitaError):
    """A variant is rejected, and another may do."""

    def __init__(self, message: str, detail: str) -> None:
        super().__init__(message)
        self.detail = detail
        """The message without location and remedy."""


class NotRunningError(RejectedError, GenerationError):
    """A written graph does not open or run."""

    @property
    def refused_by_provider(self) -> bool:
        """Whether the provider does not support all of the graph, or has no kernel for it."""
        return isinstance(self.__cause__, ProviderError)


class TargetParityError(RejectedError, ParityError):
    """The graph computes the model's results on the CPU provider, and not on its target."""


class RoundingParityError(RejectedError, ParityError):
    """The 16-bit graph exceeds the tolerance; another may round less."""


@contextmanager
def opened_and_run(provider: str, folder: Path) -> Iterator[None]:
    """Convert errors of opening and running a graph into NotRunningError, without the hidden `folder`."""
    try:
        yield
    except (ParityError, ResourceError, NotRunningError, OSError, MemoryError):
        raise
    except Exception as error:  # a lowering may fail in any way
        # Without the remedy of PartitaErrors, which is for published packages.
        if isinstance(error, PartitaError):
            text = error.message if error.path in (None, folder) else f"{error.path.name}: {error.message}"
        else:
            text = f"{type(error).__name__}: {error}"
        # ONNX Runtime names a file by its whole path.
        error_text = " ".join(text.split()).replace(f"{folder}{os.sep}", "") or "no message"
        detail = f"does not run on {provider}: {error_text[:LONGEST]}"
        raise NotRunningError(detail, detail) from error


def run_all(
    work: Work, manifest: Manifest, target: Target | None, *, measured: bool = False
) -> tuple[Verification | None, tuple[SmokeRecord, ...]]:
    """The smoke runs on the CPU provider and the target, and the known answer there. Raises TargetParityError."""
    has_copy = work.options.computing.cpu_dtype is not None
    verified = manifest.verification.status == "verified" and manifest.verification.converted_copy is None
    same = target is not None and target.provider == CPU and not has_copy
    by_quality = measured and not manifest.graph.symbolic_batch
    first = () if same and not verified else (run_on_cpu(work, manifest, by_quality=by_quality),)
    if target is None:
        return None, first
    try:
        result, record = _on_target(work, manifest, target)
    except NotRunningError as error:
        result, record = None, _record_unverified(work, target, error)
    return result, (record,) if same else (*first, record)


def run_on_cpu(work: Work, manifest: Manifest, *, by_quality: bool = False) -> SmokeRecord:
    """The smoke run on the CPU provider, of the float32 copy where that is verified. Raises NotRunningError."""
    has_copy, smoke = work.options.computing.cpu_dtype is not None, work.smoke
    packed = work.options.quantises  # then another graph was replayed
    if manifest.verification.status == "verified" and not packed:
        detail = f"{BY_REPLAY}, with its float32 copy" if has_copy else BY_REPLAY
        return SmokeRecord(chain=CPU, status="ran", detail=detail, replayed=not has_copy)
    if smoke is None:
        return SmokeRecord(chain=CPU, status="not_run", detail="no runtime was given")
    if by_quality:
        return SmokeRecord(chain=CPU, status="ran", detail=f"{COPY_RAN}: {BY_QUALITY}" if has_copy else BY_QUALITY)

    def run_float32_copy(folder: Path, manifest: Manifest) -> SmokeRecord:
        record = on_wide(folder, manifest, smoke)
        return record.model_copy(update={"detail": f"{COPY_RAN}: {record.detail}"})

    with stage(work.progress, "smoke run", work.seconds):
        return _try_run(work, manifest, run_float32_copy if has_copy else smoke, CPU)


def _try_run(work: Work, manifest: Manifest, smoke: Smoke, provider: str) -> SmokeRecord:
    """A smoke run, or a record that there is no memory for it. Raises NotRunningError."""
    try:
        if not work.options.verify:  # otherwise checked before the source model ran
            known_answer.check_run_memory(manifest)
        with opened_and_run(provider, work.folder):
            return smoke(work.folder, manifest)
    except ResourceError as error:
        add_note(work, f"not run on {provider} here: {error}")
        return SmokeRecord(chain=provider, status="not_run", detail=f"not run here: {error}")


def _on_target(work: Work, manifest: Manifest, target: Target) -> tuple[Verification | None, SmokeRecord]:
    """The known answer replayed on the target and its smoke run, as far as it can run here."""
    if target.replay is not None and work.options.verify:
        with stage(work.progress, "verify target", work.seconds):
            try:
                with opened_and_run(target.provider, work.folder):
                    result = target.replay(work.folder, manifest)
            except NotRunningError as error:
                if not error.refused_by_provider:
                    raise
                add_note(work, f"not verified on {target.provider}: {error.__cause__}")
            else:
                if result.status != "verified":
                    raise TargetParityError(
                        f"{work.options.checkpoint}: {target.provider} does not match the source model: "
                        f"{result.detail}; nothing was written; choose another `attention` or another `target`",
                        result.detail,
                    )
                return result, SmokeRecord(chain=target.provider, status="ran", detail=BY_REPLAY, replayed=True)
    if target.smoke is None:
        reason = f"not run here: {target.not_here or 'no runtime was given'}"
        return None, SmokeRecord(chain=target.provider, status="not_run", detail=reason)
    with stage(work.progress, "smoke target", work.seconds):
        return None, _try_run(work, manifest, target.smoke, target.provider)


def _record_unverified(work: Work, target: Target, error: NotRunningError) -> SmokeRecord:
    """The record of a package whose float32 copy is verified and which does not run on a default target."""
    if work.options.computing.cpu_dtype is None or not target.by_default or not error.refused_by_provider:
        raise error
    add_note(
        work,
        f"this bf16 package {error.detail}; its float32 copy was verified, so it runs on providers with "
        f"bfloat16 kernels (`target` queries one); for {target.provider}, export with `precision=fp16` or "
        "fp32",
    )
    return SmokeRecord(chain=target.provider, status="failed", detail=error.detail)


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
    """Replay the known answer on the float32 copy with `run`; `rounded` as for `verify_with_copy`."""

    def run_wide(folder: Path, manifest: Manifest) -> Verification:
        return on_wide(folder, manifest, run)

    result = verify_with_copy(folder, manifest, run_wide, rounded, run)
    return result.model_copy(update={"detail": f"{result.detail}; {WIDE_DETAIL}", "converted_copy": WIDE_DETAIL})


def verify_with_copy(
    folder: Path, manifest: Manifest, run: Replay, rounded: Rounded = lambda: None, prove: Replay | None = None
) -> Verification:
    """The verification of a 16-bit package that may choose among experts.

    Where the package differs and its float32 copy does not, positions where rounding changes the choice are excluded,
    while they are the minority, and the verification records the proof. The copy is compared with `rounded`, or with
    the package's known answer; `prove` runs it, by default `run`.
    """
    found = run(folder, manifest)
    if found.status == "verified":
        return found
    try:
        proved = on_wide(folder, manifest, prove or run, rounded())
    except (ResourceError, MemoryError, OSError):
        raise
    except Exception:  # noqa: BLE001 - without a copy that runs, `found` stands
        return found
    if proved.status != "verified":
        return found
    again = run(folder, manifest.model_copy(update={"verification": proved.model_copy(update={"proof": PROOF})}))
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
