"""Read adapter_config.json of a PEFT adapter. A setting that is set and unknown is refused."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from partita.capped import is_number
from partita.errors import CheckpointError, UnsupportedModelError
from partita.export.checkpoint.weight_files import SHOWN_CHARACTERS, matches, read_json

CONFIG = "adapter_config.json"
HANDLED = frozenset(
    {
        "peft_type",
        "r",
        "lora_alpha",
        "rank_pattern",
        "alpha_pattern",
        "use_rslora",
        "use_dora",
        "lora_bias",
        "bias",
        "modules_to_save",
        "ensure_weight_tying",
        "base_model_name_or_path",
        "init_lora_weights",
    }
)
WITHOUT_EFFECT = frozenset(
    {
        "auto_mapping",
        "peft_version",
        "revision",
        "task_type",
        "inference_mode",
        "target_modules",
        "exclude_modules",
        "lora_dropout",
        "fan_in_fan_out",
        "layers_to_transform",
        "layers_pattern",
        "megatron_core",
        "loftq_config",
        "eva_config",
        "corda_config",
        "lora_ga_config",
        "qalora_group_size",
        "runtime_config",
    }
)
"""Training settings, and target settings that the tensor names state."""
REFUSED = {
    "use_qalora": "QALoRA, which averages the adapter's inputs",
    "alora_invocation_tokens": "activated LoRA (aLoRA), which is active only after certain tokens",
    "arrow_config": "Arrow, a router over several adapters",
    "layer_replication": "repeated layers (layer_replication)",
    "megatron_config": "Megatron layers",
    "trainable_token_indices": "single rows of the embedding (trainable_token_indices)",
    "target_parameters": "parameters of experts (target_parameters)",
    "use_bdlora": "block-diagonal LoRA",
}
"""Settings that change the computation and are not supported."""
CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""LoRA initialisations that change the weights of the base model."""
NOT_MERGED = frozenset(
    (
        *("PROMPT_TUNING", "MULTITASK_PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", "ADAPTION_PROMPT", "CPT"),
        *("CARTRIDGE", "LILY", "POLY", "SHADOW", "XLORA"),
    )
)
"""Adapter types that peft 0.21 cannot merge into weights."""
INSTEAD = "merge it with peft (merge_and_unload) and export the merged model"


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """The settings of adapter_config.json that the export uses."""

    rank: int
    alpha: float
    rank_pattern: tuple[tuple[str, float], ...]
    alpha_pattern: tuple[tuple[str, float], ...]
    rank_stabilised: bool
    """Scaled by alpha / sqrt(rank) (rsLoRA, arXiv 2312.03732) in place of alpha / rank."""
    dora: bool
    keeps_ties: bool
    base_model: str

    def rank_of(self, module: str) -> int:
        """The rank of the adapter of a module."""
        return int(_matched(self.rank_pattern, module, self.rank))

    def scale(self, module: str) -> float:
        """The factor s of s B A."""
        rank = self.rank_of(module)
        alpha = _matched(self.alpha_pattern, module, self.alpha)
        return alpha / (math.sqrt(rank) if self.rank_stabilised else rank)


def _matched(patterns: tuple[tuple[str, float], ...], module: str, default: float) -> float:
    """The value of the first pattern that matches the end of a module's name, as in peft."""
    for pattern, value in patterns:
        if matches(rf"(.*\.)?({pattern})$", module):
            return value
    return default


def read_config(folder: Path) -> AdapterConfig:
    """Read adapter_config.json in `folder`.

    Raises CheckpointError when it is missing or damaged, UnsupportedModelError for an unsupported adapter type.
    """
    path = folder / CONFIG
    if not path.is_file():
        raise CheckpointError(f"{folder}: not an adapter: {CONFIG} is missing")
    raw = read_json(path)
    _refuse_kind(path, raw)
    rank = raw.get("r", 8)
    alpha = raw.get("lora_alpha", 8)
    if not _is_count(rank) or not is_number(alpha):
        raise CheckpointError(f"{path}: damaged: r is {rank!r} and lora_alpha is {alpha!r}"[: 2 * SHOWN_CHARACTERS])
    return AdapterConfig(
        rank=rank,
        alpha=float(alpha),
        rank_pattern=_patterns(path, raw, "rank_pattern"),
        alpha_pattern=_patterns(path, raw, "alpha_pattern"),
        rank_stabilised=bool(raw.get("use_rslora")),
        dora=bool(raw.get("use_dora")),
        keeps_ties=bool(raw.get("ensure_weight_tying")),
        base_model=str(raw.get("base_model_name_or_path") or ""),
    )


def _refuse_kind(path: Path, raw: Mapping[str, Any]) -> None:
    """Refuse adapter types other than LoRA and DoRA, and unsupported settings, by name."""
    kind = str(raw.get("peft_type"))[:40].upper()
    if "peft_type" not in raw:
        raise CheckpointError(f"{path}: damaged: peft_type is missing")
    if kind != "LORA":
        ending = "; it does not modify weights" if kind in NOT_MERGED else f"; {INSTEAD}"
        raise UnsupportedModelError(f"{path}: adapter type {kind}: only LoRA and DoRA are supported{ending}")
    began = str(raw.get("init_lora_weights") or "").lower()
    if began.startswith(CHANGES_BASE):
        raise UnsupportedModelError(
            f"{path}: init_lora_weights is {began[:40]}, which also changed the weights of the model; "
            "save it as a plain LoRA (path_initial_model_for_weight_conversion of save_pretrained in peft)"
        )
    for key, value in raw.items():
        if not value or key in HANDLED or key in WITHOUT_EFFECT:
            continue
        if key in REFUSED:
            raise UnsupportedModelError(f"{path}: the adapter uses {REFUSED[key]}, which is not supported; {INSTEAD}")
        raise UnsupportedModelError(
            f"{path}: {key[:SHOWN_CHARACTERS]} is set; Partita does not know it, and it may change the "
            f"result of the adapter; {INSTEAD}"
        )
    if raw.get("lora_bias") and raw.get("use_dora"):
        raise UnsupportedModelError(
            f"{path}: lora_bias and use_dora are both set, which peft does not support either; unset one of them"
        )


def _patterns(path: Path, raw: Mapping[str, Any], key: str) -> tuple[tuple[str, float], ...]:
    """Regular expressions on module names, with the rank or alpha of each."""
    found = raw.get(key) or {}
    if not isinstance(found, dict) or not all(is_number(value) for value in found.values()):
        raise CheckpointError(f"{path}: damaged: {key} is not a table of numbers")
    if key == "rank_pattern" and not all(map(_is_count, found.values())):
        raise CheckpointError(f"{path}: damaged: a rank of {key} is not a positive integer")
    for pattern in found:
        try:
            matches(pattern, "")
        except re.error as error:
            raise CheckpointError(
                f"{path}: {key} has {pattern[:SHOWN_CHARACTERS]!r}, which is not a valid pattern ({error})"
            ) from error
    return tuple(found.items())


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= 1 << 20
