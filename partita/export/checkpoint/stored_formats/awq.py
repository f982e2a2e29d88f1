"""AWQ, as AutoAWQ saves it for its GEMM kernels: 4-bit integers with a scale and a zero point per group.

    X.qweight [K, N / 8] int32     integers packed along N; nibble i of a word, from the lowest, is number ORDER[i]
    X.qzeros  [G, N / 8] int32     zero points, packed in the same way
    X.scales  [G, N] float16

    W[n, k] = scales[g, n] * (q[k, n] - z[g, n]),  g = k / group size

X.scales without integers divide the output of an activation (awq/modules/act.py); they are not supported.

(AutoAWQ, awq/modules/linear/gemm.py and awq/utils/packing_utils.py.)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from partita.export.checkpoint.stored_formats import (
    FLOAT,
    INT32,
    WORD,
    AffineWeight,
    Parts,
    Sources,
    StoredFormat,
    StoredWeight,
    claims_of,
    words,
)
from partita.export.checkpoint.weight_files import OpenFiles, TensorInfo
from partita.export.weights.origins import Region

BITS = 4
PER_WORD = WORD // BITS
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class _Weight(AffineWeight):
    """An AWQ weight [N, K]."""

    qweight: TensorInfo
    qzeros: TensorInfo
    scales: TensorInfo

    def parts(self, region: Region, files: OpenFiles) -> Parts:
        rows, (begin, end) = region
        low, high = begin // self.block, -(-end // self.block)
        groups = torch.arange(begin, end) // self.block - low
        integers = _unpacked(self.qweight, (begin, end), rows, files)
        zeros = _unpacked(self.qzeros, (low, high), rows, files)
        scales = files.read(self.scales, ((low, high), rows)).float()
        return Parts(integers.T, scales[groups].T, zeros[groups].T)

    def zero_points(self, files: OpenFiles) -> torch.Tensor:
        return _unpacked(self.qzeros, (0, self.qzeros.shape[0]), (0, self.shape[0]), files)


def _unpacked(info: TensorInfo, lines: tuple[int, int], columns: tuple[int, int], files: OpenFiles) -> torch.Tensor:
    """The integers of a tensor [L, N / 8], uint8 [lines, columns]."""
    begin, end = columns[0] // PER_WORD, -(-columns[1] // PER_WORD)
    found = words(files.read(info, (lines, (begin, end))), BITS, 0, (end - begin) * PER_WORD)
    back = [ORDER.index(place) for place in range(PER_WORD)]
    ordered = found.reshape(len(found), -1, PER_WORD)[:, :, back].reshape(len(found), (end - begin) * PER_WORD)
    return ordered[:, columns[0] - begin * PER_WORD : columns[1] - begin * PER_WORD]


def _read(sources: Sources) -> list[StoredWeight | None]:
    version = str(sources.settings.get("version") or "gemm").lower()
    if version != "gemm":
        raise sources.unsupported_error(f"packed for the kernels {version[:40]}", "save it in AWQ's version gemm")
    bits = sources.number("bits", "w_bit")
    if bits not in (None, BITS):
        raise sources.unsupported_error(f"with {bits} bits", f"only {BITS} bits are supported")
    size = sources.number("group_size", "q_group_size", least=-1)
    for stem in sources.stems(".scales"):
        if any(f"{stem}.{part}" in sources.tensors for part in ("qweight", "qzeros")):
            continue  # the scales of a weight that lacks one of its tensors
        raise sources.unsupported_error(
            f"with activation scales ({stem}.scales)",
            "activation scales are not supported; export the unquantised checkpoint",
        )
    return [_weight(sources, stem, size) for stem in sources.stems(".qweight", INT32)]


def _weight(sources: Sources, stem: str, size: int | None) -> _Weight | None:
    qweight, scales = sources.take(f"{stem}.qweight", INT32), sources.take(f"{stem}.scales", FLOAT)
    qzeros = sources.take(f"{stem}.qzeros", INT32)
    if qweight is None or scales is None or qzeros is None:
        return None
    for info in (qweight, scales, qzeros):
        if len(info.shape) != 2:
            raise sources.tensor_error(info.name, f"is {list(info.shape)}, not a matrix")
    width, rows = qweight.shape[0], qweight.shape[1] * PER_WORD
    size = width // max(1, scales.shape[0]) if size is None else size
    group = size if size > 0 else width
    if not group or width % group:
        raise sources.tensor_error(qweight.name, f"has {width} inputs, not a multiple of the group size {size}")
    for info, shape in ((scales, (width // group, rows)), (qzeros, (width // group, rows // PER_WORD))):
        if info.shape != shape:
            raise sources.tensor_error(
                info.name,
                f"is {list(info.shape)}, but {qweight.name} {list(qweight.shape)} in groups of {size} "
                f"requires {list(shape)}: the group size of the quantisation settings is wrong",
            )
    tensors, name = (qweight, scales, qzeros), f"{stem}.weight"
    symmetric = sources.settings.get("zero_point") is False
    sources.declarations[name] = [
        {"zero_point false": ("symmetric", symmetric)} | claims_of(sources.settings, {"sym": "symmetric"})
    ]
    return _Weight(name, (rows, width), tensors, scales.dtype, BITS, 1, group, qweight, qzeros, scales)


FORMAT = StoredFormat("awq", ("AWQ",), "integers of 4 bits and zero points, packed for GEMM kernels", _read)
