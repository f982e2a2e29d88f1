"""Packages of every stored format generate the same tokens as transformers with dequantised weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import partita
from partita.export.checkpoint.description import open_checkpoint
from partita.export.verify.known_answer import load
from partita.package.folder import read_manifest
from tests import quantised_checkpoints as formats
from tests.conftest import Exported, TinyCheckpoint

BNB8 = {"quant_method": "bitsandbytes", "load_in_8bit": True}
BNB4 = {"quant_method": "bitsandbytes", "load_in_4bit": True}
COMPRESSED = {"quant_method": "compressed-tensors", "format": "float-quantized"}
TORCHAO = {"quant_method": "torchao"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}
ORDER = torch.randperm(96, generator=torch.Generator().manual_seed(0))
FORMATS: dict[str, tuple[dict[str, Any], formats.Packer]] = {
    "nf4": (BNB4, lambda weight: formats.nf4(weight, 32)),
    "llm_int8": (BNB8, formats.scaled_rows),
    "fp8_block": ({"quant_method": "fp8", "weight_block_size": [32, 32]}, formats.float8()),
    "fp8_tensor": ({"quant_method": "fp8", "activation_scheme": "static"}, formats.float8(None)),
    "compressed_fp8": (COMPRESSED, formats.float8(None, "_scale")),
    "compressed_w4a16": ({"quant_method": "compressed-tensors"}, formats.compressed_integers()),
    "gptq_act_order": ({**GPTQ, "desc_act": True}, formats.gptq(order=ORDER)),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}, formats.awq()),
    "torchao_int8": (TORCHAO, formats.torchao_rows),
    "torchao_int4_plain": (TORCHAO, formats.torchao_plain),
}
INTEGERS = ("llm_int8", "compressed_w4a16", "gptq_act_order", "awq", "torchao_int8")
"""Packages have their integers, whose products round activations to 8 bits, except in the verified float copy."""
PROMPT, TOKENS = [5, 17, 9, 40, 3], 8


@pytest.mark.parametrize(
    "name",
    [
        each if each in ("nf4", "torchao_int4_plain") else pytest.param(each, marks=pytest.mark.heavy)
        for each in FORMATS
    ],
)
def test_tokens_match_the_dequantised_model(
    name: str, tiny_checkpoint: TinyCheckpoint, exported: Exported, short_text: Path, tmp_path: Path
) -> None:
    settings, packer = FORMATS[name]
    folder = formats.save_quantised(tiny_checkpoint("llama"), tmp_path / "quantised", settings, packer)
    package = exported(folder, precision="auto", **({"quality_text": short_text} if name in INTEGERS else {}))
    manifest = read_manifest(package)
    assert manifest.verification.status == "verified" and manifest.source.quantised is not None
    assert manifest.source.quantised.conversion == ("as stored" if name in INTEGERS else "dequantised")
    assert name in INTEGERS or manifest.graph.precision == "fp32"
    if name in INTEGERS:
        package = exported(folder, precision="fp32")
    model = load(open_checkpoint(str(folder)))
    with torch.no_grad():
        written = model.generate(torch.tensor([PROMPT]), max_new_tokens=TOKENS, do_sample=False, eos_token_id=None)
    with partita.load(package, providers="cpu") as ours:
        made = ours.generate([PROMPT], max_new_tokens=TOKENS, stop_token_ids=()).run()
    assert list(made.tokens[0]) == written[0, len(PROMPT) :].tolist()
