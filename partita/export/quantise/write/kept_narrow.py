"""Weights of modules that `--keep MODULE=fp16` or `bf16` is said of, in a package of packed weights.

They lie in 16 bits in the file and are cast as the graph is opened, as in a package of that precision
(`narrow_weights.py`). Where the package computes in 16 bits itself there is nothing to do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import onnx_ir as ir
import torch

from partita.export.checkpoint.naming import Sources
from partita.export.graph.element_types import to_torch
from partita.export.passes.base import Pass, PassContext, over
from partita.export.passes.manager import run as run_passes
from partita.export.passes.rewriting import drop_unused_initializers
from partita.export.quantise.plan import Plan
from partita.export.quantise.rounding.reference import parameter_names
from partita.export.quantise.write.rewrite import Outcome, modules_of
from partita.export.target import TakesEach
from partita.export.weights.narrow_weights import Narrow, Narrowed, behind_cast, is_matrix, looks_up
from partita.export.weights.sources import Plain, StoredPart, stored
from partita.export.weights.spilled import let_go


def keep_narrow(
    model: ir.Model, context: PassContext, plan: Plan, outcome: Outcome, takes: TakesEach | None
) -> dict[str, int]:
    """Keep what the plan says so of in 16 bits, in place; how many weights, by the name of the pass.

    Raises PassError.
    """
    kinds = {keep.stored for keep in plan.keep if keep.stored is not None}
    if not kinds:
        return {}
    ways = {kind: Narrow(kind, looks_up(takes, kind)) for kind in kinds}

    def run(model: ir.Model, context: PassContext) -> int:
        found = list(_said(model.graph, plan))  # all of them first: what one is read with has its name by what it is
        for value, part, nodes, narrowed in found:
            outcome.narrowed[part.source.key] = narrowed
            with over(nodes[0]):
                behind_cast(model.graph, value, part, ways[narrowed.dtype])
        drop_unused_initializers(model.graph)
        return len(found)

    return run_passes(model, (Pass("narrow_weights", run),), context)


def _said(graph: ir.Graph, plan: Plan) -> Iterator[tuple[ir.Value, StoredPart, list[ir.Node], Narrowed]]:
    """Matrices that are to be kept in 16 bits, each with what reads it."""
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
    """Give `model`, of transformers, those weights as 16 bits have them, in place."""
    names = parameter_names(model, sources)
    readers = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    for each in narrowed.values():
        found = [name for tensor in each.tensors for name in names.single.get(tensor, ())]
        found += [name for name, _ in names.stacked_of(each.tensors)]
        own = [name for name in found if name.rpartition(".")[0] in each.modules]
        given = [model.get_parameter(name) for name in own or found]
        for name, wide in zip(own or found, given, strict=True):
            rounded = wide.detach().to(to_torch(each.dtype)).to(wide.dtype)
            if sum(other is wide for other in given) == readers[id(wide)]:  # where it lies: it may be in a file
                wide.data.copy_(rounded)
                continue
            readers[id(wide)] -= 1
            module, _, last = name.rpartition(".")
            setattr(model.get_submodule(module), last, torch.nn.Parameter(rounded, requires_grad=False))
        let_go(model)
