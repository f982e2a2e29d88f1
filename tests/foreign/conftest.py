"""Folders of other exporters, as tests may change them: copies of the samples, and variants made of one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from partita.foreign.folder import Choice, open_folder

SAMPLES = Path(__file__).parent / "samples"
KNOWN: dict[str, list[int]] = json.loads((SAMPLES / "tokens.json").read_text(encoding="utf-8"))
"""Prompt, and the greedy tokens of transformers after it."""


Sample = Callable[[str], Path]
"""The fixture `sample`: a folder of a layout that the test may change."""


@pytest.fixture
def sample(tmp_path: Path) -> Sample:
    """Copies of the sample folders; `pair` and `whole` are put together of the files of others."""

    def copy(layout: str) -> Path:
        out = tmp_path / layout
        home = SAMPLES / (layout if (SAMPLES / layout).is_dir() else "optimum")
        shutil.copytree(home, out)
        if layout in ("pair", "whole", "merged"):
            for name in ("config.json", "generation_config.json"):
                shutil.copy(SAMPLES / "optimum" / name, out / name)
        if layout == "pair":
            (out / "model.onnx").rename(out / "decoder_with_past_model.onnx")
            shutil.copy(SAMPLES / "first" / "decoder_model.onnx", out)
        if layout == "whole":
            shutil.copy(SAMPLES / "first" / "decoder_model.onnx", out / "model.onnx")
        return out

    return copy


@pytest.fixture(scope="session")
def hub_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as hub repositories for transformers.js are, with variants that ONNX Runtime's own tools made."""
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from onnxruntime.quantization.matmul_bnb4_quantizer import MatMulBnb4Quantizer
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer
    from onnxruntime.transformers.float16 import convert_float_to_float16

    folder = tmp_path_factory.mktemp("hub-") / "tiny-llama"
    inner = folder / "onnx"
    inner.mkdir(parents=True)
    for name in ("config.json", "generation_config.json"):
        shutil.copy(SAMPLES / "optimum" / name, folder)
    plain = shutil.copy(SAMPLES / "optimum" / "model.onnx", inner)
    onnx.save(convert_float_to_float16(onnx.load(plain)), inner / "model_fp16.onnx")
    for name, kind in (("int8", QuantType.QInt8), ("uint8", QuantType.QUInt8)):
        quantize_dynamic(plain, inner / f"model_{name}.onnx", weight_type=kind)
    packer = MatMulNBitsQuantizer(onnx.load(plain), block_size=32, is_symmetric=True)
    packer.process()
    packer.model.save_model_to_file(str(inner / "model_q4.onnx"))
    onnx.save(convert_float_to_float16(packer.model.model), inner / "model_q4f16.onnx")
    table = MatMulBnb4Quantizer(onnx.load(plain), MatMulBnb4Quantizer.NF4, 32)
    table.process()
    onnx.save(table.model.model, inner / "model_bnb4.onnx")
    return folder


def changed(path: Path, **values: Any) -> None:
    """Write other values into a JSON file; dotted names go into its sections, written as a__b."""
    raw = json.loads(path.read_text(encoding="utf-8"))
    for name, value in values.items():
        section, parts = raw, name.split("__")
        for part in parts[:-1]:
            section = section[part]
        section[parts[-1]] = value
    path.write_text(json.dumps(raw), encoding="utf-8")


def length_and_notes(folder: Path, max_length: int | None = None) -> tuple[int, str]:
    """The maximum length of a foreign folder, and its notes on one line."""
    manifest = open_folder(folder, Choice(max_length=max_length))
    assert manifest.foreign is not None
    return manifest.graph.max_length, "; ".join(manifest.foreign.notes)
