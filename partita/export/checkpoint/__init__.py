"""Reading of checkpoints. Here: the transformers class of a checkpoint, and its text decoder.

A multimodal checkpoint is traced as its whole class with token inputs only; the vision and audio towers leave no nodes
in the graph.
"""

from __future__ import annotations

from typing import Any

from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM, PreTrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

THINKER = "thinker_config"
"""The text part of models that generate speech (their "talker" is not used)."""
_MAPPINGS: tuple[tuple[Any, Any], ...] = (
    (AutoModelForCausalLM, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
    (AutoModelForMultimodalLM, MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES),
)
"""In order of preference. The second has every image-text-to-text and audio-text-to-text type."""


def classes(model_type: str) -> tuple[str, ...]:
    """Names of transformers' classes with a language-model head for a model type; empty for other types."""
    found: str | tuple[str, ...] = next((names[model_type] for _, names in _MAPPINGS if model_type in names), ())
    return (found,) if isinstance(found, str) else tuple(found)


def auto_class(config: PreTrainedConfig) -> Any:
    """The transformers auto class that builds and loads models of `config`."""
    return next((auto for auto, names in _MAPPINGS if config.model_type in names), AutoModelForCausalLM)


def of_text(config: PreTrainedConfig) -> PreTrainedConfig:
    """The config of the text-generating part: the thinker, where the model has one."""
    thinker = getattr(config, THINKER, None)
    return thinker if isinstance(thinker, PreTrainedConfig) else config
