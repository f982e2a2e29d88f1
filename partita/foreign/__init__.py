"""Foreign folders: a contract inferred for folders of other exporters, so that they can be used like packages.

Here: an ONNX file as the inference reads it, without its weights.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from partita import dtypes
from partita.package.folder import path_inside

if TYPE_CHECKING:
    import onnx

    from partita.runtime.place.onnx_model import ModelPort, OnnxModel


Size = int | str | None
"""A size of a shape: a number, the name of a symbolic size, or None."""


@dataclass(frozen=True, slots=True)
class GraphFacts:
    """One ONNX file."""

    file: str
    """Relative to the folder, with / as separator."""
    model: OnnxModel
    outputs: tuple[ModelPort, ...]
    defaults: tuple[ModelPort, ...]
    """Inputs with a default value in the file; `inputs` are the others."""
    producers: Mapping[str, onnx.NodeProto]
    """Tensor -> the node of the main graph that computes it."""
    readers: Mapping[str, Sequence[onnx.NodeProto]]
    """Tensor -> the nodes of the main graph that read it, also in their subgraphs."""
    integers: Mapping[str, int]
    """Scalar integer constants of all graphs in the file."""
    has_masks: bool
    """Whether a constant may be a mask over pairs of positions."""
    data_files: tuple[str, ...]
    """Relative to the folder."""
    weights: Mapping[str, int]
    """Number of stored elements by type."""
    operators: frozenset[str]
    """Operators of all graphs; domain.operator for other domains than ONNX's."""
    product_bits: Mapping[int, int]
    """Number of products with quantised weights (MatMulNBits) by bits."""

    @property
    def inputs(self) -> tuple[ModelPort, ...]:
        """The inputs that every run needs."""
        return self.model.inputs

    def input(self, name: str) -> ModelPort | None:
        """The input of that name."""
        return next((port for port in self.inputs if port.name == name), None)

    def output(self, name: str) -> ModelPort | None:
        """The output of that name."""
        return next((port for port in self.outputs if port.name == name), None)


def read_graph(folder: Path, file: str) -> GraphFacts:
    """The facts of `file`. Raises PackageError when missing or damaged."""
    # imported here, because `partita.load` must run before ONNX Runtime is loaded
    from partita.runtime.place.model_file import all_graphs, all_nodes, all_tensors, tensors_read
    from partita.runtime.place.onnx_model import read_onnx, read_port

    model = read_onnx(path_inside(folder, file))
    graph = model.proto.graph
    producers: dict[str, onnx.NodeProto] = {}
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.node:
        producers |= dict.fromkeys(filter(None, node.output), node)
        for name in set(tensors_read(node)):
            readers.setdefault(name, []).append(node)
    needed = {port.name for port in model.inputs}
    constants = [named for each in (*all_graphs(graph), *model.proto.functions) for named in _constants(each)]
    nodes, weights = list(all_nodes(graph)), Counter[str]()
    for tensor in all_tensors(model.proto):
        weights[dtypes.name_of(tensor.data_type)] += math.prod(tensor.dims)
    return GraphFacts(
        file=file,
        model=model,
        outputs=tuple(map(read_port, graph.output)),
        defaults=tuple(read_port(port) for port in graph.input if port.name not in needed),
        producers=producers,
        readers=readers,
        integers=dict(_integers(constants)),
        has_masks=any(_is_mask(tensor) for _, tensor in constants),
        data_files=tuple((PurePosixPath(file).parent / name).as_posix() for name in model.data_files),
        weights=weights,
        operators=frozenset(
            f"{node.domain}.{node.op_type}".removeprefix("ai.onnx").removeprefix(".") for node in nodes
        ),
        product_bits=Counter(integer(node, "bits", 4) for node in nodes if node.op_type == "MatMulNBits"),
    )


def _constants(graph: onnx.GraphProto | onnx.FunctionProto) -> Iterator[tuple[str, onnx.TensorProto]]:
    """Names and values of a graph's constants, in all forms that exporters use."""
    from onnx import TensorProto, helper

    yield from ((tensor.name, tensor) for tensor in getattr(graph, "initializer", ()))
    for node in graph.node:
        for attribute in node.attribute if node.op_type == "Constant" and node.output else ():
            if attribute.name == "value":
                yield node.output[0], attribute.t
            elif attribute.name in ("value_int", "value_ints"):
                values = list(attribute.ints) or [attribute.i]
                yield node.output[0], helper.make_tensor(node.output[0], TensorProto.INT64, [len(values)], values)


def _integers(constants: Sequence[tuple[str, onnx.TensorProto]]) -> Iterator[tuple[str, int]]:
    """Names and values of the scalar integers that are in the file itself."""
    from onnx import TensorProto, numpy_helper

    for name, tensor in constants:
        is_integer = tensor.data_type in (TensorProto.INT64, TensorProto.INT32)
        if is_integer and all(size == 1 for size in tensor.dims) and not tensor.external_data:
            with suppress(ValueError):  # missing bytes are reported when the file is opened
                yield name, int(numpy_helper.to_array(tensor).item())


def _is_mask(tensor: onnx.TensorProto) -> bool:
    """Whether a constant may be a mask over pairs of positions."""
    from onnx import TensorProto

    square = len(tensor.dims) > 1 and tensor.dims[-1] == tensor.dims[-2] > 1
    return square and (tensor.data_type == TensorProto.BOOL or len(tensor.dims) > 3)


def integer(node: onnx.NodeProto, name: str, default: int) -> int:
    """The value of an integer attribute."""
    return next((int(attribute.i) for attribute in node.attribute if attribute.name == name), default)
