"""Cached states of a foreign graph: pairs of a past input and a present output, and the axes of their rows. Pure.

The operators between them pair an input and an output where they show exactly one of each. Otherwise names do, without
the words for past and present: the numbers (layers) and the kind (key or value) remain. So past_key_values.3.key
matches present.3.key, and cache_k_3 matches new_cache_k_3.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, get_args

from partita.foreign import GraphFacts, Size, integer

if TYPE_CHECKING:
    import onnx

    from partita.runtime.place.onnx_model import ModelPort

Kind = Literal["key", "value", "conv", "recurrent"]
CONTRIB, GQA = "com.microsoft", "GroupQueryAttention"
CACHED_BY = {
    (CONTRIB, GQA): {3: 1, 4: 2},
    (CONTRIB, "SparseAttention"): {3: 1, 4: 2},
    (CONTRIB, "MultiHeadAttention"): {6: 1, 7: 2},
    (CONTRIB, "DecoderMaskedMultiHeadAttention"): {5: 1, 6: 2},
    ("", "Attention"): {4: 1, 5: 2},
}
"""Attention operators with a cache -> inputs of past keys and values, and the outputs that continue them."""
LENGTHENING = frozenset({"Concat", "MultiHeadAttention", "Attention"})
"""Operators whose output is longer than past; other attention writes after the valid rows of a longer buffer."""
WRITING = {"ScatterElements": 0, "Scatter": 0, "TensorScatter": -2}
"""Operators that replace rows along an axis -> default axis."""
SAME_AXES = frozenset({"Identity", "Cast", "Where"})
CUTTING = frozenset({"Slice", "Gather", "GatherElements", "GatherND", "Split"})
OTHER_AXES = CUTTING | {"Reshape", "Squeeze", "Unsqueeze", "Flatten", "ScatterND"}
"""Operators on rows of their first input that hide the axis of rows."""
ROWS_AXIS = 2
"""The token axis of keys and values [B, heads, T, head size] in attention."""
ROTARY = "RotaryEmbedding"
COMPARED = frozenset({"Greater", "GreaterOrEqual"})

PARTS = re.compile(r"\d+|[a-zA-Z]+")
CONTAINERS = re.compile(
    r"past_?key_?values?|present_?key_?values?|key_?values|kv_?cache|past_?kv|present_?kv", re.IGNORECASE
)
"""Words for the whole cache; the kind of a state follows the number."""
CACHED = re.compile(r"past|present|cache|state|kv", re.IGNORECASE)
"""Words in the name of an unnumbered cache."""
DIRECTIONS = frozenset(
    (
        *("past", "present", "in", "out", "input", "output", "new", "old", "updated", "prev", "next", "last"),
        *("cache", "cached", "state", "states", "model", "decoder", "transformer", "h"),
        *("self", "attn", "attention", "layer", "layers", "block", "blocks"),
    )
)
KINDS: Mapping[str, Kind] = {
    "key": "key", "keys": "key", "k": "key",
    "value": "value", "values": "value", "v": "value",
    "conv": "conv", "convolution": "conv",
    "recurrent": "recurrent", "ssm": "recurrent", "rnn": "recurrent", "temporal": "recurrent",
}  # fmt: skip
LENGTHS = re.compile(r"past|seq|len|total|ctx|context|kv_?length|cache|time|step", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Flow:
    """How the operators of a graph continue an input in an output."""

    past: str
    axis: int | None = None
    """The axis of rows that are appended or replaced; None: unknown."""
    lengthens: bool = False
    """The output is longer than the input."""


@dataclass(frozen=True, slots=True)
class Pair:
    """An input and the output with its next value."""

    past: ModelPort
    present: ModelPort
    layer: int
    kind: Kind
    source: str
    flow: Flow | None = None

    @property
    def shape(self) -> tuple[Size, ...]:
        """The declared sizes of the input; empty where its rank is unknown."""
        return self.past.shape or ()


@dataclass(frozen=True, slots=True)
class Mark:
    """The parts of a name other than past or present."""

    numbers: tuple[int, ...]
    words: tuple[str, ...]

    @classmethod
    def of(cls, name: str) -> Mark:
        """Numbers and significant words of a name."""
        parts = [part.lower() for part in PARTS.findall(CONTAINERS.sub(" ", name, count=1))]
        numbers = tuple(int(part) for part in parts if part.isdigit())
        return cls(numbers, tuple(part for part in parts if not part.isdigit() and part not in DIRECTIONS))

    def pair(self, past: ModelPort, present: ModelPort, source: str) -> Pair:
        """The pair with the last number as its layer, and the kind that its first word names; else of keys."""
        kind: Kind = next((KINDS[word] for word in self.words if word in KINDS), "key")
        return Pair(past, present, self.numbers[-1] if self.numbers else 0, kind, source)


def pair_up(
    inputs: Sequence[ModelPort], outputs: Sequence[ModelPort], graph: GraphFacts, templates: Mapping[str, str]
) -> tuple[list[Pair], list[ModelPort]]:
    """Pairs of past and present, and inputs without one. `templates`: kind and direction -> name with %d."""
    pairs: list[Pair] = []
    unpaired: list[ModelPort] = []
    marks = {port.name: Mark.of(port.name) for port in (*inputs, *outputs)}
    nameless = sum(marks[port.name] == Mark((), ()) for port in inputs)
    flows = [(port, flow) for port in outputs if inputs and (flow := flow_into(graph, port)) is not None]
    for port in inputs:
        mark = marks[port.name]
        pair = _by_template(port, outputs, templates)
        if pair is None and (mark != Mark((), ()) or (nameless == 1 and CACHED.search(port.name))):
            alike = [output for output in outputs if marks[output.name] == mark and _same_type(port, output)]
            pair = mark.pair(port, alike[0], "name, type and shape") if len(alike) == 1 else None
        shown = [(output, flow) for output, flow in flows if flow.past == port.name]
        if len(shown) == 1:  # the graph decides where names say something else
            present, flow = shown[0]
            if pair is None or pair.present != present:
                pair = mark.pair(port, present, "the graph")
            pair = replace(pair, flow=flow)
        if pair is None:
            unpaired.append(port)
        else:
            pairs.append(replace(pair, kind=_kind_in_attention(port.name, graph) or pair.kind))
    return pairs, unpaired


def _by_template(port: ModelPort, outputs: Sequence[ModelPort], templates: Mapping[str, str]) -> Pair | None:
    """The pair that a configuration names."""
    for kind in get_args(Kind):
        past, present = (templates.get(f"{time}_{kind}_names", "") for time in ("past", "present"))
        layer = layer_in(past, port.name)
        name = present.replace("%d", str(layer))
        found = next((output for output in outputs if output.name == name), None)
        if layer is not None and found is not None:
            return Pair(port, found, layer, kind, "configuration")
    return None


def layer_in(template: str, name: str, blank: str = "%d") -> int | None:
    """The layer in a name that matches a template; None where it does not match."""
    pattern = re.escape(template).replace(re.escape(blank), "([0-9]+)", 1)
    found = re.fullmatch(pattern, name)
    return None if found is None else int(found[1]) if found.groups() else 0


def _kind_in_attention(name: str, graph: GraphFacts) -> Kind | None:
    """Whether an attention operator reads a tensor as past keys or as past values; None without one."""
    for node in graph.readers.get(name, ()):
        places = attention_places(node)
        read = [place for place in places if node.input[place : place + 1] == [name]]
        if read:
            return "key" if read == [min(places)] else "value"
    return None


def _same_type(past: ModelPort, present: ModelPort) -> bool:
    """Whether type and rank are equal, where known."""
    ranks = past.shape is None or present.shape is None or len(past.shape) == len(present.shape)
    return past.dtype == present.dtype and ranks


def attention_places(node: onnx.NodeProto) -> Mapping[int, int]:
    """Inputs of past -> outputs that continue them; empty for a node without a cache."""
    return CACHED_BY.get((node.domain.removeprefix("ai.onnx"), node.op_type), {})


def flow_into(graph: GraphFacts, present: ModelPort) -> Flow | None:
    """How an output continues an input of its type and rank; None unless operators show exactly one input."""
    pasts = {port.name for port in graph.inputs if _same_type(port, present)}
    found: dict[str, Flow] = {}
    seen: set[str] = set()
    pending = [(present.name, tuple(range(len(present.shape or ()))), Flow(""))]
    while pending:
        tensor, axes, flow = pending.pop()  # axes of the tensor as axes of the output; empty where unknown
        if tensor in pasts:
            found[tensor] = replace(flow, past=tensor)
        node = graph.producers.get(tensor)
        if node is None or tensor in seen:
            continue
        seen.add(tensor)
        sources, along = _continued(node, tensor, len(axes))
        if node.op_type == "Transpose":
            axes = _turned(node, axes)
        elif node.op_type in OTHER_AXES:
            axes, flow = (), Flow("")
        elif along is not None:
            flow = Flow("", axes[along], node.op_type in LENGTHENING)
        pending += [(source, axes, flow) for source in sources]
    return next(iter(found.values())) if len(found) == 1 else None


def _continued(node: onnx.NodeProto, tensor: str, rank: int) -> tuple[Sequence[str], int | None]:
    """Inputs that an output of a node may continue, and the axis along which it appends or replaces rows."""
    axis: int | None = None
    if places := attention_places(node):
        made = list(node.output).index(tensor)
        sources = [node.input[place] for place, output in places.items() if output == made and place < len(node.input)]
        return sources, ROWS_AXIS if rank == ROWS_AXIS + 2 else None
    if node.op_type == "Concat":
        axis, sources = integer(node, "axis", 0), list(node.input)
    elif node.op_type in WRITING:
        axis, sources = integer(node, "axis", WRITING[node.op_type]), node.input[:1]
    elif node.op_type == "Where":
        sources = node.input[1:3]
    else:
        sources = node.input[:1] if node.op_type in {"Transpose", *SAME_AXES, *OTHER_AXES} else []
    return sources, axis % rank if axis is not None and rank else None


def _turned(node: onnx.NodeProto, axes: tuple[int, ...]) -> tuple[int, ...]:
    """The axes of a Transpose's input as axes of the output; empty where unknown."""
    default = range(len(axes) - 1, -1, -1)
    order = next((tuple(each.ints) for each in node.attribute if each.name == "perm"), tuple(default))
    if sorted(order) != [*range(len(axes))]:
        return ()
    return tuple(axes[order.index(axis)] for axis in range(len(axes)))


def shares_buffer(pair: Pair, graph: GraphFacts) -> bool:
    """Whether a step may write present into the buffer of past, which is longer than its valid rows.

    Only GroupQueryAttention supports it: it appends new rows, and its inputs give the number of valid ones. Other
    consumers of past, including its shape, would use the buffer's length. Keys and values must both qualify.
    """
    node = _attention_of(pair, graph)
    if node is None:
        return False
    pasts = [name for place in attention_places(node) for name in node.input[place : place + 1]]
    presents = [name for made in attention_places(node).values() for name in node.output[made : made + 1]]
    alone = all(len(graph.readers.get(name, ())) == 1 and list(node.input).count(name) == 1 for name in pasts)
    ports = all(map(graph.input, pasts)) and all(map(graph.output, presents))
    return alone and ports and (pair.past.name, pair.present.name) in zip(pasts, presents, strict=False)


def _attention_of(pair: Pair, graph: GraphFacts) -> onnx.NodeProto | None:
    """The GroupQueryAttention that computes present."""
    node = graph.producers.get(pair.present.name)
    return node if node is not None and (node.domain, node.op_type) == (CONTRIB, GQA) else None


def window_of(pair: Pair, graph: GraphFacts) -> int | None:
    """The sliding window of a state's attention node, if it has one."""
    node = _attention_of(pair, graph)
    size = 0 if node is None else integer(node, "local_window_size", 0)
    return size if size > 0 else None


def rolls(pair: Pair, graph: GraphFacts) -> bool:
    """Whether the attention of a state caches only its window, and moves rows itself."""
    node = _attention_of(pair, graph)
    return node is not None and integer(node, "sliding_window_cache", 0) == 1


def batch_axis(symbol: Size, port: ModelPort) -> int | None:
    """The batch axis: named as that of the tokens, else the first, unless it is fixed."""
    shape = port.shape or ()
    if isinstance(symbol, str) and symbol in shape:
        return shape.index(symbol)
    return 0 if shape and not isinstance(shape[0], int) else None


def growing_axis(pair: Pair, batch: int | None) -> int | None:
    """The axis along which present is longer than past; None where they have one size, or it is unknown.

    `batch`: the batch axis, which does not grow. Without an operator that shows it, the declared sizes decide: a fixed
    axis, or one with the same name in past and present, does not grow; of several others, the axis named like a length
    grows.
    """
    past, present = pair.shape, pair.present.shape or ()
    if pair.flow is not None and pair.flow.lengthens:
        return pair.flow.axis
    free = [axis for axis, size in enumerate(past) if not isinstance(size, int) and axis != batch]
    if len(present) == len(past):
        free = [axis for axis in free if past[axis] is None or past[axis] != present[axis]]
    named = [axis for axis in free if isinstance(past[axis], str) and LENGTHS.search(str(past[axis]))]
    found = named if len(named) == 1 else free
    return found[0] if len(found) == 1 else None


def rows_axis(pair: Pair, graph: GraphFacts, batch: int | None, lengths: frozenset[Size]) -> int | None:
    """The axis of keys or values with one entry per token, or None. `lengths`: of masks."""
    if shares_buffer(pair, graph):
        return ROWS_AXIS
    if (grown := growing_axis(pair, batch)) is not None:
        return grown
    if pair.flow is not None and pair.flow.axis is not None:
        return pair.flow.axis
    named = [axis for axis, size in enumerate(pair.shape) if isinstance(size, int) and size in lengths]
    return named[0] if len(named) == 1 else ROWS_AXIS if len(pair.shape) == ROWS_AXIS + 2 else None


def frequencies_change_at(graph: GraphFacts) -> int:
    """The length beyond which an If selects other tables for rotary embeddings (LongRoPE); 0: none."""
    limits = []
    for node in graph.model.proto.graph.node:
        compare = graph.producers.get(node.input[0]) if node.op_type == "If" and node.input else None
        if compare is None or compare.op_type not in COMPARED or len(compare.input) < 2:
            continue
        limit = graph.integers.get(compare.input[1], 0)
        readers = (reader.op_type for output in node.output for reader in graph.readers.get(output, ()))
        if limit > 1 and not {GQA, ROTARY}.isdisjoint(readers):
            limits.append(limit - (compare.op_type == "GreaterOrEqual"))
    return min(limits, default=0)
