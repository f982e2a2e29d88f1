"""Merged adapters against manually changed checkpoint weights and against peft."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from partita.export.checkpoint import auto_class
from partita.export.checkpoint.adapters import read_adapter
from partita.export.checkpoint.adapters.merge import merge_adapter
from partita.export.checkpoint.description import open_checkpoint
from partita.export.verify.known_answer import load
from partita.package.folder import KNOWN_ANSWER, read_manifest
from tests.adapters import PREFIX, save_adapter
from tests.checkpoints import edit_tensors
from tests.conftest import Exported, TinyCheckpoint, require


def changed(checkpoint: Path, folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A copy of a checkpoint with its weights changed."""
    return edit_tensors(Path(shutil.copytree(checkpoint, folder)), change)


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


def merged_model(checkpoint: Path, adapter: Path) -> Any:
    """The original model with an adapter merged, as the known answer is computed with it."""
    import torch

    opened = open_checkpoint(str(checkpoint))
    with torch.device("meta"):
        empty = auto_class(opened.config).from_config(opened.config)
    return load(merge_adapter(opened, empty, read_adapter(adapter))[0])


def logits(model: Any, prompt: Any = None) -> np.ndarray[Any, Any]:
    """[S, vocab] of a prompt."""
    import torch

    tokens = torch.arange(3, 27) if prompt is None else torch.from_numpy(prompt)
    with torch.no_grad():
        found: np.ndarray[Any, Any] = model(input_ids=tokens[None], use_cache=False).logits[0].numpy()
    return found


def agree(model: Any, other: Path) -> None:
    """A model computes what that of a checkpoint does, and other weights than those of it have the same numbers."""
    wanted = load(open_checkpoint(str(other)))
    values = dict(wanted.named_parameters(remove_duplicate=False))
    for name, value in model.named_parameters(remove_duplicate=False):
        np.testing.assert_allclose(value.detach(), values[name].detach(), atol=1e-5, rtol=1e-5, err_msg=name)
    np.testing.assert_allclose(logits(model), logits(wanted), atol=2e-4, rtol=2e-4)


def test_patterns_of_ranks_and_alphas_match_the_lora_formula(tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint("llama")
    patterns: Any = {"rank_pattern": {"k_proj": 2}, "alpha_pattern": {r"layers\.1\..*\.q_proj": 1}}
    adapter = save_adapter(tmp_path / "adapter", checkpoint, ranks={"k_proj": 2}, **patterns)

    def scale(module: str, rank: int) -> float:
        return (1 if "layers.1" in module and module.endswith("q_proj") else 8) / rank

    model = merged_model(checkpoint, adapter)
    agree(model, changed(checkpoint, tmp_path / "changed", by_hand(adapter, scale)))
    assert np.abs(logits(model) - logits(load(open_checkpoint(str(checkpoint))))).max() > 0.1


def test_package_matches_the_merged_model(tiny_checkpoint: TinyCheckpoint, exported: Exported, tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint("llama")
    adapter = save_adapter(tmp_path / "adapter", checkpoint, use_dora=True)
    package = exported(checkpoint, adapter=adapter)
    manifest = read_manifest(package)
    (record,) = manifest.adapters
    assert manifest.verification.status == "verified" and record.merged and record.name == "adapter"
    assert record.kind == "dora" and record.ranks == (4,) and record.modules == 8
    assert [file.name for file in record.source] == ["adapter_config.json", "adapter_model.safetensors"]
    answer = load_file(package / KNOWN_ANSWER)
    wanted = logits(merged_model(checkpoint, adapter), answer["prompt"])
    np.testing.assert_allclose(answer["prefill_logits"], wanted, atol=2e-4, rtol=2e-4)


def test_transposed_weights_merge_correctly(tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint("gpt2")
    adapter = save_adapter(tmp_path / "adapter", checkpoint, ("c_attn", "c_proj", "c_fc"), turned=True, use_dora=True)
    wanted = changed(checkpoint, tmp_path / "changed", by_hand(adapter, lambda module, rank: 2.0, turned=True))
    agree(merged_model(checkpoint, adapter), wanted)


def test_adapters_of_individual_experts_merge_correctly(tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> None:
    """Older adapters name each expert; transformers stacks the experts in a single tensor."""
    checkpoint = tiny_checkpoint(
        "qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, decoder_sparse_step=1
    )
    adapter = save_adapter(tmp_path / "adapter", checkpoint, ("down_proj", "gate_proj"), rank=2)
    wanted = changed(checkpoint, tmp_path / "changed", by_hand(adapter, lambda module, rank: 2.0))
    agree(merged_model(checkpoint, adapter), wanted)


@pytest.mark.filterwarnings("ignore")  # peft and transformers are not ours
def test_merged_models_match_peft(tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> None:
    """The reference is peft without merging."""
    require("peft")
    import peft
    import torch
    from transformers import AutoModelForCausalLM

    checkpoint = tiny_checkpoint("llama", tied=True, attention_bias=True)
    kinds: dict[str, dict[str, Any]] = {
        "lora": {"target_modules": ["q_proj", "down_proj", "lm_head"], "use_rslora": True},
        "dora": {"target_modules": "all-linear", "use_dora": True, "rank_pattern": {"up_proj": 2}},
        "head": {"target_modules": ["lm_head"]},
        "whole head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
        "embedding": {"target_modules": ["embed_tokens", "v_proj"], "modules_to_save": ["norm"]},
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
        model.save_pretrained(str(tmp_path / name))
        found = logits(merged_model(checkpoint, tmp_path / name))
        np.testing.assert_allclose(found, logits(model), atol=3e-4, rtol=3e-4, err_msg=name)
