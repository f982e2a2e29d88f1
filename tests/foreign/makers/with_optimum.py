"""Runs in optimum's environment: a tiny checkpoint, what transformers says of it, and optimum's exports of it.

    python with_optimum.py OUT TOKENIZER_FOLDER [MODEL_TYPE ...]

Writes OUT/TYPE/checkpoint, OUT/TYPE/optimum (one file) and OUT/TYPE/tokens.json; of llama alone OUT/TYPE/pair,
OUT/TYPE/merged and OUT/TYPE/whole (without past), too.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": True,
}
TYPES: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 16},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "mistral": {"head_dim": 16, "sliding_window": 8},
    "gpt2": {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 64},
    "gpt_neox": {},
    "gpt_bigcode": {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 64},
    "bloom": {"n_layer": 1, "n_head": 2},
    "opt": {"ffn_dim": 32, "word_embed_proj_dim": 32},
    "phi3": {},
    "granite": {},
    "gemma3_text": {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16},
}
PROMPT = [5, 9, 17, 40, 3, 33, 21, 8, 60, 22, 11]
NEW_TOKENS = 24


def checkpoint(model_type: str, out: Path) -> list[int]:
    """Write a random model; greedy tokens after the prompt, each of the whole text."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(3)
    config = AutoConfig.for_model(model_type, **{**SIZES, **TYPES[model_type]})
    model = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.3)
        model.save_pretrained(out)
        ids = torch.tensor([PROMPT])
        for _ in range(NEW_TOKENS):
            last = model(input_ids=ids, use_cache=False).logits[0, -1]
            ids = torch.cat([ids, last.argmax().reshape(1, 1)], dim=1)
    return [int(token) for token in ids[0, len(PROMPT) :]]


def export(source: Path, out: Path, task: str) -> None:
    """What `optimum-cli export onnx --task TASK` writes."""
    from optimum.exporters.onnx import main_export  # type: ignore[import-not-found]

    main_export(str(source), str(out), task=task, do_validation=False, no_post_process=True)


def pair(source: Path, out: Path, merged: Path) -> None:
    """optimum's older form: a graph for the first step, one for the others, and both merged."""
    from optimum.exporters.onnx import export as write
    from optimum.exporters.tasks import TasksManager  # type: ignore[import-not-found]
    from optimum.onnx import merge_decoders  # type: ignore[import-not-found]
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source)
    make = TasksManager.get_exporter_config_constructor("onnx", model=model, task="text-generation-with-past")
    out.mkdir(parents=True)
    names = ("decoder_model.onnx", "decoder_with_past_model.onnx")
    for name, past in zip(names, (False, True), strict=True):
        config = make(model.config, use_past=True, use_past_in_inputs=past)
        write(model, config, out / name)
    merged.mkdir(parents=True)
    merge_decoders(out / names[0], out / names[1], save_path=merged / "decoder_model_merged.onnx")
    for name in ("config.json", "generation_config.json"):
        for folder in (out, merged):
            shutil.copy(source / name, folder / name)


def main(out: Path, tokenizer: Path, types: list[str]) -> None:
    """Everything of every type."""
    for model_type in types or list(TYPES):
        home = out / model_type
        tokens = checkpoint(model_type, home / "checkpoint")
        for path in tokenizer.glob("*token*.json"):
            shutil.copy(path, home / "checkpoint" / path.name)
        (home / "tokens.json").write_text(json.dumps({"prompt": PROMPT, "tokens": tokens}) + "\n")
        export(home / "checkpoint", home / "optimum", "text-generation-with-past")
        if model_type == "llama":
            export(home / "checkpoint", home / "whole", "text-generation")
            pair(home / "checkpoint", home / "pair", home / "merged")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
