"""The shapes that are measured, and checkpoints of them with random weights.

Speed and memory do not depend on what the weights say. The rope base is 10,000 everywhere: the configs of transformers
4, which one peer needs, and of 5 write it in different places, and this is the default of both.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.records import Bits

TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
"""Files of the embedded checkpoint: some exporters refuse a checkpoint without a tokenizer. Nothing is tokenized."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A model without its weights."""

    name: str
    title: str
    model_type: str
    settings: dict[str, Any]
    widths: tuple[Bits, ...] = (32, 16, 8, 4)
    """Bits per weight that are measured where none are asked for."""


def _decoder(
    vocab: int, hidden: int, inner: int, layers: int, heads: int, kv_heads: int, **more: Any
) -> dict[str, Any]:
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **more,
    }


_MOE = {
    "head_dim": 128,
    "moe_intermediate_size": 1024,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "mlp_only_layers": [],
}
_LISTED = (
    Shape("tiny", "a llama for trying the benchmark", "llama", _decoder(2048, 256, 512, 2, 4, 2)),
    Shape(
        "tiny-moe",
        "a mixture for trying the benchmark",
        "qwen3_moe",
        _decoder(2048, 256, 512, 2, 4, 2, **{**_MOE, "head_dim": 64, "moe_intermediate_size": 256, "num_experts": 4}),
    ),
    Shape("135m", "135 M llama", "llama", _decoder(49152, 576, 1536, 30, 9, 3)),
    Shape("0.5b", "0.5 B qwen2", "qwen2", _decoder(151936, 896, 4864, 24, 14, 2), widths=(16, 4)),
    Shape("1b", "1 B llama", "llama", _decoder(128256, 2048, 8192, 16, 32, 8, head_dim=64), widths=(4,)),
    Shape(
        "moe",
        "1 B-active mixture (16 experts, 4 used, 2.5 B in all)",
        "qwen3_moe",
        _decoder(151936, 2048, 6144, 20, 16, 4, **_MOE),
        widths=(4,),
    ),
)
"""Where one is run in 4 bits alone by default, that is how it is used on a CPU; in 32 bits each turn takes minutes."""
SHAPES = {shape.name: shape for shape in _LISTED}
DEFAULT_SHAPES = ("135m", "0.5b", "1b", "moe")


def make_checkpoint(folder: Path, shape: Shape) -> Path:
    """Write a bfloat16 checkpoint to `folder`, unless it is there; in a child process, which takes its memory along."""
    if not (folder / "model.safetensors").is_file() and not list(folder.glob("*.index.json")):
        subprocess.run([sys.executable, "-m", "benchmarks.peers.shapes", str(folder), shape.name], check=True)
    return folder


def _write(folder: Path, shape: Shape) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from partita.demo import checkpoint_path

    torch.manual_seed(0)
    config = AutoConfig.for_model(shape.model_type, **shape.settings)
    part = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    torch.set_default_dtype(torch.bfloat16)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(part, max_shard_size="100GB")
    for name in TOKENIZER:
        shutil.copy(checkpoint_path() / name, part / name)
    file = part / "config.json"
    written = json.loads(file.read_text("utf-8"))
    # transformers 4 calls it num_experts.
    written |= {key: value for key, value in shape.settings.items() if key == "num_experts"}
    file.write_text(json.dumps(written, indent=2) + "\n", "utf-8")
    part.replace(folder)
    print(json.dumps({"parameters": sum(p.numel() for p in model.parameters())}))


if __name__ == "__main__":
    _write(Path(sys.argv[1]), SHAPES[sys.argv[2]])
