"""What a package, a foreign folder or an ONNX file holds, as a function. Nothing is run, and no weight is read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import overload

from partita.errors import PackageError, UsageError
from partita.foreign.folder import AS_IT_IS, Choice, open_folder
from partita.inspection.diff.records import InspectionDiff
from partita.inspection.records import Inspection
from partita.library.edge import public
from partita.options.fields import checked
from partita.options.inspection import InspectOptions
from partita.package.folder import COMPANIONS, Manifest, check_folder, refuse_absent, unreadable
from partita.strangers import recognise

ONNX_SUFFIX = ".onnx"


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
) -> InspectionDiff: ...


@public
def inspect(
    package: str | os.PathLike[str],
    *,
    against: str | os.PathLike[str] | None = None,
    variant: str | None = None,
    contract: str | os.PathLike[str] | None = None,
    max_length: int | None = None,
    hashes: bool = False,
    against_variant: str | None = None,
    against_contract: str | os.PathLike[str] | None = None,
) -> Inspection | InspectionDiff:
    """What a package, a folder of ONNX files or an ONNX file holds: graphs, contract, states, precision, provenance.

    With `against` what is different in that one. What is wrong with one, a damaged manifest or a missing file, is in
    its `findings`. `variant`, `contract` and `max_length` are about a folder that Partita did not write, as for `load`;
    `against_variant` and `against_contract` about the other one. `hashes`: files whose SHA-256 nobody says are read for
    it. Neither onnxruntime nor torch is imported, and no weights are read otherwise.

    Raises ArgumentError, and PackageError when there is nothing of the kind.
    """
    options = InspectOptions(
        package,
        against=against,
        variant=variant,
        contract=contract,
        max_length=max_length,
        hashes=hashes,
        against_variant=against_variant,
        against_contract=against_contract,
    )
    return inspected(checked(options))


def inspected(options: InspectOptions) -> Inspection | InspectionDiff:
    """The same for checked options."""
    other = choice_of_other(options)
    found = read(Path(options.package), Choice.of(options), hashes=options.hashes)
    if options.against is None:
        return found
    from partita.inspection.diff.compare import compare

    return compare(found, read(Path(options.against), other, hashes=options.hashes))


def choice_of_other(options: InspectOptions) -> Choice:
    """The choice for the folder of `against`. Raises UsageError where there is none to choose for."""
    for name in ("against_variant", "against_contract"):
        value = getattr(options, name)
        if options.against is None and value is not None:
            raise UsageError(f"`{name}={value}` is about `against`, which is not given")
    contract = None if options.against_contract is None else Path(options.against_contract)
    return Choice(options.against_variant, contract)


def read(path: Path, choice: Choice = AS_IT_IS, *, hashes: bool = False) -> Inspection:
    """The same for a path. Raises PackageError when it is no package, no ONNX file, and no folder with one."""
    from partita.runtime.contents.build import graphs_in
    from partita.runtime.contents.build import inspect as look

    try:
        if path.is_file() and path.suffix == ONNX_SUFFIX:
            refuse_absent(path)
            check_folder(path.absolute().parent, COMPANIONS)
            if choice.given:
                raise UsageError(f"`{choice.given[0]}` is for folders that Partita did not write, not for a file")
            found = look(path, None, (), hashes=hashes)
            if not found.graphs:
                raise PackageError(found.findings[0].what)
            return found
        manifest, wrong = _manifest(path, choice)
        if wrong and not graphs_in(path):
            raise wrong[0]
        return look(path, manifest, wrong, hashes=hashes)
    except PermissionError as error:
        raise unreadable(path) from error


def _manifest(path: Path, choice: Choice) -> tuple[Manifest | None, tuple[PackageError, ...]]:
    """The manifest, or what is wrong with it. Raises PackageError for what is no folder, UsageError for the choice."""
    if not path.is_dir():
        stranger = recognise(path)
        raise PackageError(f"{path}: {stranger.what}", remedy=stranger.remedy)
    check_folder(path)
    try:
        return open_folder(path, choice), ()
    except PackageError as error:
        return None, (error,)


def files_of(path: Path) -> tuple[Path, ...]:
    """Every file that is looked at: those of a folder, or an ONNX file with those that hold its weights."""
    if path.is_dir():
        return (path, *(child for child in path.rglob("*") if child.is_file()))
    from partita.runtime.contents.light import read_light
    from partita.runtime.place.model_file import data_files

    try:
        return (path, *(path.parent / name for name in sorted(data_files(read_light(path)))))
    except (TypeError, ValueError, OSError):  # which is said when it is looked at
        return (path,)
