"""Every GGUF tensor type, from random bytes: values equal those of the gguf package bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from tests.conftest import require

AFFINE = ("Q4_0", "Q8_0", "Q6_K", "MXFP4")
OTHERS = ("Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "IQ4_NL", "IQ4_XS", "F16", "BF16", "F32")
RARE = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "TQ1_0", "TQ2_0")
"""Read as floats, of which nobody but llama.cpp writes files."""
HALVES = {
    **dict.fromkeys(("Q4_0", "Q8_0", "Q5_0", "IQ4_NL", "IQ4_XS"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    **dict.fromkeys(("IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"), (0,)),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
}
"""Bytes at which a float16 lies that must be finite, as a file of a model has it."""


def random_rows(name, rows=7, blocks=2, seed=0):
    """Bytes of rows of random blocks."""
    import gguf

    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    count = blocks if block > 1 else 64
    raw = np.random.default_rng(seed).integers(0, 256, (rows, count, size), np.uint8)
    for at in HALVES.get(name, ()):
        scales = np.random.default_rng(seed).normal(size=(rows, count, 1)).astype(np.float16)
        raw[:, :, at : at + 2] = scales.view(np.uint8)
    if name == "MXFP4":
        raw[:, :, 0] = np.random.default_rng(seed).integers(0, 200, (rows, count))
    return raw.reshape(rows, -1), count * block


@pytest.mark.parametrize("name", [*AFFINE, *OTHERS, *RARE])
def test_every_region_equals_gguf_dequantisation(name, tmp_path):
    require("gguf")
    import gguf
    import torch

    from partita.export.checkpoint.gguf import GgufTensor, block_type
    from partita.export.checkpoint.gguf.weights import row_weight
    from partita.export.checkpoint.stored_formats import AffineWeight
    from partita.export.checkpoint.weight_files import OpenFiles

    raw, width = random_rows(name)
    kind = gguf.GGMLQuantizationType[name]
    (tmp_path / "file").write_bytes(b"\0" * 32 + raw.tobytes())
    found = block_type(int(kind))
    assert found is not None
    tensor = GgufTensor("a", tmp_path / "file", (7, width), name, raw.size, type=found, start=32)
    order = np.random.default_rng(1).permutation(7)
    weight = row_weight("a.weight", (7, width), (tensor,), order)
    typed = raw.view({"F32": np.float32, "F16": np.float16}.get(name, np.uint8))
    whole = torch.from_numpy(np.array(gguf.quants.dequantize(typed, kind), np.float32))[torch.from_numpy(order)]
    assert isinstance(weight, AffineWeight) is (name in AFFINE)
    with OpenFiles() as files:
        if isinstance(weight, AffineWeight):
            assert int(weight.parts(((0, 7), (0, width)), files).integers.max()) < 1 << weight.bits
        for rows, columns in (((0, 7), (0, width)), ((2, 5), (3, 40)), ((6, 7), (width - 1, width)), ((3, 3), (0, 5))):
            part = files.read(weight.info, (rows, columns))
            wanted = whole[slice(*rows), slice(*columns)]
            assert part.dtype == torch.float32 and torch.equal(part.nan_to_num(), wanted.nan_to_num())
