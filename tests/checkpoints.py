"""Random weights for tiny models: what the fixtures and the breadth tests save as checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def edit_config(folder: Path, **settings: Any) -> Path:
    """Change settings of config.json; returns the folder."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **settings}))
    return folder


def edit_tensors(folder: Path, change: Callable[[dict[str, Any]], object], name: str = "model.safetensors") -> Path:
    """Change the tensors of a weight file in place; returns the folder."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / name)
    change(tensors)
    save_file({key: value.contiguous() for key, value in tensors.items()}, folder / name, metadata={"format": "pt"})
    return folder


def save_random_model(
    folder: Path, model_type: str, settings: dict[str, Any], dtype: str, seed: int, std: float = 0.2
) -> None:
    """Write config.json, generation_config.json and model.safetensors.

    Fresh weights of transformers are so small that all logits are nearly equal and a wrong graph looks right. These are
    large enough that attention is sharp and logits differ: normal with `std`; vectors are moved by std 0.1. Tied
    embeddings are smaller, or every token would predict itself whatever the layers compute.
    """
    import torch
    from transformers import AutoConfig
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # it would end up in what a test captures
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = _new_model(AutoConfig.for_model(model_type, **settings))
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=std)
            else:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
        for name, buffer in model.named_buffers():
            if name.endswith("bias") and buffer.is_floating_point():  # the routers of some experts have one
                buffer.add_(torch.randn_like(buffer), alpha=0.1)
        if getattr(model.config, "tie_word_embeddings", False):
            for module in model.modules():
                if isinstance(module, torch.nn.Embedding):  # positions, too, or tokens would not count beside them
                    module.weight.mul_(0.25)
    model.to(getattr(torch, dtype)).save_pretrained(folder)


def _new_model(config: Any) -> Any:
    """The model that a checkpoint of this config is saved from: with its vision tower, where the type has one."""
    from transformers import AutoModelForMultimodalLM

    from partita.export.checkpoint import auto_class

    model = auto_class(config).from_config(config)
    return model if type(model.config) is type(config) else AutoModelForMultimodalLM.from_config(config)
