"""Write weights from checkpoint files to one external data file, slice by slice.

Equal weights (tied weights, and those shared by prefill and decode graphs) are written once. Peak memory is one slice.
"""

from __future__ import annotations

import errno
import hashlib
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch

from partita.errors import CheckpointError, PartitaError, ResourceError
from partita.export.checkpoint.description import Checkpoint
from partita.export.checkpoint.naming import Sources
from partita.export.checkpoint.weight_files import SHOWN_CHARACTERS, OpenFiles, few, unreadable
from partita.export.progress import Stage
from partita.export.publish import is_written, scratch_in
from partita.export.weights import CHECKPOINT, COMPUTING, to_ir
from partita.export.weights.origins import Origin, TensorInfo
from partita.export.weights.sources import StoredPart, WeightSource, checkpoint_weight, weight_part
from partita.observations.text_format import human_bytes, plural
from partita.package.folder import WEIGHTS
from partita.remedies import fix_for

COMPUTED_IN = frozenset(to_ir(name) for name in COMPUTING)
INLINE_BYTES = 1024
"""Smaller constants stay inside the ONNX file."""
ALIGNMENT = 4096
"""Offset alignment of large tensors for memory mapping by ONNX Runtime (ONNX external data specification)."""
COMPUTED = ("inv_freq", ".masked_bias", ".attn.bias")
"""Name suffixes of tensors that transformers computes, and that some checkpoints contain."""
SPACE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def attach(model: ir.Model, checkpoint: Checkpoint, sources: Sources, buffers: Mapping[str, torch.Tensor]) -> None:
    """Attach the checkpoint tensor or buffer to every initializer without data. Raises CheckpointError."""
    missing, wrong = [], []
    for name, value in model.graph.initializers.items():
        if value.const_value is not None:
            continue
        origin = sources.of(name)
        assert value.shape is not None and value.dtype is not None
        if origin is None and name in buffers:
            value.const_value = ir.tensor(buffers[name], name=name)
        elif origin is None and name in sources.failures:
            wrong.append(f"{name} cannot be assembled ({sources.failures[name]})")
        elif origin is None:
            missing.append(name)
        elif problem := _misfit(origin, tuple(value.shape.numpy()), value.dtype):
            wrong.append(problem)
        elif value.dtype in COMPUTED_IN:
            known_as = origin.name if isinstance(origin, TensorInfo) else name
            value.const_value = checkpoint_weight(checkpoint, origin, value.dtype, name=known_as, parameter=name)
        else:
            with OpenFiles() as files:
                value.const_value = ir.tensor(origin.read_all(files).contiguous(), name=name)
    if missing or wrong:
        strange = [name for name in sources.unmatched_tensors if not name.endswith(COMPUTED)]
        differences = [
            f"{what} {few(items, separator)}"
            for what, items, separator in (
                ("missing from the weight files:", sorted(missing), ", "),
                ("not expected by the model:", sorted(wrong), "; "),
                ("not in the model:", strange, ", "),
            )
            if items
        ]
        raise CheckpointError(
            f"{checkpoint.location}: weights and config.json do not match: {'; '.join(differences)}; "
            "check that they belong to the same model"
        )


def _misfit(origin: Origin, shape: tuple[int, ...], dtype: ir.DataType) -> str | None:
    """The mismatch of an origin with `shape` and `dtype`; None where they match."""
    tensors = list(origin.tensors())
    if origin.shape != shape:
        name = tensors[0].name if len(tensors) == 1 else f"the result of {len(tensors)} tensors like {tensors[0].name}"
        return f"{name} is {list(origin.shape)}, but config.json requires {list(shape)}"
    if dtype in COMPUTED_IN:
        for info in tensors:
            if info.dtype not in CHECKPOINT:
                return f"{info.name} is {info.dtype}, not a float type"
    return None


def unused_tensors(models: Iterable[ir.Model], checkpoint: Checkpoint, sources: Sources) -> list[str]:
    """Unused checkpoint tensors by outermost unused module: `vision_tower (312 tensors, 381 MiB)`."""
    used = {name for m in models for w in _weights(m) for name in w.source.tensors} | sources.second_names()
    used |= sources.ignored_tensors
    left = [t for n, t in sorted(checkpoint.tensors.items()) if n not in used and not n.endswith(COMPUTED)]
    modules = {prefix for name in used for prefix in _modules(name)}
    groups: dict[str, list[TensorInfo]] = {}
    for info in left:
        outermost = next((prefix for prefix in _modules(info.name) if prefix not in modules), info.name)
        groups.setdefault(outermost, []).append(info)
    return [_counted(name, infos) for name, infos in sorted(groups.items(), key=lambda g: -len(g[1]))]


def _modules(name: str) -> list[str]:
    """The modules of a tensor by its name, outermost first."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


def _counted(name: str, infos: list[TensorInfo]) -> str:
    if [info.name for info in infos] == [name]:
        return name[:SHOWN_CHARACTERS]
    size = sum(info.size_bytes for info in infos)
    return f"{name[:SHOWN_CHARACTERS]} ({plural(len(infos), 'tensor')}, {human_bytes(size)})"


def parameter_count(models: Iterable[ir.Model]) -> int:
    """Elements of all weights; shared ones count once."""
    sizes = {w.source.name: w.source.elements for m in models for w in _weights(m)}
    return sum(sizes.values())


def _weights(model: ir.Model) -> Iterator[StoredPart]:
    """Weight parts that are not written yet."""
    return (part for value in model.graph.initializers.values() if (part := weight_part(value)) is not None)


@dataclass(frozen=True, slots=True)
class DataFile:
    """The written external data file."""

    size_bytes: int
    sha256: str


def planned_bytes(models: Iterable[ir.Model]) -> int:
    """Size of the external data file in bytes, without alignment."""
    return sum({w.key: w.nbytes for m in models for w in _weights(m)}.values())


def file_bytes(models: Iterable[ir.Model]) -> int:
    """Size of the external data file in bytes."""
    position, placed = 0, set()
    for value in (value for model in models for value in model.graph.initializers.values()):
        tensor, part = value.const_value, weight_part(value)
        assert tensor is not None, value.name
        key: object = tensor.tobytes() if part is None and tensor.nbytes >= INLINE_BYTES else None
        if part is not None:
            key = part.source.key
        if key is None or key in placed:
            continue
        placed.add(key)
        for size in [tensor.nbytes] if part is None else [each.size_bytes for each in part.source.parts]:
            position += _filling(position, size) + size
    return position


def _filling(position: int, size: int) -> int:
    """Padding in bytes before a tensor of `size` bytes."""
    return -position % (ALIGNMENT if size >= ALIGNMENT else 64)


def write_data(models: Sequence[ir.Model], folder: Path, stage: Stage) -> DataFile:
    """Write large initializers to `folder`/model.onnx.data, and refer to it. Raises ResourceError."""
    try:
        with (folder / WEIGHTS).open("wb") as stream, scratch_in(folder):
            writer = _Writer(stream, stage)
            for model in models:
                for value in model.graph.initializers.values():
                    writer.place(value, folder)
            return DataFile(writer.position, writer.digest.hexdigest())
    except OSError as error:
        raise translate_space(error, folder) from error


def translate_space(error: OSError, folder: Path) -> PartitaError:
    """The error for an OSError while the package in `folder` is written, in one line."""
    if remedy := fix_for(error, "", folder.parent):
        where = error.filename or tempfile.tempdir or "TMPDIR"
        return ResourceError(f"{where}: cannot write a temporary file ({error.strerror or error}); {remedy}")
    if error.errno in SPACE_ERRORS:
        return ResourceError(f"{folder.parent}: no space left while writing the package; free some and export again")
    if isinstance(error.filename, str) and not is_written(Path(error.filename), folder):
        return unreadable(error, Path(error.filename))
    return ResourceError(f"{folder.parent}: cannot write the package ({error.strerror or error})")


class _Writer:
    """Appends aligned tensors to a stream, each distinct one once."""

    def __init__(self, stream: Any, stage: Stage) -> None:
        self.stream, self.stage = stream, stage
        self.position = 0
        self.digest = hashlib.sha256()
        self.placed: dict[object, tuple[int, int]] = {}

    def place(self, value: ir.Value, folder: Path) -> None:
        tensor = value.const_value
        assert tensor is not None, value.name
        part = weight_part(value)
        if part is not None:
            if part.key not in self.placed:
                self._append_weight(part.source)
            offset, length = self.placed[part.key]
        elif tensor.nbytes < INLINE_BYTES:
            if isinstance(tensor, ir.ExternalTensor):  # a file of another exporter
                value.const_value = ir.tensor(tensor.numpy(), dtype=tensor.dtype, name=value.name)
            return
        else:
            offset, length = self._append_constant(tensor.tobytes())
        value.const_value = ir.ExternalTensor(
            WEIGHTS,
            offset,
            length,
            tensor.dtype,
            shape=ir.Shape(tensor.shape.numpy()),
            name=value.name or "",
            base_dir=folder,
        )

    def _append_weight(self, source: WeightSource) -> None:
        """Write the parts of a weight in the order of its source."""
        starts, written = [self.position] * len(source.parts), [0] * len(source.parts)
        current = -1
        for index, piece in source.pieces():
            if index != current:
                self._align(source.parts[index].size_bytes)
                starts[index], current = self.position, index
            # little-endian bytes without a copy; numpy lacks bfloat16
            self._write(piece.reshape(-1).view(torch.uint8).numpy().data)
            written[index] += piece.nbytes
            self.stage.advance(piece.nbytes)
        for index, part in enumerate(source.parts):
            if written[index] != part.size_bytes:
                raise ValueError(
                    f"{source.name}: part {index} has {part.size_bytes} bytes, but {written[index]} were written"
                )
            self.placed[source.key, index] = starts[index], written[index]

    def _append_constant(self, data: bytes) -> tuple[int, int]:
        key = hashlib.sha256(data).hexdigest()
        if key not in self.placed:
            self._align(len(data))
            self.placed[key] = self.position, len(data)
            self._write(data)
        return self.placed[key]

    def _align(self, size: int) -> None:
        """Pad to the alignment of a tensor of `size` bytes."""
        self._write(b"\0" * _filling(self.position, size))

    def _write(self, data: bytes | memoryview) -> None:
        self.stream.write(data)
        self.digest.update(data)
        self.position += len(data)
