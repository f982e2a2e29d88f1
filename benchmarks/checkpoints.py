"""Random checkpoints of real sizes. Speed and memory do not depend on what the weights say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

QWEN2_05B = {
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "max_position_embeddings": 32768,
    "bos_token_id": 1,
    "eos_token_id": None,
}
"""The shape of a 0.5 B qwen2."""
TINY = {**QWEN2_05B, "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2}
"""For trying the benchmark itself."""
SHAPES = {"0.5b": QWEN2_05B, "tiny": TINY}


def make(folder: Path, shape: str) -> Path:
    """Write a bfloat16 qwen2 checkpoint of `shape` to `folder`, unless it is there already; in a child, to leave no
    memory.
    """
    if not (folder / "model.safetensors").is_file():
        subprocess.run([sys.executable, "-m", "benchmarks.checkpoints", str(folder), shape], check=True)
    return folder


def _write(folder: Path, shape: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen2", **SHAPES[shape])
    part = folder.with_name(f"{folder.name}.part")
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(part)
    part.replace(folder)


if __name__ == "__main__":
    _write(Path(sys.argv[1]), sys.argv[2])
