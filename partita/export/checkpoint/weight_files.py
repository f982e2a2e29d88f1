"""The weight files of a checkpoint: tensor headers, and reads of regions.

A safetensors file is memory-mapped, and opened again after `MAPPED_BYTES`, because pages stay in memory while it is
open.
"""

from __future__ import annotations

import json
import math
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from partita import dtypes
from partita.errors import CheckpointError
from partita.export.weights import CHECKPOINT, of_torch
from partita.export.weights.origins import Reader, Region, TensorInfo
from partita.remedies import is_lfs_pointer, lfs_pull
from partita.untrusted_files import check_size, irregular

FLOATS = {dtypes.dtype_named(name).safetensors: name for name in CHECKPOINT}
"""safetensors name -> ONNX name of float dtypes."""
LAYOUTS = (("model.safetensors", "model.safetensors.index.json"), ("pytorch_model.bin", "pytorch_model.bin.index.json"))
"""A single file, and the index of a sharded one, in order of preference."""
SHOWN_CHARACTERS = 120
"""Maximum characters of a name from a file in a message."""
MAPPED_BYTES = 32 << 20


def first_line(error: BaseException) -> str:
    """The first line of an exception's text, and the next where the first ends with a colon."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1])[:200]


def few(items: Sequence[str], separator: str = ", ") -> str:
    """The first five items, and the total number."""
    shown = separator.join(item[: 2 * SHOWN_CHARACTERS] for item in items[:5])
    return shown + (f" and {len(items) - 5} more ({len(items)} in all)" if len(items) > 5 else "")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises CheckpointError when the file is not a JSON object, OSError."""
    check_text_file(path)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, too many digits, or too deeply nested
        raise CheckpointError(f"{path}: damaged: not JSON ({first_line(error)})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: damaged: not a JSON object")
    return value


def check_text_file(path: Path) -> None:
    """Raise CheckpointError for a too large file, and for a Git LFS pointer. Raises OSError."""
    refuse_pointer(path)
    try:
        check_size(path)
    except ValueError as error:
        raise CheckpointError(f"{path}: damaged: {error}") from error


def refuse_pointer(path: Path) -> None:
    """Raise CheckpointError for a Git LFS pointer."""
    if is_lfs_pointer(path):
        raise CheckpointError("cannot be read", path=path, remedy=lfs_pull(path))


def unreadable(error: OSError, path: Path) -> CheckpointError:
    """The error for an unreadable file or folder: the path of `error`, else `path`."""
    where = Path(error.filename) if isinstance(error.filename, str) else path
    return CheckpointError(f"cannot be read ({error.strerror or error})", path=where)


def find_tensors(folder: Path) -> tuple[dict[str, TensorInfo], tuple[str, ...]]:
    """Tensors, and weight files. Raises CheckpointError for damaged files."""
    for single, index in LAYOUTS:
        # The order of transformers: save_pretrained may leave an old index next to a single file.
        if (folder / single).is_file():
            return {info.name: info for info in list_tensors(folder, single)}, (single,)
        if (folder / index).is_file():
            return _read_sharded(folder, index)
    raise CheckpointError(
        f"{folder}: config.json is there, but no weights (model.safetensors or pytorch_model.bin, or their index)"
    )


def _read_sharded(folder: Path, index: str) -> tuple[dict[str, TensorInfo], tuple[str, ...]]:
    weight_map = read_json(folder / index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(v, str) for v in weight_map.values()):
        raise CheckpointError(f"{folder / index}: damaged: weight_map is missing")
    files = tuple(sorted(set(weight_map.values())))
    tensors: dict[str, TensorInfo] = {}
    for name in files:
        if Path(name).name != name or name in ("", ".", "..") or not name.isprintable() or len(name) > 255:
            raise CheckpointError(
                f"{folder / index}: names the shard {name[:SHOWN_CHARACTERS]!r}, which is outside the "
                "checkpoint folder; correct the index"
            )
        if reason := irregular(folder / name, folder):
            raise CheckpointError(f"{folder / name}: {reason}")
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder / name}: this shard of {index} is missing; download the checkpoint again")
        tensors |= {info.name: info for info in list_tensors(folder, name)}  # as in transformers, the last file counts
    return tensors, files


def list_tensors(folder: Path, file: str) -> list[TensorInfo]:
    """Names, shapes and dtypes of one weight file. Raises CheckpointError when it is damaged or holds other data."""
    path = folder / file
    refuse_pointer(path)
    if file.endswith(".bin"):
        found = [
            TensorInfo(name, path, tuple(each.shape), _dtype_name(each.dtype), each.nbytes)
            for name, each in _load_bin(path).items()
        ]
    else:
        found = _list_safetensors(path)
    for info in found:
        if not is_name(info.name):
            raise CheckpointError(
                f"{path}: damaged: it contains a tensor with the invalid name "
                f"{info.name[:SHOWN_CHARACTERS]!r}; download the checkpoint again"
            )
    return found


def is_name(name: str) -> bool:
    """Whether this is a valid tensor name: at most 500 printable characters, no empty part, ASCII digits."""
    parts = name.split(".")
    return name.isprintable() and len(name) <= 500 and all(p and (p.isascii() or not p.isdigit()) for p in parts)


def _list_safetensors(path: Path) -> list[TensorInfo]:
    try:
        with safe_open(str(path), framework="pt") as handle:
            found = []
            for name in handle.keys():  # noqa: SIM118 - safe_open is no dict
                part = handle.get_slice(name)
                dtype, shape = str(part.get_dtype()), tuple(part.get_shape())
                size = _size_bytes(dtype, shape)
                found.append(TensorInfo(name, path, shape, FLOATS.get(dtype, dtype), size))
            return found
    except (SafetensorError, OSError) as error:
        size = path.stat().st_size
        raise CheckpointError(
            f"{path}: damaged or truncated at {size:,} bytes ({first_line(error)}); download the checkpoint again"
        ) from error


def _size_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Size of a tensor in bytes. `dtype`: the safetensors name, e.g. F8_E4M3, BF16, BOOL."""
    digits = dtype.lstrip("ABCDEFGHIJKLMNOPQRSTUVWXYZ").partition("_")[0]
    return (int(digits) if digits.isdigit() else 8) * math.prod(shape) // 8


def _dtype_name(dtype: torch.dtype) -> str:
    """The ONNX name of a float dtype, else torch's name."""
    return of_torch(dtype) if of_torch(dtype) in CHECKPOINT else str(dtype)


def _is_mappable(path: Path) -> bool:
    """Whether torch can map a file: an archive, as it writes since 1.6, whose records are not compressed."""
    try:
        with zipfile.ZipFile(path) as archive:
            return all(entry.compress_type == zipfile.ZIP_STORED for entry in archive.infolist())
    except (zipfile.BadZipFile, ValueError, NotImplementedError):
        return False


def _load_bin(path: Path) -> dict[str, torch.Tensor]:
    """Tensors of a .bin file, loaded with weights_only; mapped where possible."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=_is_mappable(path))
    except Exception as error:
        raise CheckpointError(
            f"{path}: cannot be read as plain weights ({first_line(error)}; {path.stat().st_size:,} bytes); "
            "download it again, or use safetensors files"
        ) from error
    if not isinstance(loaded, dict) or not all(isinstance(k, str) and _is_plain(v) for k, v in loaded.items()):
        raise CheckpointError(f"{path}: contains something other than named tensors; use safetensors files")
    return dict(loaded)


def _is_plain(value: Any) -> bool:
    """Whether it is a strided, unquantised CPU tensor."""
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return False
    return value.device.type == "cpu" and not value.is_quantized


class OpenFiles(Reader):
    """Reads checkpoint files. Use as a context manager: computed values are cached until it closes."""

    def __init__(self) -> None:
        super().__init__()
        self._loaded: dict[Path, Mapping[str, torch.Tensor]] = {}
        self._mapped: tuple[Path | None, Any] = None, None
        """Path and handle of the open safetensors file."""
        self._mapped_bytes = 0

    def __enter__(self) -> OpenFiles:
        return self

    def __exit__(self, *details: Any) -> None:
        self.computed.clear()
        self._loaded.clear()
        self._mapped = None, None

    def read(self, info: TensorInfo, region: Region) -> torch.Tensor:
        """The elements of a tensor in `region`. Raises CheckpointError."""
        if info.decoder is not None:
            return info.decoder.read(region, self)
        path = info.file
        index: Any = tuple(slice(start, stop) for start, stop in region) or ...
        if path.suffix == ".bin":
            if path not in self._loaded:
                self._loaded[path] = _load_bin(path)
            return self._loaded[path][info.name][index]
        try:
            if self._mapped[0] != path or self._mapped_bytes > MAPPED_BYTES:
                self._mapped = None, None
                self._mapped, self._mapped_bytes = (path, safe_open(str(path), framework="pt")), 0
            self._mapped_bytes += info.size_bytes
            return torch.as_tensor(self._mapped[1].get_slice(info.name)[index])
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path}: cannot be read ({first_line(error)})") from error
