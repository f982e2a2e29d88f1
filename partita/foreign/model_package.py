"""Model packages of ONNX Runtime (from 1.32): one folder with variants of a model for several providers.

The format is defined by model_package/README.md and onnxruntime/core/session/model_package/README.md of
microsoft/onnxruntime. Files are named relative to the variant's folder, or as sha256:HASH/NAME in a shared folder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from partita.errors import PackageError, UsageError
from partita.observations.text_format import listing
from partita.package.folder import MANIFEST, MODEL_PACKAGE, manifest_keys, path_inside
from partita.untrusted_files import read_json_value

COMPONENT, SHARED = "component.json", "shared_assets"
Parsed = TypeVar("Parsed", bound=BaseModel)
HASH = "sha256:"
WEIGHTS_OPTION = "session.model_external_initializers_file_folder_path"


class _Executor(BaseModel):
    model_file: str
    session_options: dict[str, str] = {}


class _Executors(BaseModel):
    ort: str | _Executor


class _VariantFile(BaseModel):
    variant_directory: str | None = None
    ep: str | None = None
    executor_info: _Executors


class _ComponentFile(BaseModel):
    variants: dict[str, _VariantFile]


class _ManifestFile(BaseModel):
    schema_version: str | int
    components: dict[str, str | _ComponentFile]
    shared_assets: dict[str, str] = {}


@dataclass(frozen=True, slots=True)
class Variant:
    """One variant of one component."""

    component: str
    name: str
    provider: str | None
    """ONNX Runtime's name of its provider."""
    path: Path
    """Its ONNX file."""
    weights: Path | None
    """Folder of the external data of the file; None: that of the file."""

    @property
    def label(self) -> str:
        """The name for `--variant`, and the provider: `decoder/cpu (CPUExecutionProvider)`."""
        return f"{self.component}/{self.name} ({self.provider or 'no provider'})"


def is_model_package(folder: Path) -> bool:
    """Whether a folder is a model package of ONNX Runtime."""
    return (manifest_keys(folder / MANIFEST) or set()) >= MODEL_PACKAGE


def is_folder(path: Path) -> bool:
    """Whether a path is a package or a foreign folder: a folder, but no model package."""
    return path.is_dir() and not is_model_package(path)


def read_variants(folder: Path) -> tuple[Variant, ...]:
    """Every variant of a model package. Raises PackageError when a file is missing, damaged or outside the folder."""
    manifest = _parse(folder / MANIFEST, _ManifestFile)
    if str(manifest.schema_version).partition(".")[0] != "1":
        raise PackageError(f"{folder}: model package of format {manifest.schema_version}; Partita reads format 1.x")
    found = []
    for component, value in manifest.components.items():
        home = folder
        if isinstance(value, str):
            place = path_inside(folder, value)
            file = place / COMPONENT if place.is_dir() else place
            home, value = file.parent, _parse(file, _ComponentFile)
        for name, variant in value.variants.items():
            found.append(_read_variant(folder, home, component, name, variant, manifest.shared_assets))
    if not found:
        raise PackageError(f"{folder}: a model package without variants")
    return tuple(found)


def choose_variant(folder: Path, name: str | None, providers: Sequence[str] = ()) -> Variant:
    """The variant called `name`, or else, as in ONNX Runtime, that for the first provider of the chain.

    `name`: VARIANT, COMPONENT or COMPONENT/VARIANT. Raises PackageError; UsageError for an unknown name, and when none
    or several match.
    """
    found = read_variants(folder)
    names = listing([each.label for each in found])
    if name is not None:
        named = [each for each in found if name in (each.name, each.component, f"{each.component}/{each.name}")]
        if not named:
            raise UsageError(f"`variant={name}`: no such variant; {folder} has {names}")
        found = tuple(named)
    fitting = found if len(found) == 1 and name is not None else [e for e in found if e.provider in providers[:1]]
    if len(fitting) == 1:
        return fitting[0]
    wanted = f"{len(fitting) or 'no'} variants for {providers[0]}" if providers else "several variants"
    raise UsageError(f"{folder}: {wanted}: it has {names}; choose one with `variant`, or another first provider")


def _read_variant(
    folder: Path, home: Path, component: str, name: str, variant: _VariantFile, shared: Mapping[str, str]
) -> Variant:
    """A variant of a component in the folder `home`."""
    place = _inside(folder, home, variant.variant_directory or name)
    executor = variant.executor_info.ort
    if isinstance(executor, str):
        executor = _parse(_resolve(folder, place, executor, shared), _Executor)
    path = _resolve(folder, place, executor.model_file, shared)
    weights = executor.session_options.get(WEIGHTS_OPTION)
    home_of_data = None if weights is None else _resolve(folder, place, weights, shared)
    return Variant(component, name, variant.ep, path, home_of_data)


def _resolve(folder: Path, place: Path, text: str, shared: Mapping[str, str]) -> Path:
    """The file or folder that `text` names in a variant in the folder `place`. Raises PackageError."""
    if not text.startswith(HASH):
        return _inside(folder, place, text)
    uri, _, rest = text.partition("/")
    asset = shared.get(uri, f"{SHARED}/{uri.replace(':', '-')}")
    return path_inside(folder, f"{asset}/{rest}" if rest else asset)


def _inside(folder: Path, home: Path, name: str) -> Path:
    """`home/name`. Raises PackageError when it leaves the package `folder`."""
    return path_inside(folder, str(PurePosixPath(home.relative_to(folder).as_posix(), name)))


def _parse(path: Path, kind: type[Parsed]) -> Parsed:
    """The JSON file `path` as a record. Raises PackageError."""
    try:
        value = read_json_value(path)
    except (OSError, ValueError) as error:
        raise PackageError(f"{path}: not readable as JSON ({error})") from error
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        deepest = max(error.errors(), key=lambda each: len(each["loc"]))  # a file name is allowed instead of a record
        raise PackageError(f"{path}: field {'.'.join(map(str, deepest['loc']))}: {deepest['msg']}") from error
