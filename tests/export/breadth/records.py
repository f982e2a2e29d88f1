"""What came of one model type with one lowering, and the run that it was part of; written as JSON and read back."""

from __future__ import annotations

import json
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
