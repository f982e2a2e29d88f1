"""The graph of a model, prepared for cutting: its nodes, its constants, and types as far as they are known."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from partita import dtypes
from partita.observations.names import INLINED
from partita.runtime.lab.schema import plain_domain
from partita.runtime.lab.values import find_constants, known_values, without_defaults
from partita.runtime.place.model_file import all_graphs, all_nodes, bodies, defines
from partita.runtime.place.onnx_model import OnnxModel
from partita.runtime.place.tensor_types import is_fixed, sizes_of, tensor_type, tensor_types

if TYPE_CHECKING:
    import onnx

CALLED = re.compile(r"(?P<name>.+)__\d+", re.DOTALL)
"""How the onnx package calls the node of a function that it puts in the place of a call."""
TOKEN = re.compile(r"_token_\d+")
"""What ONNX Runtime puts into the names of the nodes of further calls of a function, and at the end of other names."""


class CannotProbeError(Exception):
    """No model can be made of this node; the message says why."""


@dataclass(frozen=True, slots=True)
class Graph:
    """A model's main graph, ready to be cut into parts."""

    proto: onnx.ModelProto
    folder: Path
    """Where weights outside the file lie."""
    nodes: Mapping[str, onnx.NodeProto]
    """Those in bodies of control flow after those of the main graph."""
    constants: Mapping[str, onnx.TensorProto]
    types: Mapping[str, onnx.TypeProto]
    """As the file has them."""
    fixed: Mapping[str, onnx.TypeProto]
    """With the sizes of the run."""
    folded: Mapping[str, onnx.TensorProto] = field(default_factory=dict)
    """Tensors that are constants once the sizes are fixed."""
    given: Mapping[str, onnx.TensorProto] = field(default_factory=dict)
    """Defaults of inputs: what they are in a run that gives no others."""
    outputs: frozenset[str] = frozenset()
    """Outputs of the graph and of the bodies in it."""
    declared: Mapping[str, onnx.TypeProto] = field(default_factory=dict)
    """Types that the file itself gives, where every size is a number."""

    inside: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Nodes of functions: own names, one for each call, by ONNX Runtime's name for them without what tells calls apart.
    """
    called: Mapping[str, str] = field(default_factory=dict)
    """Which node is meant, by ONNX Runtime's name for one of a function, where a run has shown what that one makes."""

    def find(self, name: str) -> onnx.NodeProto | None:
        """The node of this name, which may be that of a function's node as ONNX Runtime has it in the call's place."""
        own = name if name in self.nodes else self.called.get(name) or self._called(name, ())
        return self.nodes.get(own)

    def _called(self, name: str, made: Sequence[str]) -> str:
        """The own name of what ONNX Runtime has in the place of a call; empty when it is none.

        `made`: types of its outputs in the run, which tell one call of a function from another.
        """
        if not name.startswith(INLINED):
            return ""
        plain = TOKEN.sub("", name)
        if plain not in self.inside:  # renamed afterwards, with something at the end
            plain = max((called for called in self.inside if plain.startswith(f"{called}_")), key=len, default="")
        same = self.inside.get(plain, ())
        return next((own for own in same if self.fits(self.nodes[own], made)), next(iter(same), ""))

    def fits(self, node: onnx.NodeProto, made: Sequence[str]) -> bool:
        """Whether a node makes what the one that ran made, as far as both are known."""
        outputs = [name for name in node.output if name]
        if made and len(outputs) != len(made):
            return False
        return all(_same_type(self.fixed.get(name), read_type(text)) for name, text in zip(outputs, made, strict=False))

    def with_seen(self, outputs: Mapping[str, Sequence[str]]) -> Graph:
        """The graph with types of outputs that only a run has shown, by node; their sizes are sizes of the run."""
        called = {name: own for name, texts in outputs.items() if (own := self._called(name, texts))}
        seen = dict(_seen_types(self, {called.get(name, name): texts for name, texts in outputs.items()}))
        sizes = {name: kind for name, kind in seen.items() if not is_fixed(self.fixed.get(name))}
        return replace(self, types={**seen, **self.types}, fixed={**self.fixed, **sizes}, called=called)


def cut_graph(model: OnnxModel, sizes: Mapping[str, tuple[int, ...]]) -> Graph:
    """Prepare a model for cutting. `sizes`: shapes of its inputs in the run."""
    return cut_proto(model.proto, model.path.parent, sizes)


def cut_proto(proto: onnx.ModelProto, folder: Path, sizes: Mapping[str, tuple[int, ...]]) -> Graph:
    """The same for a model without a file. `folder`: where weights outside the model lie."""
    proto, defaults = without_defaults(with_unique_names(_inlined(proto)))
    fixed = tensor_types(proto, sizes)
    ports = (*proto.graph.value_info, *proto.graph.output)
    constants = {**known_values(proto, {}), **find_constants(proto)}  # ONNX Runtime folds the former, too
    return Graph(
        proto=proto,
        folder=folder,
        nodes={node.name: node for node in all_nodes(proto.graph)},
        constants=constants,
        types=tensor_types(proto),
        fixed=fixed,
        folded=known_values(proto, fixed),
        given=defaults,
        declared={port.name: port.type for port in ports if is_fixed(port.type)},
        outputs=frozenset(port.name for graph in all_graphs(proto.graph) for port in graph.output),
        inside=_inside(proto),
    )


def _inside(proto: onnx.ModelProto) -> dict[str, tuple[str, ...]]:
    """Own names of the nodes of functions that stand in the place of calls, by what ONNX Runtime calls them."""
    found: dict[str, tuple[str, ...]] = {}
    for node in all_nodes(proto.graph):
        match = CALLED.fullmatch(node.name)
        if match is not None and node.name.startswith(INLINED):
            plain = TOKEN.sub("", match["name"])
            found[plain] = (*found.get(plain, ()), node.name)
    return found


def _seen_types(graph: Graph, outputs: Mapping[str, Sequence[str]]) -> Iterator[tuple[str, onnx.TypeProto]]:
    """Types of tensors from what their nodes were seen to make, written as float32[1,12]."""
    for name, texts in outputs.items():
        node = graph.nodes.get(name)
        made = [output for output in node.output if output] if node is not None else []
        if len(made) == len(texts):
            for output, text in zip(made, texts, strict=True):
                kind = read_type(text)
                if kind is not None:
                    yield output, kind


def read_type(text: str) -> onnx.TypeProto | None:
    """The type written as float32[1,12]; None for what cannot be read."""
    name, _, rest = text.partition("[")
    element = dtypes.find(name)
    sizes = [part for part in rest.rstrip("]").split(",") if part]
    if element is None or not all(part.isdecimal() for part in sizes):
        return None
    return tensor_type(element.number, [int(part) for part in sizes])


def _same_type(kind: onnx.TypeProto | None, seen: onnx.TypeProto | None) -> bool:
    """Whether two types are one; what is not known does not differ."""
    if kind is None or seen is None:
        return True
    return kind.tensor_type.elem_type == seen.tensor_type.elem_type and (sizes_of(kind) in (None, sizes_of(seen)))


def _inlined(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The model with the nodes of its functions in place of the calls, as ONNX Runtime has them.

    It reads a function's nodes in the model's own versions of the operator sets (seen with 1.31.1: Selu of a function
    that imports opset 21, in a model of 22, is Selu-22). And it names them after their function: nodes of two functions
    may have one name.
    """
    import onnx
    import onnx.inliner

    if not proto.functions:
        return proto
    versions = {plain_domain(entry.domain): entry.version for entry in proto.opset_import}
    restamped = deepcopy(proto)
    for function in restamped.functions:
        for entry in function.opset_import:
            entry.version = versions.get(plain_domain(entry.domain), entry.version)
        for node in all_nodes(function):
            node.name = f"{INLINED}{function.name}_{node.name}"
    proto = restamped
    try:
        made: onnx.ModelProto = onnx.inliner.inline_local_functions(proto)
    except Exception:  # noqa: BLE001 - native code; with the calls left in, nodes of functions cannot be tried, others can
        return proto
    return made


def called(proto: onnx.ModelProto, nodes: Sequence[onnx.NodeProto]) -> tuple[onnx.FunctionProto, ...]:
    """Functions of the file, all of them, when one of the nodes calls one."""
    names = {(function.domain, function.name) for function in proto.functions}
    inner = (entry for node in nodes for attribute in node.attribute for entry in all_nodes(attribute.g))
    calls = any((node.domain, node.op_type) in names for node in (*nodes, *inner))
    return tuple(proto.functions) if calls else ()


# --- names of tensors ----------------------------------------------------------------------------------------------


def rename(node: onnx.NodeProto, names: Mapping[str, str], numbers: Iterator[int] | None = None) -> None:
    """Rename the tensors that a node reads, also in its subgraphs, except for those that a subgraph defines.

    `numbers`: each subgraph takes one, and the names that it defines get it as a suffix.
    """
    node.input[:] = [names.get(name, name) for name in node.input]
    for body in bodies(node):
        suffix = "" if numbers is None else f"@{next(numbers)}"
        visible = {**names, **{name: f"{name}{suffix}" for name in defines(body)}}
        tensors = (*body.initializer, *(sparse.values for sparse in body.sparse_initializer))
        for entry in (*body.input, *body.output, *body.value_info, *tensors):
            entry.name = visible.get(entry.name, entry.name)
        for inner in body.node:
            rename(inner, visible, numbers)
            inner.output[:] = [visible.get(name, name) for name in inner.output]


def with_unique_names(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The model with a distinct name for each tensor of a subgraph; the model itself when it has no subgraphs."""
    if not any(True for node in proto.graph.node for _ in bodies(node)):
        return proto
    numbers, renamed = itertools.count(), deepcopy(proto)
    for node in renamed.graph.node:
        rename(node, {}, numbers)
    return renamed


def inner_names(node: onnx.NodeProto) -> frozenset[str]:
    """Names of tensors that the subgraphs of a node define, however deep."""
    return frozenset[str]().union(*(defines(graph) for body in bodies(node) for graph in all_graphs(body)))


def free_names(prefix: str, taken: Collection[str]) -> Iterator[str]:
    """`i0`, `i1`, … without those that are taken."""
    return (name for number in itertools.count() if (name := f"{prefix}{number}") not in taken)
