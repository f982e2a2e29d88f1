"""Random PEFT adapters for tiny checkpoints: the files that peft writes, without peft."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
PREFIX = "base_model.model."


def shapes_of(checkpoint: Path) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of a checkpoint in one file."""
    from safetensors import safe_open

    with safe_open(checkpoint / "model.safetensors", framework="pt") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - no dict


def save_adapter(
    folder: Path,
    checkpoint: Path,
    ends: tuple[str, ...] = ATTENTION,
    *,
    rank: int = 4,
    ranks: Mapping[str, int] | None = None,
    turned: bool = False,
    seed: int = 0,
    extra: Mapping[str, Any] | None = None,
    **config: Any,
) -> Path:
    """Write a LoRA adapter for the weights of `checkpoint` whose modules end with `ends`; `turned`: they are [K, N].

    `extra`: further tensors; `config`: settings of adapter_config.json. The matrices are large enough to change tokens.
    """
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, shape in shapes_of(checkpoint).items():
        module = name.removesuffix(".weight")
        if name == module or not module.endswith(ends):
            continue
        rows, width = reversed(shape) if turned else shape
        size = (ranks or {}).get(module.rpartition(".")[2], rank)
        tensors[f"{PREFIX}{module}.lora_A.weight"] = torch.randn(size, width, generator=generator) * 0.3
        tensors[f"{PREFIX}{module}.lora_B.weight"] = torch.randn(rows, size, generator=generator) * 0.3
        if config.get("use_dora"):
            tensors[f"{PREFIX}{module}.lora_magnitude_vector"] = 0.5 + torch.rand(rows, generator=generator)
    folder.mkdir(parents=True, exist_ok=True)
    save_file({**tensors, **(extra or {})}, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(checkpoint),
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": list(ends),
        **config,
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder
