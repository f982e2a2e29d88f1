"""GPTQ, as AutoGPTQ and GPTQModel save it: integers of 2, 3, 4 or 8 bits with a scale and a zero point per group.

    X.qweight [K * bits / 32, N] int32     integers packed along K, the lowest bits first
    X.qzeros  [G, N * bits / 32] int32     zero points packed along N; format "gptq" stores them minus 1
    X.scales  [G, N] float16 or bfloat16
    X.g_idx   [K] int32                    the group of each input; with desc_act in the order of importance

    W[n, k] = scales[g, n] * (q[k, n] - z[g, n]),  g = g_idx[k]

(GPTQModel, nn_modules/qlinear/__init__.py, dequantize_weight; AutoGPTQ, qlinear_cuda_old.py.) A zero point stored as
all ones is refused: kernels differ in reading it as 0 or 2^bits.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from partita.errors import CheckpointError
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
    read_words,
)
from partita.export.checkpoint.weight_files import OpenFiles, TensorInfo, matches
from partita.export.weights.origins import Region

BITS = (2, 3, 4, 8)
PLAIN, SECOND = ("gptq", ""), ("gptq_v2",)
"""Values of `checkpoint_format` with zero points stored minus 1, and stored unchanged."""


@dataclass(frozen=True)
class _Weight(AffineWeight):
    """A GPTQ weight [N, K]."""

    qweight: TensorInfo
    qzeros: TensorInfo
    scales: TensorInfo
    g_idx: TensorInfo | None
    less: int
    """True zero point minus stored zero point."""

    def parts(self, region: Region, files: OpenFiles) -> Parts:
        (first, last), (begin, end) = region
        groups = self._groups(begin, end, files)
        low, high = (int(groups.min()), int(groups.max()) + 1) if len(groups) else (0, 0)
        integers = read_words(self.qweight, (first, last), (begin, end), self.bits, files, along=0)
        scales = files.read(self.scales, ((low, high), (first, last))).float()
        zeros = self._zeros((low, high), (first, last), files)
        inside = groups - low
        return Parts(integers, scales[inside].T, zeros[inside].T)

    def zero_points(self, files: OpenFiles) -> torch.Tensor:
        return self._zeros((0, self.scales.shape[0]), (0, self.shape[0]), files)

    def _zeros(self, groups: tuple[int, int], rows: tuple[int, int], files: OpenFiles) -> torch.Tensor:
        """Zero points [groups, rows]."""
        zeros = read_words(self.qzeros, groups, rows, self.bits, files, along=1)
        top = (1 << self.bits) - 1
        if self.less and bool((zeros == top).any()):
            raise CheckpointError(
                f"quantised tensor {self.qzeros.name}: a zero point is stored as {top}, which some "
                f"kernels of this format read as 0 and others as {top + 1}; quantise the model again in "
                "the format gptq_v2"
            )
        return zeros + self.less

    def blocks_along(self, files: OpenFiles) -> torch.Tensor:
        return self._groups(0, self.shape[1], files)

    def _groups(self, begin: int, end: int, files: OpenFiles) -> torch.Tensor:
        """The groups of inputs `begin` .. `end`."""
        if self.g_idx is None:
            return torch.arange(begin, end) // self.block
        found = files.read(self.g_idx, ((begin, end),)).to(torch.int64)
        count = self.scales.shape[0]
        if len(found) and not 0 <= int(found.min()) <= int(found.max()) < count:
            raise CheckpointError(
                f"quantised tensor {self.g_idx.name} names a group that does not exist; {self.scales.name} has {count}"
            )
        return found


def _read(sources: Sources) -> list[StoredWeight | None]:
    stored = str(sources.settings.get("checkpoint_format") or sources.settings.get("format") or "")
    if stored not in (*PLAIN, *SECOND):
        raise sources.unsupported_error(f"in the format {stored[:40]}", "save it in the format gptq or gptq_v2")
    less = 0 if stored in SECOND else 1
    return [_weight(sources, stem, less) for stem in sources.stems(".qweight", INT32)]


def _weight(sources: Sources, stem: str, less: int) -> _Weight | None:
    qweight, scales = sources.take(f"{stem}.qweight", INT32), sources.take(f"{stem}.scales", FLOAT)
    qzeros, g_idx = sources.take(f"{stem}.qzeros", INT32), sources.optional(f"{stem}.g_idx", INT32)
    if qweight is None or scales is None or qzeros is None:
        return None
    for info in (qweight, scales, qzeros):
        if len(info.shape) != 2:
            raise sources.tensor_error(info.name, f"is {list(info.shape)}, not a matrix")
    rows = qweight.shape[1]
    settings = _settings_of(sources, stem)
    bits, size = settings["bits"], settings["group_size"]
    bits = bits or qzeros.shape[1] * WORD // max(1, rows)
    if bits not in BITS:
        raise sources.tensor_error(
            qweight.name, f"has integers of {bits} bits; {', '.join(map(str, BITS))} bits are supported"
        )
    width = qweight.shape[0] * WORD // bits
    size = size or width // max(1, scales.shape[0])
    group = width if size < 0 else size
    if group < 1:
        raise sources.tensor_error(qweight.name, f"is {list(qweight.shape)}, but {scales.name} is {list(scales.shape)}")
    groups = -(-width // group)
    wanted = {scales: (groups, rows), qzeros: (groups, rows * bits // WORD)}
    for info, shape in wanted.items():
        if info.shape != shape:
            raise sources.tensor_error(
                info.name,
                f"is {list(info.shape)}, but {qweight.name} {list(qweight.shape)} of {bits} bits in "
                f"groups of {size} requires {list(shape)}: bits or group size of the quantisation "
                "settings are wrong",
            )
    if g_idx is not None and g_idx.shape != (width,):
        raise sources.tensor_error(g_idx.name, f"is {list(g_idx.shape)}, but {qweight.name} has {width} inputs")
    tensors = (qweight, scales, qzeros, *([] if g_idx is None else [g_idx]))
    name = f"{stem}.weight"
    in_order = settings["desc_act"] is False
    sources.declarations[name] = [claims_of(settings, {"sym": "symmetric"}) | {"desc_act false": ("ordered", in_order)}]
    return _Weight(name, (rows, width), tensors, scales.dtype, bits, 1, group, qweight, qzeros, scales, g_idx, less)


def _settings_of(sources: Sources, stem: str) -> dict[str, Any]:
    """Settings of a module. GPTQModel's "dynamic" maps regular expressions to settings ("-:": not quantised)."""
    found: dict[str, Any] = {"bits": sources.number("bits"), "group_size": sources.number("group_size", least=-1)}
    found |= {key: sources.settings.get(key) for key in ("sym", "desc_act")}
    dynamic = sources.settings.get("dynamic")
    for pattern, override in (dynamic if isinstance(dynamic, Mapping) else {}).items():
        excludes = pattern.startswith("-:")
        if not isinstance(override, Mapping) and not excludes:
            continue
        try:
            fits = matches(pattern.removeprefix("-:" if excludes else "+:"), stem)
        except re.error as error:
            if excludes:
                continue  # a module with integers is quantised
            raise sources.unsupported_error(
                f"(dynamic has {pattern[:60]!r}: {error})", "correct config.json"
            ) from error
        if fits:
            own = override if isinstance(override, Mapping) and not excludes else {}
            found |= {key: value for key, value in own.items() if key in found and isinstance(value, int)}
            break
    size = found["group_size"]
    if size is not None and (size == 0 or size < -1):
        raise sources.tensor_error(f"{stem}.qweight", f"has a group size of {size}")
    return found


FORMAT = StoredFormat("gptq", ("GPTQ",), "integers of 2, 3, 4 or 8 bits, zero points, act-order", _read)
