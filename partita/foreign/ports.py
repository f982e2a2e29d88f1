"""Roles of a graph's inputs and outputs that are not states: by name, type, shape and consumers. Pure.

Adapters of a foreign graph: inputs with defaults without effect, and files with values for them.

Olive and onnxruntime-genai store LoRA weights as graph inputs with initializers, and one ONNX Runtime adapter file per
adapter. Old exporters list every weight as an input with a default; those have fixed sizes, and there is no file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from partita.errors import PackageError
from partita.foreign import GraphFacts, PortFact, Size
from partita.observations.text_format import listing
from partita.package.contract import AdapterInput, Role
from partita.package.folder import AdapterRecord
from partita.remedies import Remedy

INTEGERS = frozenset({"int64", "int32"})
FLAGS = INTEGERS | {"bool"}
FLOATS = frozenset({"float32", "float16", "bfloat16", "float64"})
GATHERS = frozenset({"Gather", "GatherBlockQuantized"})


@dataclass(frozen=True, slots=True)
class Sign:
    """The features of an input with a role."""

    role: Role
    name: re.Pattern[str]
    dtypes: frozenset[str]
    ranks: frozenset[int]
    shapes: tuple[tuple[int | None, ...], ...] = ()
    """Other possible shapes, with None for any size."""

    def matches(self, port: PortFact) -> bool:
        """Whether an input has the type, and the rank or a shape, of the role."""
        if port.dtype not in self.dtypes or port.shape is None:
            return port.dtype in self.dtypes
        return len(port.shape) in self.ranks or any(_has(port.shape, shape) for shape in self.shapes)

    @property
    def forms(self) -> str:
        """For messages: `int32 or int64 in 1 or 2 dimensions or as [3,?,?]`."""
        types, ranks = " or ".join(sorted(self.dtypes)), " or ".join(map(str, sorted(self.ranks)))
        shapes = (",".join("?" if size is None else str(size) for size in shape) for shape in self.shapes)
        return f"{types} in {ranks} dimensions{''.join(f' or as [{shape}]' for shape in shapes)}"


def _has(shape: Sequence[Size], wanted: Sequence[int | None]) -> bool:
    return len(shape) == len(wanted) and all(want in (None, size) for size, want in zip(shape, wanted, strict=True))


def _sign(
    role: Role, name: str, dtypes: frozenset[str], *ranks: int, shapes: tuple[tuple[int | None, ...], ...] = ()
) -> Sign:
    return Sign(role, re.compile(rf"(.*[./])?({name})$", re.IGNORECASE), dtypes, frozenset(ranks), shapes)


COLUMN = ((None, 1),)
"""One number per sequence, as some exporters declare it."""
PLACES = ((3, None, None),)
"""Time, row and column of an image, which are equal for text tokens."""
LENGTHS = "seq(uence)?_?len(gth)?"
INPUTS = (
    _sign("tokens", r"input_?ids|token_?ids|tokens|ids|input_tokens", INTEGERS, 1, 2),
    _sign("mask", r"attention_?mask|attn_?mask|mask|past_?mask", FLAGS, 2),
    _sign(
        "positions", r"pos(ition_?|_)ids|positions?|cache_position|input_?pos(itions?)?", INTEGERS, 1, 2, shapes=PLACES
    ),
    _sign("cache_branch", r"use_cache_branch|use_cache", frozenset({"bool"}), 0, 1),
    _sign("logits_count", r"(num_)?logits_to_keep", INTEGERS, 0, 1),
    _sign("total_length", rf"total_?{LENGTHS}", INTEGERS, 0, 1),
    _sign("last_index", r"seqlens_k", INTEGERS, 1, shapes=COLUMN),
    _sign("write_start", rf"past_?{LENGTHS}s?|past_len(gth)?|start_pos(ition)?", INTEGERS, 0, 1, shapes=COLUMN),
)
"""Inputs by the names that exporters use. An input of another type or rank does not match."""


@dataclass(frozen=True, slots=True)
class Meaning:
    """The role of a port, and the source of that information."""

    role: Role
    source: str


def fits(port: PortFact, role: Role) -> bool:
    """Whether an input can have a role by its type and rank."""
    sign = next((sign for sign in INPUTS if sign.role == role), None)
    if sign is None:
        return port.dtype in INTEGERS and (port.shape is None or len(port.shape) in (0, 1))
    return sign.matches(port)


def by_name(port: PortFact, roles: Mapping[str, Role]) -> Meaning | None:
    """The role of an input by its name, type and rank. `roles`: names given in a configuration."""
    if port.name in roles and fits(port, roles[port.name]):
        return Meaning(roles[port.name], "configuration")
    sign = next((sign for sign in INPUTS if sign.name.fullmatch(port.name) and sign.matches(port)), None)
    return None if sign is None else Meaning(sign.role, "name, type and shape")


def called_otherwise(port: PortFact) -> Sign | None:
    """The sign whose name an input has with another type or rank; None for other names."""
    if by_name(port, {}) is not None:
        return None
    return next((sign for sign in INPUTS if sign.name.fullmatch(port.name)), None)


def tokens_by_use(graph: GraphFacts, left: Mapping[str, PortFact]) -> str | None:
    """The only integer input [B, S] or [S] that indexes a weight table; None for none or several."""
    found = [
        name
        for name, port in left.items()
        if port.dtype in INTEGERS and port.shape is not None and len(port.shape) in (1, 2) and _looks_up(graph, name)
    ]
    return found[0] if len(found) == 1 else None


def _looks_up(graph: GraphFacts, name: str) -> bool:
    """Whether a tensor, possibly cast, is the index of a Gather."""
    for node in graph.readers_of(name):
        if node.op_type in GATHERS and name in node.inputs[1:2]:
            return True
        if node.op_type in ("Cast", "Identity") and any(_looks_up(graph, output) for output in node.outputs):
            return True
    return False


def logits_of(graph: GraphFacts, name: str | None, vocab_size: int, states: frozenset[str]) -> PortFact | None:
    """The output of logits [B, S, vocab] by `name`, the vocabulary, or as the only one not in `states`."""
    if name is not None:
        return graph.output(name)
    ranked = [
        port
        for port in graph.outputs
        if port.name not in states and port.dtype in FLOATS and port.shape is not None and len(port.shape) in (2, 3)
    ]
    called = [port for port in ranked if re.fullmatch(r"(.*[./_])?logits", port.name)]
    sized = [port for port in ranked if vocab_size and port.shape is not None and port.shape[-1] == vocab_size]
    whole = [port for port in ranked if port.shape is not None and len(port.shape) == 3]
    for found in (called, sized, whole):
        if len(found) == 1:
            return found[0]
    return None


SUFFIX = ".onnx_adapter"
NAMED_TWICE = Remedy("rename one of them")


def adapter_files(folder: Path, homes: Sequence[str]) -> tuple[str, ...]:
    """Adapter files in a folder and in its subfolders with graphs, relative to it."""
    places = dict.fromkeys((folder, *((folder / home) for home in homes)))
    return tuple(
        path.relative_to(folder).as_posix()
        for place in places
        for path in sorted(place.glob(f"*{SUFFIX}"))
        if path.is_file()
    )


def adapter_records(folder: Path, files: Sequence[str]) -> tuple[AdapterRecord, ...]:
    """One record per file, named after it. Raises PackageError for equal names."""
    found: dict[str, str] = {}
    for file in files:
        name = PurePosixPath(file).stem
        if name in found:
            raise PackageError(
                f"{folder}: {listing((found[name], file))} are adapters with the same name", remedy=NAMED_TWICE
            )
        found[name] = file
    return tuple(AdapterRecord(name=name, merged=False, file=file) for name, file in found.items())


def adapter_inputs(graph: GraphFacts, *, files: bool) -> tuple[AdapterInput, ...]:
    """Inputs for adapters: with `files` all that have defaults, else those with an empty or symbolic one."""
    return tuple(
        AdapterInput(
            name=port.name,
            shape=tuple(f"{port.name}_{axis}" if size is None else size for axis, size in enumerate(port.shape or ())),
            dtype=port.dtype,
        )
        for port in graph.defaults
        if files or port.name in graph.empty or any(not isinstance(size, int) for size in port.shape or ())
    )
