"""Adapters of a foreign graph: inputs with defaults without effect, and files with values for them.

Olive and onnxruntime-genai store LoRA weights as graph inputs with initializers, and one ONNX Runtime adapter file per
adapter. Old exporters list every weight as an input with a default; those have fixed sizes, and there is no file.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from partita.errors import PackageError
from partita.foreign.facts import GraphFacts, PortFact
from partita.observations.text_format import listing
from partita.package.contract import AdapterInput
from partita.package.folder import AdapterRecord
from partita.remedies import Remedy

SUFFIX = ".onnx_adapter"
NAMED_TWICE = Remedy("rename one of them")


def adapter_files(folder: Path, homes: Sequence[str]) -> tuple[str, ...]:
    """Adapter files in a folder and in its subfolders with graphs, relative to it."""
    places = dict.fromkeys((folder, *((folder / home) for home in homes)))
    return tuple(
        path.relative_to(folder).as_posix()
        for place in places
        for path in sorted(place.glob(f"*{SUFFIX}"))
        if path.is_file()
    )


def adapter_records(folder: Path, files: Sequence[str]) -> tuple[AdapterRecord, ...]:
    """One record per file, named after it. Raises PackageError for equal names."""
    found: dict[str, str] = {}
    for file in files:
        name = PurePosixPath(file).stem
        if name in found:
            raise PackageError(
                f"{folder}: {listing((found[name], file))} are adapters with the same name", remedy=NAMED_TWICE
            )
        found[name] = file
    return tuple(AdapterRecord(name=name, merged=False, file=file) for name, file in found.items())


def adapter_inputs(graph: GraphFacts, *, files: bool) -> tuple[AdapterInput, ...]:
    """Inputs for values of adapters.

    With adapter `files`, all inputs with defaults; without, those with an empty default or a symbolic size.
    """
    return tuple(
        AdapterInput(
            name=port.name,
            shape=tuple(f"{port.name}_{axis}" if size is None else size for axis, size in enumerate(port.shape or ())),
            dtype=port.dtype,
        )
        for port in graph.defaults
        if files or port.name in graph.empty or _open(port)
    )


def _open(port: PortFact) -> bool:
    return any(not isinstance(size, int) for size in port.shape or ())
