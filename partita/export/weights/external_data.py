"""Write weights from checkpoint files to one external data file, slice by slice.

Equal weights (tied weights, and those shared by prefill and decode graphs) are written once. Small weights are
converted ahead, and a slice is hashed while the next is written, so a few slices are in memory.
"""

from __future__ import annotations

import errno
import hashlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import onnx_ir as ir
import torch

from partita.errors import CheckpointError, PartitaError, ResourceError
from partita.export.checkpoint.description import Checkpoint
from partita.export.checkpoint.naming import Sources
from partita.export.checkpoint.weight_files import SHOWN_CHARACTERS, OpenFiles, few
from partita.export.progress import Stage
from partita.export.weights import CHECKPOINT, COMPUTING, to_ir
from partita.export.weights.origins import Origin, TensorInfo
from partita.export.weights.sources import (
    SLICE_BYTES,
    FloatSource,
    StoredPart,
    WeightSource,
    weight_part,
    workers,
)
from partita.observations.text_format import human_bytes, plural
from partita.package.folder import WEIGHTS, FileRecord

COMPUTED_IN = frozenset(to_ir(name) for name in COMPUTING)
INLINE_BYTES = 1024
"""Smaller constants stay inside the ONNX file."""
ALIGNMENT = 4096
"""Offset alignment of large tensors for memory mapping by ONNX Runtime (ONNX external data specification)."""
COMPUTED = ("inv_freq", ".masked_bias", ".attn.bias", ".attention.bias", "causal_mask", "position_ids")
"""Name suffixes of tensors that transformers computes, and that some checkpoints contain."""
AHEAD = 2
"""Weights that are converted while another one is written."""
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
            value.const_value = StoredPart(FloatSource(checkpoint, origin, value.dtype, known_as, (name,)))
        else:
            with OpenFiles() as files:
                value.const_value = ir.tensor(origin.read_all(files).contiguous(), name=name)
    if missing or wrong:
        strange = [name for name in sources.unmatched_tensors if not name.endswith(COMPUTED)]
        differences = [f"missing from the weight files: {few(sorted(missing))}"] if missing else []
        differences += [f"not expected by the model: {few(sorted(wrong), '; ')}"] if wrong else []
        differences += [f"not in the model: {few(strange)}"] if strange else []
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
                return f"{info.name} is {info.dtype}, not a float type; config.json has no settings for it"
    return None


def unused_tensors(models: Iterable[ir.Model], checkpoint: Checkpoint, sources: Sources) -> list[str]:
    """Unused checkpoint tensors by outermost unused module: `vision_tower (312 tensors, 381 MiB)`."""
    used = {name for m in models for w in _weights(m) for name in w.source.tensors} | sources.second_names()
    left = [t for n, t in sorted(checkpoint.tensors.items()) if n not in used and not n.endswith(COMPUTED)]
    modules = {prefix for name in used for prefix in _modules(name)}
    groups: dict[str, list[TensorInfo]] = {}
    for info in left:
        outermost = next((prefix for prefix in _modules(info.name) if prefix not in modules), info.name)
        groups.setdefault(outermost, []).append(info)
    texts = []
    for name, infos in sorted(groups.items(), key=lambda group: -len(group[1])):
        size = f" ({plural(len(infos), 'tensor')}, {human_bytes(sum(info.size_bytes for info in infos))})"
        texts.append(name[:SHOWN_CHARACTERS] + ("" if name == infos[0].name else size))
    return texts


def _modules(name: str) -> list[str]:
    """The modules of a tensor by its name, outermost first."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


def parameter_count(models: Iterable[ir.Model]) -> int:
    """Elements of all weights; shared ones count once."""
    sizes = {w.source.name: w.source.elements for m in models for w in _weights(m)}
    return sum(sizes.values())


def _weights(model: ir.Model) -> Iterator[StoredPart]:
    """Weight parts that are not written yet."""
    return (part for value in model.graph.initializers.values() if (part := weight_part(value)) is not None)


def planned_bytes(models: Iterable[ir.Model]) -> int:
    """Size of the external data file in bytes, without alignment."""
    return sum({w.key: w.nbytes for m in models for w in _weights(m)}.values())


_Content = WeightSource | ir.TensorProtocol
"""A weight or a constant."""
_Piece = tuple[int, bytes | memoryview]
"""The index of a part, and little-endian bytes of it."""


@dataclass(slots=True)
class _FileLayout:
    """The distinct tensors of a data file, and their places in it."""

    contents: list[tuple[_Content, tuple[int, ...]]] = field(default_factory=list)
    """In order: a weight or constant, and the offset of each part."""
    places: dict[object, tuple[int, int]] = field(default_factory=dict)
    """Key of a tensor -> offset and length. Tensors with equal keys have equal bytes."""
    values: list[tuple[ir.Value, object]] = field(default_factory=list)
    """The initializers in the file, with the keys of their tensors."""
    size_bytes: int = 0

    @classmethod
    def of(cls, models: Iterable[ir.Model]) -> _FileLayout:
        """The layout of the data file of `models`."""
        layout = cls()
        for value in (value for model in models for value in model.graph.initializers.values()):
            tensor = value.const_value
            assert tensor is not None, value.name
            if isinstance(tensor, StoredPart):
                source = tensor.source
                layout.values.append((value, tensor.key))
                layout._add(source, {(source.key, index): part.size_bytes for index, part in enumerate(source.parts)})
            elif tensor.nbytes >= INLINE_BYTES:
                key = hashlib.sha256(tensor.tobytes()).hexdigest()
                layout.values.append((value, key))
                layout._add(tensor, {key: tensor.nbytes})
        return layout

    def _add(self, content: _Content, sizes: Mapping[object, int]) -> None:
        """Append a weight or constant with the sizes of its parts, unless it has a place."""
        if sizes.keys() <= self.places.keys():
            return
        for key, size in sizes.items():
            self.size_bytes += -self.size_bytes % (ALIGNMENT if size >= ALIGNMENT else 64)
            self.places[key] = self.size_bytes, size
            self.size_bytes += size
        self.contents.append((content, tuple(self.places[key][0] for key in sizes)))

    def pieces(self, stage: Stage) -> Iterator[bytes | memoryview]:
        """The bytes of the file in order, padding included. Raises CheckpointError."""
        position = 0
        for content, offsets, pieces in self._ahead():
            for index, piece in pieces:
                yield b"\0" * (offsets[index] - position)
                yield piece
                position = max(position, offsets[index]) + len(piece)
                stage.advance(len(piece))
            end = offsets[-1] + (content.parts[-1].size_bytes if isinstance(content, WeightSource) else content.nbytes)
            if position != end:
                raise ValueError(f"{content.name}: its last part ends at byte {position:,}, not at {end:,}")

    def _ahead(self) -> Iterator[tuple[_Content, tuple[int, ...], Iterable[_Piece]]]:
        """The contents, their offsets and pieces; small contents are converted in threads before they are needed."""
        waiting: deque[tuple[_Content, tuple[int, ...], Future[list[_Piece]] | None]] = deque()
        with workers(), ThreadPoolExecutor(AHEAD) as threads:
            for last, (content, offsets) in enumerate(self.contents, 1):
                small = isinstance(content, WeightSource) and _is_small(content)
                found = threads.submit(copy_context().run, partial(list[_Piece], _pieces(content))) if small else None
                waiting.append((content, offsets, found))
                while len(waiting) > (AHEAD if last < len(self.contents) else 0):
                    content, offsets, found = waiting.popleft()
                    yield content, offsets, _pieces(content) if found is None else found.result()


def _pieces(content: _Content) -> Iterator[_Piece]:
    """The pieces of a weight or constant in order."""
    if not isinstance(content, WeightSource):
        yield 0, content.tobytes()
        return
    for index, piece in content.pieces():
        yield index, piece.reshape(-1).view(torch.uint8).numpy().data  # without a copy; numpy lacks bfloat16


def _is_small(weight: WeightSource) -> bool:
    """Whether a slice has all of it, and its checkpoint files are mapped: a thread would read another file whole."""
    mapped = all(info.file.suffix == ".safetensors" for info in weight.origin.tensors())
    return mapped and sum(part.size_bytes for part in weight.parts) <= SLICE_BYTES


def file_bytes(models: Iterable[ir.Model]) -> int:
    """Size of the external data file in bytes."""
    return _FileLayout.of(models).size_bytes


def write_data(models: Sequence[ir.Model], folder: Path, stage: Stage) -> FileRecord:
    """Write large initializers to `folder`/model.onnx.data, and refer to it; its record. Raises ResourceError."""
    try:
        with (folder / WEIGHTS).open("wb") as stream, ThreadPoolExecutor(1) as hashing:
            layout, digest = _FileLayout.of(models), hashlib.sha256()
            hashed: Future[None] | None = None
            for piece in layout.pieces(stage):
                if hashed is not None:
                    hashed.result()  # of the piece before: hashed while it was written and this one converted
                hashed = hashing.submit(digest.update, piece)
                stream.write(piece)
    except OSError as error:
        raise translate_space(error, folder) from error
    for value in (value for model in models for value in model.graph.initializers.values()):
        if isinstance(tensor := value.const_value, ir.ExternalTensor) and tensor.nbytes < INLINE_BYTES:
            value.const_value = ir.tensor(tensor.numpy(), dtype=tensor.dtype, name=value.name)  # of another exporter
    for value, key in layout.values:
        tensor, (offset, length) = value.const_value, layout.places[key]
        assert tensor is not None
        shape, name = ir.Shape(tensor.shape.numpy()), value.name or ""
        value.const_value = ir.ExternalTensor(
            WEIGHTS, offset, length, tensor.dtype, shape=shape, name=name, base_dir=folder
        )
    return FileRecord(name=WEIGHTS, size_bytes=layout.size_bytes, sha256=digest.hexdigest())


def translate_space(error: OSError, folder: Path) -> PartitaError:
    """The error for an OSError while the package in `folder` is written, in one line."""
    if error.errno in SPACE_ERRORS:
        place = f"{folder.parent}: no space left while writing the package"
        return ResourceError(f"{place}; free some there, and in the temporary folder (TMPDIR), and export again")
    where = error.filename if isinstance(error.filename, str) else folder.parent
    return ResourceError(f"{where}: {error.strerror or error}; the package was not written")
