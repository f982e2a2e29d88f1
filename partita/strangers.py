"""What a path is that was given where a package was expected, and the command that takes it as it is.

Told from what lies on disk: names of files, the first bytes, the schema of a JSON file. Knows nothing of what a package
holds but the name of its manifest.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from partita.remedies import Remedy, is_lfs_pointer, lfs_pull

MANIFEST = "manifest.json"
CONFIG = "config.json"
WEIGHTS = frozenset({".safetensors", ".bin", ".pt", ".pth"})
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
READ_BY_SHOW = {"partita.report": "the report of a run", "partita.bench": "the result of a bench"}
LARGEST_JSON_BYTES = 256 << 20

EXPORT = Remedy("export it first", ("partita", "export", "{checkpoint}", "{out}"))
EXPORT_HUB = Remedy("if it is a model of the hub, export it first", ("partita", "export", "{checkpoint}", "{out}"))
EXPORT_ANY = Remedy("name a package; export a checkpoint with", ("partita", "export", "CHECKPOINT", "{out}"))
PLACE = Remedy("see where it runs with", ("partita", "place", "{path}"))
SHOW = Remedy("see it with", ("partita", "report", "show", "{path}"))
NAME = Remedy("name {path} instead")
CHOOSE = Remedy("name the package's folder")


@dataclass(frozen=True, slots=True)
class Stranger:
    """What is there, in words that follow the path and a colon, and what to do with it."""

    what: str
    remedy: Remedy


def recognise(path: Path) -> Stranger:
    """What `path` is, which is no package. Raises PermissionError when it cannot be looked at."""
    if path.is_dir():
        return _recognise_folder(path)
    if path.exists():
        return _recognise_file(path)
    if HUB_ID.fullmatch(str(path)) and not path.parent.exists():
        return Stranger("no such folder", EXPORT_HUB.filled(checkpoint=path, out=f"{path.name}-package"))
    return Stranger("no such folder", EXPORT_ANY.filled(out=path))


def _recognise_folder(folder: Path) -> Stranger:
    """What a folder without a manifest is."""
    if (folder / CONFIG).is_file():
        return Stranger("a checkpoint, not a package", _exporting(folder))
    inside = sorted(child for child in folder.iterdir() if (child / MANIFEST).is_file())
    if inside:
        return Stranger(f"not a package, it has no {MANIFEST}; there is one in it", NAME.filled(path=inside[0]))
    models = sorted(folder.glob("*.onnx"))
    if models:
        return Stranger(f"a folder with an ONNX model, not a package ({MANIFEST} is missing)", _placing(models[0]))
    return Stranger(f"not a Partita package, it has no {MANIFEST}", EXPORT_ANY.filled(out="OUT"))


def _recognise_file(path: Path) -> Stranger:
    folder = path.absolute().parent
    if is_lfs_pointer(path):
        return Stranger("not a package; a package is a folder", lfs_pull(path))
    if (folder / MANIFEST).is_file():
        return Stranger("a file inside a package; a package is a folder", NAME.filled(path=path.parent))
    if path.suffix == ".onnx":
        return Stranger("an ONNX file, not a package", _placing(path))
    schema = _schema_of(path).partition("/")[0]
    if schema in READ_BY_SHOW:
        return Stranger(f"{READ_BY_SHOW[schema]}, not a package", SHOW.filled(path=path))
    if path.suffix in WEIGHTS | {".json"} and (folder / CONFIG).is_file():
        return Stranger("a file of a checkpoint, not a package", _exporting(path.parent))
    return Stranger("a file; a package is a folder", CHOOSE)


def _exporting(folder: Path) -> Remedy:
    """How a checkpoint becomes a package beside the place where the command was given."""
    return EXPORT.filled(checkpoint=folder, out=f"{folder.absolute().name or 'checkpoint'}-package")


def _placing(path: Path) -> Remedy:
    """How to look at an ONNX file."""
    return PLACE.filled(path=path)


def _schema_of(path: Path) -> str:
    """The schema that a JSON file names; empty when it names none, or is no JSON."""
    if not path.is_file() or path.stat().st_size > LARGEST_JSON_BYTES:
        return ""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        return ""
    found = raw.get("schema") if isinstance(raw, dict) else None
    return found if isinstance(found, str) else ""
