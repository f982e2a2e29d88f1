"""Write packages of several targets as one model package of ONNX Runtime (from 1.32), over shared weights.

    manifest.json                     components and variants; Partita's manifests under additional_metadata.partita
    decoder/TARGET/model.onnx         the graph of a target, and its other files that differ between targets
    shared_assets/sha256-HASH/        the weights of all graphs, each tensor once, and the files that are equal

`--static-shapes` gives two components, prefill and decode. The format is defined by model_package/README.md of
microsoft/onnxruntime.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir

from partita.export.options import ExportOptions
from partita.export.progress import Stage
from partita.export.publish import PARTIAL, reserve
from partita.export.weights.external_data import translate_space, write_data
from partita.package.folder import MANIFEST, SCHEMA, WEIGHTS, Manifest, record_file

VERSION = "1.0"
SHARED = "shared_assets"
WEIGHTS_OPTION = "session.model_external_initializers_file_folder_path"


@dataclass(frozen=True, slots=True)
class TargetPackage:
    """The package for one target."""

    target: str
    ort_name: str
    """ONNX Runtime's name of the provider."""
    folder: Path
    manifest: Manifest


@contextmanager
def reserve_for_variants(options: ExportOptions) -> Iterator[tuple[Path, Path]]:
    """An empty folder that becomes the output of `options`, and a temporary one for the packages of the targets.

    Raises PackageError when the output is taken, ResourceError.
    """
    out = options.folder
    try:
        with reserve(out, options.read_paths, force=options.force) as place:
            with tempfile.TemporaryDirectory(dir=place.folder.parent, prefix=f".{out.name}{PARTIAL}") as folder:
                yield place.folder, Path(folder)
            place.publish()
    except OSError as error:
        raise translate_space(error, out) from error


def write_model_package(packages: Sequence[TargetPackage], out: Path, current: Stage) -> None:
    """Write packages of one checkpoint to the empty folder `out`. Raises ResourceError."""
    shared = out / SHARED / "unfinished"
    shared.mkdir(parents=True)
    graphs = [(each, file) for each in packages for file in each.manifest.graph.files]
    models = [ir.load(each.folder / file.file) for each, file in graphs]
    write_data(models, shared, current)
    components: dict[str, dict[str, Any]] = {}
    for (each, file), model in zip(graphs, models, strict=True):
        component = "decoder" if file.phase == "any" else file.phase
        home = out / component / each.target
        home.mkdir(parents=True, exist_ok=True)
        ir.save(model, home / file.file)
        components.setdefault(component, {})[each.target] = {
            "variant_directory": f"{component}/{each.target}",
            "ep": each.ort_name,
            "executor_info": {"ort": {"model_file": file.file, "session_options": {WEIGHTS_OPTION: ""}}},
        }
    _copy_other_files(packages, out / next(iter(components)), shared)
    uri = directory_uri(shared)
    shared.rename(shared.with_name(uri.replace(":", "-")))
    for variant in (variant for component in components.values() for variant in component.values()):
        variant["executor_info"]["ort"]["session_options"][WEIGHTS_OPTION] = uri
    names = sorted(path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file())
    manifests = {each.target: each.manifest.model_dump(mode="json", by_alias=True) for each in packages}
    files = [record_file(out, name).model_dump(mode="json") for name in names]
    manifest = {
        "schema_version": VERSION,
        "package_name": Path(packages[0].manifest.source.checkpoint).name,
        "components": {name: {"variants": variants} for name, variants in components.items()},
        "additional_metadata": {"partita": {"schema": SCHEMA, "files": files, "packages": manifests}},
    }
    (out / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")


def _copy_other_files(packages: Sequence[TargetPackage], home: Path, shared: Path) -> None:
    """Copy the files besides graphs and weights: equal ones to `shared`, others to `home`/TARGET."""
    digests = []
    for each in packages:
        graphs = {WEIGHTS, *(file.file for file in each.manifest.graph.files)}
        digests.append({record.name: record.sha256 for record in each.manifest.files if record.name not in graphs})
    for each, found in zip(packages, digests, strict=True):
        for name, digest in found.items():
            everywhere = all(other.get(name) == digest for other in digests)
            copy = (shared if everywhere else home / each.target) / name
            if not copy.exists():
                shutil.copyfile(each.folder / name, copy)


def directory_uri(folder: Path) -> str:
    """ONNX Runtime's name for the contents of a folder: the hash of its sorted lines `HASH  NAME`."""
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    lines = "".join(f"{record_file(folder, name).sha256}  {name}\n" for name in names)
    return f"sha256:{hashlib.sha256(lines.encode()).hexdigest()}"
