"""Removes times and value-dependent sizes from the facts of a dry run.

In a dry run device memory reads as zeros, so computed values and sizes that depend on them are wrong.
"""

from __future__ import annotations

from dataclasses import replace

from partita.diagnosis.session_index import SessionIndex
from partita.observations.facts import RunFacts, SessionFacts
from partita.partition_reports.cost import NodeTimes

NOTE = "no times: this was a dry run without a device"
BY_VALUES = frozenset(
    {
        *("BeamSearch", "BlackmanWindow", "Compress", "ConstantOfShape", "GreedySearch", "HammingWindow", "HannWindow"),
        *("If", "Loop", "MelWeightMatrix", "NonMaxSuppression", "NonZero"),
        *("Optional", "OptionalGetElement", "Range", "RemovePadding", "Sampling", "Scan", "SequenceAt", "SequenceMap"),
        *("SplitToSequence", "StringNormalizer", "StringSplit", "Unique", "WhisperBeamSearch"),
    }
)
"""Operators whose output sizes depend on input values, or on the execution of control-flow subgraphs."""
BY_FURTHER_INPUTS = frozenset(
    {
        *("AffineGrid", "CenterCropPad", "Col2Im", "CropAndResize", "DFT", "Expand", "MaxUnpool", "OneHot", "Pad"),
        *("ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin"),
        *("ReduceProd", "ReduceSum", "ReduceSumSquare", "Reshape", "Resize", "STFT", "Slice", "Split", "Tile", "TopK"),
        "Upsample",
    }
)
"""Operators whose output sizes depend on the values of inputs other than the first."""
RESIDENT = ("rss_before_load_bytes", "rss_after_load_bytes", "peak_rss_bytes", "anonymous_growth_bytes")


def without_times(facts: RunFacts) -> RunFacts:
    """The run without steps, loading times and resident memory of this machine, and without sizes that need values."""
    return replace(
        facts,
        sessions=tuple(map(_without_sizes, facts.sessions)),
        steps=(),
        first_token_seconds=None,
        memory=facts.memory.model_copy(update=dict.fromkeys(RESIDENT)),
    )


def _without_sizes(facts: SessionFacts) -> SessionFacts:
    """The session with unknown sizes for graph outputs that may depend on values; inputs and states keep their size."""
    unknown = _tensors_of_unknown_size(facts)
    ports = tuple(
        replace(port, bytes_per_decode_step=None)
        if port.direction == "output" and port.role != "state" and port.name in unknown
        else port
        for port in facts.ports
    )
    return replace(facts, ports=ports)


def without_values(index: SessionIndex, times: NodeTimes) -> NodeTimes:
    """Sizes of the nodes of one phase that do not depend on values; no times."""
    tensors = _tensors_of_unknown_size(index.facts)
    sizes = {name: size for name, size in times.output_bytes.items() if not tensors or _is_known(index, name, tensors)}
    return replace(times, host_us={}, output_bytes=sizes, note=NOTE)


def _is_known(index: SessionIndex, name: str, unknown: frozenset[str]) -> bool:
    """Whether the size of the node's output does not depend on values.

    For a node outside the file, the nodes that it replaces decide; for a copy, its tensor. If both are unknown, the
    size is unknown.
    """
    origins = [index.file_nodes[each] for each in (name, *index.replaces(name)) if each in index.file_nodes]
    if origins:
        return not any(tensor in unknown for node in origins for tensor in node.outputs)
    copied = index.memcpy.get(name)
    if copied is None or copied.tensor in unknown:
        return False
    # ONNX Runtime adds tensors that no node of the file writes or reads.
    return any(copied.tensor in (*node.outputs, *node.inputs) for node in index.facts.graph)


def _tensors_of_unknown_size(facts: SessionFacts) -> frozenset[str]:
    """Tensors of the file whose size may depend on values: neither shape inference nor constants determine it."""
    unknown: set[str] = set()
    for node in facts.graph:
        sizes = set(filter(None, node.inputs[1:])) if node.op_type in BY_FURTHER_INPUTS else set[str]()
        if node.op_type in BY_VALUES or unknown.intersection(node.inputs) or not sizes <= facts.constants:
            unknown.update(name for name in node.outputs if name and name not in facts.fixed_shapes)
    return frozenset(unknown)
