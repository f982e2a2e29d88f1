"""Inputs and outputs of a foreign graph: roles, cached states, and adapters. Pure.

A role follows from name, type, shape and consumers. A past input and a present output are a state when their names are
equal without the words for past and present: the numbers (layers) and the kind (key or value) remain. So
past_key_values.3.key matches present.3.key, and cache_k_3 matches new_cache_k_3.

Olive and onnxruntime-genai store LoRA weights as graph inputs with initializers, and one ONNX Runtime adapter file per
adapter. Old exporters list every weight as an input with a default; those have fixed sizes, and there is no file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from partita.foreign import GraphFacts, Size, integer
from partita.package.contract import AdapterInput, Dimension, Role

if TYPE_CHECKING:
    import onnx

    from partita.runtime.place.onnx_model import ModelPort

INTEGERS = frozenset({"int64", "int32"})
FLAGS = INTEGERS | {"bool"}
FLOATS = frozenset({"float32", "float16", "bfloat16", "float64"})
ADAPTER_SUFFIX = ".onnx_adapter"
GQA, ROTARY = "GroupQueryAttention", "RotaryEmbedding"
GQA_PASTS, GQA_PRESENTS = slice(3, 5), slice(1, 3)
"""Past keys and values among the operator's inputs, and the outputs that continue them."""
ROWS_AXIS = 2
"""The token axis of keys and values [B, heads, T, head size] in attention."""
WRITING = {"Concat": 0, "ScatterElements": 0, "TensorScatter": -2}
"""Operators that append rows or overwrite them along an axis -> default axis."""
SAME_VALUES = frozenset({"Identity", "Cast"})
COMPARED = frozenset({"Greater", "GreaterOrEqual"})


@dataclass(frozen=True, slots=True)
class Sign:
    """The features of an input with a role."""

    role: Role
    names: str
    """A regular expression of its names, without prefixes."""
    dtypes: frozenset[str]
    shapes: tuple[tuple[int | None, ...], ...]
    """Possible shapes, with None for any size."""

    def matches(self, port: ModelPort) -> bool:
        """Whether an input has the type of the role, and one of its shapes where its rank is known."""
        sizes = port.shape
        fits = sizes is None or any(
            len(shape) == len(sizes) and all(wanted in (None, size) for wanted, size in zip(shape, sizes, strict=True))
            for shape in self.shapes
        )
        return port.dtype in self.dtypes and fits


ROW, ROWS = (None,), (None, None)
COLUMN = (None, 1)
"""One number per sequence, as some exporters declare it."""
PLACES = (3, None, None)
"""Time, row and column of an image, which are equal for text tokens."""
NUMBER = ((), ROW)
LENGTH = "seq(uence)?_?len(gth)?"
INPUTS = (
    Sign("tokens", r"input_?ids|token_?ids|tokens|ids|input_tokens", INTEGERS, (ROW, ROWS)),
    Sign("mask", r"attention_?mask|attn_?mask|mask|past_?mask", FLAGS, (ROWS,)),
    Sign(
        "positions",
        r"pos(ition_?|_)ids|positions?|cache_position|input_?pos(itions?)?",
        INTEGERS,
        (ROW, ROWS, PLACES),
    ),
    Sign("cache_branch", r"use_cache_branch|use_cache", frozenset({"bool"}), NUMBER),
    Sign("logits_count", r"(num_)?logits_to_keep", INTEGERS, NUMBER),
    Sign("total_length", rf"total_?{LENGTH}", INTEGERS, NUMBER),
    Sign("last_index", r"seqlens_k", INTEGERS, (ROW, COLUMN)),
    Sign("write_start", rf"past_?{LENGTH}s?|past_len(gth)?|start_pos(ition)?", INTEGERS, (*NUMBER, COLUMN)),
)
"""Inputs by the names that exporters use. An input of another type or shape does not match."""
OTHER_INPUT = Sign("valid_length", "", INTEGERS, NUMBER)
"""The type and shapes of the roles that no exporter has a name for."""

Kind = Literal["key", "value", "conv", "recurrent"]
KINDS: Mapping[str, Kind] = {
    "key": "key", "keys": "key", "k": "key",
    "value": "value", "values": "value", "v": "value",
    "conv": "conv", "convolution": "conv",
    "recurrent": "recurrent", "ssm": "recurrent", "rnn": "recurrent", "temporal": "recurrent",
}  # fmt: skip
PARTS = re.compile(r"\d+|[a-zA-Z]+")
CONTAINERS = re.compile(
    r"past_?key_?values?|present_?key_?values?|key_?values|kv_?cache|past_?kv|present_?kv", re.IGNORECASE
)
"""Words for the whole cache; the kind of a state follows the number."""
DIRECTIONS = frozenset(
    (
        *("past", "present", "in", "out", "input", "output", "new", "old", "updated", "prev", "next", "last"),
        *("cache", "cached", "state", "states", "model", "decoder", "transformer", "h"),
        *("self", "attn", "attention", "layer", "layers", "block", "blocks"),
    )
)
LENGTHS = re.compile(r"past|seq|len|total|ctx|context|kv_?length|cache|time|step", re.IGNORECASE)


def fits(port: ModelPort, role: Role) -> bool:
    """Whether an input can have a role by its type and shape."""
    return next((sign for sign in INPUTS if sign.role == role), OTHER_INPUT).matches(port)


def by_name(port: ModelPort) -> Role | None:
    """The role of an input by its name, type and shape."""
    called = (sign for sign in INPUTS if re.fullmatch(rf"(.*[./])?({sign.names})", port.name, re.IGNORECASE))
    return next((sign.role for sign in called if sign.matches(port)), None)


def logits_of(graph: GraphFacts, name: str | None, vocab_size: int, states: frozenset[str]) -> ModelPort | None:
    """The output of logits [B, S, vocab] by `name`, the vocabulary, or as the only one not in `states`."""
    if name is not None:
        return graph.output(name)
    ranked = [
        (port, port.shape)
        for port in graph.outputs
        if port.name not in states and port.dtype in FLOATS and port.shape is not None and len(port.shape) in (2, 3)
    ]
    called = [port for port, _ in ranked if re.fullmatch(r"(.*[./_])?logits", port.name)]
    sized = [port for port, shape in ranked if vocab_size and shape[-1] == vocab_size]
    whole = [port for port, shape in ranked if len(shape) == 3]
    return next((found[0] for found in (called, sized, whole) if len(found) == 1), None)


def named_sizes(port: ModelPort) -> tuple[Dimension, ...]:
    """The shape of a port, with a name for each unnamed size."""
    return tuple(f"{port.name}_{axis}" if size is None else size for axis, size in enumerate(port.shape or ()))


@dataclass(frozen=True, slots=True)
class Pair:
    """An input and the output with its next value."""

    past: ModelPort
    present: ModelPort
    layer: int
    kind: Kind
    source: str

    @property
    def shape(self) -> tuple[Size, ...]:
        """The declared sizes of the input; empty where its rank is unknown."""
        return self.past.shape or ()


def pair_up(
    inputs: Sequence[ModelPort], outputs: Sequence[ModelPort], templates: Mapping[str, str]
) -> tuple[list[Pair], list[ModelPort]]:
    """Pairs of past and present, and inputs without one. `templates`: kind and direction -> name with %d."""
    found = [(port, _by_template(port, outputs, templates) or _by_mark(port, inputs, outputs)) for port in inputs]
    return [pair for _, pair in found if pair is not None], [port for port, pair in found if pair is None]


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


def _by_mark(port: ModelPort, inputs: Sequence[ModelPort], outputs: Sequence[ModelPort]) -> Pair | None:
    """The pair of the only input and output with the same mark, type and rank; of keys by default."""
    numbers, words = mark = _mark(port.name)
    pasts, presents = (
        [each for each in ports if _mark(each.name) == mark and _same_type(each, port)] for ports in (inputs, outputs)
    )
    if len(pasts) != 1 or len(presents) != 1:
        return None
    kind: Kind = next((KINDS[word] for word in words if word in KINDS), "key")
    return Pair(port, presents[0], numbers[-1] if numbers else 0, kind, "name, type and shape")


def _mark(name: str) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The numbers of a name, and its words other than past or present."""
    parts = [part.lower() for part in PARTS.findall(CONTAINERS.sub(" ", name, count=1))]
    numbers = tuple(int(part) for part in parts if part.isdigit())
    return numbers, tuple(part for part in parts if not part.isdigit() and part not in DIRECTIONS)


def _same_type(past: ModelPort, present: ModelPort) -> bool:
    """Whether type and rank are equal, where known."""
    ranks = past.shape is None or present.shape is None or len(past.shape) == len(present.shape)
    return past.dtype == present.dtype and ranks


def layer_in(template: str, name: str, blank: str = "%d") -> int | None:
    """The layer in a name that matches a template; None where it does not match."""
    pattern = re.escape(template).replace(re.escape(blank), "([0-9]+)", 1)
    found = re.fullmatch(pattern, name)
    return None if found is None else int(found[1]) if found.groups() else 0


def shares_buffer(pair: Pair, graph: GraphFacts) -> bool:
    """Whether a step may write present into the buffer of past, which is longer than its valid rows.

    Only GroupQueryAttention supports it: it appends new rows, and its inputs give the number of valid ones. Other
    consumers of past, including its shape, would use the buffer's length. Keys and values must both qualify.
    """
    node = _attention_of(pair, graph)
    if node is None:
        return False
    pasts, presents = node.input[GQA_PASTS], node.output[GQA_PRESENTS]
    alone = all(len(graph.readers.get(name, ())) == 1 and list(node.input).count(name) == 1 for name in pasts)
    ports = all(map(graph.input, pasts)) and all(map(graph.output, presents))
    return alone and ports and (pair.past.name, pair.present.name) in zip(pasts, presents, strict=False)


def _attention_of(pair: Pair, graph: GraphFacts) -> onnx.NodeProto | None:
    """The GroupQueryAttention that computes present."""
    node = graph.producers.get(pair.present.name)
    return node if node is not None and (node.domain, node.op_type) == ("com.microsoft", GQA) else None


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


def written_axis(pair: Pair, graph: GraphFacts) -> tuple[int | None, bool]:
    """The axis along which a node extends past (True) or overwrites rows of it (False); None where no node shows it.

    The node is found from present, through nodes that keep the values.
    """
    axes = list(range(len(pair.present.shape or ())))
    for node in _upstream(pair.present.name, graph):
        if node.op_type in WRITING:
            sources, axis = {_origin(each, graph) for each in node.input}, integer(node, "axis", WRITING[node.op_type])
            shown = pair.past.name in sources and -len(axes) <= axis < len(axes)
            return axes[axis] if shown else None, node.op_type == "Concat"
        if node.op_type == "Transpose":
            order = next((list(each.ints) for each in node.attribute if each.name == "perm"), [*range(len(axes))][::-1])
            if sorted(order) != sorted(axes):
                break
            axes = [axes[order.index(axis)] for axis in range(len(axes))]
        elif node.op_type not in SAME_VALUES:
            break
    return None, False


def _origin(name: str, graph: GraphFacts) -> str:
    """The tensor that others have the values of, in another order or type."""
    for node in _upstream(name, graph):
        if node.op_type not in SAME_VALUES | {"Transpose"}:
            break
        name = node.input[0]
    return name


def _upstream(name: str, graph: GraphFacts) -> Iterator[onnx.NodeProto]:
    """The node that computes a tensor, then that of its first input, and so on; a damaged graph may have cycles."""
    seen: set[str] = set()
    while (node := graph.producers.get(name)) is not None and node.input and name not in seen:
        seen.add(name)
        yield node
        name = node.input[0]


def growing_axis(pair: Pair, graph: GraphFacts, batch: int | None) -> int | None:
    """The axis along which present is longer than past; None where they have one size, or it is unknown.

    `batch`: the batch axis, which does not grow. Where no Concat shows the axis, a fixed one, or one with the same name
    in past and present, does not grow. Of several others, the axis named like a length grows, else the token axis of
    keys and values.
    """
    past, present = pair.shape, pair.present.shape or ()
    shown, extends = written_axis(pair, graph)
    if extends and shown is not None:
        return shown
    free = [axis for axis, size in enumerate(past) if not isinstance(size, int) and axis != batch]
    if len(present) == len(past):
        free = [axis for axis in free if past[axis] is None or past[axis] != present[axis]]
    named = [axis for axis in free if isinstance(past[axis], str) and LENGTHS.search(str(past[axis]))]
    found = named if len(named) == 1 else free
    if len(found) > 1 and len(past) == ROWS_AXIS + 2 and pair.kind in ("key", "value"):
        found = [ROWS_AXIS] if ROWS_AXIS in found else []
    return found[0] if len(found) == 1 else None


def rows_axis(pair: Pair, graph: GraphFacts, batch: int | None, lengths: frozenset[Size]) -> int | None:
    """The axis of keys or values with one entry per token, or None. `lengths`: of masks."""
    if shares_buffer(pair, graph):
        return ROWS_AXIS
    if (grown := growing_axis(pair, graph, batch)) is not None:
        return grown
    if (shown := written_axis(pair, graph)[0]) is not None:
        return shown
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


def adapter_files(folder: Path, graph: GraphFacts) -> tuple[str, ...]:
    """Adapter files next to a graph, relative to the folder."""
    found = sorted((folder / graph.file).parent.glob(f"*{ADAPTER_SUFFIX}"))
    return tuple(path.relative_to(folder).as_posix() for path in found if path.is_file())


def adapter_inputs(graph: GraphFacts, *, files: bool) -> tuple[AdapterInput, ...]:
    """Inputs for adapters: with `files` all floats with defaults, else those with an empty or symbolic one."""
    empty = {tensor.name for tensor in graph.model.proto.graph.initializer if 0 in tensor.dims}
    return tuple(
        AdapterInput(name=port.name, shape=named_sizes(port), dtype=port.dtype)
        for port in graph.defaults
        if port.dtype in ("float32", "float16")
        and (files or port.name in empty or any(not isinstance(size, int) for size in port.shape or ()))
    )
