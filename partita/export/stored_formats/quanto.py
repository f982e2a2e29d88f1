"""optimum-quanto, where a weight has 8 bits: integers or floats with a scale for each row.

    X.weight._data [N, K] int8 or float8, X.weight._scale [N, 1]        W = scale * data

(optimum-quanto, tensor/qbytes.py.) Weights of 4 and 2 bits have a float shift, and their shape is not in the file.
"""

from __future__ import annotations

from partita.export.stored_formats.base import FLOAT, FLOAT8, SIGNED_BYTE, Read, Sources, StoredFormat, StoredWeight
from partita.export.stored_formats.compressed_tensors import of_integers
from partita.export.stored_formats.fp8 import scaled

SMALL = "._data._data"
"""The end of the name of what has 4 or 2 bits."""


def _read(sources: Sources) -> Read:
    small = sources.stems(SMALL)
    if small:
        raise sources.refused(
            f"with weights of 4 or 2 bits ({small[0]}{SMALL})",
            "their shape is not in the file; dequantise it in transformers and export what you save, or export the "
            "checkpoint that it was quantised from",
        )
    weights: list[StoredWeight] = []
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
    for end in (".input_scale", ".output_scale"):
        sources.taken.update(stem + end for stem in sources.stems(end))
    return Read(weights)


FORMAT = StoredFormat("quanto", ("Quanto",), "integers or floats of 8 bits with a scale for each row", _read)
