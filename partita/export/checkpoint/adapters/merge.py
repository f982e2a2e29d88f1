"""An adapter merged into a checkpoint: tensors computed from the stored weights and the adapter when they are read."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from partita.errors import CheckpointError, UnsupportedModelError
from partita.export.checkpoint.adapters import ALTERNATIVE, Adapter, LowRank, Matrices
from partita.export.checkpoint.description import Checkpoint
from partita.export.checkpoint.naming import match_names
from partita.export.weights.origins import Origin, TensorInfo


@dataclass(frozen=True, slots=True)
class Site:
    """The location of a parameter in the checkpoint."""

    base: TensorInfo
    """The tensor in the checkpoint."""
    name: str
    """The name of the merged tensor: that of `base`, or of the parameter where `base` is tied to it."""
    transposed: bool = False
    """Stored as [K, N]: an embedding [V, H], or a Conv1D of GPT-2."""
    embedding: bool = False


class _Matching:
    """An adapter matched with the parameters of a model. Raises CheckpointError for an adapter of another model."""

    def __init__(self, checkpoint: Checkpoint, model: torch.nn.Module, adapter: Adapter) -> None:
        assert isinstance(model, PreTrainedModel)
        self.checkpoint, self.model, self.adapter = checkpoint, model, adapter
        self.sources = match_names(model, checkpoint.tensors)
        self.names = frozenset(model.state_dict())
        self.merged: dict[str, TensorInfo] = {}
        self.notes: list[str] = []

    def mismatch(self, difference: str) -> CheckpointError:
        """The error for an adapter that does not fit the model."""
        base = self.adapter.config.base_model_name_or_path
        ending = f"{difference}; it was trained on {base[:120]}" if base else difference
        return CheckpointError(f"{self.adapter.folder}: this adapter belongs to another model: {ending}")

    def check_shape(self, description: str, given: tuple[int, ...], own: tuple[int, ...]) -> None:
        """Check the shape of a parameter of the adapter against that of the model."""
        if given != own:
            raise self.mismatch(
                f"{description}, but the model's is {list(own)}; if only the vocabulary differs, resize the checkpoint "
                "first (resize_token_embeddings and save_pretrained of transformers)"
            )

    def site(self, name: str) -> Site:
        """The location of a parameter by its name in the adapter. Raises UnsupportedModelError for a computed one."""
        if name not in self.names and name not in self.checkpoint.tensors:
            # an earlier transformers called it so
            name = next(
                iter(match_names(self.model, {name: TensorInfo(name, Path(), (1, 1), "float32")}).origins), name
            )
        origin = self.sources.of(name)
        if isinstance(origin, TensorInfo):
            module = self.model.get_submodule(name.rpartition(".")[0])
            place = origin.name if name in self.sources.origins else name
            embedding = isinstance(module, torch.nn.Embedding)
            transposed = embedding or (isinstance(module, Conv1D) and len(origin.shape) == 2)
            return Site(self.merged.get(place, origin), place, transposed, embedding)
        if origin is not None:
            raise UnsupportedModelError(
                f"{self.adapter.folder}: the adapter changes {name}, which transformers computes from several tensors "
                f"of the checkpoint; {ALTERNATIVE}"
            )
        if name in self.checkpoint.tensors and name not in self.sources.unmatched_tensors:
            return Site(self.merged.get(name, self.checkpoint.tensors[name]), name)
        raise self.mismatch(f"{name} is not in the model")

    def site_of_module(self, name: str, matrices: Matrices) -> Site:
        """The location of a weight [N, K] that A [r, K], B [N, r] and m [N] fit."""
        site = self.site(f"{name}.weight")
        if site.embedding != matrices.embedding:
            kind = "an embedding" if site.embedding else "not an embedding"
            raise self.mismatch(f"{name} is {kind} in the model, but not in the adapter")
        shape = tuple(reversed(site.base.shape)) if site.transposed else site.base.shape
        shapes = f"{name} has lora_A {list(matrices.down.shape)} and lora_B {list(matrices.up.shape)}"
        self.check_shape(shapes, (matrices.up.shape[0], matrices.down.shape[1]), shape)
        if matrices.magnitude is not None:
            self.check_shape(shapes, (math.prod(matrices.magnitude.shape),), shape[:1])
        return site

    def merge(self, name: str, site: Site, values: Origin) -> None:
        """Replace a parameter with `values`. Tied parameters keep the stored weight."""
        base = site.base
        self.merged[site.name] = TensorInfo(site.name, base.file, base.shape, "float32", base.size_bytes, values)
        partners = self.sources.tied_names.get(name, frozenset()) - {name}
        for partner in partners:
            if partner not in self.sources.origins and name in self.sources.origins:
                stored = self.checkpoint.tensors[site.name]
                same = TensorInfo(partner, stored.file, stored.shape, stored.dtype, 0, stored)
                self.merged.setdefault(partner, same)
        if not partners <= {*(f"{module}.weight" for module in self.adapter.modules), *self.adapter.replaced_tensors}:
            self.notes.append(
                f"the adapter changes {name}, but not {', '.join(sorted(partners))}, which the model ties to it: "
                "the package stores them as two weights, as peft does before merging"
            )


def merge_adapter(checkpoint: Checkpoint, model: torch.nn.Module, adapter: Adapter) -> tuple[Checkpoint, list[str]]:
    """The checkpoint with `adapter` merged, and notes. Raises CheckpointError for an adapter of another model."""
    matching = _Matching(checkpoint, model, adapter)
    for name, value in adapter.replaced_tensors.items():
        site = matching.site(name)
        matching.check_shape(f"{name} is {list(value.shape)}", value.shape, site.base.shape)
        matching.merge(name, site, value)
    for name, each in adapter.modules.items():  # after `replaced_tensors`, which may contain the same weights
        site, scale = matching.site_of_module(name, each), adapter.config.scale(name)
        merged = LowRank(site.base, each.down, each.up, scale, site.transposed, each.magnitude)
        matching.merge(f"{name}.weight", site, merged)
    tensors = {**checkpoint.tensors, **matching.merged}
    notes = [*base_note(checkpoint, adapter, "merged into"), *matching.notes]
    return replace(checkpoint, tensors=tensors, without_adapter=checkpoint.tensors), notes


def sites(checkpoint: Checkpoint, model: torch.nn.Module, adapter: Adapter) -> dict[str, Site]:
    """Module -> location of its weight, for every module of an adapter. Raises as `merge_adapter` does."""
    matching = _Matching(checkpoint, model, adapter)
    return {name: matching.site_of_module(name, matrices) for name, matrices in adapter.modules.items()}


def base_note(checkpoint: Checkpoint, adapter: Adapter, done: str) -> list[str]:
    """A note where the adapter names another base model. `done`: a participle for it, e.g. "merged into"."""
    base = adapter.config.base_model_name_or_path
    names = [text.rstrip("/").rpartition("/")[2].casefold() for text in (base, checkpoint.source_name)]
    if not base or names[0] == names[1]:
        return []
    return [
        f"{adapter.folder.name}: the adapter's base model is {base[:120]}, but it is {done} {checkpoint.source_name}"
    ]
