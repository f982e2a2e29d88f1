"""Which versions of which operators are asked about: all, some by name, or those that a model has, in its types."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from partita.runtime.support.operators import Operator, operators, plain
from partita.runtime.support.plan import Wanted
from partita.runtime.support.variants import Types, ir_version
from partita.support.answers import Need

if TYPE_CHECKING:
    import onnx


@dataclass(frozen=True, slots=True)
class Asked:
    """Operators, or the nodes of a model, that a support table is to have."""

    versions: tuple[Wanted, ...]
    opset: int
    """The newest version of ONNX's operator set that this ONNX Runtime opens."""
    needs: tuple[Need, ...] = ()
    """Of the model, where there is one."""


def all_wanted(what: Mapping[str, Any], legal: Callable[[int], bool]) -> Asked:
    """The versions that are asked about, of those that this ONNX Runtime knows.

    `what`: `operators`, a list of [domain, name], None for all; or `model`, a file. `legal`: whether ONNX Runtime opens
    a model of this version of the operator set.
    """
    opset = _newest_opset(legal)
    known = [entry for entry in operators() if entry.domain != "" or entry.since <= opset]
    if what.get("model"):
        return _of_model(Path(what["model"]), known, opset)
    named = what.get("operators")
    chosen = known if named is None else [entry for entry in known if [entry.domain, entry.name] in named]
    return Asked(tuple(Wanted(entry) for entry in chosen), opset)


def name_of(operator: Operator) -> str:
    """A version of an operator as people write it: com.microsoft:Attention-1."""
    domain = f"{operator.domain}:" if operator.domain else ""
    return f"{domain}{operator.name}-{operator.since}"


def _newest_opset(legal: Callable[[int], bool]) -> int:
    """The newest version of ONNX's operator set that this ONNX Runtime opens."""
    import onnx

    newest: int = onnx.defs.onnx_opset_version()
    return next((opset for opset in range(newest, 0, -1) if legal(opset)), 1)


def opset_model(opset: int) -> bytes:
    """A model of one node, in a version of ONNX's operator set."""
    import onnx
    from onnx import helper

    port = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Neg", ["x"], ["y"])], "opset", port[:1], port[1:])
    model: onnx.ModelProto = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=ir_version(opset)
    )
    return bytes(model.SerializeToString())


def newest_of(asked: Asked) -> frozenset[Operator]:
    """Of each operator the version that the newest operator set has; in a model, all that it has."""
    if asked.needs:
        return frozenset(entry.operator for entry in asked.versions)
    found = {(entry.operator.domain, entry.operator.name): entry.operator for entry in asked.versions}
    return frozenset(found.values())


def _of_model(path: Path, known: Collection[Operator], opset: int) -> Asked:
    """The versions that a model has, each with the types that it has them in."""
    needed = _needs_of(path, known)
    needs = tuple(
        Need(operator.domain, operator.name, operator.since, types, nodes)
        for operator, counted in needed.items()
        for types, nodes in counted.items()
    )
    return Asked(tuple(Wanted(operator, frozenset(types)) for operator, types in needed.items()), opset, needs)


def _needs_of(path: Path, known: Collection[Operator]) -> dict[Operator, dict[Types, int]]:
    """How many nodes of a model have which version of an operator, in which types."""
    from partita.runtime.onnx_model import read_onnx
    from partita.runtime.probes.graphs import cut_graph

    graph = cut_graph(read_onnx(path), {})
    versions = {plain(entry.domain): entry.version for entry in graph.proto.opset_import}
    history: dict[tuple[str, str], list[Operator]] = {}
    for operator in known:
        history.setdefault((operator.domain, operator.name), []).append(operator)
    found: dict[Operator, dict[Types, int]] = {}
    for node in graph.nodes.values():
        domain = plain(node.domain)
        fitting = [entry for entry in history.get((domain, node.op_type), ()) if entry.since <= versions.get(domain, 1)]
        if fitting:
            counted = found.setdefault(fitting[-1], {})
            types = _types_of(node, fitting[-1], {**graph.fixed, **graph.types})
            counted[types] = counted.get(types, 0) + 1
    return found


def _types_of(node: onnx.NodeProto, operator: Operator, kinds: Mapping[str, onnx.TypeProto]) -> Types:
    """The types of a node by type variable, as far as they are known."""
    found: dict[str, str] = {}
    for index, name in enumerate(node.input):
        slot, kind = operator.input(index), kinds.get(name)
        if slot is not None and kind is not None and (text := spelled(kind)) in slot.types:
            found.setdefault(slot.variable, text)
    slot = operator.output(0)
    if (
        slot is not None
        and slot.variable not in found
        and node.output
        and (kind := kinds.get(node.output[0])) is not None
    ):
        text = spelled(kind)
        if text in slot.types and len(slot.types) > 1:
            found[slot.variable] = text
    return tuple(found.items())


def spelled(kind: onnx.TypeProto) -> str:
    """A type as schemas spell it; empty for one that they have no words for."""
    import onnx

    which = kind.WhichOneof("value")
    if which == "tensor_type":
        name = onnx.TensorProto.DataType.Name(kind.tensor_type.elem_type).lower()
        return f"tensor({name})"
    if which == "sequence_type":
        return f"seq({spelled(kind.sequence_type.elem_type)})"
    if which == "optional_type":
        return f"optional({spelled(kind.optional_type.elem_type)})"
    return ""
