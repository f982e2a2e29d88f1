"""Which checkpoint tensor is which parameter: by transformers' own renaming rules, tied names included.

transformers renames tensors while it loads (`embed_out.weight` of a GPT-NeoX checkpoint becomes `lm_head.weight`) and
builds some parameters from several tensors. The first is followed here; the second is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key


@dataclass(frozen=True, slots=True)
class Sources:
    """Where the parameters and stored buffers of a model lie in a checkpoint."""

    found: Mapping[str, str]
    """Name in the model -> name in the checkpoint."""
    converted: frozenset[str]
    """Names in the model of what transformers computes from several tensors, or stores in another layout."""
    tied: Mapping[str, frozenset[str]]
    """Name in the model -> every name of the same tensor."""

    def of(self, name: str) -> str | None:
        """The checkpoint tensor that holds `name`, under that or a tied name; None when there is none."""
        names = (name, *sorted(self.tied.get(name, ())))
        return next((self.found[n] for n in names if n in self.found), None)

    def is_known(self, stored: str) -> bool:
        """Whether a checkpoint tensor holds something of the model, be it another name of a tied tensor."""
        return any(source == stored and len(self.tied.get(name, ())) > 1 for name, source in self.found.items())


def match_names(model: torch.nn.Module, stored: Iterable[str]) -> Sources:
    """Match the checkpoint names `stored` with the names in `model`."""
    assert isinstance(model, PreTrainedModel)
    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    state = model.state_dict()
    found, converted = {}, set()
    for source in stored:
        name, pattern = rename_source_key(source, renamings, converters, model.base_model_prefix, state)
        if pattern is not None:
            converted.add(name)
        else:
            found[name] = source
    return Sources(found, frozenset(converted), _tied(model))


def _tied(model: torch.nn.Module) -> dict[str, frozenset[str]]:
    """Name -> all names of one tensor, for parameters that have more than one."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {name: frozenset(group) for group in names.values() if len(group) > 1 for name in group}
