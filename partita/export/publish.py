"""Where a package goes: what may be replaced, and how it appears whole or not at all.

Knows folders and manifests; knows nothing of what is in a package.
"""

from __future__ import annotations

import errno
import json
import shutil
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path

from partita.errors import PackageError
from partita.package import MANIFEST, SCHEMA


def check_target(checkpoint: str, out: Path, *, force: bool) -> None:
    """Refuse to replace anything but a package, and never the checkpoint itself."""
    if not out.exists() and not out.is_symlink():
        return
    if not force:
        raise PackageError(f"{out}: exists already; choose another folder, or replace the package with --force")
    if out.is_symlink() or not out.is_dir():
        raise PackageError(f"{out}: a link or a file, not a package; --force replaces packages only")
    if Path(checkpoint).resolve().is_relative_to(out.resolve()):
        raise PackageError(f"{out}: holds the checkpoint that is to be exported; choose another folder")
    strange = _not_ours(out)
    if strange is not None:
        raise PackageError(f"{out}: --force replaces packages only, and this folder {strange}; remove it yourself")


def _not_ours(folder: Path) -> str | None:
    """Why `folder` is not just a package or empty; None when it is."""
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*")}
    if not names:
        return None
    try:
        listed = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        known = {MANIFEST, *(entry["name"] for entry in listed["files"])}
        ours = str(listed["schema"]).startswith(SCHEMA.partition("/")[0] + "/")
    except (OSError, ValueError, KeyError, TypeError):
        return f"has no {MANIFEST} of a package"
    if not ours:
        return f"has a {MANIFEST} of something else"
    extra = sorted(names - known)
    return f"holds files that are not the package's ({', '.join(extra[:3])})" if extra else None


def make_parents(parent: Path, cleanup: ExitStack) -> None:
    """Make the folder that OUT goes into; on failure, what was made is removed again."""
    missing = [p for p in (parent, *parent.parents) if not p.exists()]
    for path in reversed(missing):
        path.mkdir()
        cleanup.callback(_remove_if_empty, path)
    if not parent.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "not a folder", str(parent))


def _remove_if_empty(path: Path) -> None:
    with suppress(OSError):
        path.rmdir()


def publish(folder: Path, out: Path) -> None:
    """Move the finished folder to its place; an old package is put aside first and comes back if that fails."""
    folder.chmod(0o755)
    if not out.exists():
        folder.rename(out)
        return
    aside = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}.old-"))
    try:
        out.rename(aside / "package")
        try:
            folder.rename(out)
        except BaseException:
            (aside / "package").rename(out)
            raise
    finally:
        if out.exists():
            shutil.rmtree(aside, ignore_errors=True)
