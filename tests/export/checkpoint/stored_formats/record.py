"""Records what the libraries of quantised formats store for a small weight, and what they say it stands for.

    python -m tests.export.checkpoint.stored_formats.record

in an environment with compressed-tensors, bitsandbytes, auto-gptq, autoawq and torchao beside
torch and transformers, or some of them: what is not there is left as it is. Written were `libraries/*.safetensors` with
compressed-tensors 0.20.0, bitsandbytes 0.50.2, auto-gptq 0.7.1, autoawq 0.2.7.post3, torchao 0.18.0, transformers
5.23.0. Each file has the stored tensors, `expected`, and the settings of its config
as metadata.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import save_file

from tests import quantised_checkpoints as ours

FOLDER = Path(__file__).parent / "libraries"
ROWS, WIDTH = 32, 64
Recorded = tuple[dict[str, Any], dict[str, torch.Tensor], torch.Tensor]
"""Settings, the tensors of a module X, and its weight as the library has it."""


def without_init(*packages: str) -> None:
    """Let modules of these packages be imported without what their __init__ imports: other versions of transformers."""
    for name in packages:
        if name not in sys.modules:
            parent, _, last = name.rpartition(".")
            places = sys.modules[parent].__path__ if parent else sys.path
            found = next((Path(place) / last for place in places if (Path(place) / last).is_dir()), None)
            if found is None:
                raise ImportError(name)
            sys.modules[name] = ModuleType(name)
            sys.modules[name].__path__ = [str(found)]


def library(name: str) -> Any:
    """A module of a library that may not be there. Raises ImportError."""
    return importlib.import_module(name)


def weight(width: int = WIDTH) -> torch.Tensor:
    """A weight [32, width] like a trained one: most numbers are small, some are not."""
    generator = torch.Generator().manual_seed(7)
    return torch.randn(ROWS, width, generator=generator) * torch.rand(1, width, generator=generator)


def _gptq(bits: int, group: int, *, symmetric: bool, order: bool) -> Recorded:
    without_init("auto_gptq", "auto_gptq.nn_modules", "auto_gptq.nn_modules.qlinear", "auto_gptq.utils")
    kernels = library(f"auto_gptq.nn_modules.qlinear.qlinear_cuda{'' if order else '_old'}")

    taken = torch.randperm(WIDTH, generator=torch.Generator().manual_seed(1)) if order else torch.arange(WIDTH)
    _, scales, zeros = ours.rounded(weight()[:, taken], bits, group, symmetric=symmetric)
    groups = (taken.argsort() // group).to(torch.int32)
    integers, *_ = ours.rounded(weight()[:, taken], bits, group, symmetric=symmetric)
    linear = torch.nn.Linear(WIDTH, ROWS, bias=False)
    linear.weight.data = ((integers - zeros.repeat_interleave(group, 1)) * scales.float().repeat_interleave(group, 1))[
        :, taken.argsort()
    ]
    made = kernels.QuantLinear(bits, group, WIDTH, ROWS, False)
    made.pack(linear.half(), scales.float(), zeros.float(), groups)
    made.wf = made.wf.to("cpu")
    expected = made(torch.eye(WIDTH, dtype=torch.float16)).T  # x W^T of the unit matrix
    settings = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": order, "sym": symmetric}
    tensors = {f"X.{name}": getattr(made, name) for name in ("qweight", "qzeros", "scales", "g_idx")}
    return settings, tensors, expected


def _awq() -> Recorded:
    without_init("awq", "awq.modules", "awq.modules.linear", "awq.utils")
    gemm, unpacking = library("awq.modules.linear.gemm"), library("awq.utils.packing_utils")

    group = 32
    integers, scales, zeros = ours.rounded(weight(), 4, group)
    linear = torch.nn.Linear(WIDTH, ROWS, bias=False)
    linear.weight.data = (integers - zeros.repeat_interleave(group, 1)) * scales.float().repeat_interleave(group, 1)
    turned = {"scales": scales.T.contiguous(), "zeros": zeros.T.contiguous()}
    made = gemm.WQLinear_GEMM.from_linear(linear.half(), 4, group, **turned)
    expected = unpacking.dequantize_gemm(made.qweight, made.qzeros, made.scales, 4, group).T
    settings = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    return settings, {f"X.{name}": getattr(made, name) for name in ("qweight", "qzeros", "scales")}, expected


def _compressed(form: str, bits: int = 8, kind: str = "int", **more: Any) -> Recorded:
    weights = {"num_bits": bits, "type": kind, **more}
    compressors, quantization = library("compressed_tensors.compressors"), library("compressed_tensors.quantization")
    calculate_qparams = library("compressed_tensors.quantization.utils").calculate_qparams

    args = quantization.QuantizationArgs(**weights)
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=args, format=form)
    given = weight().to(torch.bfloat16)
    if args.strategy == "block":
        high, wide = args.block_structure
        blocks = given.reshape(ROWS // high, high, WIDTH // wide, wide).transpose(1, 2).flatten(2)
    elif args.strategy == "tensor":
        blocks = given.reshape(1, -1)
    else:
        blocks = given.reshape(ROWS, -1, args.group_size or WIDTH)
    scale, zero = calculate_qparams(blocks.amin(-1), blocks.amax(-1), args)
    if args.strategy == "tensor":
        scale, zero = scale.reshape(1), zero.reshape(1)
    state = {"weight": given, "weight_scale": scale, "weight_zero_point": zero}
    compressor = compressors.BaseCompressor.get_value_from_registry(form)
    stored = compressor.compress(state, scheme)
    expected = compressor.decompress(stored, scheme)["weight"]
    settings = {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }
    return settings, {f"X.{name}": tensor for name, tensor in stored.items()}, expected


def _fp8(block: int | None, dtype: torch.dtype = torch.bfloat16) -> Recorded:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    stored = ours.float8(block)(weight())
    expected = Fp8Dequantize(None)._dequantize_one(stored[".weight"], stored[".weight_scale_inv"], dtype)
    settings = {"quant_method": "fp8", "weight_block_size": [block, block] if block else None}
    return settings, {f"X{end}": tensor for end, tensor in stored.items()}, expected


def _mxfp4() -> Recorded:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(3)
    blocks = torch.randint(0, 256, (2, ROWS, 2, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(110, 130, (2, ROWS, 2), dtype=torch.uint8, generator=generator)
    expected = convert_moe_packed_tensors(blocks, scales)
    return {"quant_method": "mxfp4"}, {"X.weight_blocks": blocks, "X.weight_scales": scales}, expected


def _four_bits(kind: str, *, nested: bool, dtype: torch.dtype) -> Recorded:
    functional = library("bitsandbytes.functional")
    packed, state = functional.quantize_4bit(
        weight().to(dtype), blocksize=64, quant_type=kind, compress_statistics=nested
    )
    tensors = {"X.weight": packed, **{f"X.weight.{key}": value for key, value in state.as_dict(packed=True).items()}}
    return {"quant_method": "bitsandbytes", "load_in_4bit": True}, tensors, functional.dequantize_4bit(packed, state)


def _eight_bits() -> Recorded:
    functional = library("bitsandbytes.functional")
    stored = ours.scaled_rows(weight())
    expected = functional.int8_vectorwise_dequant(stored[".weight"], stored[".SCB"])
    tensors = {f"X{end}": tensor for end, tensor in stored.items()}
    return {"quant_method": "bitsandbytes", "load_in_8bit": True}, tensors, expected


def _torchao(config: str, **settings: Any) -> Recorded:
    safetensors = library("torchao.prototype.safetensors.safetensors_support")
    linear = torch.nn.Linear(WIDTH, ROWS, bias=False, dtype=torch.bfloat16)
    linear.weight.data = weight().to(torch.bfloat16)
    model = torch.nn.Sequential()
    model.add_module("X", linear)
    quantization = library("torchao.quantization")
    quantization.quantize_(model, getattr(quantization, config)(**settings))
    tensors, metadata = safetensors.flatten_tensor_state_dict({"X.weight": linear.weight.data})
    return {"quant_method": "torchao", "metadata": metadata}, tensors, linear.weight.dequantize()


def _torchao_plain() -> Recorded:
    """Plain int4, whose own quantiser needs a GPU: laid out as `Int4Tensor` has it, numbers by torchao's function."""
    primitives = library("torchao.quantization.quant_primitives")
    workflows = library("torchao.quantization")
    safetensors = library("torchao.prototype.safetensors.safetensors_support")
    given, block = weight().to(torch.bfloat16), (1, 32)
    scale, zero = primitives._choose_qparams_affine_tinygemm(
        given, primitives.MappingType.ASYMMETRIC, block, torch.int32, 0, 15,
        scale_dtype=torch.bfloat16, zero_point_dtype=torch.bfloat16,
    )  # fmt: skip
    integers = primitives._quantize_affine_tinygemm(given, block, scale, zero, torch.int32, 0, 15)
    expected = primitives._dequantize_affine_tinygemm(
        integers, block, scale, zero, torch.int32, 0, 15, output_dtype=torch.bfloat16
    )
    nibbles = (integers - 8) & 15
    packed = (nibbles[:, ::2] | nibbles[:, 1::2] << 4).to(torch.uint8).view(torch.int8)
    made = workflows.Int4Tensor(
        packed, *(x.reshape(ROWS, -1).T.contiguous() for x in (scale, zero)), block, given.shape
    )
    tensors, metadata = safetensors.flatten_tensor_state_dict({"X.weight": made})
    return {"quant_method": "torchao", "metadata": metadata}, tensors, expected


def _torchao_int4(granularity: str, *settings: int) -> Recorded:
    kinds = library("torchao.quantization.granularity")
    asked = {"weight_dtype": library("torch").int4, "granularity": getattr(kinds, granularity)(*settings)}
    return _torchao("IntxWeightOnlyConfig", **asked)


GROUPS: dict[str, Any] = {"strategy": "group", "group_size": 32}
CASES: dict[str, Callable[[], Recorded]] = {
    "gptq_4": lambda: _gptq(4, 32, symmetric=False, order=False),
    "gptq_4_symmetric": lambda: _gptq(4, 32, symmetric=True, order=False),
    "gptq_8": lambda: _gptq(8, 64, symmetric=False, order=False),
    "gptq_3": lambda: _gptq(3, 32, symmetric=False, order=False),
    "gptq_2": lambda: _gptq(2, 32, symmetric=False, order=False),
    "gptq_act_order": lambda: _gptq(4, 32, symmetric=False, order=True),
    "awq": _awq,
    "compressed_w4a16": lambda: _compressed("pack-quantized", 4, symmetric=True, **GROUPS),
    "compressed_w4a16_asymmetric": lambda: _compressed("pack-quantized", 4, symmetric=False, **GROUPS),
    "compressed_w3a16": lambda: _compressed("pack-quantized", 3, symmetric=False, **GROUPS),
    "compressed_w8a16": lambda: _compressed("pack-quantized", strategy="channel", symmetric=True),
    "compressed_int8": lambda: _compressed("int-quantized", strategy="channel", symmetric=True),
    "compressed_int8_asymmetric": lambda: _compressed("int-quantized", strategy="channel", symmetric=False),
    "compressed_fp8": lambda: _compressed("float-quantized", kind="float", strategy="channel"),
    "compressed_fp8_tensor": lambda: _compressed("float-quantized", kind="float", strategy="tensor"),
    "compressed_fp8_block": lambda: _compressed(
        "float-quantized", kind="float", strategy="block", block_structure=[16, 16]
    ),
    "fp8_block": lambda: _fp8(16),
    "fp8_block_float32": lambda: _fp8(16, torch.float32),
    "fp8_tensor": lambda: _fp8(None),
    "mxfp4": _mxfp4,
    "bnb_nf4": lambda: _four_bits("nf4", nested=False, dtype=torch.bfloat16),
    "bnb_nf4_nested": lambda: _four_bits("nf4", nested=True, dtype=torch.float16),
    "bnb_fp4": lambda: _four_bits("fp4", nested=False, dtype=torch.float32),
    "bnb_int8": _eight_bits,
    "torchao_int8": lambda: _torchao("Int8WeightOnlyConfig", version=2),
    "torchao_float8": lambda: _torchao("Float8WeightOnlyConfig"),
    "torchao_int4": lambda: _torchao_int4("PerGroup", 32),
    "torchao_int4_rows": lambda: _torchao_int4("PerAxis", 0),
    "torchao_int4_plain": _torchao_plain,
}


def main() -> None:
    """Write every case whose library is there, and say what became of each."""
    FOLDER.mkdir(exist_ok=True)
    for name, make in CASES.items():
        try:
            settings, tensors, expected = make()
        except ImportError as error:
            print(f"{name}: left as it is ({error})")
            continue
        kept = {key: tensor.detach().clone().contiguous() for key, tensor in tensors.items()}
        kept["expected"] = expected.detach().clone().contiguous()
        said = {**settings.get("metadata", {}), "settings": json.dumps(settings)}
        save_file(kept, FOLDER / f"{name}.safetensors", metadata=said)
        print(f"{name}: {', '.join(sorted(kept))}")


if __name__ == "__main__":
    main()
