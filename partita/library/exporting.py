"""Exports a checkpoint, with the runtime functions that the exporter needs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from partita.demo import heldout_path
from partita.errors import UsageError
from partita.export.hub import at_revision
from partita.export.options import ExportOptions, check
from partita.export.progress import Progress, Silent, stage
from partita.export.publish import ExportResult as ExportResult
from partita.extras import checked_versions
from partita.library.api import LOGGER, QUIET, Audience, from_fields
from partita.options.export import ExportOptions as Options
from partita.options.fields import group
from partita.package.folder import Graph, Manifest
from partita.package.records import SmokeRecord, Verification
from partita.providers.options import parse_libraries
from partita.providers.resolve import all_names, parse_chain

if TYPE_CHECKING:
    from partita.export.target import Target
    from partita.export.verify.quality import Scorer


@from_fields(Options)
def export(options: Options) -> ExportResult:
    """Export a checkpoint, a folder or a hub id, to a package in the folder `out`, and verify it against the source
    model.

    The arguments are the options of `partita export`; `target_options` and `target_libraries` belong to the provider
    `target`; an unknown `exporter` is refused with the available names. Raises ArgumentError, CheckpointError,
    UnsupportedModelError, ParityError when the graph's logits differ from the model's, ProviderError when the target
    cannot be probed, ResourceError, and InstallationError without the extra `export`. A failed export leaves no files.
    """
    result = run_export(options)
    for line in result.notes:
        LOGGER.warning(line)
    return result


def run_export(given: Options, progress: Progress | None = None, audience: Audience = QUIET) -> ExportResult:
    """Find the target and export for it, or for each target of a model package. Raises a PartitaError."""
    check_before_loading(given)
    given = _at_revision(given)
    shown = progress or Silent()
    if given.format == "ort-package":
        return _export_variants(given, shown, audience)
    options = group(given, ExportOptions)
    # torch and transformers take seconds, in which a process checks the provider
    choosing = ThreadPoolExecutor(1).submit(_choose_target, options, audience)
    with stage(shown, "load libraries", {}):
        from partita.export.optimum import with_optimum_remedy
        from partita.export.options import asked_options
        from partita.export.pipeline import export as write
        from partita.library.drifting import locate
        from partita.library.place.target import supported_by_cpu
        from partita.runtime.generate.text.tokens import stop_token_ids
        from partita.runtime.ort.buffers import write_adapter

    with stage(shown, "find target", {}):
        target = choosing.result()
    with checked_versions():
        return write(
            options,
            replay=replay,
            smoke=smoke,
            reader=stop_token_ids,
            scorer=scorer,
            target=target,
            supports=supported_by_cpu,
            write_adapter=write_adapter,
            locate=locate,
            progress=shown,
            quality_text=heldout_path(),
            offer=with_optimum_remedy,
            read_folder=read_foreign,
            asked=asked_options(given),
        )


def _export_variants(given: Options, progress: Progress, audience: Audience) -> ExportResult:
    """Export for each target, and write a model package with a variant for each. Raises a PartitaError."""
    from partita.export.model_package import TargetPackage, reserve_for_variants, write_model_package

    options = group(given, ExportOptions)
    libraries = parse_libraries(given.target_libraries or {}, all_names(), "target_libraries")
    chain = parse_chain(given.target or "", libraries, argument="target")
    with reserve_for_variants(options) as (place, folder):
        found = [run_export(_for_target(given, each.name, folder / each.name), progress, audience) for each in chain]
        packages = [
            TargetPackage(provider.name, provider.ort_name, summary.path, summary.manifest)
            for provider, summary in zip(chain, found, strict=True)
        ]
        with stage(progress, "write model package", {}) as current:
            write_model_package(packages, place, current)
    variants = tuple(replace(summary, path=options.folder) for summary in found)
    notes = dict.fromkeys(line for each in variants for line in each.notes)
    return replace(variants[0], notes=tuple(notes), variants=variants)


def _for_target(given: Options, name: str, out: Path) -> Options:
    """The options of the export for one of several targets, without options and libraries of the others."""
    options, libraries = given.target_options, given.target_libraries
    return replace(
        given,
        format="package",
        target=name,
        out=out,
        target_options=options and {n: v for n, v in options.items() if n == name or not isinstance(v, Mapping)},
        target_libraries=libraries and {n: path for n, path in libraries.items() if n == name},
    )


def check_before_loading(options: Options) -> None:
    """Check options that need neither torch nor transformers. Raises UsageError, CheckpointError, PackageError."""
    options = _at_revision(options)
    several = options.target is not None and "," in options.target
    if options.format == "ort-package" and options.target is None:
        raise UsageError("`format=ort-package` needs `target`, a provider for each variant; add it")
    if several and options.format == "package":
        raise UsageError(f"`target={options.target}`: several targets need `format=ort-package`; add it")
    if options.target is None and options.target_libraries:
        raise UsageError("`target_libraries` needs `target`, the name of its provider; add it")
    if options.target is None and options.target_options:
        raise UsageError("`target_options` needs `target`, the provider it belongs to; add it")
    if options.target is not None and not options.target_libraries:  # a library may contain a provider of another name
        parse_chain(options.target, argument="target")
    check(group(options, ExportOptions))


def _at_revision(options: Options) -> Options:
    """The options with `revision` as a part of the hub id. Raises UsageError for a checkpoint on disk."""
    if options.revision is None:
        return options
    return replace(options, checkpoint=at_revision(os.fspath(options.checkpoint), options.revision), revision=None)


def _choose_target(options: Options, audience: Audience = QUIET) -> Target | None:
    """The target; None when the user set a lowering and no target. Raises UsageError, ProviderError."""
    if options.target is None and (options.attention != "auto" or options.cache != "fixed"):
        if options.target_default:
            raise UsageError("`target_default` needs `target`, the provider it belongs to; add it")
        return None
    from partita.library.place.target import find_target

    given = options.target_options or {}
    by_provider = {name: value for name, value in given.items() if isinstance(value, Mapping)}
    named = {name: value for name, value in given.items() if not isinstance(value, Mapping)}
    if named and options.target is not None:
        by_provider = {**by_provider, options.target: {**by_provider.get(options.target, {}), **named}}
    return find_target(
        options.target,
        by_provider,
        default_allowed=options.target_default,
        libraries=options.target_libraries or {},
        audience=audience,
    )


def read_foreign(folder: Path, batch_size: int, max_length: int) -> Graph:
    """The inferred graph contract of a foreign folder. Raises PackageError."""
    from partita.foreign.folder import Choice, open_folder

    contract = folder / "contract.toml"
    contract.write_text(f"batch_size = {batch_size}\n", encoding="utf-8")
    return open_folder(folder, Choice(contract=contract, max_length=max_length)).graph


def replay(folder: Path, manifest: Manifest) -> Verification:
    """Replay the reference logits on the CPU provider."""
    from partita.runtime.verify.replay import replay as replay_on

    return replay_on(folder, parse_chain("cpu"), manifest=manifest)


def smoke(folder: Path, manifest: Manifest) -> SmokeRecord:
    """Open the package on the CPU provider and run a chunk and a token."""
    from partita.runtime.verify.replay import smoke as smoke_on

    return smoke_on(folder, parse_chain("cpu"), manifest=manifest)


def scorer(folder: Path, manifest: Manifest) -> AbstractContextManager[Scorer]:
    """The package opened on the CPU provider, for scoring a text."""
    from partita.runtime.verify.quality import open_scorer

    return open_scorer(folder, parse_chain("cpu"), manifest=manifest)
