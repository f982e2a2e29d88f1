"""Cached states of a foreign graph: pairs of past inputs and present outputs, and how a step continues them. Pure.

Names are compared without the words for past and present: the numbers (layers) and the kind (key or value) remain. So
past_key_values.3.key matches present.3.key, and cache_k_3 matches new_cache_k_3. How a graph computes the next value of
a cached tensor is traced from the output back to the input:

    Behind        new rows appended to past: Concat, attention with its own Concat, GroupQueryAttention's present
    At a cursor   rows of past replaced at an input position: Scatter, TensorScatter, Where
    Moved         a part of past with appended rows: the oldest rows are dropped, and all rows move

A static cache is supported only if its rows do not move.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from partita.foreign import GraphFacts, NodeFact, PortFact

AxisOrigin = Literal["behind", "cursor", "moved", "unknown"]
CONTRIB, GQA = "com.microsoft", "GroupQueryAttention"
PASS_THROUGH = frozenset({"Identity", "Cast", "Transpose", "Reshape", "Squeeze", "Unsqueeze", "Flatten"})
"""Operators that keep the order of rows."""
PLACED = {"ScatterND": (0, 1), "ScatterElements": (0, 1), "Scatter": (0, 1), "TensorScatter": (0, 2)}
"""Operators that replace rows -> input of the tensor, and of the positions."""
WRITTEN_ALONG = {"ScatterElements": 0, "Scatter": 0, "TensorScatter": -2}
"""Operators that replace rows along an axis -> default axis."""
CUT = frozenset({"Slice", "Gather", "GatherElements", "GatherND", "Split"})
CACHED_BY = {
    (CONTRIB, GQA): {3: 1, 4: 2},
    (CONTRIB, "SparseAttention"): {3: 1, 4: 2},
    (CONTRIB, "MultiHeadAttention"): {6: 1, 7: 2},
    (CONTRIB, "DecoderMaskedMultiHeadAttention"): {5: 1, 6: 2},
    ("", "Attention"): {4: 1, 5: 2},
}
"""Attention operators with a cache -> inputs of past keys and values, and the outputs that continue them."""
AT_LENGTH = frozenset({GQA, "SparseAttention", "DecoderMaskedMultiHeadAttention"})
"""Of these, operators that write new rows after the valid ones of a longer buffer."""


def attention_places(node: NodeFact) -> dict[int, int]:
    """Inputs of past -> outputs that continue them; empty for a node without a cache."""
    domain = "" if node.domain == "ai.onnx" else node.domain
    return CACHED_BY.get((domain, node.op_type), {})


def carried(graph: GraphFacts, present: str, cursors: frozenset[str] | None = None) -> tuple[str | None, AxisOrigin]:
    """The input that an output continues, or None, and how. `cursors`: inputs with positions of new rows."""
    output = graph.output(present)
    pasts = {port.name for port in graph.inputs if output is not None and port.dtype == output.dtype}
    producers = {output: node for node in graph.nodes for output in node.outputs if output}
    axis_origin: AxisOrigin | None = None
    tensor, seen = present, set[str]()
    while tensor not in pasts:
        node = producers.get(tensor)
        if node is None or tensor in seen:
            return None, "unknown"
        seen.add(tensor)
        places = attention_places(node)
        if places:
            made = node.outputs.index(tensor)
            place = next((place for place, output in places.items() if output == made), None)
            if place is None or len(node.inputs) <= place or node.inputs[place] not in pasts:
                return None, "unknown"
            here: AxisOrigin = "cursor" if node.op_type in AT_LENGTH else "behind"
            return node.inputs[place], "moved" if axis_origin == "moved" else here
        if node.op_type in PASS_THROUGH:
            tensor = node.inputs[0]
        elif node.op_type in PLACED:
            data, where = PLACED[node.op_type]
            if len(node.inputs) <= where or not follows(producers, node.inputs[where], cursors):
                return None, "unknown"
            tensor, axis_origin = node.inputs[data], axis_origin or "cursor"
        elif node.op_type == "Where":
            continued = [name for name in node.inputs[1:3] if _leads_to(producers, name, pasts)]
            if len(continued) != 1 or not follows(producers, node.inputs[0], cursors):
                return None, "unknown"
            tensor, axis_origin = continued[0], axis_origin or "cursor"
        elif node.op_type == "Concat":
            continued = [name for name in node.inputs if _leads_to(producers, name, pasts)]
            if len(continued) != 1:
                return None, "unknown"
            tensor, axis_origin = continued[0], axis_origin or "behind"
        elif node.op_type in CUT:
            tensor, axis_origin = node.inputs[0], "moved"
        else:
            return None, "unknown"
    return tensor, axis_origin or "unknown"


def cursor_axis(graph: GraphFacts, present: str, rank: int) -> int | None:
    """The axis along which rows of an output are replaced at a cursor; None where no operator shows it."""
    producers = {output: node for node in graph.nodes for output in node.outputs if output}
    turns: list[tuple[int, ...]] = []
    node, seen = producers.get(present), set[str]()
    while node is not None and node.outputs[0] not in seen:
        seen.add(node.outputs[0])
        if node.op_type in WRITTEN_ALONG:
            written_axis = node.attributes.get("axis", WRITTEN_ALONG[node.op_type])
            axis = written_axis % rank if isinstance(written_axis, int) and rank else None
            for turn in reversed(turns):
                axis = turn.index(axis) if axis in turn else None
            return axis
        if node.op_type == "Transpose":
            order = node.attributes.get("perm", tuple(reversed(range(rank))))
            if not isinstance(order, tuple) or len(order) != rank:
                return None
            turns.append(order)
        elif node.op_type not in ("Identity", "Cast"):
            return None
        node = producers.get(node.inputs[0])
    return None


def _leads_to(producers: dict[str, NodeFact], tensor: str, pasts: Iterable[str]) -> bool:
    """Whether a tensor is a graph input, possibly with rows replaced, cut off or appended."""
    seen = set[str]()
    while tensor not in pasts:
        node = producers.get(tensor)
        if node is None or tensor in seen or node.op_type not in PASS_THROUGH | CUT | PLACED.keys():
            return False
        seen.add(tensor)
        tensor = node.inputs[0]
    return True


def follows(producers: Mapping[str, NodeFact], tensor: str, cursors: frozenset[str] | None) -> bool:
    """Whether a tensor is computed from one of `cursors`; True for None."""
    if cursors is None:
        return True
    pending, seen = [tensor], set[str]()
    while pending:
        name = pending.pop()
        if name in cursors:
            return True
        if name not in seen and (node := producers.get(name)) is not None:
            pending += [*node.inputs, *node.subgraph_inputs]
        seen.add(name)
    return False


ROTARY = "RotaryEmbedding"
COMPARED = frozenset({"Greater", "GreaterOrEqual"})


def frequencies_change_at(graph: GraphFacts) -> int:
    """The length beyond which an If selects other tables for rotary embeddings (LongRoPE); 0: none."""
    producers = {output: node for node in graph.nodes for output in node.outputs if output}
    limits = []
    for node in graph.nodes:
        compare = producers.get(node.inputs[0]) if node.op_type == "If" and node.inputs else None
        readers = (reader for output in node.outputs for reader in graph.readers_of(output))
        if compare is None or compare.op_type not in COMPARED or len(compare.inputs) < 2:
            continue
        limit = graph.integer_constants.get(compare.inputs[1], 0)
        if limit > 1 and any(reader.op_type in (GQA, ROTARY) for reader in readers):
            limits.append(limit - (compare.op_type == "GreaterOrEqual"))
    return min(limits, default=0)


Kind = Literal["key", "value", "conv", "recurrent"]
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
ROWS_AXIS = 2
"""The token axis of keys and values [B, heads, T, head size] in attention."""


@dataclass(frozen=True, slots=True)
class Pair:
    """An input and the output with its next value."""

    past: PortFact
    present: PortFact
    layer: int
    kind: Kind
    source: str


@dataclass(frozen=True, slots=True)
class Mark:
    """The parts of a name other than past or present."""

    numbers: tuple[int, ...]
    words: tuple[str, ...]

    @property
    def layer(self) -> int:
        """The last number; 0 without one."""
        return self.numbers[-1] if self.numbers else 0

    @property
    def kind(self) -> Kind | None:
        """The kind by the first word that names one; a tensor with keys and values counts as keys."""
        return next((KINDS[word] for word in self.words if word in KINDS), None)


NO_MARK = Mark((), ())


def mark_of(name: str) -> Mark:
    """Numbers and significant words of a name."""
    parts = [part.lower() for part in PARTS.findall(CONTAINERS.sub(" ", name, count=1))]
    numbers = tuple(int(part) for part in parts if part.isdigit())
    return Mark(numbers, tuple(part for part in parts if not part.isdigit() and part not in DIRECTIONS))


def pair_up(
    inputs: Sequence[PortFact], outputs: Sequence[PortFact], graph: GraphFacts, templates: Mapping[str, str]
) -> tuple[list[Pair], list[PortFact]]:
    """Pairs of past and present, and inputs without one. `templates`: kind and direction -> name with %d."""
    pairs: list[Pair] = []
    unpaired: list[PortFact] = []
    marks: dict[Mark, list[PortFact]] = {}
    for port in outputs:
        marks.setdefault(mark_of(port.name), []).append(port)
    continued = [(port, carried(graph, port.name)[0]) for port in outputs] if inputs else []
    nameless = sum(mark_of(port.name) == NO_MARK for port in inputs)
    for port in inputs:
        found = _by_template(port, outputs, templates) or _by_mark(port, marks, alone=nameless == 1)
        shown = _by_data_flow(port, continued)
        if shown is not None and (found is None or found.present != shown.present):
            found = shown  # the graph decides where names say something else
        if found is None:
            unpaired.append(port)
        else:
            pairs.append(replace(found, kind=_kind_in_attention(port.name, graph) or found.kind))
    return pairs, unpaired


def _by_template(port: PortFact, outputs: Iterable[PortFact], templates: Mapping[str, str]) -> Pair | None:
    """The pair that a configuration names."""
    for kind in ("key", "value", "conv", "recurrent"):
        past, present = templates.get(f"past_{kind}_names"), templates.get(f"present_{kind}_names")
        layer = layer_in(past, port.name) if past and present else None
        if layer is not None and present is not None:
            name = present.replace("%d", str(layer))
            found = next((output for output in outputs if output.name == name), None)
            if found is not None:
                return Pair(port, found, layer, kind, "configuration")
    return None


def layer_in(template: str, name: str, blank: str = "%d") -> int | None:
    """The layer in a name that matches a template; None where it does not match."""
    before, found, after = template.partition(blank)
    if not found:
        return 0 if name == template else None
    digits = name[len(before) : len(name) - len(after)] if after else name[len(before) :]
    fits = name.startswith(before) and name.endswith(after) and digits.isdigit()
    return int(digits) if fits else None


def _by_mark(port: PortFact, marks: Mapping[Mark, Sequence[PortFact]], *, alone: bool) -> Pair | None:
    """The pair with equal marks, where exactly one output has the same type and rank."""
    mark = mark_of(port.name)
    fitting = [output for output in marks.get(mark, ()) if _same_type(port, output)]
    if len(fitting) != 1 or (mark == NO_MARK and not (alone and CACHED.search(port.name))):
        return None
    return Pair(port, fitting[0], mark.layer, mark.kind or "key", "name, type and shape")


def _by_data_flow(port: PortFact, continued: Sequence[tuple[PortFact, str | None]]) -> Pair | None:
    """The pair that the graph's data flow shows, if it is unique."""
    found = [output for output, past in continued if past == port.name and _same_type(port, output)]
    if len(found) != 1:
        return None
    mark = mark_of(port.name)
    return Pair(port, found[0], mark.layer, mark.kind or "key", "the graph")


def _kind_in_attention(name: str, graph: GraphFacts) -> Kind | None:
    """Whether an attention operator reads a tensor as past keys or as past values; None without one."""
    for node in graph.readers_of(name):
        places = attention_places(node)
        read = [place for place in places if node.inputs[place : place + 1] == (name,)]
        if read:
            return "key" if read == [min(places)] else "value"
    return None


def _same_type(past: PortFact, present: PortFact) -> bool:
    """Whether type and rank are equal, where known."""
    ranks = past.shape is None or present.shape is None or len(past.shape) == len(present.shape)
    return past.dtype == present.dtype and ranks


def shares_buffer(pair: Pair, graph: GraphFacts) -> bool:
    """Whether a step may write present into the buffer of past, which is longer than its valid rows.

    Only GroupQueryAttention supports it: it appends new rows, and its inputs give the number of valid ones. Other
    consumers of past, including its shape, would use the buffer's length. Keys and values must both qualify.
    """
    node = graph.producer_of(pair.present.name)
    if node is None or node.op_type != GQA or node.domain != CONTRIB:
        return False
    states = [
        (node.inputs[place : place + 1], node.outputs[made : made + 1])
        for place, made in attention_places(node).items()
    ]
    alone = all(_is_its_own(node, past, present, graph) for past, present in states)
    return alone and ((pair.past.name,), (pair.present.name,)) in states


def _is_its_own(node: NodeFact, past: tuple[str, ...], present: tuple[str, ...], graph: GraphFacts) -> bool:
    """Whether only this node reads a past input, once, and a present output is one of its outputs."""
    return (
        any(graph.input(name) is not None for name in past)
        and any(graph.output(name) is not None for name in present)
        and all(graph.readers_of(name) == [node] and node.inputs.count(name) == 1 for name in past)
    )


def window_of(pair: Pair, graph: GraphFacts) -> int | None:
    """The sliding window of a state's attention node, if it has one."""
    node = graph.producer_of(pair.present.name)
    size = node.attributes.get("local_window_size", -1) if node is not None and node.op_type == GQA else -1
    return size if isinstance(size, int) and size > 0 else None


def rolls(pair: Pair, graph: GraphFacts) -> bool:
    """Whether the attention of a state caches only its window, and moves rows itself."""
    node = graph.producer_of(pair.present.name)
    return node is not None and node.op_type == GQA and node.attributes.get("sliding_window_cache") == 1


def growing_axis(pair: Pair, graph: GraphFacts, batch: int | None) -> int | None:
    """The axis along which present is longer than past; None where they have one size, or it is unknown.

    `batch`: the batch axis, which does not grow. A Concat grows along its axis, attention along the third axis.
    Otherwise the declared sizes decide: a fixed axis, or one with the same name in past and present, does not grow; of
    several others, the axis named like a length grows.
    """
    past, present = pair.past.shape or (), pair.present.shape or ()
    node = _makes(graph, pair.present.name)
    if node is not None and node.op_type == "Concat" and pair.past.name in node.inputs:
        axis = node.attributes.get("axis")
        return axis % len(past) if isinstance(axis, int) and past else None
    if node is not None and attention_places(node) and node.op_type not in AT_LENGTH and len(past) == 4:
        return None if isinstance(past[ROWS_AXIS], int) else ROWS_AXIS
    free = [axis for axis, size in enumerate(past) if not isinstance(size, int) and axis != batch]
    if len(present) == len(past):
        free = [axis for axis in free if past[axis] is None or past[axis] != present[axis]]
    named = [axis for axis in free if isinstance(past[axis], str) and LENGTHS.search(str(past[axis]))]
    found = named if len(named) == 1 else free
    return found[0] if len(found) == 1 else None


def rows_axis(pair: Pair, graph: GraphFacts, batch: int | None, lengths: frozenset[int]) -> int | None:
    """The axis of keys or values with one entry per token, or None. `lengths`: of masks of fixed length."""
    shape = pair.past.shape or ()
    if shares_buffer(pair, graph):
        return ROWS_AXIS
    if (grown := growing_axis(pair, graph, batch)) is not None or appends(pair, graph):
        return grown
    if (written := cursor_axis(graph, pair.present.name, len(shape))) is not None:
        return written
    named = [axis for axis, size in enumerate(shape) if size in lengths]
    if len(named) == 1:
        return named[0]
    return ROWS_AXIS if len(shape) == ROWS_AXIS + 2 else None


def appends(pair: Pair, graph: GraphFacts) -> bool:
    """Whether the operator of present always makes it longer than past."""
    node = _makes(graph, pair.present.name)
    if node is None:
        return False
    attention = bool(attention_places(node)) and node.op_type not in AT_LENGTH
    return attention or (node.op_type == "Concat" and pair.past.name in node.inputs)


def _makes(graph: GraphFacts, tensor: str) -> NodeFact | None:
    """The node that computes a tensor, behind Identity nodes."""
    node = graph.producer_of(tensor)
    while node is not None and node.op_type == "Identity":
        node = graph.producer_of(node.inputs[0])
    return node
