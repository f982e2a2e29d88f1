"""Weights from checkpoint files to one external data file, a slice at a time.

Until it is written, a weight is a `CheckpointWeight`: which tensors it comes from and what is done to them on the way.
Equal weights (tied ones, and those of a prefill and a decode graph) are written once. Peak memory is one slice of one
tensor.
"""

from __future__ import annotations

import errno
import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch

from partita.errors import CheckpointError, ResourceError
from partita.export.checkpoint import Checkpoint
from partita.export.element_types import CHECKPOINT, COMPUTING, of_ir, to_ir, to_torch
from partita.export.naming import Sources
from partita.export.origins import Interleaved, Origin, Stored, blocks
from partita.export.progress import Stage
from partita.export.weight_files import SHOWN_CHARACTERS, OpenFiles, TensorInfo
from partita.package import WEIGHTS

COMPUTED_IN = frozenset(to_ir(name) for name in COMPUTING)
SLICE_BYTES = 32 << 20
"""Weights are read, cast and written in pieces of about this size."""
INLINE_BYTES = 1024
"""Smaller constants stay inside the ONNX file."""
ALIGNMENT = 4096
"""Offset alignment of large tensors, so that ONNX Runtime can map them into memory (ONNX external data
specification).
"""
COMPUTED = ("inv_freq", ".masked_bias", ".attn.bias")
"""Ends of the names of what transformers computes itself, and some checkpoints hold all the same."""
SPACE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class CheckpointWeight(ir.LazyTensor):
    """A weight that still lies in the checkpoint: in one of its tensors, or made of several."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        source: str | Origin,
        dtype: ir.DataType,
        *,
        name: str | None = None,
        shape: tuple[int, ...] | None = None,
    ) -> None:
        origin = Stored(checkpoint.tensors[source]) if isinstance(source, str) else source
        self.tensors = frozenset(info.name for info in origin.tensors())
        name = name or min(self.tensors)
        super().__init__(self._whole, dtype, ir.Shape(origin.shape if shape is None else shape), name=name)
        self.checkpoint, self.origin, self.source = checkpoint, origin, name

    @property
    def key(self) -> tuple[Origin, int]:
        """Equal keys are equal bytes."""
        return self.origin, int(self.dtype)

    def permuted(self, order: tuple[int, ...]) -> CheckpointWeight:
        """The same weight with axis `order[i]` as axis i."""
        return self._as(self.origin.permuted(order))

    def transpose(self) -> CheckpointWeight:
        """The same weight with its two axes swapped."""
        return self.permuted((1, 0))

    def interleaved(self, axis: int) -> CheckpointWeight:
        """The same weight with its halves along `axis`, [gate; up], as g0, u0, g1, u1, ..."""
        return self._as(Interleaved(self.origin, axis))

    def reshaped(self, shape: tuple[int, ...]) -> CheckpointWeight:
        """The same bytes as a tensor of another shape. This comes last: axes are those of the origin before it."""
        if math.prod(shape) != self.size:
            raise ValueError(f"{self.source}: {list(self.shape)} cannot be seen as {list(shape)}")
        return CheckpointWeight(self.checkpoint, self.origin, self.dtype, name=self.source, shape=shape)

    def _as(self, origin: Origin) -> CheckpointWeight:
        if self.shape != ir.Shape(self.origin.shape):
            raise ValueError(f"{self.source}: the axes of {list(self.origin.shape)} are gone in {list(self.shape)}")
        return CheckpointWeight(self.checkpoint, origin, self.dtype, name=self.source)

    def slices(self) -> Iterator[torch.Tensor]:
        """The weight in package dtype and layout, in consecutive pieces of about `SLICE_BYTES`.

        Raises CheckpointError when a value does not fit the dtype.
        """
        target = to_torch(of_ir(self.dtype))
        with OpenFiles(self.checkpoint.folder) as files:
            for region in blocks(self.origin.shape, SLICE_BYTES // target.itemsize):
                piece = self.origin.read(region, files)
                cast = piece.to(target)
                if torch.isnan(cast).any():
                    raise CheckpointError(
                        f"{self.checkpoint.folder}: tensor {self.source} holds NaN; the checkpoint is broken"
                    )
                if target is torch.float16 and not torch.isfinite(cast).all() and torch.isfinite(piece).all():
                    raise CheckpointError(
                        f"tensor {self.source}: a value of {float(piece.abs().max()):.3g} does not fit float16; use "
                        "--precision "
                        "bf16 or fp32"
                    )
                yield cast.contiguous()

    def _whole(self) -> ir.TensorProtocol:
        """The whole weight in memory; for tests and tools, not used when a package is written."""
        pieces = [piece.reshape(-1) for piece in self.slices()]
        flat = torch.cat(pieces) if pieces else torch.empty(0, dtype=to_torch(of_ir(self.dtype)))
        return ir.tensor(flat.reshape(tuple(self.shape.numpy())), dtype=self.dtype)


def _raw(tensor: torch.Tensor) -> memoryview:
    """Little-endian bytes of a contiguous tensor, not copied; numpy has no bfloat16, so the bits are taken as they
    are.
    """
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def attach(model: ir.Model, checkpoint: Checkpoint, sources: Sources, buffers: Mapping[str, torch.Tensor]) -> None:
    """Give every initializer that has no data yet its checkpoint tensor.

    `buffers` are the model's own values of stored buffers, for those the checkpoint does not hold. Raises
    CheckpointError naming what is missing or of another shape or dtype than the config asks for.
    """
    missing, wrong = [], []
    for name, value in model.graph.initializers.items():
        if value.const_value is not None:
            continue
        origin = sources.of(name)
        assert value.shape is not None and value.dtype is not None
        if origin is None and name in buffers:
            value.const_value = ir.tensor(buffers[name], name=name)
        elif origin is None and name in sources.failed:
            wrong.append(f"{name} cannot be put together ({sources.failed[name]})")
        elif origin is None:
            missing.append(name)
        elif problem := _misfit(origin, tuple(value.shape.numpy()), value.dtype):
            wrong.append(problem)
        elif value.dtype in COMPUTED_IN:
            value.const_value = CheckpointWeight(checkpoint, origin, value.dtype, name=_name_of(origin, name))
        else:
            with OpenFiles(checkpoint.folder) as files:
                value.const_value = ir.tensor(origin.read_all(files).contiguous(), name=name)
    if missing or wrong:
        told = [
            f"{what} {_few(items, separator)}"
            for what, items, separator in (
                ("missing from the weight files:", sorted(missing), ", "),
                ("not what the model takes:", sorted(wrong), "; "),
                ("not in the model:", _unknown(sources), ", "),
            )
            if items
        ]
        raise CheckpointError(
            f"{checkpoint.folder}: weights and config.json disagree: {'; '.join(told)}; check that they belong together"
        )


def _unknown(sources: Sources) -> list[str]:
    """Tensors that the model has no place for."""
    return [name for name in sources.unmatched if not name.endswith(COMPUTED)]


def _name_of(origin: Origin, name: str) -> str:
    """What users know a weight by: the checkpoint's name, or the model's name of what is made of several tensors."""
    return origin.info.name if isinstance(origin, Stored) else name


def _misfit(origin: Origin, shape: tuple[int, ...], dtype: ir.DataType) -> str | None:
    """What is wrong with an origin for a value of `shape` and `dtype`; None when nothing is."""
    tensors = list(origin.tensors())
    if origin.shape != shape:
        name = tensors[0].name if len(tensors) == 1 else f"what {len(tensors)} tensors like {tensors[0].name} make"
        return f"{name} is {list(origin.shape)}, config.json asks for {list(shape)}"
    if dtype in COMPUTED_IN:
        for info in tensors:
            if info.dtype not in CHECKPOINT:
                return f"{info.name} is {info.dtype}, not a float type; quantised checkpoints cannot be exported yet"
    return None


def _few(items: list[str], separator: str = ", ") -> str:
    """The first five, and how many there are."""
    shown = separator.join(item[: 2 * SHOWN_CHARACTERS] for item in items[:5])
    return shown + (f" and {len(items) - 5} more ({len(items)} in all)" if len(items) > 5 else "")


def unused_tensors(models: Iterable[ir.Model], checkpoint: Checkpoint, sources: Sources) -> list[str]:
    """What the checkpoint holds and no graph uses, by the outermost modules that nothing is used of, with counts:
    `vision_tower (312 tensors, 0.4 GB)`. Second names and what transformers computes itself are not told.
    """
    used = {name for m in models for w in _weights(m) for name in w.tensors} | sources.second_names()
    used |= sources.ignored
    left = [t for n, t in sorted(checkpoint.tensors.items()) if n not in used and not n.endswith(COMPUTED)]
    modules = {prefix for name in used for prefix in _modules(name)}
    groups: dict[str, list[TensorInfo]] = {}
    for info in left:
        outermost = next((prefix for prefix in _modules(info.name) if prefix not in modules), info.name)
        groups.setdefault(outermost, []).append(info)
    return [_counted(name, infos) for name, infos in sorted(groups.items(), key=lambda g: -len(g[1]))]


def _modules(name: str) -> list[str]:
    """The modules that a tensor is in, by its name, outermost first."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


def _counted(name: str, infos: list[TensorInfo]) -> str:
    if [info.name for info in infos] == [name]:
        return name[:SHOWN_CHARACTERS]
    size = sum(info.size_bytes for info in infos)
    told = f"{size / 1e9:.1f} GB" if size >= 5e7 else f"{size / 1e6:.1f} MB" if size >= 5e4 else f"{size:,} bytes"
    return f"{name[:SHOWN_CHARACTERS]} ({len(infos)} tensor{'s' if len(infos) != 1 else ''}, {told})"


def parameter_count(models: Iterable[ir.Model]) -> int:
    """Elements of all weights, a shared one counted once."""
    sizes = {w.source: w.size for m in models for w in _weights(m)}
    return sum(sizes.values())


def _weights(model: ir.Model) -> Iterator[CheckpointWeight]:
    for value in model.graph.initializers.values():
        if isinstance(value.const_value, CheckpointWeight):
            yield value.const_value


@dataclass(frozen=True, slots=True)
class DataFile:
    """The external data file that was written."""

    size_bytes: int
    sha256: str


def planned_bytes(models: Iterable[ir.Model]) -> int:
    """Size that the external data file will have, without alignment."""
    return sum({w.key: w.nbytes for m in models for w in _weights(m)}.values())


def write_data(models: list[ir.Model], folder: Path, stage: Stage) -> DataFile:
    """Write every large initializer of `models` to `folder`/model.onnx.data and point the graphs at it.

    Raises ResourceError when the disk is full.
    """
    try:
        with (folder / WEIGHTS).open("wb") as stream:
            writer = _Writer(stream, stage)
            for model in models:
                for value in model.graph.initializers.values():
                    writer.place(value, folder)
            return DataFile(writer.position, writer.digest.hexdigest())
    except OSError as error:
        raise translate_space(error, folder) from error


def translate_space(error: OSError, folder: Path) -> ResourceError:
    """An operating system error while writing a package, as one line."""
    if error.errno in SPACE_ERRORS:
        return ResourceError(f"{folder.parent}: no space left while writing the package; free some and export again")
    return ResourceError(f"{folder.parent}: cannot write the package ({error.strerror or error})")


class _Writer:
    """Appends tensors to a stream, aligned, each distinct one once."""

    def __init__(self, stream: Any, stage: Stage) -> None:
        self.stream, self.stage = stream, stage
        self.position = 0
        self.digest = hashlib.sha256()
        self.placed: dict[object, tuple[int, int]] = {}

    def place(self, value: ir.Value, folder: Path) -> None:
        tensor = value.const_value
        assert tensor is not None, value.name
        if not isinstance(tensor, CheckpointWeight) and tensor.nbytes < INLINE_BYTES:
            return
        key: object = (
            tensor.key if isinstance(tensor, CheckpointWeight) else hashlib.sha256(tensor.tobytes()).hexdigest()
        )
        if key not in self.placed:
            self.placed[key] = self._append(tensor)
        offset, length = self.placed[key]
        value.const_value = ir.ExternalTensor(
            WEIGHTS,
            offset,
            length,
            tensor.dtype,
            shape=ir.Shape(tensor.shape.numpy()),
            name=value.name or "",
            base_dir=folder,
        )

    def _append(self, tensor: Any) -> tuple[int, int]:
        self._write(b"\0" * (-self.position % (ALIGNMENT if tensor.nbytes >= ALIGNMENT else 64)))
        start = self.position
        if isinstance(tensor, CheckpointWeight):
            for piece in tensor.slices():
                self._write(_raw(piece))
                self.stage.advance(piece.nbytes)
        else:
            self._write(tensor.tobytes())
        return start, self.position - start

    def _write(self, data: bytes | memoryview) -> None:
        self.stream.write(data)
        self.digest.update(data)
        self.position += len(data)
