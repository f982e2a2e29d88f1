"""Stored quantised weights equal the dequantised values that `record.py` recorded from each format's library."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from partita.export.checkpoint.quantisation_method import by_config
from partita.export.checkpoint.stored_formats import AffineWeight, QuantisedTensors, read
from partita.export.checkpoint.weight_files import OpenFiles, find_tensors

LIBRARIES = Path(__file__).parent / "libraries"
CASES = sorted(path.stem for path in LIBRARIES.glob("*.safetensors"))
DEQUANTISED_ONLY = ("bnb_nf4", "bnb_fp4", "fp8", "float8", "int4_plain")
"""Formats whose numbers are no integers with a scale and an integer zero point."""


def recorded(name: str, folder: Path) -> tuple[dict[str, Any], torch.Tensor]:
    """Put a file of a library into the folder; its settings, and the weight as the library reads it."""
    path = LIBRARIES / f"{name}.safetensors"
    (folder / "model.safetensors").symlink_to(path)
    with safe_open(str(path), framework="pt") as file:
        return json.loads(file.metadata()["settings"]), file.get_tensor("expected")


def opened(folder: Path, settings: dict[str, Any]) -> QuantisedTensors:
    tensors = {key: info for key, info in find_tensors(folder)[0].items() if key != "expected"}
    found = by_config(folder, {"quantization_config": settings})
    assert found is not None
    return read(folder, found, tensors)


def stored(name: str, folder: Path) -> tuple[QuantisedTensors, torch.Tensor]:
    """A checkpoint of one weight as the library stores it, and what the library makes of it."""
    settings, expected = recorded(name, folder)
    return opened(folder, settings), expected


def test_every_recordable_case_is_recorded() -> None:
    from tests.export.checkpoint.stored_formats import record

    assert sorted(record.CASES) == CASES


@pytest.mark.parametrize("name", CASES)
def test_dequantised_values_equal_those_of_the_library(tmp_path: Path, name: str) -> None:
    quantised, expected = stored(name, tmp_path)
    (weight,) = quantised.weights.values()
    assert weight.name == "X.weight" and weight.shape == tuple(expected.shape)
    with OpenFiles() as files:
        found = weight.read(tuple((0, size) for size in weight.shape), files)
        assert torch.equal(found.to(expected.dtype), expected)
        # Any region is the same part of the whole: what crosses words, groups and blocks, too.
        for cut in (1, 3, 7):
            edges = [sorted({0, size // cut, size // 2 + 1, size}) for size in weight.shape]
            for begin, end in pairwise(edges[-1]):
                region = (*((0, size) for size in weight.shape[:-2]), (edges[-2][1], weight.shape[-2]), (begin, end))
                part = weight.read(region, files)
                assert torch.equal(part, found[tuple(slice(*each) for each in region)])


@pytest.mark.parametrize("name", CASES)
def test_integers_scales_and_zero_points_reproduce_values(tmp_path: Path, name: str) -> None:
    """Checks scale * (integer - zero point), constant scales within a block, and the integer range."""
    quantised, _ = stored(name, tmp_path)
    (weight,) = quantised.weights.values()
    assert isinstance(weight, AffineWeight) is not any(part in name for part in DEQUANTISED_ONLY)
    if not isinstance(weight, AffineWeight):
        return
    whole = tuple((0, size) for size in weight.shape)
    with OpenFiles() as files:
        integers, scales, zeros = (part.expand(weight.shape) for part in weight.parts(whole, files))
        values, along = weight.read(whole, files), weight.blocks_along(files)
        assert set(zeros.unique().tolist()) <= set(weight.zero_points(files).unique().tolist())
    made = (integers.float() - zeros.float()) * scales
    worst = float(((made - values).abs() / values.abs().clamp(min=1e-30)).max())
    assert worst <= (2**-23 if name == "bnb_int8" else 0)  # which multiplies in another order
    assert int(integers.max()) < 1 << weight.bits and int(zeros.max()) < 1 << weight.bits
    by_axis = scales.movedim(weight.axis, 0).flatten(1), zeros.movedim(weight.axis, 0).flatten(1)
    for block in along.unique():
        for part in by_axis:
            assert bool((part[along == block] == part[along == block][0]).all())
    assert len(along) == weight.shape[weight.axis] and math.ceil(len(along) / weight.block) == len(along.unique())


@pytest.mark.parametrize("name", ["gptq_4", "awq", "compressed_w4a16", "fp8_block", "bnb_nf4", "mxfp4"])
def test_missing_settings_are_derived_from_shapes(tmp_path: Path, name: str) -> None:
    settings, expected = recorded(name, tmp_path)
    (weight,) = opened(tmp_path, {"quant_method": settings["quant_method"]}).weights.values()
    with OpenFiles() as files:
        values = weight.read(tuple((0, size) for size in weight.shape), files)
    assert torch.equal(values.to(expected.dtype), expected)
