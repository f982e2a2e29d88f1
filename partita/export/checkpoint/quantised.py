"""Checkpoints that are already quantised: recognised by their config or by their tensors.

`METHODS` is all that is known about them. Those that `stored_formats/` has a file for are read; the others, and what
fits none of them, are refused with the name that the checkpoint gives it: packed integers must not be taken for
weights.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from partita.errors import UnsupportedModelError
from partita.export.checkpoint.weight_files import TensorInfo, read_json


@dataclass(frozen=True, slots=True)
class Method:
    """A way to store quantised weights."""

    name: str
    methods: tuple[str, ...] = ()
    """What `quant_method` is in a config."""
    keys: tuple[str, ...] = ()
    """Keys of a config without `quant_method`; those of one entry are all there."""
    tensors: tuple[tuple[str, str], ...] = ()
    """Ends that a tensor's name may have, and its dtype as a regular expression. The tensors lie beside one another."""


ANY, BYTE, UNSIGNED = ".*", r"[IU]8|torch\.u?int8", r"U8|torch\.uint8"
INTEGER, FLOAT8 = r"[IU](8|16|32|64)|torch\.u?int.*", r"F8_.*|torch\.float8.*"
METHODS = (
    Method(
        "bitsandbytes",
        ("bitsandbytes", "bitsandbytes_4bit", "bitsandbytes_8bit"),
        ("load_in_4bit", "load_in_8bit", "_load_in_4bit", "_load_in_8bit", "bnb_4bit_quant_type"),
        ((".weight.absmax .weight.quant_map", ANY),),
    ),
    Method("bitsandbytes LLM.int8", tensors=((".SCB", ANY), (".weight", BYTE))),
    Method(
        "GPTQ",
        ("gptq", "gptqmodel", "marlin"),
        ("bits desc_act", "bits group_size sym"),
        ((".qweight", INTEGER), (".qzeros", INTEGER), (".scales", ANY), (".g_idx", INTEGER)),
    ),
    Method(
        "AWQ",
        ("awq", "llm-awq"),
        ("w_bit q_group_size", "w_bit zero_point"),
        ((".qweight", INTEGER), (".qzeros", INTEGER), (".scales", ANY)),
    ),
    Method("EXL2 (ExLlama)", ("exl2", "exl3"), (), ((".q_weight", INTEGER), (".q_scale", ANY))),
    Method(
        "MXFP4",
        ("mxfp4",),
        (),
        (("_blocks", BYTE), ("_scales", BYTE)),
    ),
    Method("NVFP4", ("nvfp4",), (), ((".weight_scale_2", ANY), (".weight", BYTE))),
    Method(
        "compressed-tensors",
        ("compressed-tensors", "sparseml"),
        ("config_groups", "quantization_status", "sparsity_config"),
        ((".weight_packed", INTEGER),),
    ),
    Method("ModelOpt", ("modelopt",), ("quant_algo",)),
    Method("FBGEMM fp8", ("fbgemm_fp8",), ("activation_scale_ub",)),
    Method(
        "fp8",
        ("fp8", "mxfp8"),
        ("activation_scheme", "weight_block_size"),
        (("", FLOAT8),),
    ),
    Method("HQQ", ("hqq",), (), ((".W_q", ANY),)),
    Method("Quanto", ("quanto",), (), (("._data._data ._data", ANY), ("._scale", ANY))),
    Method("AQLM", ("aqlm",), ("in_group_size num_codebooks",), ((".codes", ANY), (".codebooks", ANY))),
    Method("VPTQ", ("vptq",), (), ((".centroids.weight", ANY), (".indices", ANY))),
    Method("EETQ", ("eetq",), (), ((".weight_scales", ANY), (".weight", BYTE))),
    Method("TorchAO", ("torchao",), (), ((":qdata _weight_qdata", ANY),)),
    Method("BitNet", ("bitnet",), (), ((".weight_scale", ANY), (".weight", UNSIGNED))),
    Method("SpQR", ("spqr",), (), ((".dense_weights", ANY), (".col_vals", ANY))),
    Method("HIGGS", ("higgs",)),
    Method("AutoRound", ("auto-round", "intel/auto-round")),
    Method("Quark", ("quark",)),
    Method("FP-Quant", ("fp_quant",), (), ((".qweight .dqweight", ANY), (".forward_hadamard_matrix", ANY))),
    Method("MLX", ("mlx",), ("bits group_size",), ((".weight", INTEGER), (".scales", ANY), (".biases", ANY))),
    Method("int8", ("int8",), (), ((".weight_scale .weight_scale_inv", ANY), (".weight", BYTE))),
)
"""Of two that fit, the one that asks for more comes first."""
UNKNOWN = Method("an unknown method")
SECTIONS = ("quantization_config", "compression_config", "quantization")
"""Keys of config.json, and of the configs in it, under which settings lie; the last one is MLX's."""
BESIDE = (("quantize_config.json", None), ("quant_config.json", None), ("hf_quant_config.json", "quantization"))
"""Files of settings beside config.json, and the key in them."""


@dataclass(frozen=True, slots=True)
class Recognised:
    """What a checkpoint is quantised with."""

    method: Method
    where: str
    """What says so, in words."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The settings of its config; empty where only the tensors say so."""


def by_config(folder: Path, config: Mapping[str, Any]) -> Recognised | None:
    """What config.json, or a file beside it, says that the weights are quantised with; None when nothing does.

    Settings of a file beside it complete those of config.json: older tools write some into the one and some into the
    other.
    """
    found: Recognised | None = None
    for where, settings in (*_sections(config, "config.json"), *_files(folder)):
        method = _told(settings)
        if method is None:
            continue
        if found is None:
            found = Recognised(method, where, settings if isinstance(settings, Mapping) else {})
        elif method is found.method and isinstance(settings, Mapping):
            found = replace(found, settings={**settings, **found.settings})
    return found


def by_tensors(tensors: Mapping[str, TensorInfo]) -> Recognised | None:
    """What the tensors say that they are quantised with, whatever the config says; None when they are floats."""
    for method in METHODS:
        example = _stored(method, tensors)
        if example is not None:
            return Recognised(method, f"by its tensor {example.name}, {example.dtype}")
    for info in tensors.values():
        if len(info.shape) > 1 and info.name.endswith(".weight") and re.fullmatch(INTEGER, info.dtype):
            return Recognised(UNKNOWN, f"by its tensor {info.name}, {info.dtype}")
    return None


def refusal(folder: Path, method: Method, where: str) -> UnsupportedModelError:
    """The refusal of a checkpoint whose method nothing here reads."""
    return UnsupportedModelError(
        f"{folder}: the checkpoint is quantised: {method.name} ({where}); this format is not supported: export the "
        "checkpoint that it was quantised from, or one in another format (docs/quantised_checkpoints.md)"
    )


def _sections(config: Mapping[str, Any], where: str, depth: int = 3) -> Iterator[tuple[str, Any]]:
    """Settings in a config and in the configs in it, with where they are."""
    for key, value in config.items():
        if key in SECTIONS:
            yield f"{key} in {where}", value
        elif isinstance(value, Mapping) and key.endswith("config") and depth:
            yield from _sections(value, f"{key} of {where}", depth - 1)


def _files(folder: Path) -> Iterator[tuple[str, Any]]:
    """Settings in files of their own."""
    for name, key in BESIDE:
        if (folder / name).is_file():
            settings = read_json(folder / name)
            yield name, settings.get(key) if key else settings


def _told(settings: Any) -> Method | None:
    """The method that settings name, or else that their keys fit; None when nothing is quantised."""
    if not isinstance(settings, Mapping):
        return UNKNOWN if settings else None
    method = _named(settings)
    return None if method is None or _is_of_the_cache(method, settings) else method


def _named(settings: Mapping[str, Any]) -> Method | None:
    """The method that settings name, or else that their keys fit; None when there are none."""
    named = settings.get("quant_method")
    if named:
        known = (m for m in METHODS if str(named).lower().replace("_", "-") in [n.replace("_", "-") for n in m.methods])
        return next(known, Method(str(named)[:40]))
    if "quant_algo" in settings and not settings["quant_algo"]:
        return None  # ModelOpt, of the cache alone
    present = {key for key, value in settings.items() if value is not None}
    by_keys = (m for m in METHODS if any(present.issuperset(group.split()) for group in m.keys))
    return next(by_keys, UNKNOWN) if present else None


def _is_of_the_cache(method: Method, settings: Mapping[str, Any]) -> bool:
    """Whether settings of compressed-tensors say how the cache is rounded, and nothing of weights, which are floats."""
    sparse = settings.get("sparsity_config")
    form = sparse.get("format") if isinstance(sparse, Mapping) else sparse
    return (
        "compressed-tensors" in method.methods
        and bool(settings.get("kv_cache_scheme"))
        and not any(settings.get(key) for key in ("config_groups", "transform_config"))
        and (not form or form == "dense")
    )


def _stored(method: Method, tensors: Mapping[str, TensorInfo]) -> TensorInfo | None:
    """A tensor of the kind that the method stores, where all that belong to it lie beside one another."""
    if not method.tensors:
        return None
    (ends, dtype), *others = method.tensors
    for name, info in tensors.items():
        end = next((e for e in ends.split() or [""] if name.endswith(e)), None)
        if end is None or not re.fullmatch(dtype, info.dtype):
            continue
        stem = name.removesuffix(end)
        beside = [[tensors.get(stem + e) for e in also.split()] for also, _ in others]
        if all(
            any(t is not None and re.fullmatch(kind, t.dtype) for t in found)
            for found, (_, kind) in zip(beside, others, strict=True)
        ):
            return info
    return None
