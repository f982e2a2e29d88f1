"""Detects quantised checkpoints by their config.

`METHODS` with a reader are read by `stored_formats/`. Other methods, and unknown ones, are refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from partita.export.checkpoint.weight_files import read_json


@dataclass(frozen=True, slots=True)
class Method:
    """A way to store quantised weights."""

    name: str
    methods: tuple[str, ...] = ()
    """Values of `quant_method`, with - for _."""
    keys: tuple[str, ...] = ()
    """Keys of a config without `quant_method`. All keys of one entry must exist."""
    reader: str = ""
    """The module of `stored_formats` that reads it; empty: it is refused."""


METHODS = (
    Method(
        "bitsandbytes",
        ("bitsandbytes", "bitsandbytes-4bit", "bitsandbytes-8bit"),
        ("load_in_4bit", "load_in_8bit", "_load_in_4bit", "_load_in_8bit", "bnb_4bit_quant_type"),
        reader="bitsandbytes",
    ),
    Method("GPTQ", ("gptq", "gptqmodel", "marlin"), ("bits desc_act", "bits group_size sym"), reader="gptq"),
    Method("AWQ", ("awq", "llm-awq"), ("w_bit q_group_size", "w_bit zero_point"), reader="gptq"),
    Method("MXFP4", ("mxfp4",), reader="mxfp4"),
    Method(
        "compressed-tensors",
        ("compressed-tensors", "sparseml"),
        ("config_groups", "quantization_status", "sparsity_config"),
        reader="compressed_tensors",
    ),
    Method("ModelOpt", ("modelopt",), ("quant_algo",)),
    Method("FBGEMM fp8", ("fbgemm-fp8",), ("activation_scale_ub",), reader="fp8"),
    Method("fp8", ("fp8", "mxfp8"), ("activation_scheme", "weight_block_size"), reader="fp8"),
    Method("TorchAO", ("torchao",), reader="torchao"),
    Method("MLX", ("mlx",), ("bits group_size",)),
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
    settings: Mapping[str, Any]
    """The quantisation settings of the config."""


def by_config(folder: Path, config: Mapping[str, Any]) -> DetectedMethod | None:
    """The quantisation that config.json, completed by files next to it, declares; None without one."""
    sections = [*_sections(config, "config.json")]
    for name, key in METHOD_FILES:
        if (folder / name).is_file():
            settings = read_json(folder / name)
            sections.append((name, settings.get(key) if key else settings))
    found: DetectedMethod | None = None
    for where, settings in sections:
        declared = settings if isinstance(settings, Mapping) else {}
        method = _named(declared) if isinstance(settings, Mapping) else UNKNOWN if settings else None
        if method is None:
            continue
        if found is None:
            found = DetectedMethod(method, where, declared)
        elif method is found.method:
            found = replace(found, settings={**declared, **found.settings})
    return found


def _sections(config: Mapping[str, Any], where: str, depth: int = 3) -> Iterator[tuple[str, Any]]:
    """Quantisation settings in a config and its sub-configs, with their location in words."""
    for key, value in config.items():
        if key in SECTIONS:
            yield f"{key} in {where}", value
        elif isinstance(value, Mapping) and key.endswith("config") and depth:
            yield from _sections(value, f"{key} of {where}", depth - 1)


def _named(settings: Mapping[str, Any]) -> Method | None:
    """The declared method, or the method whose keys match; None without a match."""
    if named := settings.get("quant_method"):
        name = str(named).lower().replace("_", "-")
        return next((method for method in METHODS if name in method.methods), Method(str(named)[:40]))
    if "quant_algo" in settings and not settings["quant_algo"]:
        return None  # ModelOpt with a quantised cache only
    present = {key for key, value in settings.items() if value is not None}
    by_keys = (m for m in METHODS if any(present.issuperset(group.split()) for group in m.keys))
    return next(by_keys, UNKNOWN) if present else None
