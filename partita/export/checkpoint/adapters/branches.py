"""Switchable adapters: a low-rank branch parallel to a MatMul, with the matrices as graph inputs.

    x ─ product with W ─ y                       x ─ product with W ────────────┐
                                    becomes      x ─ MatMul(A) ─ MatMul(B) ─ Add ┴─ y

The inputs A [K, r] and B [r, N] have initializers of rank 0 as defaults, so that a run without an adapter adds nothing.
ONNX Runtime's adapter files hold values for them by name, as Olive writes them. A joined weight, e.g. query, key and
value, has one branch: B has the rows of each module at its outputs and zeros in the other columns.

In a graph with a batch the inputs have a leading axis: [1, K, r] for one adapter, [B, K, r] for one adapter per
sequence, padded with zeros to one rank. With fixed sizes the inputs have no default, because compiling providers may
treat it as a constant (seen with OpenVINO); a run without an adapter passes zeros.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import torch

from partita import dtypes
from partita.errors import CheckpointError, UnsupportedModelError
from partita.export.checkpoint.adapters import ALTERNATIVE, Adapter
from partita.export.checkpoint.adapters.merge import Site, sites
from partita.export.checkpoint.description import Checkpoint
from partita.export.checkpoint.weight_files import OpenFiles, few
from partita.export.passes.base import take_names
from partita.export.quantise.products import weight_of_product
from partita.export.quantise.reference import only_rearranges
from partita.export.weights import of_ir
from partita.export.weights.origins import whole_rows
from partita.export.weights.sources import FloatSource
from partita.package.contract import AdapterInput
from partita.package.folder import AdapterRecord

ADAPTED = ("float32", "float16")
"""Activation dtypes that branches support: both numpy and ONNX Runtime's adapter files have them."""
ROWS = "adapter_rows"
"""The batch axis of the inputs: 1 or the batch size of a run."""


@dataclass(frozen=True, slots=True)
class SwitchableAdapter:
    """An adapter that a run can switch on."""

    name: str
    adapter: Adapter
    sites: Mapping[str, Site]
    """Module -> location of its weight."""

    def rank(self, modules: Iterable[str]) -> int:
        """The sum of the ranks of its matrices for `modules`."""
        return sum(self.adapter.modules[module].rank for module in modules if module in self.adapter.modules)


@dataclass(frozen=True, slots=True)
class Adapters:
    """The adapters of a package."""

    merged: tuple[AdapterRecord, ...] = ()
    """Adapters merged into the weights."""
    switched: tuple[SwitchableAdapter, ...] = ()
    """Adapters in branches."""


@dataclass(frozen=True, slots=True)
class Branch:
    """A low-rank branch parallel to a MatMul."""

    down: AdapterInput
    """The input A [K, r]; r is a name where it is dynamic."""
    up: AdapterInput
    """The input B [r, N]."""
    modules: Mapping[str, torch.Tensor]
    """Module -> the output index of each row of its weight, int64."""


def match_switchable(checkpoint: Checkpoint, model: torch.nn.Module, name: str, adapter: Adapter) -> SwitchableAdapter:
    """Match an adapter with the model. Raises CheckpointError, UnsupportedModelError for more than MatMuls."""
    embeddings = [module for module, each in adapter.modules.items() if each.embedding]
    if adapter.config.use_dora or adapter.replaced_tensors or embeddings:
        others = ["magnitudes (DoRA)"] * adapter.config.use_dora + sorted([*adapter.replaced_tensors, *embeddings])
        raise UnsupportedModelError(
            f"`with_adapters` {name}={adapter.folder}: it also changes {few(others)}, which cannot be switched; "
            "merge it with `adapter`",
            option="with_adapters",
        )
    return SwitchableAdapter(name, adapter, sites(checkpoint, model, adapter))


def add_branches(
    model: ir.Model, adapters: Sequence[SwitchableAdapter], batch: int, *, fixed: bool
) -> dict[str, Branch]:
    """Add a branch to every MatMul that `adapters` change: name of A -> branch. Raises UnsupportedModelError."""
    made: dict[str, Branch] = {}
    apart = None if batch == 1 else batch if fixed else ROWS
    for node in list(model.graph):
        plain = weight_of_product(node)
        if plain is None or not only_rearranges(plain.origin):
            continue
        modules = _modules(plain, adapters)
        if modules:
            rank = max(each.rank(modules) for each in adapters) if fixed else None
            branch = _branch(node, plain, modules, rank, apart)
            made[branch.down.name] = branch
            _insert(model.graph, node, branch)
    placed = {module for branch in made.values() for module in branch.modules}
    for each in adapters:
        if unplaced := sorted(set(each.sites) - placed):
            raise UnsupportedModelError(
                f"{each.adapter.folder}: cannot be switched: no plain product of the graph reads the weights of "
                f"{few(unplaced)}; merge it with `adapter`, or {ALTERNATIVE}",
                option="with_adapters",
            )
    return made


def _modules(plain: FloatSource, adapters: Sequence[SwitchableAdapter]) -> dict[str, torch.Tensor]:
    """The adapted modules whose weights `plain` [N, K] has, row by row -> the indices of their rows in it."""
    found: dict[str, torch.Tensor] = {}
    for module, site in ((module, site) for each in adapters for module, site in each.sites.items()):
        if module not in found and site.base.name in plain.tensors:
            rows, numbers = whole_rows(plain.origin, site.base.name, transposed=site.transposed)
            if torch.equal(numbers.sort().values, torch.arange(site.base.shape[1 if site.transposed else 0])):
                found[module] = rows[numbers.argsort()]
    return found


def _branch(
    node: ir.Node, plain: FloatSource, modules: Mapping[str, torch.Tensor], fixed: int | None, apart: int | str | None
) -> Branch:
    """Build the branch of a MatMul. `fixed`: its rank; `apart`: the batch axis, if the hidden states have one."""
    hidden = node.inputs[0]
    assert hidden is not None and hidden.dtype is not None
    dtype, (rows, width) = of_ir(hidden.dtype), plain.origin.shape
    if dtype not in ADAPTED:
        raise UnsupportedModelError(
            f"`with_adapters`: the graph computes in {dtype}, but switchable adapters need "
            f"{' or '.join(ADAPTED)}; choose another `precision`, or add `activations=fp32`",
            option="with_adapters",
        )
    name = plain.name.removesuffix(".weight")
    rank = fixed or f"{name}.lora_A_rank"
    batch = [apart] if apart is not None and hidden.shape is not None and len(hidden.shape) == 3 else []

    def port(end: str, *shape: int | str) -> AdapterInput:
        return AdapterInput(name=f"{name}.lora_{end}", shape=(*batch, *shape), dtype=dtype, by_row=bool(batch))

    return Branch(port("A", width, rank), port("B", rank, rows), modules)


def _insert(graph: ir.Graph, node: ir.Node, branch: Branch) -> None:
    """Insert a branch after a MatMul."""
    product, hidden = node.outputs[0], node.inputs[0]
    assert hidden is not None
    users, given = list(product.uses()), product.is_graph_output()
    down = ir.node("MatMul", [hidden, _input(graph, branch.down)])
    up = ir.node("MatMul", [down.outputs[0], _input(graph, branch.up)])
    total = ir.node("Add", [product, up.outputs[0]])
    narrow = None if hidden.shape is None else ir.Shape([*hidden.shape[:-1], branch.down.shape[1]])
    for new, shape in ((down, narrow), (up, product.shape), (total, product.shape)):
        take_names(new, node)
        new.outputs[0].shape, new.outputs[0].type = shape, product.type
    graph.insert_after(node, [down, up, total])
    result = total.outputs[0]
    for use in users:
        use.node.replace_input_with(use.idx, result)
    if given:
        index = next(place for place, value in enumerate(graph.outputs) if value is product)
        graph.outputs[index] = result
        product.name, result.name = f"{product.name}_base", product.name


def _input(graph: ir.Graph, port: AdapterInput) -> ir.Value:
    """The graph input of `port`, created with a default of rank 0 where the rank is dynamic."""
    known = next((value for value in graph.inputs if value.name == port.name), None)
    if known is not None:
        return known
    kind = ir.TensorType(ir.DataType(dtypes.dtype_named(port.dtype).number))
    value = ir.Value(name=port.name, shape=ir.Shape(port.shape), type=kind)
    graph.inputs.append(value)
    if not all(isinstance(size, int) for size in port.shape):
        sizes = [size if isinstance(size, int) else int(size == ROWS) for size in port.shape]
        value.const_value = ir.tensor(np.zeros(sizes, np.dtype(port.dtype)), name=port.name)
        graph.initializers[port.name] = value
    return value


def parameters(each: SwitchableAdapter, branches: Iterable[Branch]) -> dict[str, npt.NDArray[Any]]:
    """The values of an adapter for the graphs' inputs, by name. Raises CheckpointError outside of the dtype."""
    found: dict[str, npt.NDArray[Any]] = {}
    with OpenFiles() as files:
        for branch in branches:
            rank = each.rank(branch.modules)
            if not rank:
                continue
            given = branch.down, branch.up
            down, up = (
                torch.zeros([size if isinstance(size, int) else rank for size in port.shape[-2:]]) for port in given
            )
            start = 0
            for module, places in branch.modules.items():
                matrices = each.adapter.modules.get(module)
                if matrices is None:
                    continue
                stop = start + matrices.rank
                down[:, start:stop] = matrices.down.read_all(files).float().T
                up[start:stop, places] = matrices.up.read_all(files).float().T * each.adapter.config.scale(module)
                start = stop
            for port, value in zip(given, (down, up), strict=True):
                value = value[None] if port.by_row else value
                found[port.name] = value.numpy().astype(np.dtype(port.dtype))
                if not np.isfinite(found[port.name]).all():
                    raise CheckpointError(
                        f"{each.adapter.folder}: a value of {port.name} does not fit {port.dtype}; use `precision=fp32`"
                    )
    return found


def add_to(model: Any, each: SwitchableAdapter) -> None:
    """Add an adapter to the float32 weights of a transformers model, in place."""
    with torch.no_grad(), OpenFiles() as files:
        for module, site in each.sites.items():
            matrices = each.adapter.modules[module]
            owner = model.get_submodule(module)
            shared = [name for name, p in model.named_parameters(remove_duplicate=False) if p is owner.weight]
            if len(shared) > 1:
                owner.weight = torch.nn.Parameter(owner.weight.detach().clone(), requires_grad=False)
            down, up = (part.read_all(files).float() for part in (matrices.down, matrices.up))
            added = up @ down * each.adapter.config.scale(module)
            owner.weight.add_(added.T if site.transposed else added)


def weights_text(placed: object, prompts: object, adapter: SwitchableAdapter | None) -> str:
    """The end of a sentence that names the weights of the source model."""
    parts = ["the package's rounded weights"] if placed else []
    parts += [] if adapter is None else [f"the adapter {adapter.name}"]
    ending = f", with {' and '.join(parts)}" if parts else ""
    return ending + (", which differ after the prompt" if prompts else "")
