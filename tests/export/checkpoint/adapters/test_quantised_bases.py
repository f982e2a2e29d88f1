"""Adapters trained on a quantised model (QLoRA): added to the dequantised weights, as in peft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from partita.errors import UnsupportedModelError
from partita.export.checkpoint.description import open_checkpoint
from partita.export.verify.known_answer import load
from partita.package.folder import KNOWN_ANSWER, answer_file, read_manifest
from tests import quantised_checkpoints as formats
from tests.adapters import save_adapter
from tests.conftest import Exported, TinyCheckpoint, require
from tests.export.checkpoint.adapters.test_merge import logits, merged_model
from tests.export.checkpoint.adapters.test_switched import greedy, tokens_of
from tests.export.test_bad_checkpoints import refuse
from tests.gguf_files import save_gguf

GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 32}
ORDER = torch.randperm(96, generator=torch.Generator().manual_seed(0))
BASES: dict[str, tuple[dict[str, Any], formats.Packer]] = {
    "gptq": (GPTQ, formats.gptq()),
    "gptq_act_order": ({**GPTQ, "desc_act": True}, formats.gptq(order=ORDER)),
    "nf4": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, formats.nf4),
}
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.fixture
def floats(tiny_checkpoint: TinyCheckpoint) -> Path:
    return tiny_checkpoint("llama")


def base_of(name: str, floats: Path, folder: Path) -> Path:
    """A quantised checkpoint, or a GGUF file."""
    if name == "gguf":
        require("gguf")
        return save_gguf(folder / "model.gguf", floats, "Q4_0")
    return formats.save_quantised(floats, folder / name, *BASES[name])


def taken(package: Path) -> str:
    """What became of the stored integers."""
    quantised = read_manifest(package).source.quantised
    assert quantised is not None
    return quantised.conversion


def of_peft(base: Path, adapter: Path) -> Any:
    """The model of the stored weights with the adapter that peft puts beside them, which merges nothing."""
    require("peft")
    import peft

    return peft.PeftModel.from_pretrained(load(open_checkpoint(str(base))), str(adapter))


@pytest.mark.filterwarnings("ignore")  # peft is not ours
@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("name", ["gptq", "gptq_act_order", "nf4", "gguf"])
def test_merged_quantised_base_matches_peft(name: str, dora: bool, floats: Path, tmp_path: Path) -> None:
    base = base_of(name, floats, tmp_path)
    adapter = save_adapter(tmp_path / "adapter", floats, LINEAR, use_dora=dora)
    found = logits(merged_model(base, adapter))
    np.testing.assert_allclose(found, logits(of_peft(base, adapter)), atol=3e-4, rtol=3e-4)
    assert np.abs(found - logits(load(open_checkpoint(str(base))))).max() > 0.1


@pytest.mark.filterwarnings("ignore")
def test_package_of_merged_quantised_base_matches_peft(floats: Path, exported: Exported, tmp_path: Path) -> None:
    base = base_of("nf4", floats, tmp_path)
    adapter = save_adapter(tmp_path / "adapter", floats, ("q_proj", "down_proj"))
    package = exported(base, adapter=adapter, precision="fp32")
    manifest, answer = read_manifest(package), load_file(package / KNOWN_ANSWER)
    assert manifest.verification.status == "verified" and taken(package) == "dequantised"
    wanted = logits(of_peft(base, adapter), answer["prompt"])
    np.testing.assert_allclose(answer["prefill_logits"], wanted, atol=3e-4, rtol=3e-4)
    assert tokens_of(package, None) == greedy(of_peft(base, adapter))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["gptq_act_order", pytest.param("gguf", marks=pytest.mark.heavy)])
def test_switchable_adapter_on_stored_integers_matches_peft(
    name: str, floats: Path, exported: Exported, tmp_path: Path
) -> None:
    base = base_of(name, floats, tmp_path)
    adapter = save_adapter(tmp_path / "adapter", floats, LINEAR)
    package = exported(base, precision="auto", with_adapters={"tuned": adapter})
    manifest, answer = read_manifest(package), load_file(package / answer_file("tuned"))
    assert manifest.verification.status == "verified" and taken(package) == "as stored"
    assert manifest.graph.precision == "int4"
    wanted = logits(of_peft(base, adapter), answer["prompt"])
    np.testing.assert_allclose(answer["prefill_logits"], wanted, atol=3e-4, rtol=3e-4)


@pytest.mark.parametrize("name", ["gptq", "gguf"])
def test_merging_into_stored_integers_raises_error(name: str, floats: Path, tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    base, adapter = base_of(name, floats, tmp_path / "base"), save_adapter(tmp_path / "adapter", floats, ("q_proj",))
    error = refuse(base, tmp_path / "out", adapter=adapter, max_length=64)
    assert isinstance(error, UnsupportedModelError) and f"`adapter={adapter}`: cannot merge into weights" in str(error)
    assert "model.layers.0.self_attn.q_proj.weight, model.layers.1.self_attn.q_proj.weight; keep it" in str(error)
    assert "`with_adapters`" in str(error) and "`precision=bf16`" in str(error) and "`requantise=True`" in str(error)
