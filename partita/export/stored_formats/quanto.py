"""optimum-quanto: integers or floats of 8 bits with a scale for each row, and integers of 4 or 2 bits in groups.

    8 bits   X.weight._data [N, K] int8 or float8, X.weight._scale [N, 1]        W = scale * data

    4 and 2  X.weight._data._data [rows / 2 or 4, group] uint8    of a table of groups, which are its rows: the first
    bits                                                          part of the rows in the lowest bits
             X.weight._scale, X.weight._shift [rows, 1]

             W = scale * q - shift, each rounded to the type of the scales, as rows of K numbers
             W = scale * (q - shift) where shifts are integers

(optimum-quanto, tensor/qbytes.py, qbits.py, packed.py, grouped.py.) A row of W is one group or several; how wide it is
is nowhere in the file, and is that of the model's own weight. Shifts are not integers, as a rule, so that no packed
product is exact; a package keeps the integers as codes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from partita.export.element_types import to_torch
from partita.export.origins import Region
from partita.export.stored_formats.base import (
    BYTE,
    FLOAT,
    FLOAT8,
    SIGNED_BYTE,
    Read,
    Sources,
    StoredFormat,
    StoredWeight,
    Zeros,
    claims_of,
)
from partita.export.stored_formats.compressed_tensors import of_integers
from partita.export.stored_formats.fp8 import scaled
from partita.export.stored_formats.groups import GroupedWeight
from partita.export.weight_files import OpenFiles

SMALL = "._data._data"
"""The end of the name of what has 4 or 2 bits."""
PER_BYTE = (2, 4)
"""How many integers of 4 and of 2 bits lie in a byte."""


@dataclass(frozen=True)
class _Grouped(GroupedWeight):
    """[N, K] of integers of 4 or 2 bits."""

    rows: int
    """Of the table of groups."""

    def integers(self, region: Region, files: OpenFiles) -> torch.Tensor:
        (first, last), (begin, end) = region
        width = self.shape[1]
        start, stop = first * width, last * width
        low, high = start // self.group, -(-stop // self.group)
        flat = self._table(low, high, files).reshape(-1)[start - low * self.group : stop - low * self.group]
        return flat.reshape(last - first, width)[:, begin:end]

    def _table(self, low: int, high: int, files: OpenFiles) -> torch.Tensor:
        """Rows `low` .. `high` of the table of groups, uint8."""
        data, bits = self.tensors[0], self.bits
        step, columns = data.shape
        made = torch.empty(high - low, columns, dtype=torch.uint8)
        for part in range(8 // bits):
            begin, end = max(low, part * step), min(high, (part + 1) * step, self.rows)
            if begin < end:
                some = files.read(data, ((begin - part * step, end - part * step), (0, columns)))
                made[begin - low : end - low] = (some >> (bits * part)) & ((1 << bits) - 1)
        return made


def _read(sources: Sources) -> Read:
    small = sources.stems(SMALL)
    shapes = sources.shapes() if small else {}
    weights: list[StoredWeight | None] = [_grouped(sources, stem, shapes.get(stem)) for stem in small]
    for stem in sources.stems("._data", f"{SIGNED_BYTE}|{FLOAT8}"):
        data, scales = sources.take(f"{stem}._data"), sources.take(f"{stem}._scale", FLOAT)
        if data is None or scales is None:
            continue
        if scales.shape not in ((), (1,), (1, 1), (*data.shape[:1], 1)):
            raise sources.wrong(scales.name, f"is {list(scales.shape)}, and {data.name} is {list(data.shape)}")
        if data.dtype in ("I8", "torch.int8"):
            weights.append(of_integers(sources, stem, data.shape, 8, data, scales, None))
        else:
            weights.append(scaled(sources, data, scales, (1, data.shape[-1]), stem))
    found = [weight for weight in weights if weight is not None]
    sources.claims |= {weight.name: [claims_of(sources.settings, {"weights": "kind"})] for weight in found}
    for end in (".input_scale", ".output_scale"):
        sources.taken.update(stem + end for stem in sources.stems(end))
    return Read(found)


def _grouped(sources: Sources, stem: str, shape: tuple[int, ...] | None) -> StoredWeight | None:
    """The weight of integers of 4 or 2 bits. Raises CheckpointError when tensors do not fit the model's shape."""
    data, scale = sources.take(stem + SMALL, BYTE), sources.take(f"{stem}._scale", FLOAT)
    shift = sources.take(f"{stem}._shift", f"{FLOAT}|{BYTE}|{SIGNED_BYTE}")
    if data is None or scale is None or shift is None:
        return None
    if shape is None or len(shape) != 2:
        raise sources.refused(
            f"with weights of 4 or 2 bits, whose shape is not in the file ({data.name})",
            f"the model of its config has no matrix {stem}; dequantise it in transformers and export what you save, or "
            "export the checkpoint that it was quantised from",
        )
    said = f"is {list(data.shape)}, and the model has {stem} {list(shape)}"
    if len(data.shape) != 2 or data.shape[1] < 1 or shape[1] % data.shape[1]:
        raise sources.wrong(data.name, said)
    rows = shape[0] * shape[1] // data.shape[1]
    for info in (scale, shift):
        if info.shape != (rows, 1):
            raise sources.wrong(info.name, f"is {list(info.shape)}; {stem} {list(shape)} asks for {[rows, 1]}")
    per_byte = [count for count in PER_BYTE if -(-rows // count) == data.shape[0]]
    if len(per_byte) != 1:  # so few rows take as many bytes in either form
        raise sources.wrong(data.name, said)
    form: Zeros = "after" if re.fullmatch(FLOAT, shift.dtype) else "before"
    kind, tensors = to_torch(scale.dtype), (data, scale, shift)
    whole, bits = (shape[0], shape[1]), 8 // per_byte[0]
    return _Grouped(stem, whole, tensors, scale.dtype, data.shape[1], bits, kind, form, True, rows)


FORMAT = StoredFormat(
    "quanto", ("Quanto",), "numbers of 8 bits, a scale for each row; integers of 4 or 2 bits with float shifts", _read
)
