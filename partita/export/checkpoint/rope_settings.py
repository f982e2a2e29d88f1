"""Refuses rotary embedding settings that the installed transformers does not know.

transformers only warns about an unknown rope type or key, and the source model of the comparison would lack it, too.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import transformers
from transformers import PreTrainedConfig
from transformers.configuration_utils import ALLOWED_LAYER_TYPES
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, RopeParameters

from partita.capped import is_number
from partita.errors import CheckpointError, UnsupportedModelError

KEYS = ("rope_parameters", "rope_scaling")
"""The key in config.json, now and before transformers 5."""
NOT_SETTINGS = frozenset({"type", "finetuned"})
"""Keys without effect: the former name of `rope_type`, and a flag of YaRN checkpoints."""
POSITIVE = ("rope_theta", "factor")
"""Settings used as a divisor or as the base of a power."""


def check_written(folder: Path, config: Mapping[str, Any]) -> None:
    """Raise CheckpointError when rotary settings in config.json are not a JSON object."""
    for where, part in (("config.json", config), ("text_config of config.json", config.get("text_config"))):
        for key in KEYS:
            settings = part.get(key) if isinstance(part, Mapping) else None
            if settings and not isinstance(settings, Mapping):
                raise CheckpointError(
                    f"{folder}: {key} in {where} is {str(settings)[:40]!r}, which is not a rope "
                    "configuration; correct it or remove it"
                )


def check_known(folder: Path, config: PreTrainedConfig) -> None:
    """Raise for rotary settings of `config` that cannot be used.

    UnsupportedModelError: transformers does not know the rope type or a key. CheckpointError: a value is invalid.
    """
    text: Any = config.get_text_config(decoder=True)
    settings = getattr(text, "rope_parameters", None)
    if not isinstance(settings, Mapping):
        return
    default = getattr(text, "default_rope_type", "default")
    types = sorted({"default", default, *ROPE_INIT_FUNCTIONS})
    known = set(RopeParameters.__annotations__) | NOT_SETTINGS | set(text.ignore_keys_at_rope_validation or ())
    for where, entry in _entries(text, settings):
        for key in POSITIVE:
            value = entry.get(key)
            number = is_number(value) and value > 0
            if value is not None and not number:
                raise CheckpointError(f"{folder}: rope setting {key}{where} is {value!r:.40}, not a number above 0")
        kind = entry.get("rope_type", entry.get("type", default))
        if kind not in types:
            raise UnsupportedModelError(
                f"{folder}: rope type {str(kind)[:40]!r}{where} is unknown to transformers "
                f"{transformers.__version__}, which knows {', '.join(types)}; try a newer transformers"
            )
        strange = sorted(str(key)[:40] for key in entry if key not in known and not _is_read(text, str(key)))
        if strange:
            raise UnsupportedModelError(
                f"{folder}: rope settings {', '.join(map(repr, strange[:5]))}{where} are unknown to "
                f"transformers {transformers.__version__}, which would ignore them; try a newer "
                "transformers"
            )


def _is_read(text: Any, key: str) -> bool:
    """Whether the source code of the model contains the name of a setting."""
    folder = Path(inspect.getfile(type(text))).parent
    return any(f'"{key}"' in file.read_text(encoding="utf-8") for file in folder.glob("*.py"))


def _entries(text: Any, settings: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The settings, or those of each layer type when they are nested, with their location for messages."""
    nested = text.nested_rope_parameter_keys(settings)
    for key in nested:
        if isinstance(settings[key], Mapping):
            yield f" of {key}", settings[key]
    # A model may have settings of unused layer types.
    yield "", {k: v for k, v in settings.items() if not nested or k not in {*nested, *ALLOWED_LAYER_TYPES}}
