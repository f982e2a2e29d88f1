"""What a dry run cannot know: times, and sizes that depend on values. Takes both out of the facts of a run.

In a dry run the device memory reads as zeros, so whatever is computed from values is wrong, and so is every size that
follows from them. Sizes that follow from shapes are right: shapes are worked out on the host.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from partita.diagnosis.session_index import SessionIndex, choose_provider
from partita.observations.facts import GraphNode, RunFacts
from partita.observations.names import CPU
from partita.partition_reports.timing import NodeTimes

TIMING_NOTE = "no times: this was a dry run, and no device computed anything"
BY_VALUES = frozenset(
    {
        "BeamSearch",
        "Compress",
        "GreedySearch",
        "If",
        "Loop",
        "NonMaxSuppression",
        "NonZero",
        "Optional",
        "OptionalGetElement",
        "RemovePadding",
        "Sampling",
        "Scan",
        "SequenceAt",
        "SequenceMap",
        "SplitToSequence",
        "StringNormalizer",
        "StringSplit",
        "Unique",
        "WhisperBeamSearch",
    }
)
"""Operators whose output sizes depend on the values of their inputs, or on which body runs and how often."""
SIZE_INPUTS: dict[str, tuple[int, ...]] = {
    "AffineGrid": (1,),
    "BlackmanWindow": (0,),
    "CenterCropPad": (1,),
    "Col2Im": (1, 2),
    "ConstantOfShape": (0,),
    "CropAndResize": (3,),
    "DFT": (1, 2),
    "Expand": (1,),
    "HammingWindow": (0,),
    "HannWindow": (0,),
    "MaxUnpool": (2,),
    "MelWeightMatrix": (0, 1),
    "OneHot": (1,),
    "Pad": (1, 3),
    "Range": (0, 1, 2),
    "ReduceL1": (1,),
    "ReduceL2": (1,),
    "ReduceLogSum": (1,),
    "ReduceLogSumExp": (1,),
    "ReduceMax": (1,),
    "ReduceMean": (1,),
    "ReduceMin": (1,),
    "ReduceProd": (1,),
    "ReduceSum": (1,),
    "ReduceSumSquare": (1,),
    "Reshape": (1,),
    "Resize": (1, 2, 3),
    "STFT": (1, 3),
    "Slice": (1, 2, 3, 4),
    "Split": (1,),
    "Tile": (1,),
    "TopK": (1,),
    "Upsample": (1,),
}
"""Operators whose output sizes depend on the values of these inputs, by position."""
SHAPE_READERS = frozenset({"Shape", "Size"})
RANDOM = frozenset(
    {"Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}
)


def without_times(facts: RunFacts) -> RunFacts:
    """The run without steps, loading times and resident memory, which are those of the machine it was played on."""
    return replace(
        facts,
        steps=(),
        first_token_seconds=None,
        memory=facts.memory.model_copy(
            update={
                "rss_before_load_bytes": None,
                "rss_after_load_bytes": None,
                "peak_rss_bytes": None,
                "anonymous_growth_bytes": None,
            }
        ),
    )


def without_sizes(index: SessionIndex) -> SessionIndex:
    """The session with the size of every graph output unknown that depends on values, or may do.

    Inputs have the size they were given, states the size of their buffer.
    """
    unknown = _tensors_of_unknown_size(index)
    ports = tuple(
        replace(port, bytes_per_decode_step=None)
        if port.direction == "output" and port.role != "state" and port.name in unknown
        else port
        for port in index.facts.ports
    )
    return replace(index, facts=replace(index.facts, ports=ports))


def without_values(index: SessionIndex, times: NodeTimes) -> NodeTimes:
    """Node times and sizes of one phase without any time, and without the sizes that depend on values."""
    unknown = _nodes_of_unknown_size(index)
    return replace(
        times,
        host_us={},
        output_bytes={name: size for name, size in times.output_bytes.items() if name not in unknown},
        last={name: event for name, event in times.last.items() if name not in unknown},
    )


def _nodes_of_unknown_size(index: SessionIndex) -> frozenset[str]:
    """Nodes of the execution order with an output whose size depends on values, or may do.

    A node that is not in the file is judged by the nodes it replaces, a copy by its tensor. Where neither is known, it
    is of unknown size as soon as any tensor is.
    """
    unknown = _tensors_of_unknown_size(index)
    return frozenset(name for name in index.order if unknown and _is_unknown(index, name, unknown))


def _is_unknown(index: SessionIndex, name: str, unknown: frozenset[str]) -> bool:
    """True when the size of the node's output depends on values, or nothing tells that it does not."""
    origins = [index.exported[each] for each in (name, *index.replaces(name)) if each in index.exported]
    if origins:
        return any(tensor in unknown for node in origins for tensor in node.outputs)
    copied = index.memcpy.get(name)
    return copied is None or copied.tensor in unknown or not _is_of_the_file(index, copied.tensor)


def _is_of_the_file(index: SessionIndex, tensor: str) -> bool:
    """True when a node of the file makes or reads the tensor; ONNX Runtime has tensors of its own."""
    return any(tensor in node.outputs or tensor in node.inputs for node in index.facts.graph)


def _tensors_of_unknown_size(index: SessionIndex) -> frozenset[str]:
    """Tensors of the file whose size depends on values, or may do."""
    known_values = set(index.facts.constants)
    unknown: set[str] = set()
    for node in index.facts.graph:
        inputs = [name for name in node.inputs if name]
        if node.op_type in BY_VALUES or unknown.intersection(inputs) or not _sizes_known(node, known_values):
            unknown.update(name for name in node.outputs if name and name not in index.facts.fixed_shapes)
        if _values_known(index, node, inputs, known_values, unknown):
            known_values.update(node.outputs)
    return frozenset(unknown)


def _sizes_known(node: GraphNode, known_values: set[str]) -> bool:
    """True when the values that decide on the sizes of the outputs are known."""
    positions = SIZE_INPUTS.get(node.op_type, ())
    return all(
        not node.inputs[position] or node.inputs[position] in known_values
        for position in positions
        if position < len(node.inputs)
    )


def _values_known(
    index: SessionIndex, node: GraphNode, inputs: Iterable[str], known_values: set[str], unknown: set[str]
) -> bool:
    """True when the outputs have the values that they would have on a real device.

    That takes a shape, or a computation on known values that the CPU makes or that ONNX Runtime has folded.
    """
    if node.op_type in SHAPE_READERS:
        return not unknown.intersection(inputs)
    if node.op_type in RANDOM or node.op_type in BY_VALUES or not known_values.issuperset(inputs):
        return False
    claims = index.claims.get(node.name)
    return claims is None or choose_provider(claims) == CPU
