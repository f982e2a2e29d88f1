"""Checkpoints that are already quantised are refused by name, told by their config, by files beside it, or by their
tensors.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from partita.cli import run
from tests.conftest import TinyCheckpoint

Copy = Callable[[Path], Path]
PROJECTION = "model.layers.0.mlp.down_proj"


def refused(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Export from the command line, which must end with exit code 1, one line, and nothing left."""
    out = tmp_path / "made" / "out"
    assert run(["export", str(folder), str(out)]) == 1
    printed, err = capsys.readouterr()
    assert printed == "" and err.startswith(f"partita: {folder}") and err.count("\n") == 1, err
    assert not out.parent.exists()
    assert "Traceback" not in err and "internal error" not in err
    return err


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "gptq": ({"quant_method": "gptq", "bits": 4}, "quantised: GPTQ (quantization_config in config.json)"),
    "gptq_without_name": ({"bits": 4, "group_size": 128, "desc_act": False}, "quantised: GPTQ ("),
    "awq": ({"quant_method": "awq", "bits": 4, "zero_point": True}, "quantised: AWQ ("),
    "fp8": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "FineGrainedFP8Config(dequantize=True)"),
    "fp8_without_name": ({"activation_scheme": "dynamic"}, "quantised: fp8 ("),
    "bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "model.dequantize()"),
    "bitsandbytes_without_name": ({"load_in_8bit": True, "llm_int8_threshold": 6.0}, "quantised: bitsandbytes ("),
    "mxfp4": ({"quant_method": "mxfp4"}, "Mxfp4Config(dequantize=True)"),
    "compressed_tensors": ({"quant_method": "compressed-tensors"}, "CompressedTensorsConfig(dequantize=True)"),
    "compressed_tensors_without_name": ({"config_groups": {}, "format": "pack-quantized"}, "compressed-tensors ("),
    "torchao": ({"quant_method": "torchao", "quant_type": "int4wo"}, "quantised: TorchAO ("),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "FP8"}, "quantised: ModelOpt ("),
    "unheard_of": ({"quant_method": "q99"}, "quantised: q99 ("),
    "nameless": ({"x": 1}, "quantised: an unknown method ("),
}


@pytest.mark.parametrize("kind", sorted(CONFIGS))
@pytest.mark.parametrize("inside", [False, True], ids=["top", "text_config"])
def test_by_its_config(
    tiny_checkpoint: TinyCheckpoint,
    own_copy: Copy,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    kind: str,
    inside: bool,
) -> None:
    settings, words = CONFIGS[kind]
    folder = own_copy(tiny_checkpoint("llama"))
    config = json.loads((folder / "config.json").read_text())
    (config.setdefault("text_config", {}) if inside else config)["quantization_config"] = settings
    (folder / "config.json").write_text(json.dumps(config))
    error = refused(folder, tmp_path, capsys)
    assert words.replace("in config.json", "in text_config of config.json" if inside else "in config.json") in error
    assert "cannot be exported yet, export the checkpoint that it was quantised from" in error


FILES: dict[str, tuple[str, dict[str, Any], str]] = {
    "auto_gptq": ("quantize_config.json", {"bits": 4, "group_size": 128, "sym": True}, "GPTQ (quantize_config.json)"),
    "auto_awq": ("quant_config.json", {"w_bit": 4, "q_group_size": 128}, "AWQ (quant_config.json)"),
    "modelopt": (
        "hf_quant_config.json",
        {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}},
        "ModelOpt (hf_quant_config.json)",
    ),
}


@pytest.mark.parametrize("kind", sorted(FILES))
def test_by_a_file_beside_the_config(
    tiny_checkpoint: TinyCheckpoint, own_copy: Copy, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    name, content, words = FILES[kind]
    folder = own_copy(tiny_checkpoint("llama"))
    (folder / name).write_text(json.dumps(content))
    assert f"quantised: {words}" in refused(folder, tmp_path, capsys)


def test_mlx(
    tiny_checkpoint: TinyCheckpoint, own_copy: Copy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = own_copy(tiny_checkpoint("llama"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization": {"group_size": 64, "bits": 4}}))
    assert "quantised: MLX (quantization in config.json)" in refused(folder, tmp_path, capsys)


def ints(dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.ones(8, 64, dtype=dtype)


SCALES = torch.ones(8, 1)
TENSORS: dict[str, tuple[dict[str, torch.Tensor], str]] = {
    "gptq": ({".qweight": ints(), ".qzeros": ints(), ".scales": SCALES, ".g_idx": ints()}, "GPTQ"),
    "awq": ({".qweight": ints(), ".qzeros": ints(), ".scales": SCALES}, "AWQ"),
    "bitsandbytes": ({".weight": ints(torch.uint8), ".weight.absmax": SCALES, ".weight.quant_map": SCALES}, "bitsandb"),
    "llm_int8": ({".weight": ints(torch.int8), ".SCB": SCALES}, "bitsandbytes LLM.int8"),
    "fp8": ({".weight": ints(torch.float32).to(torch.float8_e4m3fn), ".weight_scale_inv": SCALES}, "fp8"),
    "mxfp4": ({"_blocks": ints(torch.uint8), "_scales": ints(torch.uint8)}, "MXFP4"),
    "compressed_tensors": ({".weight_packed": ints(), ".weight_scale": SCALES}, "compressed-tensors"),
    "nvfp4": (
        {
            ".weight": ints(torch.uint8),
            ".weight_scale": SCALES.to(torch.float8_e4m3fn),
            ".weight_scale_2": torch.ones(()),
        },
        "NVFP4",
    ),
    "hqq": ({".W_q": ints(torch.uint8), ".meta": SCALES}, "HQQ"),
    "mlx": ({".weight": ints().view(torch.uint32), ".scales": SCALES, ".biases": SCALES}, "MLX"),
    "int8": ({".weight": ints(torch.int8), ".weight_scale": SCALES}, "int8"),
    "unknown": ({".weight": ints(torch.int8)}, "an unknown method"),
}


@pytest.mark.parametrize("kind", sorted(TENSORS))
def test_by_its_tensors(
    tiny_checkpoint: TinyCheckpoint, own_copy: Copy, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    """The config says nothing: it was lost, or the tool writes none."""
    added, words = TENSORS[kind]
    folder = own_copy(tiny_checkpoint("llama"))
    tensors = load_file(folder / "model.safetensors")
    del tensors[f"{PROJECTION}.weight"]
    tensors |= {PROJECTION + end: tensor.clone() for end, tensor in added.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    error = refused(folder, tmp_path, capsys)
    assert f"quantised: {words}" in error and f"(by its tensor {PROJECTION}" in error


def test_a_gguf_file_beside_other_weights_is_left_alone(tiny_checkpoint: TinyCheckpoint, own_copy: Copy) -> None:
    from partita.export.checkpoint import open_checkpoint

    folder = own_copy(tiny_checkpoint("llama"))
    (folder / "model-Q4_K_M.gguf").write_bytes(b"GGUF")
    assert open_checkpoint(str(folder)).files == ("model.safetensors",)


@pytest.mark.parametrize(
    "settings", [None, {}, {"quant_algo": None, "kv_cache_quant_algo": "FP8"}], ids=["null", "empty", "cache_only"]
)
def test_a_config_that_says_that_nothing_is_quantised(
    tiny_checkpoint: TinyCheckpoint, own_copy: Copy, settings: dict[str, Any] | None
) -> None:
    from partita.export.quantised import refuse_by_config

    refuse_by_config(tiny_checkpoint("llama"), {"quantization_config": settings})


def test_plain_checkpoints_are_not_taken_for_quantised(tiny_checkpoint: TinyCheckpoint) -> None:
    from partita.export.checkpoint import open_checkpoint

    for model_type in ("llama", "gpt_neox"):
        open_checkpoint(str(tiny_checkpoint(model_type, tokenizer=False)))
