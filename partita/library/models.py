"""Any model as a folder that runs: what has to be exported is exported once, into the cache folder."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import partita
from partita.errors import PackageError, UsageError
from partita.export.hub_id import check_model
from partita.export.progress import Progress
from partita.foreign.folder import is_foreign
from partita.library.audience import QUIET, Audience
from partita.library.exporting import own_compile_cache, run_export
from partita.observations.text_format import listing
from partita.options.export import ExportOptions
from partita.package.folder import is_package, read_manifest
from partita.paths import CACHE_VARIABLE, cache_folder

KIND = "packages"
"""The part of the cache folder that packages are in."""


@dataclass(frozen=True, slots=True)
class CachedPackage:
    """A package in the cache folder."""

    name: str
    path: Path
    source: str
    """The checkpoint, as its manifest names it."""
    precision: str
    size_bytes: int


def folder_of(
    model: str, precision: str, target: str | None, progress: Progress | None = None, audience: Audience = QUIET
) -> Path:
    """`model` itself where it is a package or a folder of another exporter, else the package that it was exported to.

    A checkpoint or GGUF file is exported again when one of its files has changed; a hub id, when its package was
    removed from the cache. Raises PackageError, UsageError, and what an export raises.
    """
    path = Path(model)
    if path.is_dir() and (is_package(path) or is_foreign(path)):
        return path
    check_model(model)
    home = cache_folder(KIND)
    if home is None:
        raise UsageError(f"{model} has to be exported, and there is no cache folder; name one in {CACHE_VARIABLE}")
    key = [partita.__version__, precision, target, *_identity(path, model)]
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:12]
    out = home / f"{_file_name(path)}-{precision}-{digest}"
    if is_package(out):
        return out
    home.mkdir(parents=True, exist_ok=True)
    audience.note(f"exporting {model} once to {out}")
    options = ExportOptions(model, out, precision=precision, target=target)
    try:
        with own_compile_cache():
            summary = run_export(options, progress, audience)
        for line in summary.notes:
            audience.note(line)
    except PackageError:
        if not is_package(out):  # another process was faster
            raise
    return out


def cached_packages() -> Iterator[CachedPackage]:
    """The packages in the cache folder, by name."""
    home = cache_folder(KIND)
    for path in sorted(home.iterdir()) if home is not None and home.is_dir() else ():
        if is_package(path):
            manifest = read_manifest(path)
            size = sum(each.stat().st_size for each in path.rglob("*") if each.is_file())
            yield CachedPackage(path.name, path, manifest.source.checkpoint, manifest.graph.precision, size)


def remove_cached(name: str) -> CachedPackage:
    """Remove the package whose name is or begins with `name`. Raises UsageError when that is not exactly one."""
    there = list(cached_packages())
    found = [each for each in there if each.name == name] or [each for each in there if each.name.startswith(name)]
    if len(found) != 1:
        names = listing([each.name for each in found or there]) or "none"
        how_many = "several packages of the cache begin" if found else "no package of the cache begins"
        raise UsageError(f"{name!r}: {how_many} with that; there are: {names}")
    shutil.rmtree(found[0].path)
    return found[0]


def _identity(path: Path, model: str) -> list[object]:
    """What a package has to be made again for: names, sizes and times of the files, or the hub id."""
    if not path.exists():
        return [model]
    files = sorted(each for each in path.iterdir() if each.is_file()) if path.is_dir() else [path]
    return [os.fspath(path.resolve()), *([each.name, each.stat().st_size, each.stat().st_mtime_ns] for each in files)]


def _file_name(path: Path) -> str:
    """The last part of a path or hub id, as the beginning of a folder's name."""
    name = (path if path.name not in ("", "..") else path.resolve()).name.removesuffix(".gguf")
    return re.sub(r"[^\w.-]+", "-", name).strip("-.")[:60] or "model"
