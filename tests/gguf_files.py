"""GGUF files of tiny checkpoints, as llama.cpp's converter would write them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.peers.gguf_write import ARCHITECTURES, Safetensors, arranged, metadata, planned

Kind = str | Callable[[str], str]


def save_gguf(out: Path, checkpoint: Path, kind: Kind = "F32", *, tokenizer: bool = True, **settings: Any) -> Path:
    """Write `checkpoint`, of one safetensors file, with its matrices in `kind`, or in what it says of each name.

    Vectors and routers are F32, as llama.cpp has them. `settings`: further ones, by name with _ for a dot.
    """
    import gguf
    import numpy as np

    config = json.loads((checkpoint / "config.json").read_text("utf-8"))
    writer = gguf.GGUFWriter(out, ARCHITECTURES[config["model_type"]])
    given = {**metadata(config, 0), **{name.replace("__", "."): value for name, value in settings.items()}}
    if tokenizer:
        _add_tokenizer(writer, checkpoint)
        given.pop("tokenizer.ggml.model")
    for key, value in given.items():
        _add(writer, key, value)
    source = Safetensors(checkpoint / "model.safetensors")
    for plan in planned(list(source), config):
        array = arranged(plan, source)
        wanted = "F32" if plan.wide or array.ndim < 2 else kind if isinstance(kind, str) else kind(plan.name)
        number = gguf.GGMLQuantizationType[wanted]
        if wanted in ("F32", "F16"):
            writer.add_tensor(plan.name, array.astype(np.float32 if wanted == "F32" else np.float16))
        else:
            writer.add_tensor(plan.name, gguf.quants.quantize(array, number), raw_dtype=number)
    return _written(writer, out)


def save_settings(
    out: Path, architecture: str, settings: Mapping[str, Any], others: Mapping[str, Any] | None = None
) -> Path:
    """Write a file of any architecture with the settings of a small model, and those that are given; a tensor is there
    so that it is a file, and no others. `others`: settings that are not of the architecture.
    """
    import gguf
    import numpy as np

    small = {
        "context_length": 64,
        "embedding_length": 64,
        "block_count": 2,
        "feed_forward_length": 96,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
    }
    writer = gguf.GGUFWriter(out, architecture)
    for name, value in {**small, **settings}.items():
        _add(writer, f"{architecture}.{name}", value)
    for name, value in (others or {}).items():
        _add(writer, name, value)
    writer.add_tensor("token_embd.weight", np.zeros((4, 64), np.float32))
    return _written(writer, out)


def _add(writer: Any, key: str, value: Any) -> None:
    """One setting, in the type that llama.cpp has for such."""
    if isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)
    else:
        writer.add_uint32(key, value)


def _written(writer: Any, out: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def _add_tokenizer(writer: Any, checkpoint: Path) -> None:
    """The byte-level tokenizer of a tiny checkpoint."""
    core = json.loads((checkpoint / "tokenizer.json").read_text("utf-8"))
    vocabulary = core["model"]["vocab"]
    tokens = sorted(vocabulary, key=lambda token: vocabulary[token])
    special = {token["content"] for token in core["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    writer.add_token_merges([" ".join(pair) if isinstance(pair, list) else pair for pair in core["model"]["merges"]])
    writer.add_bos_token_id(vocabulary["<bos>"])
    writer.add_eos_token_id(vocabulary["<eos>"])
    writer.add_pad_token_id(vocabulary["<pad>"])
