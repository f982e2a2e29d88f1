"""Quantised storage formats, one module each: a reader of the tensors, and the values of the weights."""

from __future__ import annotations

import importlib
import math
import pkgutil
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from partita.errors import CheckpointError
from partita.export.checkpoint.quantised import Recognised, refusal
from partita.export.checkpoint.stored_formats.base import (
    INTEGER,
    AffineWeight,
    Parts,
    Sources,
    StoredFormat,
    StoredWeight,
    contradiction,
)
from partita.export.checkpoint.weight_files import SHOWN_CHARACTERS, OpenFiles, TensorInfo

__all__ = [
    "AffineWeight",
    "Parts",
    "Quantised",
    "StoredFormat",
    "StoredWeight",
    "affine",
    "format_of",
    "names",
    "read",
]


@dataclass(frozen=True, slots=True)
class Quantised:
    """The quantised weights of a checkpoint."""

    method: str
    """The name for users, e.g. GPTQ."""
    tensors: Mapping[str, TensorInfo]
    """All tensors of the checkpoint; quantised weights as floats that are computed on reading."""
    weights: Mapping[str, StoredWeight]
    """Name -> quantised weight."""
    notes: tuple[str, ...] = ()

    @property
    def bits(self) -> int | None:
        """The bits of the stored integers of most elements, 4 or 8; None where no weight has integers."""
        counts = {4: 0, 8: 0}
        for weight in self.weights.values():
            if isinstance(weight, AffineWeight):
                counts[container(weight)] += math.prod(weight.shape)
        return None if not any(counts.values()) else max(counts, key=lambda bits: counts[bits])

    @property
    def all_affine(self) -> bool:
        """Whether every quantised weight has integers with scales and integer zero points."""
        return all(isinstance(weight, AffineWeight) for weight in self.weights.values())


def container(weight: AffineWeight) -> int:
    """Bits of the package's integers that can hold those of `weight`."""
    return 4 if weight.bits <= 4 else 8


def affine(info: TensorInfo) -> AffineWeight | None:
    """The stored integers of a tensor; None where it has none."""
    return info.decoder if isinstance(info.decoder, AffineWeight) else None


def names() -> tuple[str, ...]:
    """Names of all formats, sorted. Imports none of them."""
    return tuple(sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name != "base"))


def format_of(method: str) -> StoredFormat | None:
    """The format that reads a method of `quantised.METHODS`; None where there is none."""
    for name in names():
        found = importlib.import_module(f"{__name__}.{name}").FORMAT
        assert isinstance(found, StoredFormat)
        if method in found.methods:
            return found
    return None


def read(folder: Path, found: Recognised, tensors: Mapping[str, TensorInfo]) -> Quantised:
    """The tensors of a quantised checkpoint, with its weights as floats.

    Raises UnsupportedModelError for an unsupported method, CheckpointError when tensors do not match each other.
    """
    known = format_of(found.method.name)
    if known is None:
        raise refusal(folder, found.method, found.where)
    sources = Sources(folder, found.method.name, found.settings, tensors)
    made = known.read(sources)
    sources.raise_missing()
    if not made.weights:
        raise CheckpointError(
            f"{folder}: the checkpoint is quantised: {found.method.name} ({found.where}), but none of its tensors is "
            "in this format; correct config.json, or download the weights again"
        )
    with OpenFiles(folder) as files:
        for weight in made.weights:
            wrong = [contradiction(weight, claims, files) for claims in sources.claims.get(weight.name, ())]
            if wrong and wrong[0] is not None and None not in wrong:
                raise sources.wrong(wrong[0][0], f"{wrong[0][1]}; correct the settings, or quantise the model again")
    left = {name: info for name, info in tensors.items() if name not in sources.taken}
    for info in left.values():
        if len(info.shape) > 1 and re.fullmatch(INTEGER, info.dtype):
            raise CheckpointError(
                f"{folder}: tensor {info.name[:SHOWN_CHARACTERS]} is {info.dtype}, but belongs to no "
                f"weight quantised with {found.method.name}; download the weights again"
            )
    weights = {weight.name: weight for weight in made.weights}
    both = sorted(name for name in weights if name in left)
    if both:
        raise CheckpointError(
            f"{folder}: tensor {both[0][:SHOWN_CHARACTERS]} exists both as floats and quantised with "
            f"{found.method.name}; remove one of them"
        )
    all_tensors = {**left, **{name: weight.info for name, weight in weights.items()}}
    return Quantised(found.method.name, all_tensors, weights, made.notes)
