"""Settings of config.json that the export overrides, and checks of values that no model can have.

Overridden settings are removed before transformers reads the file: they would change the outputs of `forward` or
require packages that are not installed. Rotary settings that the installed transformers does not know are refused: it
only warns about an unknown rope type or key, and the source model of the comparison would lack it, too.
"""

from __future__ import annotations

import inspect
import json
import math
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, PreTrainedConfig
from transformers.configuration_utils import ALLOWED_LAYER_TYPES
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, RopeParameters

from partita.errors import CheckpointError, UnsupportedModelError
from partita.export.checkpoint.weight_files import read_json
from partita.export.trace.fake_model import quiet
from partita.untrusted_files import is_number

RUN_SETTINGS = frozenset(
    (
        *("return_dict", "use_return_dict", "output_attentions", "output_hidden_states", "output_router_logits"),
        *("use_cache", "torchscript", "gradient_checkpointing"),
        *("attn_implementation", "_attn_implementation", "_attn_implementation_internal"),
        *("_attn_implementation_autoset", "experts_implementation", "_experts_implementation"),
        "_experts_implementation_internal",
        # Weights are dequantised here, without the library of the format.
        *("quantization_config", "compression_config", "quantization"),
    )
)
DTYPES = ("dtype", "torch_dtype")
"""The dtype of the weights; removed where torch has no dtype of this name, e.g. `auto`."""
POSITIVE = re.compile(
    r"norm\w*_eps(ilon)?$|^(rope_theta|rotary_emb_base|rope_local_base_freq|global_rope_theta|factor)$"
)
"""Settings that must be above 0: roots and powers are taken of them, or they are divisors."""
SIZES = re.compile(
    r"^(vocab_size|intermediate_size|ffn_dim|n_layer|n_head|n_embd|d_model)$"
    r"|(^|_)(hidden_size|num_attention_heads|num_key_value_heads|head_dim)$"
)
"""Settings that are the length of a weight's axis, or a divisor of it."""
DIVISORS = re.compile(r"vocab_size|hidden_size|_heads$")
"""Sizes that may not be 0; a part of a head may, e.g. the rotated part of glm5_next."""
ROPE = ("rope_parameters", "rope_scaling")
"""The key in config.json, now and before transformers 5."""


def read_config(folder: Path, raw: Mapping[str, Any]) -> PreTrainedConfig:
    """The config in `folder`, whose JSON is `raw`, without overridden settings. Raises as transformers does."""
    with tempfile.TemporaryDirectory(prefix="partita-config-") as name:
        (Path(name) / "config.json").write_text(json.dumps(_without_run_settings(raw)), encoding="utf-8")
        config = _loaded(Path(name))
    config.name_or_path = str(folder)
    return config


def loadable_config(folder: Path) -> str | None:
    """The text of config.json without overridden settings; None where transformers can read the file as it is."""
    try:
        _loaded(folder)
    except Exception:  # noqa: BLE001 - validation errors of configs share no base class
        return json.dumps(_without_run_settings(read_json(folder / "config.json")), indent=2)
    return None


def _loaded(folder: Path) -> PreTrainedConfig:
    """config.json in `folder`, read by transformers."""
    with quiet():
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    return config


def _without_run_settings(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that describe the model, in sub-configs too."""
    return {
        key: _without_run_settings(value) if isinstance(value, dict) and key.endswith("_config") else value
        for key, value in raw.items()
        if key not in RUN_SETTINGS
        and (key not in DTYPES or value is None or isinstance(getattr(torch, str(value), None), torch.dtype))
    }


def check_values(folder: Path, raw: Mapping[str, Any]) -> None:
    """Raise CheckpointError for the first setting whose value no model can have."""
    text = raw.get("text_config")
    if text is not None and not isinstance(text, Mapping):
        raise _bad(folder, "text_config", text, "an object")
    for name, key, value in _entries(raw):
        if key in ROPE and value:
            raise _bad(folder, name, value, "an object")
        if POSITIVE.search(key) and value is not None and not (is_number(value) and value > 0):
            raise _bad(folder, name, value, "a number above 0")
        if SIZES.search(key) and type(value) is int and value < (1 if DIVISORS.search(key) else 0):
            raise _bad(folder, name, value, "a size")
        if type(value) in (int, float) and not is_number(value) and abs(value) != math.inf:
            raise _bad(folder, name, value, "a number that a float can hold")


def _bad(folder: Path, name: str, value: Any, expected: str) -> CheckpointError:
    """The error for one value."""
    return CheckpointError(f"{folder}: {name} in config.json is {str(value)[:40]!r}, not {expected}; correct it")


def _entries(raw: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, str, Any]]:
    """Path, key and value of every setting that is not an object, in the text config and rope settings too."""
    for key, value in raw.items():
        if not isinstance(value, Mapping):
            yield f"{path}{key}", key, value
        elif key in ("text_config", *ROPE) or "rope" in path:
            yield from _entries(value, f"{path}{key}.")


NOT_SETTINGS = frozenset({"type", "finetuned"})
"""Keys without effect: the former name of `rope_type`, and a flag of YaRN checkpoints."""


def check_known(folder: Path, config: PreTrainedConfig) -> None:
    """Raise UnsupportedModelError for an unknown rope type or key."""
    text: Any = config.get_text_config(decoder=True)
    settings = getattr(text, "rope_parameters", None)
    if not isinstance(settings, Mapping):
        return
    default = getattr(text, "default_rope_type", "default")
    types = sorted({"default", default, *ROPE_INIT_FUNCTIONS})
    known = set(RopeParameters.__annotations__) | NOT_SETTINGS | set(text.ignore_keys_at_rope_validation or ())
    for where, entry in _rope_entries(text, settings):
        kind = entry.get("rope_type", entry.get("type", default))
        if kind not in types:
            raise UnsupportedModelError(
                f"{folder}: rope type {str(kind)[:40]!r}{where} is unknown to transformers "
                f"{transformers.__version__}, which knows {', '.join(types)}; try a newer transformers"
            )
        code = [file.read_text(encoding="utf-8") for file in Path(inspect.getfile(type(text))).parent.glob("*.py")]
        unknown = [str(key) for key in entry if key not in known]
        strange = sorted(key[:40] for key in unknown if not any(f'"{key}"' in source for source in code))
        if strange:
            raise UnsupportedModelError(
                f"{folder}: rope settings {', '.join(map(repr, strange[:5]))}{where} are unknown to transformers "
                f"{transformers.__version__}, which would ignore them; try a newer transformers"
            )


def _rope_entries(text: Any, settings: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The settings, or those of each layer type when they are nested, with their location for messages."""
    nested = text.nested_rope_parameter_keys(settings)
    for key in nested:
        if isinstance(settings[key], Mapping):
            yield f" of {key}", settings[key]
    # A model may have settings of unused layer types.
    yield "", {k: v for k, v in settings.items() if not nested or k not in {*nested, *ALLOWED_LAYER_TYPES}}
