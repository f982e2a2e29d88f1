"""Maps checkpoint tensors to parameters by transformers' rules, tied names included; no tensor is read.

Renames tensors (`embed_out.weight` of GPT-NeoX is `lm_head.weight`) and joins several (`conversions`) as
`convert_and_load_state_dict_in_model` of `transformers.core_model_loading` does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from partita.export.checkpoint.conversions import convert
from partita.export.checkpoint.weight_files import TensorInfo
from partita.export.graph.element_types import CHECKPOINT
from partita.export.weights.origins import Origin, Stored


@dataclass(frozen=True, slots=True)
class Sources:
    """The location of a model's parameters and stored buffers in a checkpoint."""

    found: Mapping[str, Origin]
    """Name in the model -> its tensor, or the computation from several."""
    failed: Mapping[str, str]
    """Name in the model -> why it cannot be made from its tensors."""
    tied: Mapping[str, frozenset[str]]
    """Name in the model -> every name of the same tensor."""
    unmatched: tuple[str, ...]
    """Tensors of the checkpoint without a name in the model, sorted."""
    ignored: frozenset[str]
    """Unmatched tensors that transformers ignores on purpose; not in `unmatched`."""

    def of(self, name: str) -> Origin | None:
        """The origin of `name`, under that or a tied name; None where there is none."""
        names = (name, *sorted(self.tied.get(name, ())))
        return next((self.found[n] for n in names if n in self.found), None)

    def second_names(self) -> frozenset[str]:
        """Tensors of the checkpoint that hold a tied tensor, under any of its names."""
        tied = (origin for name, origin in self.found.items() if len(self.tied.get(name, ())) > 1)
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
    ignored: list[str] = []
    ignores = _ignored_names(model)
    for source in sorted(stored, key=dot_natural_key):  # transformers' order: expert 10 after expert 9
        name, pattern = rename_source_key(source, renamings, converters, model.base_model_prefix, state)
        if name not in state and source in state:
            name, pattern = rename_source_key(source, [], [], model.base_model_prefix, state)
        if name not in state:
            (ignored if _is_buffer(stored[source]) and ignores.search(name) else unmatched).append(source)
        elif pattern is None:
            found.setdefault(name, Stored(stored[source]))
        else:
            collected.setdefault(name, (by_pattern[pattern], []))[1].append((pattern, stored[source]))
    failed = {}
    for name, (converter, tensors) in collected.items():
        try:
            found |= convert(deepcopy(converter), name, tensors, model)
        except ValueError as error:
            failed[name] = str(error)
    return Sources(found, failed, _tied(model), tuple(sorted(unmatched)), frozenset(ignored))


def _ignored_names(model: PreTrainedModel) -> re.Pattern[str]:
    """Names that transformers ignores when it loads this model (`_keys_to_ignore_on_load_unexpected`)."""
    patterns = sorted(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
    return re.compile("|".join((r"rotary_emb\.inv_freq", r"(^|\.)position_ids$", *(f"({each})" for each in patterns))))


def _is_buffer(info: TensorInfo) -> bool:
    """Whether a tensor looks like a buffer of an older transformers (mask, table) and not like a weight."""
    return len(info.shape) < 2 or info.dtype not in CHECKPOINT


def _tied(model: torch.nn.Module) -> dict[str, frozenset[str]]:
    """Name -> all names of one tensor, for parameters with several names."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {name: frozenset(group) for group in names.values() if len(group) > 1 for name in group}
