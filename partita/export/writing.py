"""Write a package into the work folder, and verify it on the CPU provider and the target."""

from __future__ import annotations

import datetime
import importlib.metadata
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import onnx_ir as ir

import partita
from partita.dtypes import EXACT, Precision
from partita.errors import GenerationError, ParityError, PartitaError, ResourceError, UnsupportedModelError
from partita.export.checkpoint.adapters.branches import parameters
from partita.export.checkpoint.companions import GENERATION, probe_tokenizer, stop_notes, write_generation
from partita.export.checkpoint.config_values import loadable_config
from partita.export.checkpoint.description import Checkpoint
from partita.export.checkpoint.weight_files import refuse_pointer
from partita.export.drafts import Exported
from partita.export.passes import cache_rounding
from partita.export.progress import stage
from partita.export.target import Target
from partita.export.verify import known_answer, package_runs, quality, self_check
from partita.export.verify.package_runs import CPU, RoundingParityError, opened_and_run, run_all, run_on_cpu
from partita.export.verify.quality import Scorer, SourceLogits
from partita.export.verify.texts import Text
from partita.export.weights import external_data as weights
from partita.export.weights import memory_map
from partita.export.work import Work, add_note, source_of
from partita.observations.text_format import human_bytes
from partita.options.fields import path_of
from partita.package.contract import state_bytes
from partita.package.folder import (
    KNOWN_ANSWER,
    QUALITY,
    WEIGHTS,
    Graph,
    Manifest,
    Source,
    answer_file,
    record_file,
)
from partita.package.known_answer import KnownAnswer
from partita.package.known_answer import save as save_answer
from partita.package.records import PackedWeights, Verification

Result = TypeVar("Result")
TOOLS = ("torch", "transformers", "onnx", "onnx-ir", "onnxscript", "safetensors", "numpy", "tokenizers")


def unfinished_manifest(
    work: Work, checkpoint: Checkpoint, graph: Graph, parameters: int, *, unused: tuple[str, ...] = (), **records: Any
) -> Manifest:
    """The manifest before anything is written: without files, and unverified. `records`: of the weights."""
    return Manifest(
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        source=Source(
            checkpoint=checkpoint.source_name,
            model_type=checkpoint.model_type,
            architecture=checkpoint.architecture,
            dtype=checkpoint.dtype,
            parameters=parameters,
            files=(),
            unused=unused,
            quantised=source_of(work.options, checkpoint),
        ),
        graph=graph,
        files=(),
        tokenizer="none",
        toolchain={
            "python": sys.version.split()[0],
            "partita": partita.__version__,
            **{name: importlib.metadata.version(name) for name in TOOLS},
        },
        options=dict(work.recorded_options),
        verification=Verification(status="unverified", detail="exported with `verify=False`"),
        **records,
    )


def write(exported: Exported, target: Target | None) -> tuple[Manifest, Verification | None]:
    """Write the package into the work folder, run and verify it. Raises ParityError, NotRunningError.

    Returns the manifest without the record of the target, and the verification on the target.
    """
    work = exported.work
    text = _quality_text(exported)
    measured = text is not None
    _check_space(exported, text)
    with ExitStack() as stack:
        opened = _Opened(work, stack) if measured and work.options.computing.cpu_dtype is None else None
        manifest = _verify(exported, _write_files(exported), opened)
        if work.options.cache_precision is not None and work.scorer is not None:
            with stage(work.progress, "round cache", work.seconds) as current:
                chosen = "quality-text" in work.recorded_options
                words = cache_rounding.read_text(work.options, exported.checkpoint, manifest, chosen=chosen)
                stack.close()
                manifest, opened = cache_rounding.apply(work.folder, manifest, words, work.scorer, current), None
        manifest = _with_quality(exported, manifest, text, opened)
        if opened is not None:
            target = opened.shared_with(target, manifest)
        manifest, (result, smoke) = _run(work, manifest, lambda m: run_all(work, m, target, measured=measured))
    _refuse_ratio(work, manifest)
    return manifest.model_copy(update={"smoke": smoke}), result


class _Opened:
    """The package open on the CPU provider, for its replays and its quality."""

    def __init__(self, work: Work, stack: ExitStack) -> None:
        self._work, self._stack = work, stack
        self._package: Scorer | None = None
        self._graph: Graph | None = None

    def scorer(self, folder: Path, manifest: Manifest) -> AbstractContextManager[Scorer]:
        """The package; opened where it is not open with the same graph record."""
        assert self._work.scorer is not None
        if self._package is None or self._graph is not manifest.graph:
            self.close()
            self._package = self._stack.enter_context(self._work.scorer(folder, manifest))
            self._graph = manifest.graph
        return nullcontext(self._package)

    def replay(self, folder: Path, manifest: Manifest) -> Verification:
        """Replay the known answer of the package; see `Work.replay`."""
        with self.scorer(folder, manifest) as package:
            result = package.replay(manifest)
        if result.status != "verified":
            self.close()  # the source model, or a copy, is loaded next
        return result

    def shared_with(self, target: Target | None, manifest: Manifest) -> Target | None:
        """The target, replayed on the open package if it is the CPU provider without options and only a copy of the
        package was replayed so far; else the package is closed."""
        only_copy = manifest.verification.converted_copy is not None and not manifest.graph.symbolic_batch
        if target is not None and target.provider == CPU and only_copy and not self._work.options.target_options:
            return replace(target, replay=self.replay)
        self.close()
        return target

    def close(self) -> None:
        """Close the package, if it is open."""
        self._package = None
        self._stack.close()


def _check_space(exported: Exported, text: Text | None) -> None:
    """Raise ResourceError where memory or disk are too small for the package and its source model."""
    work, graph = exported.work, exported.manifest.graph
    if work.options.verify:
        held = memory_map.resident_parameters(exported.checkpoint.tensors, exported.model_folder, graph.weight_bytes)
        cache = state_bytes(graph.states, work.options.computing.cpu_dtype)
        known_answer.check_memory(held, cache, needed=work.options.quantises)
    needed = graph.weight_bytes + _rounded_parameters(exported)  # one byte each, until they are written
    remedy = ""
    if text is not None and work.source_logits is None:
        work.source_logits = SourceLogits(text, graph.vocab_size, work.scratch)
        work.cleanup.callback(work.source_logits.close)
        size = work.source_logits.size_bytes
        needed, remedy = needed + size, f"; {human_bytes(size)} are for logits: use fewer `quality_tokens`"
    if needed > (free := shutil.disk_usage(work.scratch).free):
        raise ResourceError(
            f"{work.scratch}: no space left: the package needs {human_bytes(needed)}, but {human_bytes(int(free))} are "
            f"free{remedy}"
        )


def _write_files(exported: Exported) -> Manifest:
    """Write weights, graphs, adapters and the files of the checkpoint. Returns the manifest with their records."""
    work, checkpoint, graph = exported.work, exported.checkpoint, exported.manifest.graph
    folder, manifest = work.folder, exported.manifest
    with (
        _calibrated_weights(exported) as packed,
        stage(work.progress, "write weights", work.seconds, graph.weight_bytes) as current,
    ):
        data = weights.write_data(exported.models, folder, current)
    with stage(work.progress, "write graph", work.seconds):
        for file, model in zip(graph.files, exported.models, strict=True):
            ir.save(model, folder / file.file)
        for name in checkpoint.companions():
            refuse_pointer(checkpoint.folder / name)
            shutil.copyfile(checkpoint.folder / name, folder / name)
        if (config := loadable_config(checkpoint.folder)) is not None:
            (folder / "config.json").write_text(config, encoding="utf-8")
        if GENERATION not in checkpoint.companions():
            write_generation(checkpoint.config, folder)
        work.notes += stop_notes(work.reader, folder, graph.vocab_size)
        sources = tuple(each.result() for each in work.source_files)
        for each, record in zip(exported.switched, manifest.switchable, strict=True):
            assert work.write_adapter is not None and exported.graphs is not None and record.file is not None
            work.write_adapter(folder / record.file, parameters(each, exported.graphs.branches.values()))
        tokenizer = probe_tokenizer(folder, checkpoint.companions(), work.notes)
    others = [record_file(folder, path.name) for path in sorted(folder.iterdir()) if path.name != WEIGHTS]
    return manifest.model_copy(
        update={
            "source": manifest.source.model_copy(update={"files": sources}),
            "graph": graph.model_copy(update={"weight_bytes": data.size_bytes}),
            "files": (data, *others),
            "tokenizer": tokenizer,
            "packed": packed,
        }
    )


def _rounded_parameters(exported: Exported) -> int:
    """Number of weights that are calibrated; 0 without calibration."""
    packed = exported.manifest.packed
    return sum(kind.parameters for kind in packed.kinds) if packed is not None and exported.calibrates else 0


@contextmanager
def _calibrated_weights(exported: Exported) -> Iterator[PackedWeights | None]:
    """The record of the quantised weights, calibrated where that was requested, while they are written."""
    work = exported.work
    if not exported.calibrates:
        yield exported.manifest.packed
        return
    with tempfile.TemporaryDirectory(dir=work.scratch, prefix=f"{work.folder.name}-rounded-") as name:
        size = _rounded_parameters(exported)
        with stage(work.progress, "calibrate", work.seconds, size, "weights") as current:
            packed = exported.calibrate(Path(name), current)
        if packed.calibration is not None and packed.calibration.not_calibrated:
            add_note(work, f"not calibrated: {', '.join(packed.calibration.not_calibrated)}")
        yield packed


def _quality_text(exported: Exported) -> Text | None:
    """The text for the quality measurement, read before anything is written; None without a measurement."""
    work, graph = exported.work, exported.manifest.graph
    path = path_of(work.options.quality_text)
    if work.scorer is None or not work.options.measures or path is None:
        return None
    return quality.read_text(
        path,
        exported.checkpoint,
        graph.vocab_size,
        graph.max_length,
        quality.measured_tokens(work.options, exported.parameters),
        partial(add_note, work),
        chosen="quality-text" in work.recorded_options,
    )


def _with_quality(exported: Exported, manifest: Manifest, text: Text | None, opened: _Opened | None) -> Manifest:
    """The manifest with the quality, where anything is rounded."""
    work, variant = exported.work, None
    scorer, source = work.scorer, work.source_logits
    if text is None or scorer is None or source is None:
        return manifest
    if work.options.computing.cpu_dtype is not None:
        scorer, variant = package_runs.scoring(scorer), package_runs.WIDE_DETAIL
    elif opened is not None:
        scorer = opened.scorer
    tokens = source.tokens * (1 if source.is_complete else 2)
    with stage(work.progress, "quality", work.seconds, tokens, "tokens") as current:
        try:
            found = quality.measure(
                exported.checkpoint, text, work.folder, manifest, scorer, current, source, work.scratch, variant
            )
        except (PartitaError, RuntimeError, ValueError) as error:
            if opened is not None:
                opened.close()
            if not isinstance(error, ResourceError):
                run_on_cpu(work, manifest)  # raises where the graph fails on any text
            if not isinstance(error, GenerationError):
                raise
            raise UnsupportedModelError(
                f"{work.options.checkpoint}: {work.options.precision} fails on {text.name}, the text for measuring "
                f"quality: {error}; nothing was written; choose another `precision`, e.g. bf16 or fp32",
                option="precision",
            ) from error
    files = (*manifest.files, record_file(work.folder, QUALITY))
    return manifest.model_copy(update={"files": files, "quality": found})


def _refuse_ratio(work: Work, manifest: Manifest) -> None:
    """Raise ParityError when the package diverges from the source model by more than allowed."""
    allowed, found = work.options.max_perplexity_ratio, manifest.quality
    if allowed is None or found is None or found.perplexity_ratio <= allowed:
        return
    within = "" if work.options.max_weight_size is None else " within `max_weight_size`"
    raise ParityError(
        f"{work.options.checkpoint}: `max_perplexity_ratio={allowed}` is not met{within}: the package has "
        f"{found.perplexity_ratio:.4f} with {human_bytes(manifest.graph.weight_bytes)} of weights; nothing was "
        "published; search with a smaller `max_perplexity_ratio`, or choose another `precision`, e.g. fp16"
    )


def _run(
    work: Work, manifest: Manifest, run: Callable[[Manifest], Result], agrees: Callable[[Result], bool] = lambda _: True
) -> tuple[Manifest, Result]:
    """The result of `run`, and the manifest it used: for full batches only, where smaller ones fail or mismatch."""
    try:
        result = run(manifest)
        if agrees(result) or not manifest.graph.symbolic_batch:
            return manifest, result
    except Exception:
        if not manifest.graph.symbolic_batch:
            raise
    whole = manifest.model_copy(update={"graph": manifest.graph.model_copy(update={"symbolic_batch": False})})
    result = run(whole)
    if agrees(result):
        add_note(
            work, "its graphs run only for the whole batch, so a prompt is prefilled together with the other sequences"
        )
    return whole, result


def _with_known_answers(exported: Exported, answer: KnownAnswer, manifest: Manifest) -> Manifest:
    """The manifest with the saved known answer, and one per switchable adapter."""
    folder, names = exported.work.folder, [KNOWN_ANSWER]
    save_answer(answer, folder)
    for each in exported.switched:
        names.append(answer_file(each.name))
        save_answer(exported.known_answer(each), folder, names[-1])
    adapters = tuple(
        record if record.merged else record.model_copy(update={"known_answer": answer_file(record.name)})
        for record in manifest.adapters
    )
    files = (*manifest.files, *(record_file(folder, name) for name in names))
    return manifest.model_copy(update={"files": files, "adapters": adapters})


def _verify(exported: Exported, manifest: Manifest, opened: _Opened | None) -> Manifest:
    """Replay the known answer, and return the manifest with the result. Raises ParityError on a mismatch."""
    work, computing = exported.work, exported.work.options.computing
    replay, source = work.replay, work.source_logits
    if not work.options.verify:
        return manifest
    assert replay is not None
    if source is not None and source.is_complete:
        source = None
    tokens = None if source is None else source.tokens
    with stage(work.progress, "known answer", work.seconds, tokens, "tokens") as current:
        first = None if source is None else partial(source.fill, stage=current)
        answer = exported.known_answer(first=first)
        manifest = _with_known_answers(exported, answer, manifest)

    def replayed(manifest: Manifest) -> Verification:
        rounded = partial(self_check.of_rounded_weights, exported.checkpoint, answer, computing, work.scratch)
        if computing.cpu_dtype is not None:
            return package_runs.replay_wide(work.folder, manifest, replay, rounded)
        if computing.bits is not None:
            return package_runs.replay_exact(work.folder, manifest, replay)
        if computes_in_half_precision(computing):
            run = replay if opened is None else opened.replay
            return package_runs.verify_with_copy(work.folder, manifest, run, rounded, replay)
        return replay(work.folder, manifest)

    with stage(work.progress, "verify", work.seconds), opened_and_run(CPU, work.folder):
        manifest, result = _run(work, manifest, replayed, lambda result: result.status == "verified")
    if result.status != "verified":
        with stage(work.progress, "look for cause", work.seconds):
            raise _mismatch(exported, manifest, answer, result)
    return manifest.model_copy(update={"verification": result})


def computes_in_half_precision(computing: Precision) -> bool:
    """Whether a package computes in 16 bits with unquantised weights where it is verified."""
    return computing.dtype != EXACT.dtype and computing.cpu_dtype is None and computing.bits is None


def _mismatch(exported: Exported, manifest: Manifest, answer: KnownAnswer, result: Verification) -> PartitaError:
    """The error for a graph with wrong results, with its cause as far as experiments show it."""
    work, checkpoint = exported.work, exported.checkpoint
    where, computing = work.options.checkpoint, work.options.computing
    own = self_check.disagreement(checkpoint, answer, work.scratch)
    if own is not None:
        return UnsupportedModelError(f"{where}: {own}; nothing was written")
    message = f"{where}: the exported graph does not match the source model: {result.detail}"
    if work.locate is not None and computing.cpu_dtype is None:  # the CPU provider runs the package
        message += f"; {work.locate(work.folder, manifest, checkpoint)}"
    if computes_in_half_precision(computing):
        message += f"; {computing.dtype} may be too coarse for this checkpoint: choose another `precision`, e.g. fp32"
        return RoundingParityError(f"{message}; nothing was written", result.detail)
    return ParityError(message + exported.caution)
