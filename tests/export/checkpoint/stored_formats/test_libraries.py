"""Stored quantised weights: values equal those that `record.py` recorded from each format's library, and tensors with
inconsistent shapes or contradicting settings raise errors that name the tensor.
"""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from partita.errors import CheckpointError, UnsupportedModelError
from partita.export.checkpoint.quantisation_method import by_config
from partita.export.checkpoint.stored_formats import AffineWeight, StoredWeight, read
from partita.export.checkpoint.weight_files import OpenFiles, find_tensors
from partita.export.weights.origins import Region
from tests import quantised_checkpoints as formats

LIBRARIES = Path(__file__).parent / "libraries"
CASES = sorted(path.stem for path in LIBRARIES.glob("*.safetensors"))
DEQUANTISED_ONLY = ("bnb_nf4", "bnb_fp4", "fp8", "float8", "int4_plain")
"""Formats whose numbers are no integers with a scale and an integer zero point."""
INFERRED = ("torchao_float8", "X._weight_scale")
"""The size of its groups is nowhere but in the shape."""
Tensors = dict[str, torch.Tensor]


def recorded(name: str) -> tuple[dict[str, Any], Tensors, torch.Tensor]:
    """The settings and tensors of a weight as the library stores it, and its values as the library reads it."""
    with safe_open(str(LIBRARIES / f"{name}.safetensors"), framework="pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - no dict
        return json.loads(file.metadata()["settings"]), tensors, tensors.pop("expected")


def opened(folder: Path, settings: dict[str, Any], tensors: Tensors) -> StoredWeight:
    """The weight of a checkpoint that has no other."""
    save_file({key: value.clone().contiguous() for key, value in tensors.items()}, folder / "model.safetensors")
    found = by_config(folder, {"quantization_config": settings})
    assert found is not None
    (weight,) = read(folder, found, find_tensors(folder)[0]).weights.values()
    return weight


def values(weight: StoredWeight, region: Region | None = None) -> torch.Tensor:
    with OpenFiles() as files:
        return weight.read_all(files) if region is None else weight.read(region, files)


def test_every_recordable_case_is_recorded() -> None:
    from tests.export.checkpoint.stored_formats import record

    assert sorted(record.CASES) == CASES


@pytest.mark.parametrize("name", CASES)
def test_dequantised_values_equal_those_of_the_library(tmp_path: Path, name: str) -> None:
    settings, tensors, expected = recorded(name)
    weight = opened(tmp_path, settings, tensors)
    assert weight.name == "X.weight" and weight.shape == tuple(expected.shape)
    found = values(weight)
    assert torch.equal(found.to(expected.dtype), expected)
    # Any region is the same part of the whole: what crosses words, groups and blocks, too.
    for cut in (1, 3, 7):
        edges = [sorted({0, size // cut, size // 2 + 1, size}) for size in weight.shape]
        for begin, end in pairwise(edges[-1]):
            region = (*((0, size) for size in weight.shape[:-2]), (edges[-2][1], weight.shape[-2]), (begin, end))
            assert torch.equal(values(weight, region), found[tuple(slice(*each) for each in region)])


@pytest.mark.parametrize("name", CASES)
def test_integers_scales_and_zero_points_reproduce_values(tmp_path: Path, name: str) -> None:
    """Checks scale * (integer - zero point), constant scales within a block, and the integer range."""
    weight = opened(tmp_path, *recorded(name)[:2])
    assert isinstance(weight, AffineWeight) is not any(part in name for part in DEQUANTISED_ONLY)
    if not isinstance(weight, AffineWeight):
        return
    whole = tuple((0, size) for size in weight.shape)
    with OpenFiles() as files:
        integers, scales, zeros = (part.expand(weight.shape) for part in weight.parts(whole, files))
        found, along = weight.read_all(files), weight.blocks_along(files)
        assert set(zeros.unique().tolist()) <= set(weight.zero_points(files).unique().tolist())
    made = (integers.float() - zeros.float()) * scales
    worst = float(((made - found).abs() / found.abs().clamp(min=1e-30)).max())
    assert worst <= (2**-23 if name == "bnb_int8" else 0)  # which multiplies in another order
    assert int(integers.max()) < 1 << weight.bits and int(zeros.max()) < 1 << weight.bits
    by_axis = scales.movedim(weight.axis, 0).flatten(1), zeros.movedim(weight.axis, 0).flatten(1)
    for block in along.unique():
        for part in by_axis:
            assert bool((part[along == block] == part[along == block][0]).all())
    assert len(along) == weight.shape[weight.axis] and math.ceil(len(along) / weight.block) == len(along.unique())


@pytest.mark.parametrize("name", ["gptq_4", "awq", "compressed_w4a16", "fp8_block", "bnb_nf4", "mxfp4"])
def test_missing_settings_are_derived_from_shapes(tmp_path: Path, name: str) -> None:
    settings, tensors, expected = recorded(name)
    weight = opened(tmp_path, {"quant_method": settings["quant_method"]}, tensors)
    assert torch.equal(values(weight).to(expected.dtype), expected)


def changes(value: torch.Tensor) -> list[torch.Tensor]:
    """The tensor longer and shorter by one on every axis."""
    longer = [torch.cat([value, value.narrow(axis, 0, 1)], axis) for axis in range(value.ndim)]
    return [*longer, *(value.narrow(axis, 0, size - 1) for axis, size in enumerate(value.shape) if size > 1)]


@pytest.mark.parametrize("name", CASES)
def test_wrong_tensor_shapes_raise_errors_or_change_weight_shape(name: str, tmp_path: Path) -> None:
    settings, tensors, expected = recorded(name)
    seen = 0
    for key, value in tensors.items():
        for other in changes(value) if (name, key) != INFERRED else ():
            try:
                weight = opened(tmp_path, settings, {**tensors, key: other})
            except CheckpointError as error:
                seen += 1
                assert "X" in str(error) and "\n" not in str(error)
            else:  # a row more or less may be right by itself; it is no weight of this model
                assert weight.shape != tuple(expected.shape) and value.numel() >= 32 * 16, (key, list(other.shape))
    assert seen or name == "fp8_tensor"  # whose scale is one number


def one_group(**weights: Any) -> dict[str, Any]:
    """Settings of compressed-tensors with one group."""
    said = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True, **weights}
    return {"config_groups": {"group_0": {"targets": ["Linear"], "weights": said}}}


@pytest.mark.parametrize(
    ("name", "more", "said"),
    [
        ("gptq_4", {"sym": True}, r"X\.qzeros contradicts the setting sym: not all of its zero points are 2\^"),
        ("gptq_4_symmetric", {"checkpoint_format": "gptq_v2"}, r"X\.qzeros contradicts the setting sym"),
        ("awq", {"zero_point": False}, r"X\.qzeros contradicts the setting zero_point false"),
        ("compressed_w4a16_asymmetric", one_group(), r"X\.weight_zero_point contradicts the setting symmetric"),
        ("compressed_w4a16", one_group(symmetric=False), r"lacks X\.weight_zero_point; download it again"),
        ("compressed_w4a16", one_group(actorder="group"), r"lacks X\.weight_g_idx; download it again"),
        *((name, {"group_size": 16}, r"quantised tensor X\.(scales|qzeros) is") for name in ("gptq_4", "awq")),
        *((f"compressed_{kind}", one_group(group_size=16), r"X\.weight_scale is") for kind in ("w4a16", "int8")),
    ],
)
def test_settings_contradicting_tensors_raise_checkpoint_error(
    name: str, more: dict[str, Any], said: str, tmp_path: Path
) -> None:
    settings, tensors, _ = recorded(name)
    with pytest.raises(CheckpointError, match=said):
        opened(tmp_path, {**settings, **more}, tensors)


@pytest.mark.parametrize(
    ("name", "more", "words"),
    [
        (
            "torchao_int8",
            {"X._weight_qdata": torch.zeros(4, 1, 32, 4, dtype=torch.int32)},
            r"in the packed layout of its kernels \(X\._weight_qdata is I32\); only plain int4",
        ),
        ("torchao_int4_plain", {"X._weight_act_pre_scale": torch.ones(64)}, r"scale \(X\._weight_act_pre_scale\)"),
        ("awq", {"X.act.scales": torch.ones(64)}, r"activation scales \(X\.act\.scales\)"),
        ("bnb_int8", {"X.weight_format": torch.tensor(3, dtype=torch.uint8)}, r"\(X\.weight_format is 3\)"),
    ],
    ids=["torchao tiles", "torchao input scale", "awq input scale", "bitsandbytes tiles"],
)
def test_layouts_without_documented_values_are_rejected(name: str, more: Tensors, words: str, tmp_path: Path) -> None:
    settings, tensors, _ = recorded(name)
    with pytest.raises(UnsupportedModelError, match=words):
        opened(tmp_path, settings, {**tensors, **more})


def test_gptq_and_gptq_v2_zero_points_give_equal_weights(tmp_path: Path) -> None:
    """gptq_v2 stores zero points unchanged; gptq stores them minus one."""
    weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    found = []
    for form, second in (("gptq", False), ("gptq_v2", True)):
        packed = {f"X{key}": value for key, value in formats.gptq(second=second)(weight).items()}
        found.append((values(opened(tmp_path, {**settings, "checkpoint_format": form}, packed)), packed["X.qzeros"]))
    assert torch.equal(found[0][0], found[1][0]) and not torch.equal(found[0][1], found[1][1])
    assert float((found[0][0] - weight).abs().max()) < 0.5


def test_gptq_dynamic_modules_use_bits_and_group_size_of_tensors(tmp_path: Path) -> None:
    """GPTQModel's `dynamic` setting; the shapes of the tensors take precedence."""
    settings, tensors, _ = recorded("gptq_4")
    more = {"bits": 8, "group_size": 128, "dynamic": {"X": {"bits": 4, "group_size": 32}}}
    weight = opened(tmp_path, {**settings, **more}, tensors)
    assert isinstance(weight, AffineWeight) and (weight.bits, weight.block) == (4, 32)


def test_compressed_tensors_g_idx_selects_the_scale_of_each_input(tmp_path: Path) -> None:
    settings, tensors, _ = recorded("compressed_w4a16")
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1))
    groups = (torch.arange(64) // (64 // tensors["X.weight_scale"].shape[1])).to(torch.int32)[order]
    plain = opened(tmp_path, settings, tensors)
    assert isinstance(plain, AffineWeight)
    with OpenFiles() as files:
        integers = plain.parts(((0, 32), (0, 64)), files).integers
    wanted = (integers.float() - 8) * tensors["X.weight_scale"].float()[:, groups.long()]
    found = opened(tmp_path, {**settings, **one_group(actorder="group")}, {**tensors, "X.weight_g_idx": groups})
    assert torch.equal(values(found), wanted)
    assert torch.equal(values(found, ((3, 9), (5, 41))), wanted[3:9, 5:41])
