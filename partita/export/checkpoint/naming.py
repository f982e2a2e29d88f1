"""Maps checkpoint tensors to parameters by transformers' rules, tied names included; no tensor is read.

Renames tensors (`embed_out.weight` of GPT-NeoX is `lm_head.weight`) and joins several as
`convert_and_load_state_dict_in_model` of `transformers.core_model_loading` does: transformers has a `WeightConverter`
per model, e.g. to stack the experts of a mixture. Its operations run here on `Pending` tensors, which record them.

`untie` unties weights that the config ties and the checkpoint stores with different values, as transformers does after
loading (`PreTrainedModel.tie_weights`); in float32, so that the precision of the package does not decide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from partita.export.checkpoint.description import Checkpoint
from partita.export.checkpoint.weight_files import OpenFiles, first_line
from partita.export.trace.fake_model import FakeModel
from partita.export.weights import CHECKPOINT, to_torch
from partita.export.weights.origins import (
    ComputedOrigin,
    ExpandedOrigin,
    JoinedOrigin,
    Origin,
    SlicedOrigin,
    TensorInfo,
    blocks,
    map_leaves,
)


@dataclass(frozen=True, slots=True)
class Sources:
    """The location of a model's parameters and stored buffers in a checkpoint."""

    origins: Mapping[str, Origin]
    """Name in the model -> its tensor, or the computation from several."""
    failures: Mapping[str, str]
    """Name in the model -> why it cannot be made from its tensors."""
    tied_names: Mapping[str, frozenset[str]]
    """Name in the model -> every name of the same tensor."""
    unmatched_tensors: tuple[str, ...]
    """Tensors of the checkpoint without a name in the model, sorted."""

    def of(self, name: str) -> Origin | None:
        """The origin of `name`, under that or a tied name; None where there is none."""
        names = (name, *sorted(self.tied_names.get(name, ())))
        return next((self.origins[n] for n in names if n in self.origins), None)

    def second_names(self) -> frozenset[str]:
        """Tensors of the checkpoint that hold a tied tensor, under any of its names."""
        tied = (origin for name, origin in self.origins.items() if len(self.tied_names.get(name, ())) > 1)
        return frozenset(info.name for origin in tied for info in origin.tensors())


def match_names(model: torch.nn.Module, stored: Mapping[str, TensorInfo]) -> Sources:
    """Map the checkpoint tensors `stored` to names in `model`."""
    assert isinstance(model, PreTrainedModel)
    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    state = model.state_dict()
    found: dict[str, Origin] = {}
    collected: dict[str, tuple[WeightConverter, list[tuple[str, TensorInfo]]]] = {}
    unmatched: list[str] = []
    for source in sorted(stored, key=dot_natural_key):  # transformers' order: expert 10 after expert 9
        name, pattern = rename_source_key(source, renamings, converters, model.base_model_prefix, state)
        if name not in state and source in state:
            name, pattern = rename_source_key(source, [], [], model.base_model_prefix, state)
        if name not in state:
            unmatched.append(source)
        elif pattern is None:
            found.setdefault(name, stored[source])
        else:
            collected.setdefault(name, (by_pattern[pattern], []))[1].append((pattern, stored[source]))
    failed = {}
    for name, (converter, tensors) in collected.items():
        try:
            found |= convert(deepcopy(converter), name, tensors, model)
        except ValueError as error:
            failed[name] = str(error)
    return Sources(found, failed, _tied(model), tuple(sorted(unmatched)))


def _tied(model: torch.nn.Module) -> dict[str, frozenset[str]]:
    """Name -> all names of one tensor, for parameters with several names."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {name: frozenset(group) for group in names.values() if len(group) > 1 for name in group}


aten = torch.ops.aten


class Pending(torch.Tensor):
    """A tensor without data. Operations on it return another, whose origin records the operation."""

    origin: Origin

    @classmethod
    def of(cls, origin: Origin, dtype: torch.dtype) -> Pending:
        """A tensor for `origin`."""
        made: Pending = cls._make_wrapper_subclass(cls, origin.shape, dtype=dtype, device=torch.device("cpu"))
        made.origin = origin
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch calls it with the operator
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Record `func` as a region of its inputs where possible, else as a deferred operation."""
        rule = RULES.get(func)
        if rule is None:
            return _remembered(LATER.get(func, func), args, kwargs or {})
        dtype = (args[0][0] if isinstance(args[0], list | tuple) else args[0]).dtype
        result = rule(*args, **(kwargs or {}))
        return [cls.of(r, dtype) for r in result] if isinstance(result, list) else cls.of(result, dtype)


def _remembered(operator: Any, arguments: Any, keywords: dict[str, Any]) -> Any:
    """The operator's results as deferred operations; a run on the meta device gives the shapes."""
    if keywords:
        raise ValueError(f"{operator} with {', '.join(sorted(keywords))} is not supported")
    result = operator(*map_leaves(arguments, Pending, lambda p: torch.empty(p.shape, dtype=p.dtype, device="meta")))
    kept = map_leaves(arguments, Pending, lambda p: p.origin, tuple)
    if isinstance(result, torch.Tensor):
        return Pending.of(ComputedOrigin(operator, kept, None, tuple(result.shape)), result.dtype)
    if isinstance(result, list | tuple) and all(isinstance(r, torch.Tensor) for r in result):
        return [Pending.of(ComputedOrigin(operator, kept, i, tuple(r.shape)), r.dtype) for i, r in enumerate(result)]
    raise ValueError(f"{operator} does not return tensors")


def _axis(tensor: Pending, dim: int, extra: int = 0) -> int:
    return dim % (tensor.ndim + extra)


def _stack(tensors: list[Pending], dim: int = 0) -> Origin:
    axis = _axis(tensors[0], dim, 1)
    return JoinedOrigin.of(tuple(ExpandedOrigin(t.origin, axis) for t in tensors), axis)


def _split_sizes(tensor: Pending, sizes: list[int], dim: int = 0) -> list[Origin]:
    axis, starts = _axis(tensor, dim), accumulate(sizes, initial=0)
    if sum(sizes) != tensor.shape[axis]:
        raise ValueError(f"{list(tensor.shape)} cannot be split into {sizes} along axis {axis}")
    return [SlicedOrigin(tensor.origin, axis, start, stop) for start, stop in pairwise(starts)]


def _split(tensor: Pending, size: int, dim: int = 0) -> list[Origin]:
    total = tensor.shape[_axis(tensor, dim)]
    return _split_sizes(tensor, [min(size, total - start) for start in range(0, total, max(1, size))], dim)


def _transpose(tensor: Pending, dim0: int, dim1: int) -> Origin:
    order = list(range(tensor.ndim))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return tensor.origin.permuted(tuple(order))


RULES: dict[Any, Callable[..., Origin | list[Origin]]] = {
    aten.cat.default: lambda tensors, dim=0: JoinedOrigin.of(tuple(t.origin for t in tensors), _axis(tensors[0], dim)),
    aten.stack.default: _stack,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split_sizes,
    aten.unsqueeze.default: lambda tensor, dim: ExpandedOrigin(tensor.origin, _axis(tensor, dim, 1)),
    aten.transpose.int: _transpose,
    **dict.fromkeys((aten.clone.default, aten.detach.default, aten.alias.default), lambda tensor, **_: tensor.origin),
}
"""Operators whose results are regions of their inputs."""

LATER = {aten.view.default: aten.reshape.default}
"""Replacements on real tensors, whose strides may differ from those of the pending ones."""


def convert(
    converter: WeightConverter, name: str, collected: Iterable[tuple[str, TensorInfo]], model: PreTrainedModel
) -> dict[str, Origin]:
    """Apply `converter`, once, to pairs of pattern and tensor: name in the model -> origin. Raises ValueError."""
    for pattern, info in collected:
        # a dtype other than floats is refused later
        seen_as = to_torch(info.dtype) if info.dtype in CHECKPOINT else torch.float32
        pending = Pending.of(info, seen_as)
        converter.add_tensor(name, info.name, pattern, pending)  # type: ignore[arg-type]
    try:
        results = converter.convert(name, model=model, config=model.config)
    except Exception as error:  # the operations belong to transformers
        raise ValueError(first_line(error)) from error
    return {name: (made[0] if isinstance(made, list) else made).origin for name, made in results.items()}


def untie(fake: FakeModel, checkpoint: Checkpoint) -> list[str]:
    """Untie parameters whose stored values differ; returns a note for each."""
    model = fake.module
    assert isinstance(model, PreTrainedModel)
    pairs = dict(getattr(model, "all_tied_weights_keys", None) or {})
    if not pairs:
        return []
    found, notes = match_names(model, checkpoint.tensors).origins, []
    for target, source in pairs.items():
        if target not in found or source not in found or _equal(found[target], found[source], checkpoint):
            continue
        parent, _, name = target.rpartition(".")
        old = model.get_parameter(target)
        with fake.mode:
            data = torch.empty(old.shape, dtype=old.dtype)
        setattr(model.get_submodule(parent), name, torch.nn.Parameter(data, requires_grad=False))
        notes.append(
            f"{target} differs from {source} in the weight files, so they are not tied; config.json ties "
            "them (tie_word_embeddings), but transformers ignores that here"
        )
    return notes


def _equal(one: Origin, other: Origin, checkpoint: Checkpoint) -> bool:
    """Whether two weights have the same shape and float32 values."""
    if one.shape != other.shape:
        return False
    with OpenFiles() as files:
        return all(
            torch.equal(one.read(region, files).float(), other.read(region, files).float())
            for region in blocks(one.shape, 8 << 20)
        )
