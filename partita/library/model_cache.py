"""Any model as a folder that runs: what has to be exported is exported once, into the cache folder."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

import partita
from partita.errors import PackageError, UsageError
from partita.export.hub import HubModel, at_revision, check_model, find_model, model_folder
from partita.export.progress import Progress
from partita.files import CACHE_VARIABLE, cache_folder
from partita.foreign.folder import files_of_other_variants, is_foreign
from partita.foreign_paths import GGUF, WEIGHTS, recognise
from partita.library.api import QUIET, Audience
from partita.library.exporting import run_export
from partita.observations.text_format import listing
from partita.options.export import ExportOptions
from partita.options.groups import ForeignFolder, PrecisionName
from partita.package.folder import MANIFEST, Manifest, is_package, read_manifest, sha256_of

KIND = "packages"
"""The part of the cache folder that packages are in."""
COMMITS = ".commits"
"""Folder in it with the commit of each hub id, for runs without a connection."""
WEIGHT_SUFFIXES = WEIGHTS | {GGUF, ".onnx"}
LARGEST_HASHED_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class CachedPackage:
    """A package in the cache folder."""

    name: str
    path: Path
    source: str
    """The checkpoint, as its manifest names it; empty for a damaged package."""
    precision: str
    """`damaged` for a package that cannot be read."""
    size_bytes: int


def folder_of(
    model: str,
    precision: PrecisionName = "auto",
    target: str | None = None,
    *,
    revision: str | None = None,
    foreign: ForeignFolder | None = None,
    progress: Progress | None = None,
    audience: Audience = QUIET,
) -> Path:
    """The folder that runs `model`: a package or folder of another exporter as it is, else its export in the cache.

    A checkpoint or GGUF file is exported again when its content has changed (`_content_key`), a hub id when it stands
    for another commit. A package or ONNX decoder on the hub is downloaded and used as it is; of an ONNX decoder only
    the variant that `foreign` chooses. Raises PackageError, CheckpointError, UsageError, and what an export raises.
    """
    path = Path(model)
    if os.path.lexists(path):
        at_revision(model, revision)
        if path.is_dir() and (is_package(path) or is_foreign(path)):
            return path
        found = recognise(path)
        if not found.is_checkpoint:
            raise PackageError(f"{path}: {found.description}", remedy=found.remedy)
        source, key = model, _content_key(path)
    else:
        check_model(model)
        given = at_revision(model, revision)
        hub = find_model(given, _cache_home(model) / COMMITS)
        if hub.is_model_folder:
            return model_folder(hub, progress, _unneeded(hub, foreign or ForeignFolder()))
        source, key, path = hub.pinned, [hub.name, hub.commit], Path(given)
    home = _cache_home(model)
    key = [partita.__version__, precision, target, *key]
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:12]
    out = home / f"{_file_name(path)}-{precision}-{digest}"
    if _manifest(out) is None:
        home.mkdir(parents=True, exist_ok=True)
        with _locked(home / f".{out.name}.lock", model, audience):
            if _manifest(out) is None:  # another process may have exported it meanwhile
                shutil.rmtree(out, ignore_errors=True)  # damaged, or of another version
                audience.note(f"exporting {model} once to {out}")
                options = ExportOptions(source, out, precision=precision, target=target)
                for line in run_export(options, progress, audience).notes:
                    audience.note(line)
    return out


def _unneeded(hub: HubModel, foreign: ForeignFolder) -> list[str]:
    """The files of a model folder on the hub that are not needed. A contract may name any file."""
    if MANIFEST in hub.files or foreign.contract is not None:
        return []
    return files_of_other_variants(hub.name, hub.files, foreign.variant)


def _cache_home(model: str) -> Path:
    """The folder of exported packages. Raises UsageError when there is no cache folder."""
    home = cache_folder(KIND)
    if home is None:
        raise UsageError(f"{model} must be exported, but there is no cache folder; set {CACHE_VARIABLE} to a folder")
    return home


@contextmanager
def _locked(path: Path, model: str, audience: Audience) -> Iterator[None]:
    """Hold a lock file, after waiting for another process that holds it."""
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        audience.note(f"another process is exporting {model}; waiting for it")
        lock.acquire()
    try:
        yield
    finally:
        path.unlink(missing_ok=True)  # before its release: filelock retries when the file it locked has no name
        lock.release()


def _manifest(folder: Path) -> Manifest | None:
    """The manifest of a cached package; None without one, and for a damaged one or one of another version."""
    try:
        return read_manifest(folder)
    except PackageError:
        return None


def cached_packages() -> Iterator[CachedPackage]:
    """The packages in the cache folder, by name."""
    home = cache_folder(KIND)
    for path in sorted(home.iterdir()) if home is not None and home.is_dir() else ():
        if is_package(path):
            manifest = _manifest(path)
            checkpoint, precision = "", "damaged"
            if manifest is not None:
                checkpoint, precision = manifest.source.checkpoint, manifest.graph.precision
            size = sum(each.stat().st_size for each in path.rglob("*") if each.is_file())
            yield CachedPackage(path.name, path, checkpoint, precision, size)


def remove_cached(name: str) -> CachedPackage:
    """Remove the package whose name is or begins with `name`. Raises UsageError when that is not exactly one."""
    there = list(cached_packages())
    found = [each for each in there if each.name == name] or [each for each in there if each.name.startswith(name)]
    if len(found) != 1:
        names = listing([each.name for each in found or there]) or "none"
        message = f"{'several cached packages have' if found else 'no cached package has'} a name that begins with it"
        raise UsageError(f"{name!r}: {message}; cached packages: {names}")
    shutil.rmtree(found[0].path)
    return found[0]


def _content_key(path: Path) -> list[object]:
    """The content of a checkpoint folder or GGUF file, where reading it is cheap, and its path.

    Weight files, and others above 64 MiB: name, size, and modification time.
    Other files, such as the config and the tokenizer: name and SHA-256. Hidden files and Markdown are left out.
    """
    found: list[object] = [os.fspath(path.resolve())]
    for file in [path] if path.is_file() else sorted(each for each in path.iterdir() if each.is_file()):
        stat = file.stat()
        if file.suffix in WEIGHT_SUFFIXES or file == path or stat.st_size > LARGEST_HASHED_BYTES:
            found.append([file.name, stat.st_size, stat.st_mtime_ns])
        elif file.suffix != ".md" and not file.name.startswith("."):
            found.append([file.name, sha256_of(file)])
    return found


def _file_name(path: Path) -> str:
    """The last part of a path or hub id, as the beginning of a folder's name."""
    name = (path if path.name not in ("", "..") else path.resolve()).name.removesuffix(".gguf")
    return re.sub(r"[^\w.-]+", "-", name).strip("-.")[:60] or "model"
