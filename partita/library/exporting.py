"""Exporting a checkpoint, as a function, and what the exporter is handed of the runtime."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from partita.demo import heldout_path
from partita.errors import UsageError
from partita.extras import checked_versions
from partita.library.audience import LOGGER, QUIET, Audience
from partita.library.edge import public
from partita.library.scratch import own_compile_cache
from partita.library.where import Libraries, Options, text
from partita.package import Manifest, TokenizerKind
from partita.package_records import SmokeRecord, Verification
from partita.spelling import spelled

if TYPE_CHECKING:
    import numpy.typing as npt

    from partita.export.companions import Reader
    from partita.export.options import ExportOptions
    from partita.export.progress import Progress
    from partita.export.quality import Scorer
    from partita.export.target import Target
    from partita.export.writing import Summary


@dataclass(frozen=True, slots=True)
class TargetOptions:
    """Which provider the package is for."""

    name: str | None = None
    """None: the best usable one, which is asked only when the lowering is to be found."""
    options: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()
    """Plugin libraries, NAME=PATH."""
    default_allowed: bool = False

    @property
    def asked(self) -> dict[str, tuple[str, ...]]:
        """What a manifest keeps of it: options, and their values. Of the file of a library it is the name alone."""
        if self.name is None:
            return {}
        libraries = [library.partition("=") for library in self.libraries]
        given = {
            "provider-option": self.options,
            "provider-library": tuple(f"{name}={Path(path).name}" for name, _, path in libraries),
        }
        flag: dict[str, tuple[str, ...]] = {"target-default": ()} if self.default_allowed else {}
        return {"target": (self.name,), **{name: values for name, values in given.items() if values}, **flag}


@dataclass(frozen=True, slots=True, repr=False)
class Exported:
    """The package that an export wrote, its manifest, and what the export took."""

    path: Path
    manifest: Manifest
    attention_reason: str
    """Why attention and cache are written as they are."""
    notes: tuple[str, ...]
    seconds: Mapping[str, float]
    """By stage."""
    peak_rss_bytes: int

    def __repr__(self) -> str:
        graph = self.manifest.graph
        status = self.manifest.verification.headline
        return f"<partita.Exported {self.path}: {graph.precision}, attention {graph.attention}, {status}>"


@public
def export(
    checkpoint: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    precision: str = "auto",
    max_length: int | None = None,
    batch_size: int = 1,
    attention: str = "auto",
    target: str | None = None,
    target_default: bool = False,
    target_options: Options | None = None,
    target_libraries: Libraries | None = None,
    static_shapes: bool = False,
    prefill_chunk: int | None = None,
    verify: bool = True,
    verify_length: int | None = None,
    force: bool = False,
    opset: int | None = None,
    exporter: str = "native",
    block_size: int | None = None,
    quantiser: str | None = None,
    keep: Mapping[str, str] | None = None,
    quality_text: str | os.PathLike[str] | None = None,
    activations: str | None = None,
    calibrate: str | os.PathLike[str] | None = None,
    max_perplexity_ratio: float | None = None,
    max_weight_size: int | None = None,
    cache_precision: str | None = None,
    without_pass: Sequence[str] = (),
    prefill_precision: str | None = None,
    requantise: bool = False,
    adapter: str | os.PathLike[str] | None = None,
    with_adapters: Mapping[str, str | os.PathLike[str]] | None = None,
    cache: str = "fixed",
) -> Exported:
    """Export a checkpoint, a folder or a hub id, to a package in the folder `out`, and check it against the original.

    The arguments are the options of `partita export`; `target_options` and `target_libraries` are about the provider
    that `target` names; an `exporter` that is not there is refused with the names of those that are. Raises
    ArgumentError, CheckpointError, UnsupportedModelError, ParityError when the graph does not compute what the model
    computes, ProviderError when the target cannot be asked, ResourceError, and InstallationError without the extra
    `export`. Nothing is left of a failed export.
    """
    with own_compile_cache():
        from partita.export.options import ExportOptions

        options = ExportOptions(
            checkpoint=os.fspath(checkpoint),
            out=Path(out),
            precision=precision,
            max_length=max_length,
            batch_size=batch_size,
            attention=attention,
            static_shapes=static_shapes,
            prefill_chunk=prefill_chunk,
            verify=verify,
            verify_length=verify_length,
            force=force,
            opset=opset,
            exporter=exporter,
            block_size=block_size,
            quantiser=quantiser,
            keep=tuple((keep or {}).items()),
            quality_text=None if quality_text is None else Path(quality_text),
            activations=activations,
            calibrate=None if calibrate is None else Path(calibrate),
            max_perplexity_ratio=max_perplexity_ratio,
            max_weight_size=max_weight_size,
            cache_precision=cache_precision,
            without_pass=tuple(without_pass),
            prefill_precision=prefill_precision,
            requantise=requantise,
            adapter=None if adapter is None else Path(adapter),
            with_adapters=tuple((name, Path(folder)) for name, folder in (with_adapters or {}).items()),
            cache=cache,
        )
        if target_options and target is None:
            raise UsageError(
                f"{spelled('target_options')} is about the provider that {spelled('target')} names; add it"
            )
        wanted = TargetOptions(
            target,
            tuple(f"{target}.{name}={text(value)}" for name, value in (target_options or {}).items()),
            tuple(f"{name}={os.fspath(path)}" for name, path in (target_libraries or {}).items()),
            default_allowed=target_default,
        )
        summary = run_export(options, wanted)
    for line in summary.notes:
        LOGGER.warning(line)
    return Exported(
        path=summary.out,
        manifest=summary.manifest,
        attention_reason=summary.attention_reason,
        notes=tuple(summary.notes),
        seconds=dict(summary.seconds),
        peak_rss_bytes=summary.peak_rss_bytes,
    )


def run_export(
    options: ExportOptions, wanted: TargetOptions, progress: Progress | None = None, audience: Audience = QUIET
) -> Summary:
    """Find the target, and export for it. Raises a PartitaError that names what is wrong."""
    from partita.export.asked import asked_options
    from partita.export.exporters import check_name
    from partita.export.optimum.offer import offered
    from partita.export.options import with_layout
    from partita.export.pipeline import check_options
    from partita.export.pipeline import export as write
    from partita.export.progress import Silent, stage
    from partita.library.target import taken_by_cpu

    shown = progress or Silent()
    check_options(options)
    check_name(options.exporter)
    asked = {**asked_options(options), **wanted.asked}
    options = with_layout(options)
    with stage(shown, "find target", {}):
        target = _choose_target(options, wanted, audience)
    if options.activations == "int8" and (target is None or target.provider == "cpu"):
        _warn_without_integer_unit(audience)
    with checked_versions():
        return write(
            options,
            replay=replay,
            smoke=smoke,
            reader=_reader(),
            scorer=scorer,
            target=target,
            takes=taken_by_cpu,
            write_adapter=write_adapter,
            progress=shown,
            quality_text=heldout_path(),
            offer=offered,
            asked=asked,
        )


def _warn_without_integer_unit(audience: Audience) -> None:
    """Say that rounded activations are not worth it where the processor has nothing that multiplies them fast."""
    from partita.runtime.environment import INTEGER_UNITS, integer_unit

    if integer_unit() == "":
        audience.note(
            f"{spelled('activations', 'int8')}: this processor has none of {', '.join(INTEGER_UNITS)}, so the package "
            "is likely to be slower here than without it"
        )


def _choose_target(options: ExportOptions, wanted: TargetOptions, audience: Audience = QUIET) -> Target | None:
    """The target; None when the user named a lowering and no target, so that there is nothing to ask.

    Raises UsageError, and ProviderError when the target cannot be asked.
    """
    if wanted.name is None and options.attention != "auto":
        if wanted.options or wanted.default_allowed or wanted.libraries:
            given = f"{spelled('target_options')}, {spelled('target_libraries')} and {spelled('target_default')}"
            raise UsageError(f"{given} are about the provider that {spelled('target')} names; add it")
        return None
    if wanted.name is None and wanted.libraries:
        raise UsageError(f"{spelled('target_libraries')} brings a provider that {spelled('target')} names; add it")
    from partita.library.target import find_target

    return find_target(
        wanted.name,
        wanted.options,
        default_allowed=wanted.default_allowed,
        libraries=wanted.libraries,
        audience=audience,
    )


def replay(folder: Path, manifest: Manifest) -> Verification:
    """Replay the known answer on the CPU provider."""
    from partita.providers.resolve import parse_chain
    from partita.runtime.verify import replay as replay_on

    return replay_on(folder, parse_chain("cpu"), manifest=manifest)


def smoke(folder: Path, manifest: Manifest) -> SmokeRecord:
    """Open the package on the CPU provider and run a chunk and a token."""
    from partita.providers.resolve import parse_chain
    from partita.runtime.smoke import smoke as smoke_on

    return smoke_on(folder, parse_chain("cpu"), manifest=manifest)


def scorer(folder: Path, manifest: Manifest) -> AbstractContextManager[Scorer]:
    """The package opened on the CPU provider, to read a text."""
    from partita.providers.resolve import parse_chain
    from partita.runtime.scoring import open_scorer

    return open_scorer(folder, parse_chain("cpu"), manifest=manifest)


def write_adapter(path: Path, values: Mapping[str, npt.NDArray[Any]]) -> None:
    """Write an adapter file of ONNX Runtime."""
    from partita.runtime.ort import adapters

    adapters.write_adapter(path, values)


def _reader() -> Reader:
    """How generate reads the files of a package."""
    from partita.export.companions import Reader
    from partita.runtime.text import load_text, stop_token_ids

    def chat(folder: Path, kind: TokenizerKind) -> bool:
        try:
            load_text(folder, kind).encode_chat("Hello")
        except UsageError:  # there is no template
            return False
        return True

    return Reader(stop_token_ids, chat)
