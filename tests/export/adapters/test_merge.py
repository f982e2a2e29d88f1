"""An adapter that is merged: the package is that of the checkpoint whose weights were changed by hand."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from partita.package import KNOWN_ANSWER, read_manifest
from tests.adapters import PREFIX, save_adapter
from tests.conftest import Exported, TinyCheckpoint, require


def changed(checkpoint: Path, folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A copy of a checkpoint with its weights changed, in float32."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(checkpoint, folder)
    tensors = {name: value.float() for name, value in load_file(folder / "model.safetensors").items()}
    change(tensors)
    save_file({name: value.contiguous() for name, value in tensors.items()}, folder / "model.safetensors")
    return folder


def by_hand(
    adapter: Path, scales: Callable[[str, int], float], *, turned: bool = False
) -> Callable[[dict[str, Any]], None]:
    """W + s B A of the LoRA and DoRA papers, whole and at once."""
    from safetensors.torch import load_file

    given = load_file(adapter / "adapter_model.safetensors")

    def change(tensors: dict[str, Any]) -> None:
        for key, down in given.items():
            if not key.endswith(".lora_A.weight"):
                continue
            module = key.removeprefix(PREFIX).removesuffix(".lora_A.weight")
            up = given[key.replace("lora_A", "lora_B")]
            weight = tensors[f"{module}.weight"]
            total = (weight.T if turned else weight) + scales(module, len(down)) * (up @ down)
            magnitude = given.get(f"{PREFIX}{module}.lora_magnitude_vector")
            if magnitude is not None:
                total = magnitude[:, None] * total / total.norm(dim=1, keepdim=True)
            tensors[f"{module}.weight"] = total.T if turned else total

    return change


def logits(package: Path) -> Mapping[str, np.ndarray[Any, Any]]:
    from safetensors.numpy import load_file

    return load_file(package / KNOWN_ANSWER)


def agree(package: Path, other: Path) -> None:
    """Both packages are verified against the same model."""
    assert read_manifest(package).verification.status == "verified"
    found, wanted = logits(package), logits(other)
    assert found["prompt"].tolist() == wanted["prompt"].tolist()
    np.testing.assert_allclose(found["prefill_logits"], wanted["prefill_logits"], atol=2e-4, rtol=2e-4)
    assert found["tokens"].tolist() == wanted["tokens"].tolist()


@pytest.mark.parametrize(
    ("options", "scales"),
    [
        ({"lora_alpha": 6}, lambda module, rank: 6 / rank),
        ({"lora_alpha": 6, "use_rslora": True, "use_dora": True}, lambda module, rank: 6 / math.sqrt(rank)),
        (
            {"ranks": {"k_proj": 2}, "rank_pattern": {"k_proj": 2}, "alpha_pattern": {r"layers\.1\..*\.q_proj": 1}},
            lambda module, rank: (1 if "layers.1" in module and module.endswith("q_proj") else 8) / rank,
        ),
    ],
    ids=["alpha", "rslora and dora", "patterns"],
)
def test_merged_weights_are_those_of_the_formula(
    options: Any, scales: Any, tiny_checkpoint: TinyCheckpoint, exported: Exported, tmp_path: Path
) -> None:
    checkpoint = tiny_checkpoint("llama")
    adapter = save_adapter(tmp_path / "adapter", checkpoint, **options)
    package = exported(checkpoint, adapter=adapter)
    agree(package, exported(changed(checkpoint, tmp_path / "changed", by_hand(adapter, scales))))
    plain = logits(exported(checkpoint))["prefill_logits"]
    assert np.abs(logits(package)["prefill_logits"] - plain).max() > 0.1
    (record,) = read_manifest(package).adapters
    assert record.merged and record.name == "adapter" and record.kind == ("dora" if "use_dora" in options else "lora")
    assert record.modules == 8 and {file.name for file in record.source} >= {"adapter_config.json"}


def test_packed_weights_are_those_of_the_merged_model(
    tiny_checkpoint: TinyCheckpoint, exported: Exported, tmp_path: Path
) -> None:
    checkpoint = tiny_checkpoint("llama")
    adapter = save_adapter(tmp_path / "adapter", checkpoint)
    other = changed(checkpoint, tmp_path / "changed", by_hand(adapter, lambda module, rank: 2.0))
    package, wanted = (
        exported(each, precision="int8", **o) for each, o in ((checkpoint, {"adapter": adapter}), (other, {}))
    )
    agree(package, wanted)
    found, reference = read_manifest(package).quality, read_manifest(wanted).quality
    assert found is not None and reference is not None
    assert found.original_perplexity == pytest.approx(reference.original_perplexity, rel=1e-4)


def test_weights_that_lie_the_other_way_round(
    tiny_checkpoint: TinyCheckpoint, exported: Exported, tmp_path: Path
) -> None:
    checkpoint = tiny_checkpoint("gpt2")
    adapter = save_adapter(tmp_path / "adapter", checkpoint, ("c_attn", "c_proj", "c_fc"), turned=True, use_dora=True)
    # The tensors of this checkpoint have the names of the model with or without its prefix, and so have adapters.
    wanted = changed(checkpoint, tmp_path / "changed", by_hand(adapter, lambda module, rank: 2.0, turned=True))
    agree(exported(checkpoint, adapter=adapter), exported(wanted))


def test_a_tied_head_alone_is_changed(tiny_checkpoint: TinyCheckpoint, exported: Exported, tmp_path: Path) -> None:
    """peft adds to what the head gives, and the embedding stays; with both in one tensor, they part."""
    from safetensors.torch import save_file

    torch = pytest.importorskip("torch")
    checkpoint = tiny_checkpoint("llama", tied=True)
    adapter = save_adapter(tmp_path / "adapter", checkpoint, ("q_proj",))
    down, up = torch.randn(4, 64) * 0.3, torch.randn(288, 4) * 0.3
    head = {f"{PREFIX}lm_head.lora_A.weight": down, f"{PREFIX}lm_head.lora_B.weight": up}
    save_file(head, adapter / "adapter_model.safetensors")

    def change(tensors: dict[str, Any]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 2.0 * (up @ down)

    other = changed(checkpoint, tmp_path / "changed", change)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    agree(exported(checkpoint, adapter=adapter), exported(other))


def test_embeddings_and_whole_parameters(tiny_checkpoint: TinyCheckpoint, exported: Exported, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    checkpoint = tiny_checkpoint("llama", tied=False)
    down, up, head = torch.randn(4, 288) * 0.3, torch.randn(64, 4) * 0.3, torch.randn(288, 64) * 0.2
    extra = {
        f"{PREFIX}model.embed_tokens.lora_embedding_A": down,
        f"{PREFIX}model.embed_tokens.lora_embedding_B": up,
        f"{PREFIX}lm_head.weight": head,
    }
    adapter = save_adapter(tmp_path / "adapter", checkpoint, ("q_proj",), extra=extra, modules_to_save=["lm_head"])

    def change(tensors: dict[str, Any]) -> None:
        by_hand(adapter, lambda module, rank: 2.0)(tensors)
        tensors["model.embed_tokens.weight"] += 2.0 * (up @ down).T
        tensors["lm_head.weight"] = head

    package = exported(checkpoint, adapter=adapter)
    agree(package, exported(changed(checkpoint, tmp_path / "changed", change)))
    assert read_manifest(package).adapters[0].whole == ("lm_head.weight",)


def test_experts_by_their_names_in_the_files(
    tiny_checkpoint: TinyCheckpoint, exported: Exported, tmp_path: Path
) -> None:
    """transformers makes one tensor of them; an adapter that names each was made before it did."""
    checkpoint = tiny_checkpoint(
        "qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, decoder_sparse_step=1
    )
    adapter = save_adapter(tmp_path / "adapter", checkpoint, ("down_proj", "gate_proj"), rank=2)
    names = json.dumps(sorted(path.name for path in adapter.iterdir()))
    assert "adapter_model" in names
    agree(
        exported(checkpoint, adapter=adapter),
        exported(changed(checkpoint, tmp_path / "changed", by_hand(adapter, lambda module, rank: 2.0))),
    )


@pytest.mark.filterwarnings("ignore")  # peft and transformers are not ours
def test_equal_to_peft(tiny_checkpoint: TinyCheckpoint, exported: Exported, tmp_path: Path) -> None:
    """The known answer, with which the package agrees, is what peft computes without merging anything."""
    require("peft")
    import peft
    import torch
    from transformers import AutoModelForCausalLM

    checkpoint = tiny_checkpoint("llama", tied=True, attention_bias=True)
    kinds: dict[str, dict[str, Any]] = {
        "lora": {"target_modules": ["q_proj", "down_proj", "lm_head"], "use_rslora": True},
        "dora": {"target_modules": "all-linear", "use_dora": True, "rank_pattern": {"up_proj": 2}},
        "embedding": {"target_modules": ["embed_tokens", "v_proj"], "modules_to_save": ["norm"]},
        "bias": {"target_modules": ["q_proj", "o_proj"], "lora_bias": True},
        "biases": {"target_modules": ["k_proj"], "bias": "lora_only"},
    }
    for name, settings in kinds.items():
        torch.manual_seed(0)
        base = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager")
        model = peft.get_peft_model(base, peft.LoraConfig(r=4, lora_alpha=6, task_type="CAUSAL_LM", **settings))
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    scale = 0.1 if "magnitude" in parameter_name or "norm" in parameter_name else 0.3
                    parameter.add_(torch.randn_like(parameter), alpha=scale)
        model.save_pretrained(tmp_path / name)
        answer = logits(exported(checkpoint, adapter=tmp_path / name))
        with torch.no_grad():
            wanted = model(input_ids=torch.from_numpy(answer["prompt"])[None], use_cache=False).logits[0].numpy()
        np.testing.assert_allclose(answer["prefill_logits"], wanted, atol=3e-4, rtol=3e-4, err_msg=name)
