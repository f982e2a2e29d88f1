"""Changed copies of a package's graphs over the same weight file, for the length of one run."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import onnx_ir as ir

from partita.package.folder import KNOWN_ANSWER, WEIGHTS, Manifest, record_file

Result = TypeVar("Result")
NO_LINKS = (errno.EPERM, errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)
"""Errors of file systems without hard links, e.g. on USB sticks."""


def beside(
    folder: Path,
    manifest: Manifest,
    change: Callable[[ir.Model], ir.Model],
    run: Callable[[Path, Manifest], Result],
) -> Result:
    """Run `run` on a folder with the graphs of the package changed by `change`, and its manifest."""
    with made(folder, manifest, change) as (twin, changed):
        return run(twin, changed)


def _share(file: Path, place: Path) -> None:
    """Hard-link a file to another place; copy it where the file system has no links. Raises OSError."""
    try:
        os.link(file, place)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        shutil.copyfile(file, place)


@contextmanager
def made(folder: Path, manifest: Manifest, change: Callable[[ir.Model], ir.Model]) -> Iterator[tuple[Path, Manifest]]:
    """Within the block, a folder with the graphs of the package changed by `change`, and its manifest."""
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f"{folder.name}-twin-") as name:
        twin = Path(name)
        switchable = manifest.switchable
        beside_weights = [name for record in switchable for name in (record.file, record.known_answer) if name]
        linked = (WEIGHTS, KNOWN_ANSWER, *beside_weights)
        for shared in linked:
            if (folder / shared).is_file():  # without --verify there is no known answer
                _share(folder / shared, twin / shared)
        files = [graph.file for graph in manifest.graph.files]
        for file in files:
            ir.save(change(ir.load(folder / file)), twin / file)
        kept = tuple(record for record in manifest.files if record.name in linked)
        changed = tuple(record_file(twin, file) for file in files)
        yield twin, manifest.model_copy(update={"files": (*kept, *changed)})
