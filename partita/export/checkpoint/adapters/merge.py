"""An adapter merged into a checkpoint: tensors computed from the stored weights and the adapter when they are read."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from partita.errors import CheckpointError, UnsupportedModelError
from partita.export.checkpoint.adapters import ALTERNATIVE, Adapter, LowRank, Matrices
from partita.export.checkpoint.description import Checkpoint
from partita.export.checkpoint.naming import Sources, match_names
from partita.export.weights.origins import Origin, TensorInfo

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Site:
    """The location of a parameter in the checkpoint."""

    base: TensorInfo
    """The tensor in the checkpoint."""
    name: str
    """The name of the merged tensor: that of `base`, or of the parameter where `base` is tied to it."""
    transposed: bool = False
    """The module reads it as [K, N]."""
    embedding: bool = False


@dataclass(slots=True)
class _Merging:
    """The state of one merge."""

    checkpoint: Checkpoint
    model: PreTrainedModel
    adapter: Adapter
    sources: Sources = field(init=False)
    names: frozenset[str] = field(init=False)
    """Parameters and stored buffers of the model."""
    merged: dict[str, TensorInfo] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sources = match_names(self.model, self.checkpoint.tensors)
        self.names = frozenset(self.model.state_dict())

    def of_another_model(self, difference: str) -> CheckpointError:
        """The error for an adapter that does not fit the model."""
        base = self.adapter.config.base_model_name_or_path
        ending = f"{difference}; it was trained on {base[:120]}" if base else difference
        return CheckpointError(f"{self.adapter.folder}: this adapter belongs to another model: {ending}")

    def check_shape(self, description: str, given: Shape, own: Shape) -> None:
        """Raise CheckpointError where a parameter of the adapter has shape `given`, and that of the model `own`."""
        if given != own:
            raise self.of_another_model(
                f"{description}, but the model's is {list(own)}; if only the vocabulary differs, resize the checkpoint "
                "first (resize_token_embeddings and save_pretrained of transformers)"
            )


def merge_adapter(checkpoint: Checkpoint, model: torch.nn.Module, adapter: Adapter) -> tuple[Checkpoint, list[str]]:
    """The checkpoint with `adapter` merged, and notes. Raises CheckpointError for an adapter of another model."""
    assert isinstance(model, PreTrainedModel)
    work = _Merging(checkpoint, model, adapter)
    for name, value in adapter.replaced_tensors.items():
        site = _site(work, name)
        work.check_shape(f"{name} is {list(value.shape)}", value.shape, site.base.shape)
        _place(work, name, site, value)
    for name, each in adapter.modules.items():  # after `replaced_tensors`, which may contain the same weights
        site = _site_of_module(work, name, each)
        transposed, scale = site.transposed or site.embedding, adapter.config.scale(name)
        merged = LowRank(site.base, each.down, each.up, scale, transposed, each.magnitude)
        _place(work, f"{name}.weight", site, merged)
    tensors = {**checkpoint.tensors, **work.merged}
    notes = [*base_note(checkpoint, adapter, "merged into"), *work.notes]
    return replace(checkpoint, tensors=tensors, without_adapter=checkpoint.tensors), notes


def sites(checkpoint: Checkpoint, model: torch.nn.Module, adapter: Adapter) -> dict[str, Site]:
    """Module -> location of its weight, for every module of an adapter. Raises as `merge_adapter` does."""
    assert isinstance(model, PreTrainedModel)
    work = _Merging(checkpoint, model, adapter)
    return {name: _site_of_module(work, name, matrices) for name, matrices in adapter.modules.items()}


def _site_of_module(work: _Merging, name: str, matrices: Matrices) -> Site:
    """The location of a weight [N, K] that A [r, K], B [N, r] and m [N] fit. Raises CheckpointError."""
    site = _site(work, f"{name}.weight")
    if site.embedding != matrices.embedding:
        kind = "an embedding" if site.embedding else "not an embedding"
        raise work.of_another_model(f"{name} is {kind} in the model, but not in the adapter")
    shape = tuple(reversed(site.base.shape)) if site.transposed or site.embedding else site.base.shape
    shapes = f"{name} has lora_A {list(matrices.down.shape)} and lora_B {list(matrices.up.shape)}"
    work.check_shape(shapes, (matrices.up.shape[0], matrices.down.shape[1]), shape)
    if matrices.magnitude is not None:
        work.check_shape(shapes, (math.prod(matrices.magnitude.shape),), shape[:1])
    return site


def _site(work: _Merging, name: str) -> Site:
    """The location of a parameter by its name in the adapter. Raises CheckpointError, UnsupportedModelError."""
    if name not in work.names and name not in work.checkpoint.tensors:
        # an earlier transformers called it so
        name = next(iter(match_names(work.model, {name: TensorInfo(name, Path(), (1, 1), "float32")}).origins), name)
    origin = work.sources.of(name)
    if isinstance(origin, TensorInfo):
        module = work.model.get_submodule(name.rpartition(".")[0])
        place = origin.name if name in work.sources.origins else name
        return Site(
            work.merged.get(place, origin),
            place,
            transposed=isinstance(module, Conv1D) and len(origin.shape) == 2,
            embedding=isinstance(module, torch.nn.Embedding),
        )
    if origin is not None:
        raise UnsupportedModelError(
            f"{work.adapter.folder}: the adapter changes {name}, which transformers computes from several tensors of "
            f"the checkpoint; {ALTERNATIVE}"
        )
    if name in work.checkpoint.tensors and name not in work.sources.unmatched_tensors:
        return Site(work.merged.get(name, work.checkpoint.tensors[name]), name)
    raise work.of_another_model(f"{name} is not in the model")


def _place(work: _Merging, name: str, site: Site, values: Origin) -> None:
    """Replace a parameter with `values`. Tied parameters keep the stored weight."""
    base = site.base
    work.merged[site.name] = TensorInfo(site.name, base.file, base.shape, "float32", base.size_bytes, values)
    partners = work.sources.tied_names.get(name, frozenset()) - {name}
    for partner in partners:
        if partner not in work.sources.origins and name in work.sources.origins:
            stored = work.checkpoint.tensors[site.name]
            same = TensorInfo(partner, stored.file, stored.shape, stored.dtype, 0, stored)
            work.merged.setdefault(partner, same)
    if not partners <= {*(f"{module}.weight" for module in work.adapter.modules), *work.adapter.replaced_tensors}:
        work.notes.append(
            f"the adapter changes {name}, but not {', '.join(sorted(partners))}, which the model ties to it: "
            "the package stores them as two weights, as peft does before merging"
        )


def base_note(checkpoint: Checkpoint, adapter: Adapter, done: str) -> list[str]:
    """A note where the adapter names another base model. `done`: a participle for it, e.g. "merged into"."""
    base = adapter.config.base_model_name_or_path
    names = [text.rstrip("/").rpartition("/")[2].casefold() for text in (base, checkpoint.source_name)]
    if not base or names[0] == names[1]:
        return []
    return [
        f"{adapter.folder.name}: the adapter's base model is {base[:120]}, but it is {done} {checkpoint.source_name}"
    ]
