"""Which class of transformers a checkpoint is a model of, and how its decoder is asked about text alone.

A checkpoint that also sees or hears is traced as the whole class that transformers has for it, given tokens and nothing
else: what that class does between embedding and decoder is then its own code's business, and a tower that text does not
pass through leaves nothing in the graph.
"""

from __future__ import annotations

from typing import Any

from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM, PreTrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

THINKER = "thinker_config"
"""Models that also speak have a thinker, which writes text, and a talker, which reads it aloud."""
_MAPPINGS: tuple[tuple[Any, Any], ...] = (
    (AutoModelForCausalLM, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
    (AutoModelForMultimodalLM, MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES),
)
"""In the order in which they are asked. The second has every image- or audio-text-to-text type."""


def classes(model_type: str) -> tuple[str, ...]:
    """Names of the classes with a language-model head that transformers has for a model type; none for other types."""
    return _named(next((names[model_type] for _, names in _MAPPINGS if model_type in names), ()))


def auto_class(config: PreTrainedConfig) -> Any:
    """The class of transformers that builds and loads models of `config`."""
    return next((auto for auto, names in _MAPPINGS if config.model_type in names), AutoModelForCausalLM)


def of_text(config: PreTrainedConfig) -> PreTrainedConfig:
    """The config of what writes text: of the thinker, where a model also speaks, and its config has one."""
    thinker = getattr(config, THINKER, None)
    return thinker if isinstance(thinker, PreTrainedConfig) else config


def _named(entry: str | tuple[str, ...] | list[str]) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else tuple(entry)
