"""HQQ: integers of 1 to 8 bits with a scale and a zero point for each group; zero points are floats.

    X.W_q [rows / 2, columns] uint8    of a table of groups: a group is a row of it (axis 1) or a column (axis 0); the
                                       first part of its rows in the highest bits, the last in the lowest
    X.scale, X.zero                    [groups, 1] or [1, groups]
    X.nbits, X.group_size, X.axis, X.shape, X.packing, X.compute_dtype    as tensors

    W = ((q - zero) * scale) in compute_dtype, as rows of `shape`

(hqq, core/quantize.py Quantizer.dequantize, core/bitpack.py.) Zero points are not integers, as a rule, so that no
packed product is exact; a package keeps the integers as codes where a group is a row of the table.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from partita.export.origins import Region
from partita.export.stored_formats.base import FLOAT, INTEGER, Read, Sources, StoredFormat, claims_of
from partita.export.stored_formats.groups import GroupedWeight
from partita.export.weight_files import OpenFiles, TensorInfo

PACKINGS = {"8bit_u8": (8, 1), "4bit_u8": (4, 2), "3bit_32": (3, 10), "2bit_u8": (2, 4), "1bit_u8": (1, 8)}
"""Bits, and how many integers a number of W_q holds."""


@dataclass(frozen=True)
class _Weight(GroupedWeight):
    """[N, K]."""

    per_number: int

    def integers(self, region: Region, files: OpenFiles) -> torch.Tensor:
        (first, last), (begin, end) = region
        width = self.shape[1]
        start, stop = first * width, last * width
        elements = self.shape[0] * width
        columns = self.group if self.in_rows else elements // self.group
        low, high = start // columns, -(-stop // columns)
        found = self._table(low, high, elements // columns, columns, files)
        flat = found.reshape(-1)[start - low * columns : stop - low * columns]
        return flat.reshape(last - first, width)[:, begin:end]

    def _table(self, low: int, high: int, rows: int, columns: int, files: OpenFiles) -> torch.Tensor:
        """Rows `low` .. `high` of the table of groups."""
        data = self.tensors[0]
        step = data.shape[0]
        made = torch.empty(high - low, columns, dtype=torch.uint8)
        for part in range(self.per_number):
            begin, end = max(low, part * step), min(high, (part + 1) * step, rows)
            if begin < end:
                some = files.read(data, ((begin - part * step, end - part * step), (0, columns))).to(torch.int32)
                shift = self.bits * (self.per_number - 1 - part)
                made[begin - low : end - low] = (some >> shift) & ((1 << self.bits) - 1)
        return made


def _read(sources: Sources) -> Read:
    found = [_weight(sources, stem) for stem in sources.stems(".W_q", INTEGER)]
    return Read([weight for weight in found if weight is not None])


def _weight(sources: Sources, stem: str) -> _Weight | None:
    data, scale, zero = sources.take(f"{stem}.W_q"), sources.take(f"{stem}.scale", FLOAT), sources.take(f"{stem}.zero")
    said = {key: sources.take(f"{stem}.{key}") for key in ("shape", "axis", "group_size", "packing", "compute_dtype")}
    beside = {name for name in sources.tensors if name.startswith(f"{stem}.")}  # further settings, which are not needed
    sources.taken.update(beside - {f"{stem}.bias"})
    if data is None or scale is None or zero is None or None in said.values():
        return None
    shape, axes, sizes = (_numbers(sources, said[key]) for key in ("shape", "axis", "group_size"))
    axis, group = next(iter(axes), -1), next(iter(sizes), 0)
    packing, dtype = (_text(sources, said[key]) for key in ("packing", "compute_dtype"))
    rounded = getattr(torch, dtype.removeprefix("torch."), None)
    if packing not in PACKINGS or not isinstance(rounded, torch.dtype):
        raise sources.wrong(data.name, f"is packed as {packing[:40]!r} for {dtype[:40]!r}, which cannot be read")
    bits, per_number = PACKINGS[packing]
    elements = shape[0] * shape[1] if len(shape) == 2 and min(shape) > 0 else 0
    if not elements or group < 1 or elements % group or axis not in (0, 1):
        raise sources.wrong(data.name, f"is of shape {shape} in groups of {group} along axis {axis}")
    groups = elements // group
    table = (groups, group) if axis == 1 else (group, groups)
    stored = (-(-table[0] // per_number), table[1])
    wanted = {data: stored, scale: (groups, 1) if axis == 1 else (1, groups)}
    wanted[zero] = wanted[scale]
    for info, expected in wanted.items():
        if info.shape != expected:
            raise sources.wrong(
                info.name, f"is {list(info.shape)}; {shape} in groups of {group} asks for {list(expected)}"
            )
    name = dtype.removeprefix("torch.")
    tensors = (data, scale, zero)
    given: Any = sources.settings.get("quant_config")
    own = given.get(re.sub(r"^model\.layers\.\d+\.", "", stem), given) if isinstance(given, Mapping) else {}
    own = own.get("weight_quant_params", own) if isinstance(own, Mapping) else {}
    sources.claims[f"{stem}.weight"] = [claims_of(own, {"nbits": "bits", "group_size": "group", "axis": "in_rows"})]
    whole = shape[0], shape[1]
    return _Weight(f"{stem}.weight", whole, tensors, name, group, bits, rounded, "before", axis == 1, per_number)


def _numbers(sources: Sources, info: TensorInfo | None) -> list[int]:
    """The whole numbers in a small tensor. Raises CheckpointError when it is none."""
    assert info is not None
    if len(info.shape) > 1 or sum(info.shape) > 64:
        raise sources.wrong(info.name, f"is {list(info.shape)}, not a setting")
    with OpenFiles(sources.folder) as files:
        found = files.read(info, tuple((0, size) for size in info.shape))
    return [int(number) for number in found.reshape(-1).tolist()]


def _text(sources: Sources, info: TensorInfo | None) -> str:
    """The text whose characters are the numbers of a small tensor."""
    return "".join(chr(number) for number in _numbers(sources, info) if 0 < number < 0x110000)


FORMAT = StoredFormat("hqq", ("HQQ",), "integers of 1 to 8 bits; zero points are floats", _read)
