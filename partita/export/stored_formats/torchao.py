"""torchao in safetensors files: integers or floats of 8 bits with a scale for each row or group.

    X._weight_qdata [N, K] int8 or float8, X._weight_scale [N, G], X._weight_zero_point [N, G] int8 or absent

    W = scale * (data - zero point)

(torchao, prototype/safetensors/safetensors_support.py; Int8Tensor, IntxUnpackedToInt8Tensor and Float8Tensor.) Its
packings of 4 bits are laid out for kernels of their own.
"""

from __future__ import annotations

from partita.export.stored_formats.base import (
    FLOAT,
    FLOAT8,
    SIGNED_BYTE,
    Read,
    Sources,
    StoredFormat,
    StoredWeight,
)
from partita.export.stored_formats.compressed_tensors import of_integers
from partita.export.stored_formats.fp8 import scaled

DATA = "._weight_qdata"


def _read(sources: Sources) -> Read:
    weights: list[StoredWeight] = []
    fitting = sources.stems(DATA, f"{SIGNED_BYTE}|{FLOAT8}")
    others = sorted(set(sources.stems(DATA)) - set(fitting))
    if others:
        info = sources.tensors[others[0] + DATA]
        raise sources.refused(
            f"in a packing of its kernels ({info.name} is {info.dtype})",
            "only integers and floats of 8 bits can be read; export the checkpoint that it was quantised from",
        )
    for stem in fitting:
        data, scales = sources.take(stem + DATA), sources.take(f"{stem}._weight_scale", FLOAT)
        zeros = sources.optional(f"{stem}._weight_zero_point", SIGNED_BYTE)
        if data is None or scales is None:
            continue
        name = f"{stem}.weight"
        if data.dtype in ("I8", "torch.int8"):
            weights.append(of_integers(sources, name, data.shape, 8, data, scales, zeros))
        else:
            weights.append(scaled(sources, data, scales, (1, data.shape[-1]), name))
    return Read(weights)


FORMAT = StoredFormat("torchao", ("TorchAO",), "integers or floats of 8 bits, a scale for each row or group", _read)
