"""What came of one model type with one lowering, the run that it was part of, and what a full run has to show."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

Status = Literal["verified", "refused", "parity", "wrong", "crashed", "hung", "no checkpoint"]
"""parity: refused because the graph was not what the model computes; nothing was written. no checkpoint: not tried."""

BAD: tuple[Status, ...] = ("wrong", "crashed", "hung")
LOWERINGS = ("gqa", "onnx24", "primitives")
VERSIONS = ("partita", "torch", "transformers", "onnxruntime")


@dataclass(frozen=True, slots=True)
class Outcome:
    """One model type with one lowering."""

    model_type: str
    attention: str
    status: Status
    max_rel_error: float | None = None
    """Largest difference of logits, relative to the largest logit of the step; None when nothing ran."""
    reason: str = ""
    """The exporter's own line, or what went wrong."""
    rows: str = ""
    """Why rows of unequal length were refused; empty when they are verified, or when nothing ran."""
    original: str = ""
    """Where transformers does not agree with itself; empty when it does."""
    seconds: float = 0.0
    code: str = ""
    """Commit of Partita that this is of, with `+` where files were changed since; empty when that is not known."""


@dataclass(frozen=True, slots=True)
class Results:
    """A run over many types."""

    versions: dict[str, str]
    date: str
    outcomes: tuple[Outcome, ...] = field(default=())

    def write(self, path: Path) -> None:
        """Write as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @staticmethod
    def read(path: Path) -> Results:
        """What `write` wrote."""
        value = json.loads(path.read_text(encoding="utf-8"))
        return Results(value["versions"], value["date"], tuple(Outcome(**entry) for entry in value["outcomes"]))


def causal_types() -> list[str]:
    """Every causal-LM type of the installed transformers, sorted."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def multimodal_types() -> list[str]:
    """Every image- or audio-text-to-text type that is no causal-LM type, sorted."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES

    return sorted(set(MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES) - set(causal_types()))


def all_types() -> list[str]:
    """Every type that is tried: the causal ones first."""
    return [*causal_types(), *multimodal_types()]


LEAST = {"gqa": 85, "onnx24": 60, "primitives": 60}
"""Verified types by lowering."""

_NAMED = """
    llama qwen2 qwen2_moe qwen3 qwen3_moe qwen3_next qwen3_5_text mistral ministral3 mixtral gemma gemma2
    gemma3_text gemma4_text phi phi3 phimoe gpt2 gpt_neox gpt_oss opt bloom falcon mpt starcoder2 olmo2 olmoe
    cohere2 granite granitemoehybrid deepseek_v2 deepseek_v3 glm4 glm4_moe stablelm smollm3 lfm2 jamba bamba
    falcon_h1 mamba2 ernie4_5 exaone4 nemotron helium minicpm3 llama4_text llava llava_next llava_onevision
    qwen2_vl qwen2_5_vl qwen3_vl mistral3 smolvlm idefics3 internvl glm4v aya_vision gemma3 voxtral qwen2_audio
    phi4_multimodal
"""
NAMED = _NAMED.split()
"""Families that are verified with gqa."""


def complaints(outcomes: Sequence[Outcome]) -> list[str]:
    """What is not as it has to be after a full run, a line each; empty when all is well."""
    lines = [
        f"{entry.model_type} with {entry.attention}: {entry.status}: {entry.reason}"
        for entry in outcomes
        if entry.status in BAD
    ]
    verified = {
        name: {e.model_type for e in outcomes if e.attention == name and e.status == "verified"} for name in LEAST
    }
    for name, least in LEAST.items():
        if len(verified[name]) < least:
            lines.append(f"{len(verified[name])} types are verified with {name}, at least {least} have to be")
    absent = [name for name in NAMED if name not in verified["gqa"]]
    if absent:
        lines.append(f"not verified with gqa: {', '.join(absent)}")
    return lines
