"""What a path is that was given where a package was expected, and the command that takes it as it is.

Recognised by names of files, the first bytes, the schema of a JSON file. Knows nothing of what a package
holds but the name of its manifest.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from partita.capped import LARGEST_REPORT_BYTES, parsed, read_capped
from partita.remedies import Remedy, is_lfs_pointer, lfs_pull

MANIFEST = "manifest.json"
CONFIG = "config.json"
GENAI_CONFIG = "genai_config.json"
ONNX, ONNX_FOLDER = ".onnx", "onnx"
GGUF, GGUF_MAGIC = ".gguf", b"GGUF"
DEEPEST, MOST_FOLDERS = 3, 500
"""How many folders down, and how many folders, are looked into for models."""
SHOWN = 8
WEIGHTS = frozenset({".safetensors", ".bin", ".pt", ".pth"})
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
READ_BY_SHOW = {"partita.report": "the report of a run", "partita.bench": "the result of a bench"}

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
    is_checkpoint: bool = False
    """A checkpoint folder or GGUF file, which can be exported."""


def recognise(path: Path) -> Stranger:
    """What `path` is, which is no package. Raises PermissionError when it cannot be looked at."""
    if path.is_dir():
        return _recognise_folder(path)
    if path.exists():
        return _recognise_file(path)
    if path.is_symlink():
        return Stranger(f"a symbolic link to {path.readlink()}, where nothing is", CHOOSE)
    if HUB_ID.fullmatch(str(path)) and not path.parent.exists():
        return Stranger("no such folder", EXPORT_HUB.filled(checkpoint=path, out=f"{path.name}-package"))
    return Stranger("no such folder", EXPORT_ANY.filled(out=path))


def _recognise_folder(folder: Path) -> Stranger:
    """What a folder without a manifest is."""
    inside = sorted(child for child in folder.iterdir() if (child / MANIFEST).is_file())
    if inside and not (folder / CONFIG).is_file():
        return Stranger(f"not a package, it has no {MANIFEST}; there is one in it", NAME.filled(path=inside[0]))
    is_checkpoint = (folder / CONFIG).is_file()
    has_models = any(folder.glob(f"*{ONNX}")) or (is_checkpoint and _has_weights(folder))
    within = () if has_models else _models_within(folder)
    if within:
        shown = ", ".join(str(home.relative_to(folder)) for home in within[:SHOWN])
        more = f" and {len(within) - SHOWN} more" if len(within) > SHOWN else ""
        what = "a folder with an ONNX model" if len(within) == 1 else f"{len(within)} folders with ONNX models"
        return Stranger(f"no model lies in it, but {what} below it: {shown}{more}", NAME.filled(path=within[0]))
    if is_checkpoint:
        return Stranger("a checkpoint, not a package", _exporting(folder), is_checkpoint=True)
    if any(folder.glob(f"*{GGUF}")):
        return Stranger("a folder with a GGUF file, not a package", _exporting(folder), is_checkpoint=True)
    models = sorted(folder.glob("*.onnx"))
    if models:
        return Stranger(f"a folder with an ONNX model, not a package ({MANIFEST} is missing)", _placing(models[0]))
    return Stranger(f"not a Partita package, it has no {MANIFEST}", EXPORT_ANY.filled(out="OUT"))


def _has_weights(folder: Path) -> bool:
    """Whether weights of a checkpoint lie in a folder."""
    return any(child.suffix in WEIGHTS for child in folder.iterdir())


def _models_within(folder: Path) -> tuple[Path, ...]:
    """Folders below one that have ONNX models, as repositories of the hub keep one for each device and precision."""
    found: dict[Path, None] = {}
    left = [(folder, 0)]
    for home, depth in left:  # grows as it is read; folders beyond a limit are not looked into
        try:
            children = sorted(home.iterdir())
        except OSError:
            continue
        files = [child.name for child in children if child.suffix == ONNX or child.name == GENAI_CONFIG]
        if files and home != folder:
            found[home.parent if home.name == ONNX_FOLDER and home.parent != folder else home] = None
        if depth < DEEPEST:
            below = [child for child in children if child.is_dir() and not child.name.startswith(".")]
            left += [(child, depth + 1) for child in below[: max(0, MOST_FOLDERS - len(left))]]
    return tuple(found)


def _recognise_file(path: Path) -> Stranger:
    folder = path.absolute().parent
    if is_lfs_pointer(path):
        return Stranger("not a package; a package is a folder", lfs_pull(path))
    if path.suffix == GGUF or _begins_with(path, GGUF_MAGIC):
        return Stranger("a GGUF file, not a package", _exporting(path), is_checkpoint=True)
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


def _begins_with(path: Path, magic: bytes) -> bool:
    """Whether a regular file begins with these bytes."""
    if not path.is_file():
        return False
    with path.open("rb") as stream:
        return stream.read(len(magic)) == magic


def _exporting(path: Path) -> Remedy:
    """The command that exports a checkpoint to a package in the current folder."""
    name = path.absolute().name.removesuffix(GGUF) or "checkpoint"
    return EXPORT.filled(checkpoint=path, out=f"{name}-package")


def _placing(path: Path) -> Remedy:
    """How to look at an ONNX file."""
    return PLACE.filled(path=path)


def _schema_of(path: Path) -> str:
    """The schema that a JSON file names; empty when it names none, or is no JSON."""
    try:
        raw = parsed(read_capped(path, LARGEST_REPORT_BYTES))
    except (OSError, ValueError):
        return ""
    found = raw.get("schema") if isinstance(raw, dict) else None
    return found if isinstance(found, str) else ""
