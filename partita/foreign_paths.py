"""Identifies a path that is not a package (checkpoint, ONNX file, report) and the command that accepts it."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from partita.remedies import Remedy, is_lfs_pointer, lfs_pull
from partita.untrusted_files import LARGEST_REPORT_BYTES, parse_json, read_capped

MANIFEST = "manifest.json"
CONFIG = "config.json"
GENAI_CONFIG = "genai_config.json"
ONNX, ONNX_FOLDER = ".onnx", "onnx"
GGUF, GGUF_MAGIC = ".gguf", b"GGUF"
DEEPEST, MOST_FOLDERS = 3, 500
"""Limits of the search for models: levels below the folder, and number of folders."""
SHOWN = 8
WEIGHTS = frozenset({".safetensors", ".bin", ".pt", ".pth"})
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
READ_BY_SHOW = {"partita.report": "the report of a run", "partita.bench": "the result of a bench"}

EXPORT = Remedy("export it first", ("partita", "export", "{checkpoint}", "{out}"))
EXPORT_HUB = Remedy("if it is a Hub model, export it first", ("partita", "export", "{checkpoint}", "{out}"))
EXPORT_ANY = Remedy("name a package; export a checkpoint with", ("partita", "export", "CHECKPOINT", "{out}"))
PLACE = Remedy("show its placement with", ("partita", "place", "{path}"))
SHOW = Remedy("show it with", ("partita", "report", "show", "{path}"))
NAME = Remedy("name {path} instead")
CHOOSE = Remedy("name the package's folder")
DOWNLOAD = Remedy("download it again")


@dataclass(frozen=True, slots=True)
class ForeignPath:
    """A path that is not a package. `what`: the part of the message after the path and a colon."""

    description: str
    remedy: Remedy
    is_checkpoint: bool = False
    """A checkpoint folder or GGUF file, which can be exported."""


def recognise(path: Path) -> ForeignPath:
    """Identify `path`, which is not a package. Raises PermissionError if it cannot be read."""
    if path.is_dir():
        return _recognise_folder(path)
    if path.exists():
        return _recognise_file(path)
    if path.is_symlink():
        return ForeignPath(f"a broken symbolic link to {path.readlink()}", CHOOSE)
    if HUB_ID.fullmatch(str(path)) and not path.parent.exists():
        return ForeignPath("no such folder", EXPORT_HUB.filled(checkpoint=path, out=f"{path.name}-package"))
    return ForeignPath("no such folder", EXPORT_ANY.filled(out=path))


def _recognise_folder(folder: Path) -> ForeignPath:
    """Identify a folder without a manifest."""
    children = sorted(folder.iterdir())
    names, suffixes = {child.name for child in children}, {child.suffix for child in children}
    if CONFIG not in names and (inside := [child for child in children if (child / MANIFEST).is_file()]):
        return ForeignPath(f"no {MANIFEST}, but it contains a package", NAME.filled(path=inside[0]))
    has_models = ONNX in suffixes or (CONFIG in names and suffixes & WEIGHTS)
    if nested := () if has_models else _nested_models(folder):
        shown = ", ".join(str(home.relative_to(folder)) for home in nested[:SHOWN])
        more = f" and {len(nested) - SHOWN} more" if len(nested) > SHOWN else ""
        what = "a folder with an ONNX model" if len(nested) == 1 else f"{len(nested)} folders with ONNX models"
        return ForeignPath(f"contains no model, but {what} below it: {shown}{more}", NAME.filled(path=nested[0]))
    if CONFIG in names:
        return ForeignPath("a checkpoint, not a package", _exporting(folder), is_checkpoint=True)
    if GGUF in suffixes:
        return ForeignPath("a folder with a GGUF file, not a package", _exporting(folder), is_checkpoint=True)
    if models := [child for child in children if child.suffix == ONNX]:
        remedy = PLACE.filled(path=models[0])
        return ForeignPath(f"a folder with an ONNX model, not a package ({MANIFEST} is missing)", remedy)
    return ForeignPath(f"not a Partita package, it has no {MANIFEST}", EXPORT_ANY.filled(out="OUT"))


def _nested_models(folder: Path) -> tuple[Path, ...]:
    """Subfolders with ONNX models, as Hub repositories have them for each device and precision."""
    found: dict[Path, None] = {}
    queue = [(folder, 0)]
    for home, depth in queue:  # grows during the loop, up to the limits
        try:
            children = sorted(home.iterdir())
        except OSError:
            continue
        files = [child.name for child in children if child.suffix == ONNX or child.name == GENAI_CONFIG]
        if files and home != folder:
            found[home.parent if home.name == ONNX_FOLDER and home.parent != folder else home] = None
        if depth < DEEPEST:
            below = [child for child in children if child.is_dir() and not child.name.startswith(".")]
            queue += [(child, depth + 1) for child in below[: max(0, MOST_FOLDERS - len(queue))]]
    return tuple(found)


def _recognise_file(path: Path) -> ForeignPath:
    folder = path.absolute().parent
    if is_lfs_pointer(path):
        return ForeignPath("not a package; a package is a folder", lfs_pull(path))
    if path.is_file():
        with path.open("rb") as stream:
            if stream.read(len(GGUF_MAGIC)) == GGUF_MAGIC:
                return ForeignPath("a GGUF file, not a package", _exporting(path), is_checkpoint=True)
    if path.suffix == GGUF:
        return ForeignPath("not a GGUF file: its first bytes are not `GGUF`", DOWNLOAD)
    if (folder / MANIFEST).is_file():
        return ForeignPath("a file inside a package; a package is a folder", NAME.filled(path=path.parent))
    if path.suffix == ONNX:
        return ForeignPath("an ONNX file, not a package", PLACE.filled(path=path))
    with suppress(OSError, ValueError, TypeError, KeyError):
        schema = str(parse_json(read_capped(path, LARGEST_REPORT_BYTES))["schema"])
        return ForeignPath(f"{READ_BY_SHOW[schema.partition('/')[0]]}, not a package", SHOW.filled(path=path))
    if path.suffix in WEIGHTS | {".json"} and (folder / CONFIG).is_file():
        return ForeignPath("a file of a checkpoint, not a package", _exporting(path.parent))
    return ForeignPath("a file; a package is a folder", CHOOSE)


def _exporting(path: Path) -> Remedy:
    """The command that exports a checkpoint to a package in the working directory."""
    name = path.absolute().name.removesuffix(GGUF) or "checkpoint"
    return EXPORT.filled(checkpoint=path, out=f"{name}-package")
