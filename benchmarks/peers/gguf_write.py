"""`python -m benchmarks.peers.gguf_write CHECKPOINT OUT FORM`: a GGUF file, in the environment of llama-cpp-python.

F16 and F32 are written by the gguf package; every other form is made of F32 by llama.cpp's own quantiser. llama.cpp's
converter is in no registry: names and keys are those of its gguf-py/gguf/constants.py, and what is done to a tensor is
what its convert_hf_to_gguf.py does for these architectures. A test compares the result with transformers.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

FORMS = {"f32": 0, "f16": 1, "q4_0": 2, "q4_0-pure": 2, "q8_0": 7, "q4_k_m": 15, "bf16": 32}
"""What we call a form -> llama_ftype of llama.h. `pure` gives the head the form of the rest."""
ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3_moe": "qwen3moe"}
"""Model type of transformers -> architecture of llama.cpp."""
WHOLE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
IN_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
}
EXPERT = {"gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps"}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(\w+)")
KEPT_WIDE = ("ffn_gate_inp",)
"""Matrices that llama.cpp keeps in float32: the router."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A tensor of the GGUF file."""

    name: str
    parts: tuple[str, ...]
    """Tensors of the checkpoint; several are stacked along a new first axis."""
    heads: int | None
    """Heads whose rows are put into another order; None leaves them."""

    @property
    def wide(self) -> bool:
        """It is written in float32."""
        return not self.name.endswith(".weight") or "norm" in self.name or any(mark in self.name for mark in KEPT_WIDE)


def planned(names: Sequence[str], config: Mapping[str, Any]) -> list[Planned]:
    """The tensors of the file, in a stable order. Raises ValueError for a name that has no counterpart."""
    stacks: dict[str, dict[int, str]] = {}
    found: list[Planned] = []
    for name in names:
        if name in WHOLE:
            found.append(Planned(WHOLE[name], (name,), None))
            continue
        match = _LAYER.fullmatch(name)
        if match is None:
            raise ValueError(f"{name}: no counterpart in a GGUF file")
        layer, inner, kind = match.groups()
        expert = _EXPERT.fullmatch(inner)
        if expert:
            stacks.setdefault(f"blk.{layer}.{EXPERT[expert[2]]}.{kind}", {})[int(expert[1])] = name
        elif inner in IN_LAYER:
            found.append(Planned(f"blk.{layer}.{IN_LAYER[inner]}.{kind}", (name,), _heads(inner, config)))
        else:
            raise ValueError(f"{name}: no counterpart in a GGUF file")
    found += [Planned(name, tuple(part for _, part in sorted(parts.items())), None) for name, parts in stacks.items()]
    return sorted(found, key=lambda each: _position(each.name))


def _position(name: str) -> tuple[int, int, str]:
    """Embedding first, then layer by layer."""
    number = re.match(r"blk\.(\d+)\.", name)
    return (1, int(number[1]), name) if number else (0 if name.startswith("token") else 2, 0, name)


def _heads(inner: str, config: Mapping[str, Any]) -> int | None:
    """llama.cpp turns neighbouring pairs in a llama, transformers halves of a head; the others it turns as halves."""
    if config["model_type"] != "llama":
        return None
    return {
        "self_attn.q_proj": config["num_attention_heads"],
        "self_attn.k_proj": config["num_key_value_heads"],
    }.get(inner)


def in_pairs(array: Array, heads: int) -> Array:
    """Rows [heads * size, ...] in which the halves of each head are interleaved."""
    halves = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
    return halves.swapaxes(1, 2).reshape(array.shape)


def metadata(config: Mapping[str, Any], file_type: int) -> dict[str, int | float | str]:
    """Keys of the file, without `general.architecture`, which the writer sets. The file has no tokenizer."""
    arch = ARCHITECTURES[config["model_type"]]
    rope = config.get("rope_parameters") or {}
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    found: dict[str, int | float | str] = {
        "general.file_type": file_type,
        "tokenizer.ggml.model": "no_vocab",
        f"{arch}.vocab_size": config["vocab_size"],
        f"{arch}.context_length": config["max_position_embeddings"],
        f"{arch}.embedding_length": config["hidden_size"],
        f"{arch}.block_count": config["num_hidden_layers"],
        f"{arch}.feed_forward_length": config["intermediate_size"],
        f"{arch}.attention.head_count": config["num_attention_heads"],
        f"{arch}.attention.head_count_kv": config["num_key_value_heads"],
        f"{arch}.attention.key_length": head,
        f"{arch}.attention.value_length": head,
        f"{arch}.rope.dimension_count": head,
        f"{arch}.rope.freq_base": float(rope.get("rope_theta", 10000.0)),
        f"{arch}.attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
    }
    experts = config.get("num_experts", config.get("num_local_experts"))
    if experts is not None:
        found[f"{arch}.expert_count"] = experts
        found[f"{arch}.expert_used_count"] = config["num_experts_per_tok"]
        found[f"{arch}.expert_feed_forward_length"] = config["moe_intermediate_size"]
    return found


class Safetensors:
    """The tensors of one file as float32, mapped; only the dtypes that the checkpoints here have."""

    def __init__(self, file: Path) -> None:
        with file.open("rb") as source:
            size = int.from_bytes(source.read(8), "little")
            header: dict[str, Any] = json.loads(source.read(size))
        header.pop("__metadata__", None)
        self.entries = header
        self.bytes = np.memmap(file, np.uint8, "r", offset=8 + size)

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def read(self, name: str) -> npt.NDArray[np.float32]:
        """One tensor. Raises ValueError for another dtype than BF16, F16 and F32."""
        entry = self.entries[name]
        begin, end = entry["data_offsets"]
        raw, shape = self.bytes[begin:end], entry["shape"]
        if entry["dtype"] == "BF16":
            return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(shape)
        if entry["dtype"] not in ("F16", "F32"):
            raise ValueError(f"{name}: {entry['dtype']} is not read here")
        return raw.view(np.float16 if entry["dtype"] == "F16" else np.float32).astype(np.float32).reshape(shape)


def arranged(plan: Planned, source: Safetensors) -> npt.NDArray[np.float32]:
    """The values of a planned tensor."""
    if len(plan.parts) > 1 or "_exps" in plan.name:
        return np.stack([source.read(part) for part in plan.parts])
    array = source.read(plan.parts[0])
    return array if plan.heads is None else in_pairs(array, plan.heads)


def write(checkpoint: Path, out: Path, *, wide: bool) -> None:
    """Write `checkpoint` as F32 or F16, a tensor in memory at a time."""
    import gguf

    config: dict[str, Any] = json.loads((checkpoint / "config.json").read_text("utf-8"))
    source = Safetensors(checkpoint / "model.safetensors")
    plans = planned(list(source), config)
    narrow = np.float32 if wide else np.float16
    writer = gguf.GGUFWriter(out, ARCHITECTURES[config["model_type"]])
    for key, value in metadata(config, FORMS["f32" if wide else "f16"]).items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_uint32(key, value)
    for plan in plans:
        shape = list(source.entries[plan.parts[0]]["shape"])
        shape = [len(plan.parts), *shape] if "_exps" in plan.name else shape
        dtype = np.dtype(np.float32 if plan.wide else narrow)
        writer.add_tensor_info(plan.name, shape, dtype, int(np.prod(shape)) * dtype.itemsize)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for plan in plans:
        writer.write_tensor_data(arranged(plan, source).astype(np.float32 if plan.wide else narrow))
    writer.close()


def quantise(wide: Path, out: Path, form: str, threads: int) -> None:
    """Let llama.cpp's quantiser make `form` of a file. Raises ValueError when it refuses."""
    import llama_cpp  # type: ignore[import-not-found]

    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.nthread, params.pure = FORMS[form], threads, form.endswith("-pure")
    if llama_cpp.llama_model_quantize(str(wide).encode(), str(out).encode(), params):
        raise ValueError(f"{wide}: llama.cpp's quantiser does not make {form} of it")


def main() -> None:
    """Write one file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("form", choices=sorted(FORMS))
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    if given.form in ("f32", "f16"):
        write(given.checkpoint, given.out, wide=given.form == "f32")
        return
    wide = given.out.with_name(f"{given.out.name}.f32")
    write(given.checkpoint, wide, wide=True)
    quantise(wide, given.out, given.form, given.threads)
    wide.unlink()


if __name__ == "__main__":
    main()
