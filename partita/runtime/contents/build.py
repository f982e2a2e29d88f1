"""Everything that a folder or an ONNX file holds, put together; what is wrong with it becomes a finding.

Nothing is run, no weight is read, and no hash is computed that was not asked for: those of the manifest are shown as it
has them, and a snapshot of the hub links to files that are called by theirs.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import partita
from partita import dtypes
from partita.contract import Contract
from partita.errors import PackageError
from partita.inspection.records import (
    AdapterFacts,
    CacheFacts,
    ContractFacts,
    FileFacts,
    Inspection,
    InspectionFinding,
    ModelFacts,
    Provenance,
    StoredTensor,
    WeightFacts,
    WeightKind,
)
from partita.observations.records import remedy_records
from partita.observations.text_format import nats
from partita.package import MANIFEST, FileRecord, Manifest, inside, left_out, sha256_of
from partita.runtime.contents.graphs import ReadGraph, read_graph
from partita.runtime.contents.licence import licence_of
from partita.runtime.contents.modules import module_precisions
from partita.runtime.contents.tensors import UNKNOWN, Stored
from partita.runtime.contents.tokenizer import read_json, tokenizer_of

LARGEST = 8
"""Tensors that are listed."""
PROTOBUF_LIMIT_BYTES = 2**31 - 1
GRAPHS = "*.onnx"
PLACES = ("", "onnx")
"""Folders in which exporters put graphs; the second is that of the hub's ONNX community."""


def graphs_in(folder: Path) -> tuple[str, ...]:
    """Names of the ONNX files of a folder, as exporters lay them out."""
    return tuple(
        path.relative_to(folder).as_posix() for place in PLACES for path in sorted((folder / place).glob(GRAPHS))
    )


def inspect(
    path: Path, manifest: Manifest | None, wrong: Sequence[PackageError], *, hashes: bool = False
) -> Inspection:
    """What `path` holds, a folder or an ONNX file. `manifest`: that of a package, or as it was inferred from a foreign
    folder; None where there is none. `wrong`: what is known to be wrong already. `hashes`: files without one are read.

    Raises OSError when the folder cannot be read.
    """
    is_file = path.is_file()
    folder = path.parent if is_file else path
    graph = None if manifest is None else manifest.graph
    there = (path.name,) if is_file else graphs_in(folder)
    names = there if graph is None else tuple(file.file for file in graph.files)
    findings = list(wrong)
    read = []
    for name in names:
        try:
            read.append(read_graph(folder, name, graph))
        except PackageError as error:
            findings.append(error)
    on_disk = manifest if manifest is not None and manifest.foreign is None else None
    findings += _wrong_files(folder, read, on_disk)
    return Inspection(
        partita_version=partita.__version__,
        path=str(path),
        kind="onnx file" if is_file else "onnx folder" if on_disk is None and not _was_package(folder) else "package",
        findings=tuple(
            InspectionFinding(what=" ".join(error.problem.split()), remedies=remedy_records(error.remedy))
            for error in findings
        ),
        model=_model(folder, manifest),
        graphs=tuple(each.facts for each in read),
        other_graphs=tuple(_file(folder, name, None, hashes=hashes) for name in there if name not in names),
        contract=_contract(manifest),
        foreign=None if manifest is None else manifest.foreign,
        cache=_cache(manifest),
        weights=_weights(read),
        modules=module_precisions(weight for each in read for weight in each.weights),
        adapters=_adapters(manifest),
        files=_files(path, folder, on_disk, read, hashes=hashes),
        provenance=_provenance(folder, manifest),
        tokenizer=tokenizer_of(folder, None if on_disk is None else on_disk.tokenizer),
        licence=licence_of(folder),
    )


def _was_package(folder: Path) -> bool:
    """Whether there is a manifest, readable or not."""
    return (folder / MANIFEST).is_file()


def _wrong_files(folder: Path, read: Sequence[ReadGraph], manifest: Manifest | None) -> list[PackageError]:
    """Files that are missing, cut off or too large."""
    found = []
    for graph in read:
        size = graph.facts.size_bytes
        if size > PROTOBUF_LIMIT_BYTES:
            told = f"{size:,} bytes; ONNX Runtime opens no ONNX file above 2 GiB: its weights have to be external data"
            found.append(PackageError(f"{folder / graph.facts.file}: {told}"))
        found += _wrong_data(folder, graph)
    if manifest is None:
        return found
    said = {file.file for file in manifest.graph.files}.union(*(graph.facts.data_files for graph in read))
    return found + [error for record in manifest.files if (error := _wrong_record(folder, record, said)) is not None]


def _wrong_record(folder: Path, record: FileRecord, said: set[str]) -> PackageError | None:
    """What is wrong with a file that the manifest lists; that those in `said` are missing is told already."""
    try:
        path = inside(folder, record.name)
    except PackageError as error:
        return error
    if not path.is_file():
        return None if record.name in said else PackageError(f"{path}: missing from the package")
    if path.stat().st_size != record.size_bytes:
        return PackageError(f"{path}: {path.stat().st_size:,} bytes, the manifest says {record.size_bytes:,}")
    return None


def _wrong_data(folder: Path, graph: ReadGraph) -> list[PackageError]:
    """Files with weights that are missing, outside of the folder, or shorter than what they are said to hold."""
    ends: dict[str, int] = {}
    for tensor in graph.tensors:
        if tensor.file != graph.facts.file:
            offset = str(tensor.place[1])
            end = (int(offset) if offset.isdecimal() else 0) + tensor.size_bytes
            ends[tensor.file] = max(ends.get(tensor.file, 0), end)
    found = []
    for name, end in ends.items():
        try:
            path = inside(folder, name)
        except PackageError as error:
            found.append(error)
            continue
        if not path.is_file():
            found.append(PackageError(f"{folder / graph.facts.file}: its weights file {name!r} is missing"))
        elif path.stat().st_size < end:
            told = f"{path.stat().st_size:,} bytes, its graph reads up to byte {end:,}: it is cut off"
            found.append(PackageError(f"{path}: {told}"))
    return found


def _model(folder: Path, manifest: Manifest | None) -> ModelFacts:
    """Which model it is."""
    if manifest is not None:
        source, graph = manifest.source, manifest.graph
        return ModelFacts(
            model_type=source.model_type if source.model_type not in ("", UNKNOWN) else None,
            architecture=source.architecture or None,
            parameters=(source.parameters or None) if manifest.foreign is None else None,
            precision=graph.precision or None,
            attention=graph.attention or None,
            layout="partita" if manifest.foreign is None else manifest.foreign.layout,
            left_out=left_out(source.unused),
        )
    config = read_json(folder / "config.json")
    listed = config.get("architectures")
    architecture = listed[0] if isinstance(listed, list) and listed and isinstance(listed[0], str) else None
    kind = config.get("model_type")
    return ModelFacts(
        model_type=kind if isinstance(kind, str) else None,
        architecture=architecture,
        parameters=None,
        precision=None,
        attention=None,
        layout=None,
    )


def _contract(manifest: Manifest | None) -> ContractFacts | None:
    """What running needs."""
    if manifest is None:
        return None
    source = "manifest" if manifest.foreign is None else f"inferred from a folder of {manifest.foreign.layout}"
    return ContractFacts.taken_from(manifest.graph, source=source)


def _cache(manifest: Manifest | None) -> CacheFacts | None:
    """What the states take."""
    if manifest is None:
        return None
    graph = manifest.graph
    sizes = [dtypes.size_bytes(state.dtype, state.shape) for state in graph.states]
    fixed = sum(
        size
        for size, state in zip(sizes, graph.states, strict=True)
        if state.kind not in ("key", "value") or state.rolls
    )
    return CacheFacts(
        states=graph.states,
        size_bytes=sum(sizes),
        bytes_per_token=(sum(sizes) - fixed) // (graph.batch_size * graph.max_length),
        fixed_bytes=fixed,
        layout=_layout(graph),
    )


def _layout(graph: Contract) -> Literal["growing", "window", "fixed"]:
    """How keys and values are kept."""
    if any(state.grows is not None for state in graph.states):
        return "growing"
    return "window" if any(state.rolls for state in graph.states) else "fixed"


def _weights(read: Sequence[ReadGraph]) -> WeightFacts:
    """What is stored, by type; a tensor that several graphs share counts once."""
    kept: dict[object, Stored] = {}
    for graph in read:
        for tensor in graph.tensors:
            kept.setdefault(tensor.place, tensor)
    kinds: dict[str, list[Stored]] = {}
    for tensor in kept.values():
        kinds.setdefault(tensor.dtype, []).append(tensor)
    rows = [
        WeightKind(
            dtype=dtype,
            tensors=len(listed),
            elements=sum(tensor.elements for tensor in listed),
            size_bytes=sum(tensor.size_bytes for tensor in listed),
        )
        for dtype, listed in kinds.items()
    ]
    largest = sorted(kept.values(), key=lambda tensor: -tensor.size_bytes)[:LARGEST]
    return WeightFacts(
        size_bytes=sum(row.size_bytes for row in rows),
        kinds=tuple(sorted(rows, key=lambda row: (-row.size_bytes, row.dtype))),
        largest=tuple(StoredTensor.taken_from(tensor) for tensor in largest),
    )


def _adapters(manifest: Manifest | None) -> tuple[AdapterFacts, ...]:
    """The adapters of a package."""
    return tuple(
        AdapterFacts(
            name=record.name,
            merged=record.merged,
            kind=record.kind,
            ranks=record.ranks,
            modules=record.modules,
            whole=record.whole,
            base_model=record.base_model or None,
            file=record.file,
            source_files=tuple(FileFacts.taken_from(file) for file in record.source),
        )
        for record in (() if manifest is None else manifest.adapters)
    )


def _files(
    path: Path, folder: Path, manifest: Manifest | None, read: Sequence[ReadGraph], *, hashes: bool
) -> tuple[FileFacts, ...]:
    """Files of a package as its manifest lists them; of another folder those that lie in it. An ONNX file by itself is
    listed for its hash alone, with the files that its weights are in.
    """
    if path.is_file():
        beside = (name for graph in read for name in graph.facts.data_files if _is_inside(folder, name))
        return tuple(_file(folder, name, None, hashes=True) for name in (path.name, *beside)) if hashes else ()
    if manifest is not None:
        return tuple(_file(folder, record.name, record.sha256) for record in manifest.files)
    names = sorted(
        path.relative_to(folder).as_posix()
        for place in PLACES
        if (folder / place).is_dir()
        for path in (folder / place).iterdir()
        if path.is_file()
    )
    return tuple(_file(folder, name, None, hashes=hashes) for name in names)


def _is_inside(folder: Path, name: str) -> bool:
    """Whether a file that a stranger's file names is to be read; one that is not is among the findings."""
    try:
        inside(folder, name)
    except PackageError:
        return False
    return True


def _file(folder: Path, name: str, sha256: str | None, *, hashes: bool = False) -> FileFacts:
    """One file; without a size where it is missing."""
    path = folder / name
    if not path.is_file():
        return FileFacts(name=name, size_bytes=None, sha256=sha256)
    sha256 = sha256 or _linked_sha256(path) or (sha256_of(path) if hashes else None)
    return FileFacts(name=name, size_bytes=path.stat().st_size, sha256=sha256)


def _linked_sha256(path: Path) -> str | None:
    """The SHA-256 that a snapshot of the hub calls a large file by, snapshots/REVISION/name -> blobs/SHA-256; None for
    anything else.
    """
    target = path.resolve() if path.is_symlink() else path
    return target.name if target.parent.name == "blobs" and re.fullmatch("[0-9a-f]{64}", target.name) else None


def _provenance(folder: Path, manifest: Manifest | None) -> Provenance:
    """Where it comes from."""
    if manifest is None or manifest.foreign is not None:
        return _foreign_provenance(folder)
    source, quality, target = manifest.source, manifest.quality, manifest.target
    told = None
    if quality is not None:
        told = (
            f"perplexity ratio {quality.perplexity_ratio:.4f}, KL divergence {nats(quality.kl_mean)} on "
            f"{quality.tokens:,} tokens of {quality.text}"
        )
    return Provenance(
        created=manifest.created,
        checkpoint=source.checkpoint,
        dtype=source.dtype,
        source_files=tuple(FileFacts.taken_from(record) for record in source.files),
        toolchain=manifest.toolchain,
        target=None if target is None else target.provider,
        verification=f"{manifest.verification.status}: {manifest.verification.detail}",
        quality=told,
    )


def _foreign_provenance(folder: Path) -> Provenance:
    """What the config beside a foreign graph says of the model that it was made from."""
    config = read_json(folder / "config.json")
    name, dtype = config.get("_name_or_path"), config.get("torch_dtype", config.get("dtype"))
    version = config.get("transformers_version")
    return Provenance(
        created=None,
        checkpoint=name if isinstance(name, str) and name else None,
        dtype=dtype if isinstance(dtype, str) else None,
        source_files=(),
        toolchain={"transformers": version} if isinstance(version, str) else {},
        target=None,
        verification=None,
        quality=None,
    )
