"""Tiny quantised checkpoints: the weights of a checkpoint of floats, stored as a format stores them.

The packers are written from the formats' documentation and sources; what the formats' own libraries store is in
`tests/export/stored_formats`. Each takes a weight [N, K] and gives the tensors that stand for it, by the ends of their
names.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Packer = Callable[[torch.Tensor], dict[str, torch.Tensor]]
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def save_quantised(
    source: Path, folder: Path, settings: dict[str, Any], packer: Packer, modules: tuple[str, ...] = PROJECTIONS
) -> Path:
    """Write the checkpoint `source` to `folder` with the weights of `modules` quantised, or stacks of such names.

    Returns `folder`.
    """
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        stem = name.removesuffix(".weight")
        if tensor.ndim > 1 and stem.rpartition(".")[2] in modules:
            tensors |= {stem + more: part.contiguous() for more, part in packer(tensor.float()).items()}
        else:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def words_of(integers: torch.Tensor, bits: int) -> torch.Tensor:
    """Integers [R, C], below 2^bits, as int32 words [R, C * bits / 32], the lowest bits first."""
    ones = (integers.long().unsqueeze(-1) >> torch.arange(bits)) & 1
    flat = ones.reshape(len(integers), -1, 32)
    return (flat << torch.arange(32)).sum(-1).to(torch.int32)


def rounded(
    weight: torch.Tensor, bits: int, group: int, *, symmetric: bool = False, dtype: torch.dtype = torch.float16
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Integers [N, K], scales [N, G] and zero points [N, G] of a weight, rounded to the nearest."""
    top = (1 << bits) - 1
    blocks = weight.reshape(len(weight), -1, group)
    if symmetric:
        scales = (blocks.abs().amax(-1) * 2 / top).clamp(min=1e-6).to(dtype)
        zeros = torch.full(scales.shape, float(1 << (bits - 1)))
    else:
        low, high = blocks.amin(-1).clamp(max=0), blocks.amax(-1).clamp(min=0)
        scales = ((high - low) / top).clamp(min=1e-6).to(dtype)
        zeros = (-low / scales.float()).round().clamp(1, top)
    integers = (blocks / scales.float().unsqueeze(-1) + zeros.unsqueeze(-1)).round().clamp(0, top)
    return integers.reshape(weight.shape).to(torch.int32), scales, zeros.to(torch.int32)


def gptq(
    bits: int = 4, group: int = 32, *, symmetric: bool = False, second: bool = False, order: torch.Tensor | None = None
) -> Packer:
    """GPTQ; `second`: gptq_v2; `order`: columns in the order in which they were quantised (act-order)."""

    def pack(weight: torch.Tensor) -> dict[str, torch.Tensor]:
        width = weight.shape[1]
        size = width if group < 0 else group
        taken = torch.arange(width) if order is None else order[order < width]
        integers, scales, zeros = rounded(weight[:, taken], bits, size, symmetric=symmetric)
        back = taken.argsort()
        return {
            ".qweight": words_of(integers[:, back], bits).T,
            ".qzeros": words_of(zeros.T - (0 if second else 1), bits),
            ".scales": scales.T,
            ".g_idx": (back // size).to(torch.int32),
        }

    return pack


def awq(group: int = 32) -> Packer:
    """AWQ for GEMM kernels."""
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def turned(integers: torch.Tensor) -> torch.Tensor:
        """Integers [L, N] with eight of each word in AWQ's order."""
        return integers.reshape(len(integers), -1, 8)[..., order].reshape(len(integers), -1)

    def pack(weight: torch.Tensor) -> dict[str, torch.Tensor]:
        integers, scales, zeros = rounded(weight, 4, group)
        return {
            ".qweight": words_of(turned(integers.T), 4),
            ".qzeros": words_of(turned(zeros.T), 4),
            ".scales": scales.T,
        }

    return pack


def compressed_integers(bits: int = 4, group: int = 32, *, symmetric: bool = True) -> Packer:
    """compressed-tensors, pack-quantized, with bfloat16 scales."""

    def pack(weight: torch.Tensor) -> dict[str, torch.Tensor]:
        size = weight.shape[1] if group < 0 else group
        integers, scales, zeros = rounded(weight, bits, size, symmetric=symmetric, dtype=torch.bfloat16)
        stored = {
            ".weight_packed": words_of(integers, bits),
            ".weight_scale": scales,
            ".weight_shape": torch.tensor(weight.shape),
        }
        return stored if symmetric else {**stored, ".weight_zero_point": words_of(zeros.T, bits).T}

    return pack


def compressed_rows(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """compressed-tensors, int-quantized (W8A8): int8, a scale for each row."""
    integers, scales, _ = rounded(weight, 8, weight.shape[1], symmetric=True, dtype=torch.bfloat16)
    return {".weight": (integers - 128).to(torch.int8), ".weight_scale": scales}


def float8(block: int | None = 32, end: str = "_scale_inv") -> Packer:
    """8-bit floats with a scale for blocks of both axes, or for the whole tensor."""

    def pack(weight: torch.Tensor) -> dict[str, torch.Tensor]:
        rows, width = weight.shape
        high, wide = (block, block) if block else (rows, width)
        blocks = weight.reshape(rows // high, high, width // wide, wide)
        scales = blocks.abs().amax((1, 3)) / 448
        numbers = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn).reshape(weight.shape)
        return {".weight": numbers, f".weight{end}": scales if block else scales.reshape(())}

    return pack


def scaled_rows(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """bitsandbytes LLM.int8: int8 and the largest magnitude of each row."""
    largest = weight.abs().amax(1)
    integers = (weight * 127 / largest[:, None]).round().to(torch.int8)
    return {".weight": integers, ".SCB": largest, ".weight_format": torch.tensor(0, dtype=torch.uint8)}


def torchao_rows(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """torchao: int8, a scale for each row."""
    scales = weight.abs().amax(1, keepdim=True) / 127
    return {"._weight_qdata": (weight / scales).round().to(torch.int8), "._weight_scale": scales}


def torchao_plain(weight: torch.Tensor, group: int = 32) -> dict[str, torch.Tensor]:
    """torchao, plain int4: two integers with a sign in a byte, and zeros that are added to them."""
    blocks = weight.reshape(len(weight), -1, group)
    low, high = blocks.amin(-1), blocks.amax(-1)
    scales = ((high - low) / 15).clamp(min=1e-6)
    zeros = low + 8 * scales
    integers = ((blocks - zeros[..., None]) / scales[..., None]).round().clamp(-8, 7).to(torch.int8)
    nibbles = integers.reshape(weight.shape) & 15
    return {
        "._weight_qdata": (nibbles[:, ::2] | nibbles[:, 1::2] << 4).to(torch.int8),
        "._weight_scale": scales.T,
        "._weight_zero_point": zeros.T,
    }


def mxfp4(stack: torch.Tensor) -> dict[str, torch.Tensor]:
    """MXFP4, of a stack [E, K, N] as gpt_oss has its experts."""
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    blocks = stack.transpose(1, 2).unflatten(-1, (-1, 32))
    exponents = (blocks.abs().amax(-1).clamp(min=1e-6) / 6).log2().ceil()
    scaled = blocks / exponents.exp2().unsqueeze(-1)
    nearest = (scaled.abs().unsqueeze(-1) - table).abs().argmin(-1) + 8 * (scaled < 0)
    data = (nearest[..., 0::2] | (nearest[..., 1::2] << 4)).to(torch.uint8)
    return {"_blocks": data, "_scales": (exponents + 127).to(torch.uint8)}


def nf4(weight: torch.Tensor, block: int = 64) -> dict[str, torch.Tensor]:
    """bitsandbytes nf4: each number the nearest of a table, with the largest magnitude of its block."""
    quantiles = torch.special.ndtri(torch.cat([torch.linspace(0.02, 0.5, 8), torch.linspace(0.5, 0.97, 9)[1:]]))
    table = quantiles / quantiles.abs().max()
    blocks = weight.reshape(-1, block)
    largest = blocks.abs().amax(1)
    places = ((blocks / largest[:, None]).unsqueeze(-1) - table).abs().argmin(-1).reshape(-1)
    said = {"shape": list(weight.shape), "blocksize": block, "dtype": "float32", "quant_type": "nf4"}
    return {
        ".weight": (places[0::2] << 4 | places[1::2]).to(torch.uint8).unsqueeze(1),
        ".weight.absmax": largest,
        ".weight.quant_map": table,
        ".weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(said).encode()), dtype=torch.uint8),
    }
