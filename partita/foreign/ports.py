"""Roles of a graph's inputs and outputs that are not states: by name, type, shape and consumers. Pure.

Adapters of a foreign graph: inputs with defaults without effect, and files with values for them.

Olive and onnxruntime-genai store LoRA weights as graph inputs with initializers, and one ONNX Runtime adapter file per
adapter. Old exporters list every weight as an input with a default; those have fixed sizes, and there is no file.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from partita.foreign import GraphFacts, Size
from partita.package.contract import AdapterInput, Dimension, Role

if TYPE_CHECKING:
    from partita.runtime.place.onnx_model import ModelPort

INTEGERS = frozenset({"int64", "int32"})
FLAGS = INTEGERS | {"bool"}
FLOATS = frozenset({"float32", "float16", "bfloat16", "float64"})
GATHERS = frozenset({"Gather", "GatherBlockQuantized"})
ADAPTER_SUFFIX = ".onnx_adapter"


@dataclass(frozen=True, slots=True)
class Sign:
    """The features of an input with a role."""

    role: Role
    names: str
    """A regular expression of its names, without prefixes."""
    dtypes: frozenset[str]
    ranks: tuple[int, ...]
    shape: tuple[Size, ...] = ()
    """Another possible shape, with None for any size."""

    def matches(self, port: ModelPort) -> bool:
        """Whether an input has the type, and the rank or the shape, of the role."""
        if port.dtype not in self.dtypes or port.shape is None:
            return port.dtype in self.dtypes
        sizes = zip(self.shape, port.shape, strict=False)
        alike = len(port.shape) == len(self.shape) > 0 and all(wanted in (None, size) for wanted, size in sizes)
        return alike or len(port.shape) in self.ranks


COLUMN = (None, 1)
"""One number per sequence, as some exporters declare it."""
PLACES = (3, None, None)
"""Time, row and column of an image, which are equal for text tokens."""
LENGTHS = "seq(uence)?_?len(gth)?"
INPUTS = (
    Sign("tokens", r"input_?ids|token_?ids|tokens|ids|input_tokens", INTEGERS, (1, 2)),
    Sign("mask", r"attention_?mask|attn_?mask|mask|past_?mask", FLAGS, (2,)),
    Sign("positions", r"pos(ition_?|_)ids|positions?|cache_position|input_?pos(itions?)?", INTEGERS, (1, 2), PLACES),
    Sign("cache_branch", r"use_cache_branch|use_cache", frozenset({"bool"}), (0, 1)),
    Sign("logits_count", r"(num_)?logits_to_keep", INTEGERS, (0, 1)),
    Sign("total_length", rf"total_?{LENGTHS}", INTEGERS, (0, 1)),
    Sign("last_index", r"seqlens_k", INTEGERS, (1,), COLUMN),
    Sign("write_start", rf"past_?{LENGTHS}s?|past_len(gth)?|start_pos(ition)?", INTEGERS, (0, 1), COLUMN),
)
"""Inputs by the names that exporters use. An input of another type or rank does not match."""


def fits(port: ModelPort, role: Role) -> bool:
    """Whether an input can have a role by its type and rank."""
    sign = next((sign for sign in INPUTS if sign.role == role), None)
    if sign is None:
        return port.dtype in INTEGERS and (port.shape is None or len(port.shape) in (0, 1))
    return sign.matches(port)


def by_name(port: ModelPort) -> Role | None:
    """The role of an input by its name, type and rank."""
    called = (sign for sign in INPUTS if re.fullmatch(rf"(.*[./])?({sign.names})", port.name, re.IGNORECASE))
    return next((sign.role for sign in called if sign.matches(port)), None)


def tokens_by_use(graph: GraphFacts, ports: Sequence[ModelPort]) -> str | None:
    """The only integer input [B, S] or [S] that indexes a weight table; None for none or several."""
    found = [
        port.name
        for port in ports
        if port.dtype in INTEGERS and len(port.shape or ()) in (1, 2) and _looks_up(graph, port.name)
    ]
    return found[0] if len(found) == 1 else None


def _looks_up(graph: GraphFacts, name: str) -> bool:
    """Whether a tensor, possibly cast, is the index of a Gather."""
    tensors = [name]
    for tensor in tensors:  # grows during the loop
        for node in graph.readers.get(tensor, ()):
            if node.op_type in GATHERS and tensor in node.input[1:2]:
                return True
            if node.op_type in ("Cast", "Identity"):
                tensors += [output for output in node.output if output not in tensors]
    return False


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
