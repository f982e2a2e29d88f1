"""Nodes of schema functions, which ONNX Runtime runs without a name where no provider supports the operator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from partita.runtime.lab.graph import CannotProbeError, Graph, cut_proto
from partita.runtime.lab.schema import find_operator, plain_domain
from partita.runtime.lab.variant import Variant, node_variant, part_model
from partita.runtime.place.model_file import all_nodes
from partita.runtime.place.tensor_types import sizes_of, tensor_type

if TYPE_CHECKING:
    import onnx

NO_FUNCTION = "ONNX Runtime gave it no name, and none of the file's functions contains it"


@dataclass(slots=True)
class Functions:
    """The functions of one graph's operators, each expanded once."""

    graph: Graph
    bodies: dict[tuple[str, bool], Graph | None] = field(default_factory=dict)

    def variant(self, owners: Sequence[str], op_type: str | None, made: Sequence[str]) -> Variant:
        """The variant of a node in the function of one of the nodes `owners`. Raises CannotProbeError.

        `made`: types of its outputs in the run, e.g. float32[1,12]; nodes with equal types are interchangeable.
        """
        for deep in (False, True):  # nested functions are expanded only where ONNX Runtime must, too
            for owner in owners:
                body = self.expanded(owner, deep)
                for node in body.nodes.values() if body is not None else ():
                    if body is not None and node.op_type == op_type and body.fits(node, made):
                        return node_variant(body, node.name)
        raise CannotProbeError(NO_FUNCTION)

    def expanded(self, owner: str, deep: bool) -> Graph | None:
        """The expanded function of a node as a graph; None if it has none."""
        key = owner, deep
        if key not in self.bodies:
            self.bodies[key] = _unfold(self.graph, owner, deep=deep)
        return self.bodies[key]


def _unfold(graph: Graph, owner: str, *, deep: bool) -> Graph | None:
    """The expanded function of one node. `deep`: nested functions are expanded, too."""
    import onnx
    import onnx.inliner

    node = graph.nodes.get(owner)
    opsets = {plain_domain(entry.domain): entry.version for entry in graph.proto.opset_import}
    if node is None or not _has_function(node, opsets):
        return None
    try:
        part = part_model(graph, [owner], fixed=False)
        _write_defaults(part.graph.node[0], opsets)
        for tensor in part.graph.initializer:  # the function may depend on their types
            part.graph.value_info.add(name=tensor.name, type=tensor_type(tensor.data_type, tensor.dims))
        chosen = [] if deep else [(plain_domain(node.domain), node.op_type)]
        body: onnx.ModelProto = onnx.inliner.inline_selected_functions(part, chosen, deep, True)
    except Exception:  # noqa: BLE001 - native code may raise any exception; other nodes can still be tested
        return None
    if [each.op_type for each in body.graph.node] == [node.op_type]:
        return None
    for number, each in enumerate(all_nodes(body.graph)):
        each.name = f"{node.op_type}/{number}"
    fixed = {port.name: sizes_of(graph.fixed.get(port.name)) for port in body.graph.input}
    return cut_proto(body, graph.folder, {name: sizes for name, sizes in fixed.items() if sizes is not None})


def _has_function(node: onnx.NodeProto, opsets: dict[str, int]) -> bool:
    """Whether the operator set defines the operator as a function; unfolding every other node takes too long."""
    import onnx

    domain = plain_domain(node.domain)
    try:
        schema: Any = onnx.defs.get_schema(node.op_type, opsets.get(domain, 1), domain)
    except onnx.defs.SchemaError:
        return False
    return any(getattr(schema, name, False) for name in ("has_function", "has_context_dependent_function"))


def _write_defaults(node: onnx.NodeProto, opsets: dict[str, int]) -> None:
    """Write default attributes explicitly, which inlining by the onnx package needs."""
    domain = plain_domain(node.domain)
    operator = find_operator(domain, node.op_type, opsets.get(domain, 1))
    given = {entry.name for entry in node.attribute}
    for name, entry in operator.attributes.items() if operator is not None else ():
        if entry.default and name not in given:
            node.attribute.add().ParseFromString(entry.default)
