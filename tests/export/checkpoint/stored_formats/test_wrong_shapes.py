"""Quantised tensors with inconsistent shapes or contradicting settings raise errors that name the tensor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from partita.errors import CheckpointError, UnsupportedModelError
from partita.export.checkpoint.quantisation_method import by_config
from partita.export.checkpoint.stored_formats import AffineWeight, QuantisedTensors, read
from partita.export.checkpoint.weight_files import OpenFiles, find_tensors
from tests import quantised_checkpoints as formats
from tests.export.checkpoint.stored_formats.test_libraries import CASES, LIBRARIES

INFERRED = {("torchao_float8", "X._weight_scale"): "the size of its groups is nowhere but in the shape"}


def tensors_of(name: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    with safe_open(str(LIBRARIES / f"{name}.safetensors"), framework="pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys() if key != "expected"}  # noqa: SIM118 - no dict
        return json.loads(file.metadata()["settings"]), tensors


def opened(folder: Path, settings: dict[str, Any], tensors: dict[str, torch.Tensor]) -> QuantisedTensors:
    """A checkpoint of one weight."""
    kept = {key: value.clone().contiguous() for key, value in tensors.items()}
    save_file(kept, folder / "model.safetensors")
    found = by_config(folder, {"quantization_config": settings})
    assert found is not None
    return read(folder, found, find_tensors(folder)[0])


def changes(value: torch.Tensor) -> list[torch.Tensor]:
    """The tensor longer and shorter by one on every axis."""
    made = []
    for axis, size in enumerate(value.shape):
        made.append(torch.cat([value, value.narrow(axis, 0, 1)], axis))
        if size > 1:
            made.append(value.narrow(axis, 0, size - 1))
    return made


@pytest.mark.parametrize("name", CASES)
def test_wrong_tensor_shapes_raise_errors_or_change_weight_shape(name: str, tmp_path: Path) -> None:
    settings, tensors = tensors_of(name)
    seen = 0
    (right,) = opened(tmp_path, settings, tensors).weights.values()
    for key, value in tensors.items():
        if (name, key) in INFERRED:
            continue
        for other in changes(value):
            try:
                (weight,) = opened(tmp_path, settings, {**tensors, key: other}).weights.values()
            except CheckpointError as error:
                seen += 1
                assert "X" in str(error) and "\n" not in str(error)
            else:  # a row more or less may be right by itself; it is no weight of this model
                assert weight.shape != right.shape and value.numel() >= 32 * 16, (key, list(other.shape))
    assert seen or name == "fp8_tensor"  # whose scale is one number


def test_group_size_mismatch_raises_checkpoint_error(tmp_path: Path) -> None:
    for name in ("gptq_4", "awq", "compressed_w4a16", "compressed_int8"):
        settings, tensors = tensors_of(name)
        more = one_group(group_size=16) if "config_groups" in settings else {"group_size": 16}
        with pytest.raises(CheckpointError, match=r"quantised tensor X\.(scales|qzeros|weight_scale) is"):
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
def test_layouts_without_documented_values_are_rejected(
    name: str, more: dict[str, torch.Tensor], words: str, tmp_path: Path
) -> None:
    settings, tensors = tensors_of(name)
    with pytest.raises(UnsupportedModelError, match=words):
        opened(tmp_path, settings, {**tensors, **more})


def test_gptq_and_gptq_v2_zero_points_give_equal_weights(tmp_path: Path) -> None:
    """gptq_v2 stores zero points unchanged; gptq stores them minus one."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(32, 64, generator=generator)
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    values = []
    for form, second in (("gptq", False), ("gptq_v2", True)):
        packed = {f"X{key}": value for key, value in formats.gptq(second=second)(weight).items()}
        (found,) = opened(tmp_path, {**settings, "checkpoint_format": form}, packed).weights.values()
        with OpenFiles() as files:
            values.append(found.read(((0, 32), (0, 64)), files))
        values.append(packed["X.qzeros"])
    assert torch.equal(values[0], values[2]) and not torch.equal(values[1], values[3])
    assert float((values[0] - weight).abs().max()) < 0.5


def test_compressed_tensors_g_idx_selects_the_scale_of_each_input(tmp_path: Path) -> None:
    settings, tensors = tensors_of("compressed_w4a16")
    settings["config_groups"]["group_0"]["weights"]["actorder"] = "group"
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1))
    groups = (torch.arange(64) // (64 // tensors["X.weight_scale"].shape[1])).to(torch.int32)[order]
    (plain,) = opened(tmp_path, tensors_of("compressed_w4a16")[0], tensors).weights.values()
    region = ((0, 32), (0, 64))
    with OpenFiles() as files:
        integers = plain.parts(region, files).integers  # type: ignore[attr-defined]
    (found,) = opened(tmp_path, settings, {**tensors, "X.weight_g_idx": groups}).weights.values()
    wanted = (integers.float() - 8) * tensors["X.weight_scale"].float()[:, groups.long()]
    with OpenFiles() as files:
        assert torch.equal(found.read(region, files), wanted)
        assert torch.equal(found.read(((3, 9), (5, 41)), files), wanted[3:9, 5:41])
    with pytest.raises(CheckpointError, match=r"X\.weight_g_idx is \[63\], but X\.weight_packed .* requires \[64\]"):
        opened(tmp_path, settings, {**tensors, "X.weight_g_idx": groups[:63]})


@pytest.mark.parametrize("name", ["compressed_int8", "compressed_w8a16"])
def test_per_row_scale_may_be_a_vector(name: str, tmp_path: Path) -> None:
    settings, tensors = tensors_of(name)
    found = []
    for shape in ((-1, 1), (-1,)):
        changed = {**tensors, "X.weight_scale": tensors["X.weight_scale"].reshape(shape)}
        (weight,) = opened(tmp_path, settings, changed).weights.values()
        with OpenFiles() as files:
            found.append([weight.read(region, files) for region in (((0, 32), (0, 64)), ((3, 9), (5, 41)))])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=str)
def test_scalar_zero_point_applies_to_all_rows(shape: tuple[int, ...], tmp_path: Path) -> None:
    settings, tensors = tensors_of("compressed_int8_asymmetric")
    more = {"X.weight_zero_point": torch.full(shape, 3, dtype=torch.int8)}
    (weight,) = opened(tmp_path, settings, {**tensors, **more}).weights.values()
    assert isinstance(weight, AffineWeight)
    expected = (tensors["X.weight"].float() - 3) * tensors["X.weight_scale"].float()
    with OpenFiles() as files:
        assert torch.equal(weight.read(((0, 32), (0, 64)), files), expected)
        assert torch.equal(weight.read(((3, 9), (5, 41)), files), expected[3:9, 5:41])
        assert set(weight.zero_points(files).reshape(-1).tolist()) == {128 + 3}


def test_gptq_dynamic_modules_use_bits_and_group_size_of_tensors(tmp_path: Path) -> None:
    """GPTQModel's `dynamic` setting; the shapes of the tensors take precedence."""
    settings, tensors = tensors_of("gptq_4")
    more = {"dynamic": {"X": {"bits": 4, "group_size": 32}}}
    (weight,) = opened(tmp_path, {**settings, "bits": 8, "group_size": 128, **more}, tensors).weights.values()
    assert isinstance(weight, AffineWeight) and (weight.bits, weight.block) == (4, 32)


def one_group(**weights: Any) -> dict[str, Any]:
    """Settings of compressed-tensors with one group."""
    said = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True, **weights}
    return {"config_groups": {"group_0": {"targets": ["Linear"], "weights": said}}}


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("gptq_4", {"sym": True}, "X.qzeros contradicts the setting sym: not all of its zero points are 2^(bits-1)"),
        ("gptq_4_symmetric", {"checkpoint_format": "gptq_v2"}, "X.qzeros contradicts the setting sym"),
        ("awq", {"zero_point": False}, "X.qzeros contradicts the setting zero_point false"),
        (
            "compressed_w4a16_asymmetric",
            one_group(),
            "X.weight_zero_point contradicts the setting symmetric: not all of its zero",
        ),
    ],
)
def test_settings_contradicting_tensors_raise_checkpoint_error(
    name: str, changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    settings, tensors = tensors_of(name)
    with pytest.raises(CheckpointError) as caught:
        opened(tmp_path, {**settings, **changes}, tensors)
    assert said in str(caught.value) and "correct the settings, or quantise the model again" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "missing"), [({"symmetric": False}, "weight_zero_point"), ({"actorder": "group"}, "weight_g_idx")]
)
def test_missing_tensors_required_by_settings_raise_checkpoint_error(
    changes: dict[str, Any], missing: str, tmp_path: Path
) -> None:
    settings, tensors = tensors_of("compressed_w4a16")
    with pytest.raises(CheckpointError, match=rf"lacks X\.{missing}; download it again"):
        opened(tmp_path, {**settings, **one_group(**changes)}, tensors)
    several = one_group(**changes)["config_groups"] | {"other": one_group()["config_groups"]["group_0"]}
    assert opened(tmp_path, {**settings, "config_groups": several}, tensors).weights
