"""Publication of a package: it appears at OUT complete, and replaces nothing but a package, if allowed.

During an export for OUT a lock on `.OUT.partita-lock` is held. Hidden folders of exports next to OUT then belong to
killed exports.
"""

from __future__ import annotations

import errno
import itertools
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from filelock import FileLock, Timeout

from partita.errors import PackageError
from partita.files import resolve_path
from partita.package.folder import MANIFEST, SCHEMA, Manifest
from partita.remedies import Remedy
from partita.signals import hold_signals
from partita.untrusted_files import read_json_value

PARTIAL, OLD = ".partial-", ".old-"
"""Parts of the names of hidden folders next to OUT: an unfinished package, and one being replaced."""
TAKEN = Remedy("choose another folder", alternative=Remedy("replace the package", options=("--force",)))
UNIQUE = "[a-z0-9_]{8}"
"""The random part of names by tempfile."""


@dataclass(frozen=True, slots=True, repr=False)
class ExportResult:
    """The exported package: its manifest, and the duration of the export."""

    path: Path
    manifest: Manifest
    attention_reason: str
    """Reasons for the attention and cache layout."""
    passes: Mapping[str, int]
    """Number of changes of the graph per pass."""
    seconds: Mapping[str, float]
    """Seconds by stage."""
    peak_rss_bytes: int
    notes: tuple[str, ...]
    variants: tuple[ExportResult, ...] = ()
    """Of a model package for several targets, whose first one this is."""

    def __repr__(self) -> str:
        graph = self.manifest.graph
        status = self.manifest.verification.headline
        return f"<partita.ExportResult {self.path}: {graph.precision}, attention {graph.attention}, {status}>"


@dataclass(slots=True)
class Reservation:
    """A place for a package, and a hidden folder next to it for the work."""

    out: Path
    force: bool
    """A package there may be replaced."""
    folder: Path
    notes: list[str]
    """Notes on remains of killed exports."""

    def publish(self) -> None:
        """Move the finished folder to its place. Raises PackageError when something else has appeared there."""
        mask = os.umask(0o077)  # which can be read only by setting another
        os.umask(mask)
        with suppress(OSError):  # a file system without modes
            self.folder.chmod(0o777 & ~mask)
        with hold_signals():  # a signal between the moves would leave the package at neither place
            try:
                check_target((), self.out, force=self.force)
            except PackageError as error:
                raise self._taken(error.problem) from error
            waste = None
            if self.out.exists():
                aside = Path(tempfile.mkdtemp(dir=self.out.parent, prefix=f".{self.out.name}{OLD}"))
                waste = aside.with_name(aside.name.replace(OLD, PARTIAL))  # the next export removes it after a kill
                self._replace(aside, aside / "package")
                aside.rename(waste)
            else:
                self.folder.rename(self.out)
        if waste is not None:
            shutil.rmtree(waste, ignore_errors=True)

    def _replace(self, aside: Path, old: Path) -> None:
        """Move the package at the place to `old`, in the folder `aside`, and the finished folder to the place."""
        try:
            self.out.rename(old)
            if (strange := _not_a_package(old)) is not None:  # after the move: nothing can be added any more
                raise self._taken(f"this folder {strange}")
            self.folder.rename(self.out)
        except BaseException:
            if old.exists():
                old.rename(self.out)
            aside.rmdir()
            raise

    def _taken(self, problem: str) -> PackageError:
        """Move the finished folder to a free name; the error with that name."""
        names = (self.out.with_name(f"{self.out.name}.new{f'-{n}' if n > 1 else ''}") for n in itertools.count(1))
        free = next(name for name in names if not os.path.lexists(name))
        return PackageError(
            f"{self.out}: has appeared or changed during the export and was not replaced ({problem}); the "
            f"finished package is in {self.folder.rename(free)}"
        )


@contextmanager
def reserve(out: Path, read: Sequence[str], *, force: bool) -> Iterator[Reservation]:
    """Reserve `out` for one export that reads `read`, the checkpoint first. Raises PackageError, OSError."""
    if out.name in ("", ".."):  # temporary names are derived from it
        out = Path(os.path.abspath(out))  # noqa: PTH100 - a link keeps its name
    check_target(read, out, force=force)
    with ExitStack() as cleanup:
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
        except FileExistsError as error:
            raise NotADirectoryError(errno.ENOTDIR, "not a folder", error.filename) from error
        lock_file = out.parent / f".{out.name}.partita-lock"
        lock = FileLock(lock_file, timeout=0)
        with hold_signals():
            try:
                lock.acquire()
            except Timeout as error:
                busy = f"{out}: another export is writing there; wait for it, or choose another folder"
                raise PackageError(busy) from error
            cleanup.callback(lock.release)
            # Removed while held: filelock detects a lock on an unlinked file and retries.
            cleanup.callback(lock_file.unlink, missing_ok=True)
        notes = _clean_up(out)
        check_target(read, out, force=force)
        with hold_signals():
            folder = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}{PARTIAL}"))
            cleanup.callback(shutil.rmtree, folder, ignore_errors=True)
        yield Reservation(out, force, folder, notes)


def check_target(read: Sequence[str], out: Path, *, force: bool) -> None:
    """Raise PackageError unless `out` is free, or a package apart from the checkpoint's files."""
    if not os.path.lexists(out):
        return
    if not force:
        raise PackageError("exists already", path=out, remedy=TAKEN)
    if out.is_symlink() or not out.is_dir():
        raise PackageError(f"{out}: a link or a file, not a package; `force=True` replaces only packages")
    if Path.cwd().is_relative_to(out.resolve()):  # it would be removed under the current process
        raise PackageError(f"{out}: is the current folder, or contains it; change to another folder first")
    for index, given in enumerate(read):
        what = "adapter" if index else "checkpoint"
        if resolve_path(Path(given)).is_relative_to(out.resolve()):
            raise PackageError(f"{out}: contains the {what} that is being exported; choose another folder")
    strange = _not_a_package(out)
    if strange is not None:
        raise PackageError(f"{out}: `force=True` replaces only packages, but this folder {strange}; remove it yourself")


def _not_a_package(folder: Path) -> str | None:
    """The reason why `folder` is not just a package or empty; None when it is."""
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*")}
    if not names:
        return None
    try:
        listed = read_json_value(folder / MANIFEST)
        if "additional_metadata" in listed:  # a model package for several targets
            listed = listed["additional_metadata"]["partita"]
        known = {MANIFEST, *(entry["name"] for entry in listed["files"])}
        known |= {str(parent) for name in known for parent in PurePosixPath(name).parents}
        ours = str(listed["schema"]).startswith(SCHEMA.partition("/")[0] + "/")
    except (FileNotFoundError, KeyError, TypeError):
        return f"has no package manifest {MANIFEST}"
    except (OSError, ValueError):
        return f"has an unreadable {MANIFEST}"
    if not ours:
        return f"has a {MANIFEST} that is not a package manifest"
    extra = sorted(names - known)
    return f"contains files that do not belong to the package ({', '.join(extra[:3])})" if extra else None


def _clean_up(out: Path) -> list[str]:
    """Clean up after killed exports to `out`; returns notes."""
    notes = []
    name = re.escape(out.name)
    for path in sorted(out.parent.iterdir()):
        if path.is_symlink() or not path.is_dir():
            continue
        if re.fullmatch(rf"\.{name}{re.escape(PARTIAL)}{UNIQUE}(-[a-z]+-{UNIQUE})?", path.name):
            shutil.rmtree(path, ignore_errors=True)
            notes.append(f"removed {path}, left behind by a killed export")
        elif re.fullmatch(rf"\.{name}{re.escape(OLD)}{UNIQUE}", path.name):  # it may be the only copy of a package
            notes.append(f"a killed export moved the package that it replaced to {path / 'package'}; remove it")
    return notes
