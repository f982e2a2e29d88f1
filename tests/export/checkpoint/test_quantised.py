"""Quantised checkpoints: detection by config or extra file; unsupported formats are rejected by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from partita.errors import PartitaError
from partita.export.checkpoint.description import open_checkpoint
from tests.checkpoints import edit_config, edit_tensors
from tests.export.test_bad_checkpoints import refuse


def refused(folder: Path) -> str:
    """The error of a checkpoint that cannot be opened, which names it in one line."""
    with pytest.raises(PartitaError) as caught:
        open_checkpoint(str(folder))
    said = str(caught.value)
    assert said.startswith(str(folder)) and "\n" not in said
    return said


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "gptq_without_name": ({"bits": 4, "group_size": 128, "desc_act": False}, "quantised: GPTQ ("),
    "awq": ({"quant_method": "awq", "bits": 4, "zero_point": True}, "quantised: AWQ ("),
    "fp8_without_name": ({"activation_scheme": "dynamic"}, "quantised: fp8 ("),
    "bitsandbytes_without_name": ({"load_in_8bit": True, "llm_int8_threshold": 6.0}, "quantised: bitsandbytes ("),
    "mxfp4": ({"quant_method": "mxfp4"}, "quantised: MXFP4 ("),
    "compressed_tensors_without_name": ({"config_groups": {}, "format": "pack-quantized"}, "compressed-tensors ("),
    "torchao": ({"quant_method": "torchao", "quant_type": "int4wo"}, "quantised: TorchAO ("),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "FP8"}, "quantised: ModelOpt ("),
    "mlx": ({"group_size": 64, "bits": 4}, "quantised: MLX ("),
    "unheard_of": ({"quant_method": "q99"}, "quantised: q99 ("),
    "nameless": ({"x": 1}, "quantised: an unknown method ("),
}


@pytest.mark.parametrize(("kind", "inside"), [*((kind, False) for kind in sorted(CONFIGS)), ("unheard_of", True)])
def test_quantisation_is_detected_by_config(llama: Path, kind: str, inside: bool) -> None:
    settings, words = CONFIGS[kind]
    quantised = {"quantization_config": settings}
    edit_config(llama, **({"text_config": quantised} if inside else quantised))
    error = refused(llama)
    assert words.replace("in config.json", "in text_config of config.json" if inside else "in config.json") in error
    if any(name in error for name in ("ModelOpt", "MLX", "q99", "unknown")):
        assert "this format is not supported: export the unquantised checkpoint, or one in" in error
    else:  # the weights beside this config are floats
        assert "but none of its tensors is in this format; correct config.json" in error


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("quantize_config.json", {"bits": 4, "group_size": 128, "sym": True}, "GPTQ (quantize_config.json)"),
        ("quant_config.json", {"w_bit": 4, "q_group_size": 128}, "AWQ (quant_config.json)"),
        ("hf_quant_config.json", {"quantization": {"quant_algo": "NVFP4"}}, "ModelOpt (hf_quant_config.json)"),
    ],
)
def test_quantisation_is_detected_by_extra_config_file(
    llama: Path, name: str, content: dict[str, Any], words: str
) -> None:
    (llama / name).write_text(json.dumps(content))
    assert f"quantised: {words}" in refused(llama)


@pytest.mark.parametrize(
    ("tensor", "dtype"),
    [(torch.ones(96, 64, dtype=torch.int8), "I8"), (torch.ones(96, 64).to(torch.float8_e4m3fn), "F8_E4M3")],
    ids=["int8", "fp8"],
)
def test_quantised_tensors_without_settings_are_rejected(
    llama: Path, tmp_path: Path, tensor: torch.Tensor, dtype: str
) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    folder = edit_tensors(llama, lambda tensors: tensors.update({name: tensor}))
    assert f"not expected by the model: {name} is {dtype}, not a float type" in str(refuse(folder, tmp_path / "o"))


def test_gguf_file_next_to_safetensors_is_ignored(llama: Path) -> None:
    (llama / "model-Q4_K_M.gguf").write_bytes(b"GGUF")
    assert open_checkpoint(str(llama)).files == ("model.safetensors",)


@pytest.mark.parametrize(
    "settings", [None, {}, {"quant_algo": None, "kv_cache_quant_algo": "FP8"}], ids=["null", "empty", "cache_only"]
)
def test_config_without_quantisation_method_is_ignored(llama: Path, settings: dict[str, Any] | None) -> None:
    from partita.export.checkpoint.quantisation_method import by_config

    assert by_config(llama, {"quantization_config": settings}) is None
