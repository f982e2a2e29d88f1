"""GGUF checkpoints: weights equal those of transformers' GGUF reader; integers are exported as stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import partita
from partita.export.checkpoint.description import open_checkpoint
from partita.export.verify.known_answer import load
from partita.package.folder import KNOWN_ANSWER, read_manifest
from tests.conftest import Exported, TinyCheckpoint, require
from tests.gguf_files import save_gguf

EXPERTS: Any = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1}


def of_transformers(file: Path) -> dict[str, Any]:
    """What transformers' own reader makes of every parameter."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(file.parent), gguf_file=file.name, dtype=torch.float32)
    return dict(model.named_parameters())


@pytest.mark.parametrize(("model_type", "kind", "options"), [("llama", "Q4_0", {}), ("qwen2", "F16", {"tied": True})])
def test_weights_equal_those_read_by_transformers(
    model_type: str, kind: str, options: Any, tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    require("gguf")
    import torch

    file = save_gguf(tmp_path / "model.gguf", tiny_checkpoint(model_type, **options), kind)
    wanted, model = of_transformers(file), load(open_checkpoint(str(file)))
    found = dict(model.named_parameters())
    assert found.keys() == wanted.keys()
    for name, value in found.items():
        assert torch.equal(value, wanted[name]), name


def test_gguf_is_recognised_by_content_not_file_name(tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> None:
    require("gguf")
    file = save_gguf(tmp_path / "model.gguf", tiny_checkpoint("llama")).rename(tmp_path / "sha256-0a1b")
    assert open_checkpoint(str(file)).model_type == "llama"


def test_stacked_experts_equal_those_of_the_safetensors_checkpoint(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    require("gguf")
    import torch

    checkpoint = tiny_checkpoint("qwen3_moe", **EXPERTS)
    wanted = dict(load(open_checkpoint(str(checkpoint))).named_parameters())
    for name, value in load(open_checkpoint(str(save_gguf(tmp_path / "m.gguf", checkpoint)))).named_parameters():
        assert torch.equal(value, wanted[name]), name


@pytest.mark.parametrize(("halves", "others"), [("Q8_0", "Q4_0"), ("Q4_1", "F16")])
def test_up_and_gate_experts_may_have_different_gguf_types(
    halves: str, others: str, tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    """Both are halves of one model parameter; each half is read with its own GGUF type."""
    require("gguf")
    import torch

    checkpoint = tiny_checkpoint("qwen3_moe", **EXPERTS)
    file = save_gguf(tmp_path / "model.gguf", checkpoint, lambda name: halves if "up_exps" in name else others)
    whole = load(open_checkpoint(str(file)))
    for name, kind in (("up", halves), ("gate", others)):
        alone = save_gguf(tmp_path / f"{name}.gguf", checkpoint, kind)
        for key, value in load(open_checkpoint(str(alone))).named_parameters():
            if key.endswith("gate_up_proj"):
                half = slice(32, None) if name == "up" else slice(32)
                assert torch.equal(dict(whole.named_parameters())[key][:, half], value[:, half]), key


def test_package_contains_stored_integers_and_matches_logits(
    tiny_checkpoint: TinyCheckpoint, exported: Exported, tmp_path: Path
) -> None:
    """llama.cpp's Q4_0 layout: 4-bit weights and an 8-bit head."""
    require("gguf")
    checkpoint = tiny_checkpoint("llama")
    file = save_gguf(tmp_path / "model.gguf", checkpoint, lambda name: "Q8_0" if name == "output.weight" else "Q4_0")
    package = exported(file, precision="auto")
    manifest = read_manifest(package)
    assert manifest.verification.status == "verified" and manifest.graph.precision == "int4"
    quantised = manifest.source.quantised
    assert quantised is not None and quantised.conversion == "as stored" and quantised.method == "GGUF Q4_0, Q8_0"
    assert manifest.source.files[0].name == "model.gguf"
    from safetensors.numpy import load_file

    answer = load_file(package / KNOWN_ANSWER)
    import torch

    model = load(open_checkpoint(str(file)))
    with torch.no_grad():
        wanted = model(input_ids=torch.from_numpy(answer["prompt"])[None], use_cache=False).logits[0].numpy()
    np.testing.assert_allclose(answer["prefill_logits"], wanted, atol=1e-4, rtol=1e-4)
    with partita.load(package, providers="cpu") as opened:
        text = "return the value"
        assert opened.encode(text) and opened.decode(opened.encode(text)).strip() == text


def test_keep_selects_gguf_tensors_by_transformers_module_name(
    tiny_checkpoint: TinyCheckpoint, exported: Exported, tmp_path: Path
) -> None:
    """The file calls this module blk.0.attn_v; the exporter fuses it into one QKV product."""
    require("gguf")
    file = save_gguf(tmp_path / "model.gguf", tiny_checkpoint("llama"))
    keep = {"model.layers.0.self_attn.v_proj": "int8"}
    package = exported(file, precision="int4", keep=keep, quantiser="nearest")
    model = onnx.load(package / "model.onnx", load_external_data=False)
    products = [node for node in model.graph.node if node.op_type == "MatMulNBits"]
    (wide,) = [node.name for node in products if any(a.name == "bits" and a.i == 8 for a in node.attribute)]
    assert wide.startswith("model.layers.0.self_attn")


@pytest.mark.parametrize(
    "options", [{"precision": "fp32"}, pytest.param({"precision": "int4", "requantise": True}, marks=pytest.mark.heavy)]
)
def test_package_of_a_folder_with_a_gguf_file_is_verified(
    options: Any, tiny_checkpoint: TinyCheckpoint, exported: Exported, tmp_path: Path
) -> None:
    require("gguf")
    save_gguf(tmp_path / "model.gguf", tiny_checkpoint("llama"), "Q4_1")
    manifest = read_manifest(exported(tmp_path, **options))
    assert manifest.verification.status == "verified" and manifest.source.checkpoint == tmp_path.name


def test_rope_frequency_factors_are_applied(
    tiny_checkpoint: TinyCheckpoint, exported: Exported, tmp_path: Path
) -> None:
    """llama.cpp stores Llama 3.1's RoPE frequencies as a factor tensor, which transformers' reader ignores."""
    require("gguf")
    import gguf
    import torch
    from transformers import AutoModelForCausalLM

    factors_of = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope = {"rope_type": "llama3", "rope_theta": 1e4, "original_max_position_embeddings": 64, **factors_of}
    checkpoint = tiny_checkpoint("llama", rope_parameters=rope)
    original = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager")
    plain = 1.0 / 10000.0 ** (torch.arange(0, 16, 2).float() / 16)
    factors = (plain / original.model.rotary_emb.inv_freq).numpy()
    assert factors.max() > 2
    add = gguf.GGUFWriter.write_header_to_file

    def with_factors(writer: Any, *args: Any) -> None:
        writer.add_tensor("rope_freqs.weight", factors.astype(np.float32))
        add(writer, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "write_header_to_file", with_factors)
        file = save_gguf(tmp_path / "model.gguf", checkpoint)
    from safetensors.numpy import load_file

    answer = load_file(exported(file, precision="fp32") / KNOWN_ANSWER)
    with torch.no_grad():
        wanted = original(input_ids=torch.from_numpy(answer["prompt"])[None], use_cache=False).logits[0].numpy()
    np.testing.assert_allclose(answer["prefill_logits"], wanted, atol=1e-3, rtol=1e-3)
