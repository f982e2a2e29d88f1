"""Detects quantised checkpoints by their config or tensors.

`METHODS` with a reader are read by `stored_formats/`. Other methods, and unknown ones, are refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from partita.errors import UnsupportedModelError
from partita.export.checkpoint.weight_files import read_json
from partita.export.weights.origins import TensorInfo


@dataclass(frozen=True, slots=True)
class Method:
    """A way to store quantised weights."""

    name: str
    methods: tuple[str, ...] = ()
    """Values of `quant_method`."""
    keys: tuple[str, ...] = ()
    """Keys of a config without `quant_method`. All keys of one entry must exist."""
    tensors: tuple[tuple[str, str], ...] = ()
    """Name suffixes with a regular expression on the dtype. All must exist with the same stem."""
    reader: str = ""
    """The module of `stored_formats` that reads it; empty: it is refused."""


ANY, BYTE = ".*", r"[IU]8|torch\.u?int8"
INTEGER, FLOAT8 = r"[IU](8|16|32|64)|torch\.u?int.*", r"F8_.*|torch\.float8.*"
METHODS = (
    Method(
        "bitsandbytes",
        ("bitsandbytes", "bitsandbytes_4bit", "bitsandbytes_8bit"),
        ("load_in_4bit", "load_in_8bit", "_load_in_4bit", "_load_in_8bit", "bnb_4bit_quant_type"),
        ((".weight.absmax .weight.quant_map", ANY),),
        reader="bitsandbytes",
    ),
    Method("bitsandbytes LLM.int8", tensors=((".SCB", ANY), (".weight", BYTE)), reader="bitsandbytes"),
    Method(
        "GPTQ",
        ("gptq", "gptqmodel", "marlin"),
        ("bits desc_act", "bits group_size sym"),
        ((".qweight", INTEGER), (".qzeros", INTEGER), (".scales", ANY), (".g_idx", INTEGER)),
        reader="gptq",
    ),
    Method(
        "AWQ",
        ("awq", "llm-awq"),
        ("w_bit q_group_size", "w_bit zero_point"),
        ((".qweight", INTEGER), (".qzeros", INTEGER), (".scales", ANY)),
        reader="awq",
    ),
    Method("MXFP4", ("mxfp4",), (), (("_blocks", BYTE), ("_scales", BYTE)), reader="mxfp4"),
    Method("NVFP4", ("nvfp4",), (), ((".weight_scale_2", ANY), (".weight", BYTE))),
    Method(
        "compressed-tensors",
        ("compressed-tensors", "sparseml"),
        ("config_groups", "quantization_status", "sparsity_config"),
        ((".weight_packed", INTEGER),),
        reader="compressed_tensors",
    ),
    Method("ModelOpt", ("modelopt",), ("quant_algo",)),
    Method("FBGEMM fp8", ("fbgemm_fp8",), ("activation_scale_ub",), reader="fp8"),
    Method("fp8", ("fp8", "mxfp8"), ("activation_scheme", "weight_block_size"), (("", FLOAT8),), reader="fp8"),
    Method("TorchAO", ("torchao",), (), ((":qdata _weight_qdata", ANY),), reader="torchao"),
    Method("MLX", ("mlx",), ("bits group_size",), ((".weight", INTEGER), (".scales", ANY), (".biases", ANY))),
)
"""In order of specificity: of two matches the first counts. Without a reader: methods that look like one that is read,
or whose settings do not name them."""
UNKNOWN = Method("an unknown method")
SECTIONS = ("quantization_config", "compression_config", "quantization")
"""Keys of quantisation settings in config.json and its sub-configs; the last is MLX's."""
METHOD_FILES = (("quantize_config.json", None), ("quant_config.json", None), ("hf_quant_config.json", "quantization"))
"""Files with quantisation settings next to config.json, and the key in them."""


@dataclass(frozen=True, slots=True)
class DetectedMethod:
    """The detected quantisation of a checkpoint."""

    method: Method
    evidence: str
    """The evidence, in words."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The quantisation settings of the config; empty where only tensors show the method."""


def by_config(folder: Path, config: Mapping[str, Any]) -> DetectedMethod | None:
    """The quantisation that config.json, completed by files next to it, declares; None without one."""
    found: DetectedMethod | None = None
    for where, settings in (*_sections(config, "config.json"), *_files(folder)):
        declared = isinstance(settings, Mapping)
        method = _named(settings) if declared else UNKNOWN if settings else None
        if method is None:
            continue
        if found is None:
            found = DetectedMethod(method, where, settings if isinstance(settings, Mapping) else {})
        elif method is found.method and isinstance(settings, Mapping):
            found = replace(found, settings={**settings, **found.settings})
    return found


def by_tensors(tensors: Mapping[str, TensorInfo]) -> DetectedMethod | None:
    """The quantisation that the tensors show, regardless of the config; None for floats."""
    for method in METHODS:
        example = _stored(method, tensors)
        if example is not None:
            return DetectedMethod(method, f"by its tensor {example.name}, {example.dtype}")
    for info in tensors.values():
        if len(info.shape) > 1 and info.name.endswith(".weight") and re.fullmatch(INTEGER, info.dtype):
            return DetectedMethod(UNKNOWN, f"by its tensor {info.name}, {info.dtype}")
    return None


def refusal(folder: Path, method: Method, where: str) -> UnsupportedModelError:
    """The error for an unsupported method."""
    return UnsupportedModelError(
        f"{folder}: the checkpoint is quantised: {method.name} ({where}); this format is not supported: "
        "export the unquantised checkpoint, or one in a supported format (docs/quantised_checkpoints.md)"
    )


def _sections(config: Mapping[str, Any], where: str, depth: int = 3) -> Iterator[tuple[str, Any]]:
    """Quantisation settings in a config and its sub-configs, with their location in words."""
    for key, value in config.items():
        if key in SECTIONS:
            yield f"{key} in {where}", value
        elif isinstance(value, Mapping) and key.endswith("config") and depth:
            yield from _sections(value, f"{key} of {where}", depth - 1)


def _files(folder: Path) -> Iterator[tuple[str, Any]]:
    """Quantisation settings in separate files."""
    for name, key in METHOD_FILES:
        if (folder / name).is_file():
            settings = read_json(folder / name)
            yield name, settings.get(key) if key else settings


def _named(settings: Mapping[str, Any]) -> Method | None:
    """The declared method, or the method whose keys match; None without a match."""
    named = settings.get("quant_method")
    if named:
        known = (m for m in METHODS if str(named).lower().replace("_", "-") in [n.replace("_", "-") for n in m.methods])
        return next(known, Method(str(named)[:40]))
    if "quant_algo" in settings and not settings["quant_algo"]:
        return None  # ModelOpt with a quantised cache only
    present = {key for key, value in settings.items() if value is not None}
    by_keys = (m for m in METHODS if any(present.issuperset(group.split()) for group in m.keys))
    return next(by_keys, UNKNOWN) if present else None


def _stored(method: Method, tensors: Mapping[str, TensorInfo]) -> TensorInfo | None:
    """A tensor of the method, where all tensors of the method exist with the same stem."""
    if not method.tensors:
        return None
    (ends, dtype), *others = method.tensors
    for name, info in tensors.items():
        end = next((e for e in ends.split() or [""] if name.endswith(e)), None)
        if end is None or not re.fullmatch(dtype, info.dtype):
            continue
        stem = name.removesuffix(end)
        companions = [[tensors.get(stem + e) for e in also.split()] for also, _ in others]
        if all(
            any(t is not None and re.fullmatch(kind, t.dtype) for t in found)
            for found, (_, kind) in zip(companions, others, strict=True)
        ):
            return info
    return None
