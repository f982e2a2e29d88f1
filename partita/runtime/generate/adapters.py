"""The switchable adapters of a package: looked up by name, and validated against the graphs' adapter inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from partita.errors import PackageError
from partita.package.contract import AdapterInput, GraphFile
from partita.package.folder import Manifest, path_inside
from partita.remedies import FROM_CHECKPOINT, Remedy
from partita.runtime.generate.checks import check_adapter
from partita.runtime.ort.buffers import Buffer, host_buffer, read_adapter

SHOWN = 5
OTHER_ADAPTER = Remedy("use an adapter that was exported for this model")
InputValues = Mapping[str, Buffer]
"""Values of adapter inputs, by input name."""
NOTHING: InputValues = {}
"""Values without an adapter."""


@dataclass(slots=True)
class Adapters:
    """The adapters of a package; each is loaded at its first use."""

    folder: Path
    manifest: Manifest
    loaded: dict[str, InputValues] = field(default_factory=dict)

    def named(self, name: str | None) -> InputValues:
        """Input values of an adapter; empty for None.

        Raises UsageError for an unknown name, PackageError for a file that is damaged or for other graphs.
        """
        check_adapter(self.folder, self.manifest, name)
        if name is None:
            return NOTHING
        if name not in self.loaded:
            record = next(record for record in self.manifest.switchable if record.name == name)
            if record.file is None:
                raise PackageError(
                    f"{self.folder}: the manifest lists no file for adapter {name}", remedy=FROM_CHECKPOINT
                )
            remedy = FROM_CHECKPOINT if self.manifest.foreign is None else OTHER_ADAPTER
            self.loaded[name] = _checked(path_inside(self.folder, record.file), self.manifest.graph.files, remedy)
        return self.loaded[name]


def stack_values(rows: Sequence[InputValues], *, every: bool = False) -> InputValues:
    """One value per input with the values of all rows on the first axis, padded with zeros to the largest rank.

    `rows`: values with a first axis of 1. Without `every`, an input whose value is the same in all rows keeps axis 1.
    """
    if all(each is rows[0] for each in rows) and (not every or not rows[0]):
        return rows[0]
    made: dict[str, Buffer] = {}
    for name in sorted({name for each in rows for name in each}):
        values = [each[name].host[0] if name in each else None for each in rows]
        present = [value for value in values if value is not None]
        sizes = [max(value.shape[axis] for value in present) for axis in range(present[0].ndim)]
        buffer = made[name] = host_buffer((len(rows), *sizes), next(each[name].dtype for each in rows if name in each))
        for row, value in enumerate(values):
            if value is not None:
                buffer.host[row][tuple(slice(0, size) for size in value.shape)] = value
    return made


def _checked(path: Path, graphs: Sequence[GraphFile], remedy: Remedy) -> InputValues:
    """The values of an adapter file, validated against the inputs of the graphs."""
    ports = {port.name: port for graph in graphs for port in graph.adapter_inputs}
    found: dict[str, Buffer] = {}
    ranks: dict[str, int] = {}
    wrong: list[str] = []
    for name, (buffer, shape) in read_adapter(path, remedy).items():
        port = ports.get(name)
        if port is None or buffer.dtype != port.dtype or not _fits(shape, port, ranks):
            requested = "no graph uses it" if port is None else f"the graphs expect {port.dtype} {list(port.shape)}"
            wrong.append(f"{name[:120]} is {buffer.dtype} {list(shape)}, {requested}")
        found[name] = buffer
    if wrong or not found:
        more = f" ({len(wrong):,} in all)" if len(wrong) > SHOWN else ""
        reason = f"{'; '.join(wrong[:SHOWN])}{more}" if wrong else "it contains no values"
        raise PackageError(f"{path}: not an adapter of this package: {reason}", remedy=remedy)
    return found


def _fits(shape: tuple[int, ...], port: AdapterInput, ranks: dict[str, int]) -> bool:
    """Whether a shape matches an input, for one row; equal symbolic sizes must have equal values."""
    wanted = (1, *port.shape[1:]) if port.by_row else port.shape
    return len(shape) == len(wanted) and all(
        size == (each if isinstance(each, int) else ranks.setdefault(each, size))
        for size, each in zip(shape, wanted, strict=True)
    )
