"""Inspects a package, a foreign folder or an ONNX file, without running it or loading weights."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import overload

from partita.compare.rows import Comparison
from partita.errors import PackageError, UsageError
from partita.foreign.folder import NO_CHOICE, Choice, open_folder
from partita.foreign.model_package import choose_variant, is_model_package, read_variants
from partita.foreign_paths import ONNX, recognise
from partita.inspection.records import Inspection
from partita.library.api import from_fields
from partita.options.inspection import InspectOptions
from partita.package.folder import COMPANIONS, Manifest, check_folder, refuse_absent, unreadable


@overload
def inspect(
    package: str | os.PathLike[str],
    *,
    variant: str | None = None,
    contract: str | os.PathLike[str] | None = None,
    max_length: int | None = None,
    hashes: bool = False,
) -> Inspection: ...


@overload
def inspect(
    package: str | os.PathLike[str],
    *,
    against: str | os.PathLike[str],
    variant: str | None = None,
    contract: str | os.PathLike[str] | None = None,
    max_length: int | None = None,
    hashes: bool = False,
    against_variant: str | None = None,
    against_contract: str | os.PathLike[str] | None = None,
) -> Comparison: ...


@from_fields(InspectOptions)
def inspect(options: InspectOptions) -> Inspection | Comparison:
    """Contents of a package, a folder of ONNX files or an ONNX file: graphs, contract, states, precision, provenance.

    With `against`, the differences to that package, folder or file. Errors such as a damaged manifest or a missing file
    are in `findings`. Imports neither onnxruntime nor torch, and loads no weights without `hashes`.

    Raises ArgumentError, and PackageError if the path contains no model.
    """
    return run_inspection(options)


def run_inspection(options: InspectOptions) -> Inspection | Comparison:
    """The inspection for checked options. Raises UsageError for a choice about `against` without it."""
    for name in ("against_variant", "against_contract"):
        value = getattr(options, name)
        if options.against is None and value is not None:
            raise UsageError(f"`{name}={value}` needs `against`, which is not set")
    found = read(Path(options.package), Choice.of(options), hashes=options.hashes)
    if options.against is None:
        return found
    from partita.compare.packages import compare_packages

    contract = None if options.against_contract is None else Path(options.against_contract)
    other = Choice(variant=options.against_variant, contract=contract)
    return compare_packages(found, read(Path(options.against), other, hashes=options.hashes))


def read(path: Path, choice: Choice = NO_CHOICE, *, hashes: bool = False) -> Inspection:
    """The inspection of a path. Raises PackageError if it is no package, no ONNX file, and no folder with one."""
    from partita.runtime.contents.build import graphs_in
    from partita.runtime.contents.build import inspect as look

    try:
        if path.is_file() and path.suffix == ONNX:
            refuse_absent(path)
            check_folder(path.absolute().parent, COMPANIONS)
            choice.refuse_for_file()
            found = look(path, None, (), hashes=hashes)
            if not found.graphs:
                raise PackageError(found.findings[0].problem)
            return found
        if is_model_package(path):
            return _model_package(path, choice, hashes=hashes)
        manifest, wrong = _manifest(path, choice)
        if wrong and not graphs_in(path):
            raise wrong[0]
        return look(path, manifest, wrong, hashes=hashes)
    except PermissionError as error:
        raise unreadable(path) from error


def _model_package(path: Path, choice: Choice, *, hashes: bool) -> Inspection:
    """The inspection of one or all variants of a model package. Raises PackageError, UsageError."""
    from partita.runtime.contents.build import inspect as look

    replace(choice, variant=None).refuse_for_file()
    chosen = read_variants(path) if choice.variant is None else (choose_variant(path, choice.variant),)
    variants = {each.path.relative_to(path).as_posix(): each for each in chosen}
    found = look(path, None, (), hashes=hashes, variants={name: each.weights for name, each in variants.items()})
    graphs = (each.model_copy(update={"variant": variants[each.file].label}) for each in found.graphs)
    return found.model_copy(update={"graphs": tuple(graphs)})


def _manifest(path: Path, choice: Choice) -> tuple[Manifest | None, tuple[PackageError, ...]]:
    """The manifest, or its errors. Raises PackageError for an invalid folder, UsageError for the choice."""
    if not path.is_dir():
        recognised = recognise(path)
        raise PackageError(f"{path}: {recognised.description}", remedy=recognised.remedy)
    check_folder(path)
    try:
        return open_folder(path, choice), ()
    except PackageError as error:
        return None, (error,)
