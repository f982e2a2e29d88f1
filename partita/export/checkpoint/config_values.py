"""Settings of config.json that say how to run a model, which an export decides itself, and values that none can have.

The first are left out before transformers reads the file: they would change what comes out of `forward`, or ask for
code that is not installed. The second are refused by the name of their field, also where nothing is verified.
"""

from __future__ import annotations

import json
import math
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

from partita.capped import is_number
from partita.errors import CheckpointError, UnsupportedModelError
from partita.export.checkpoint.weight_files import read_json
from partita.export.trace.fake_model import quiet

HOW_TO_RUN = frozenset(
    {
        "return_dict",
        "use_return_dict",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "use_cache",
        "torchscript",
        "gradient_checkpointing",
        "attn_implementation",
        "_attn_implementation",
        "_attn_implementation_internal",
        "_attn_implementation_autoset",
        "experts_implementation",
        "_experts_implementation",
        "_experts_implementation_internal",
        # Weights are dequantised here, and no library of a format is needed.
        "quantization_config",
        "compression_config",
        "quantization",
    }
)
DTYPES = ("dtype", "torch_dtype")
"""In what to load the weights; left out when torch has no such type."""
POSITIVE = re.compile(r"norm\w*_eps(ilon)?$|^(rope_theta|rotary_emb_base|rope_local_base_freq|global_rope_theta)$")
"""What a root is taken of or a power of, and has to be a number above 0."""
SIZES = re.compile(r"(^|_)(hidden_size|vocab_size|num_attention_heads|num_key_value_heads|head_dim)$")
NOT_NEGATIVE = re.compile(r"^(intermediate_size|ffn_dim|n_layer|n_head|n_embd|d_model)$")


def read_config(folder: Path, raw: Mapping[str, Any]) -> PreTrainedConfig:
    """The config in `folder`, whose JSON is `raw`, without what only says how to run. Raises what transformers does."""
    kept = _without_how_to_run(raw)
    if kept == raw:
        return _loaded(folder)
    with tempfile.TemporaryDirectory(prefix="partita-config-") as name:
        (Path(name) / "config.json").write_text(json.dumps(kept), encoding="utf-8")
        config = _loaded(Path(name))
    config.name_or_path = str(folder)
    return config


def corrected(folder: Path) -> str | None:
    """The text of config.json in `folder` without what only says how to run, where transformers cannot read the file
    with it; None where it can.
    """
    kept = _without_how_to_run(raw := read_json(folder / "config.json"))
    if kept == raw:
        return None
    try:
        _loaded(folder)
    except Exception:  # noqa: BLE001 - validation errors of configs share no base class
        return json.dumps(kept, indent=2)
    return None


def _loaded(folder: Path) -> PreTrainedConfig:
    """The config.json in `folder` as transformers reads it."""
    with quiet():
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    return config


def _without_how_to_run(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that describe the model, those of its parts included."""
    return {
        key: _without_how_to_run(value) if isinstance(value, dict) and key.endswith("_config") else value
        for key, value in raw.items()
        if key not in HOW_TO_RUN and not (key in DTYPES and not _is_dtype(value))
    }


def _is_dtype(value: Any) -> bool:
    """Whether torch has a type of this name."""
    return value is None or (isinstance(value, str) and isinstance(getattr(torch, value, None), torch.dtype))


def check_values(folder: Path, raw: Mapping[str, Any]) -> None:
    """Raise CheckpointError naming the first setting whose value no model can be computed with."""
    text = raw.get("text_config")
    if text is not None and not isinstance(text, Mapping):
        raise _bad(folder, "text_config", text, "an object")
    for name, key, value in _entries(raw):
        if isinstance(value, float) and math.isnan(value):
            raise _bad(folder, name, value, "a number")
        if not isinstance(value, int | float) or isinstance(value, bool):
            if value is not None and POSITIVE.search(key):
                raise _bad(folder, name, value, "a number above 0")
            continue
        if isinstance(value, int) and not is_number(value):
            raise _bad(folder, name, value, "a number that a float can hold")
        if POSITIVE.search(key) and not (math.isfinite(value) and value > 0):
            raise _bad(folder, name, value, "a number above 0")
        too_small = (SIZES.search(key) and value < 1) or (NOT_NEGATIVE.search(key) and value < 0)
        if too_small and not _is_default(raw.get("model_type"), name, value):
            raise _bad(folder, name, value, "a size")


def _is_default(model_type: Any, name: str, value: float) -> bool:
    """Whether models of a type have this value where a config says nothing: glm5_next turns 0 numbers of a head."""
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        return False
    try:
        with quiet():
            found: Any = CONFIG_MAPPING[model_type]().to_dict()
    except Exception:  # noqa: BLE001 - a few have no defaults to be made of, and raise anything
        return False
    for part in name.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return bool(found == value)


def sizes(config: PreTrainedConfig) -> Iterator[tuple[str, int]]:
    """Settings of the text part that are the length of an axis of a weight, or a part of it."""
    for key, value in config.get_text_config(decoder=True).to_dict().items():
        if type(value) is int and (SIZES.search(key) or NOT_NEGATIVE.search(key)):
            yield key, value


def _bad(folder: Path, name: str, value: Any, wanted: str) -> CheckpointError:
    """The refusal of one value."""
    return CheckpointError(f"{folder}: {name} in config.json is {str(value)[:40]!r}, not {wanted}; correct it")


def _entries(raw: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, str, Any]]:
    """Every setting that is no object: its path, its name and its value. Of the parts, those of the text alone."""
    for key, value in raw.items():
        if not isinstance(value, Mapping):
            yield f"{path}{key}", key, value
        elif key == "text_config":  # settings of rotary embeddings are looked at in rope_settings
            yield from _entries(value, f"{path}{key}.")


def named(error: UnsupportedModelError, folder: Path, config: PreTrainedConfig) -> CheckpointError:
    """An error of building the model, by the setting that is its cause where that can be told: a name that
    transformers has no entry for in a table of its own, or a token outside of the vocabulary.
    """
    cause = error.__cause__
    text: Any = config.get_text_config(decoder=True)
    if isinstance(cause, KeyError) and cause.args and isinstance(cause.args[0], str):
        wrong = cause.args[0]
        fields = [key for key, value in text.to_dict().items() if value == wrong and key != "model_type"]
        if fields:
            return CheckpointError(
                f"{folder}: {' and '.join(fields)} in config.json is {wrong[:40]!r}, which the installed "
                "transformers does "
                "not support; correct it, or use a transformers that does"
            )
    rope = getattr(text, "rope_parameters", None)
    missing = [key for key, value in rope.items() if value is None] if isinstance(rope, Mapping) else []
    # Models without such embeddings have null there, and do without.
    if missing and isinstance(cause, TypeError) and "NoneType" in str(cause):
        return CheckpointError(
            f"{folder}: {' and '.join(missing)} of rope_parameters in config.json is null, not a number; correct it"
        )
    pad, size = getattr(text, "pad_token_id", None), getattr(text, "vocab_size", None)
    if "padding_idx" in str(cause).lower() and isinstance(pad, int) and isinstance(size, int):
        return CheckpointError(
            f"{folder}: pad_token_id in config.json is {pad:,}, outside the vocabulary of {size:,}; correct it"
        )
    return error
