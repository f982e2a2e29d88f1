"""`--keep MODULE=fp16` or `bf16` in a quantised package: weights stored in 16 bits and cast on loading.

A package that computes in 16 bits needs no change (see `narrow_weights.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import onnx_ir as ir
import torch

from partita.export.checkpoint.naming import Sources
from partita.export.passes.base import Pass, PassContext, drop_unused_initializers, over
from partita.export.passes.manager import run as run_passes
from partita.export.quantise.plan import Plan
from partita.export.quantise.rounding.reference import parameter_names
from partita.export.quantise.write.rewrite import Outcome, modules_of
from partita.export.target import TakesEach
from partita.export.weights.element_types import to_torch
from partita.export.weights.narrow_weights import Narrow, Narrowed, behind_cast, is_matrix, looks_up
from partita.export.weights.sources import Plain, StoredPart, stored
from partita.export.weights.spilled import let_go


def keep_narrow(
    model: ir.Model, context: PassContext, plan: Plan, outcome: Outcome, takes: TakesEach | None
) -> dict[str, int]:
    """Store the weights that the plan names in 16 bits, in place. Returns the pass name with their number.

    Raises PassError.
    """
    kinds = {keep.stored for keep in plan.keep if keep.stored is not None}
    if not kinds:
        return {}
    ways = {kind: Narrow(kind, looks_up(takes, kind)) for kind in kinds}

    def run(model: ir.Model, context: PassContext) -> int:
        found = list(_matrices_to_narrow(model.graph, plan))  # all of them before the first change
        for value, part, nodes, narrowed in found:
            outcome.narrowed[part.source.key] = narrowed
            with over(nodes[0]):
                behind_cast(model.graph, value, part, ways[narrowed.dtype])
        drop_unused_initializers(model.graph)
        return len(found)

    return run_passes(model, (Pass("narrow_weights", run),), context)


def _matrices_to_narrow(graph: ir.Graph, plan: Plan) -> Iterator[tuple[ir.Value, StoredPart, list[ir.Node], Narrowed]]:
    """Matrices to store in 16 bits, with their consumers."""
    for value in graph.initializers.values():
        part, nodes = stored(value), [use.node for use in value.uses()]
        if part is None or not nodes or not is_matrix(part):
            continue
        assert isinstance(part.source, Plain)
        modules = tuple(dict.fromkeys(name for node in nodes for name in modules_of(node, part.source)))
        kind = plan.kept_type(modules)
        if kind is not None:
            yield value, part, nodes, Narrowed(part.source.tensors, modules, kind)


def round_kept(model: Any, narrowed: Mapping[object, Narrowed], sources: Sources) -> None:
    """Give `model`, a transformers model, these weights rounded to 16 bits, in place."""
    names = parameter_names(model, sources)
    readers = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    for each in narrowed.values():
        found = [name for tensor in each.tensors for name in names.single.get(tensor, ())]
        found += [name for name, _ in names.stacked_of(each.tensors)]
        own = [name for name in found if name.rpartition(".")[0] in each.modules]
        given = [model.get_parameter(name) for name in own or found]
        for name, wide in zip(own or found, given, strict=True):
            rounded = wide.detach().to(to_torch(each.dtype)).to(wide.dtype)
            if sum(other is wide for other in given) == readers[id(wide)]:  # in place: it may be memory-mapped
                wide.data.copy_(rounded)
                continue
            readers[id(wide)] -= 1
            module, _, last = name.rpartition(".")
            setattr(model.get_submodule(module), last, torch.nn.Parameter(rounded, requires_grad=False))
        let_go(model)
