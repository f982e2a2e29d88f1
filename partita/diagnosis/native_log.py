"""Parses ONNX Runtime's session log: the lines about each node, and inserted copies.

The patterns of providers interpret a line for a fallback.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from partita.observations.log_pattern import LogPattern

PREFIX = re.compile(r"^\[[VIWEF]:[^\]]*\] ?")
MEMCPY_ADDED = re.compile(r"Add (?P<op>MemcpyFromHost|MemcpyToHost) (after|before) (?P<tensor>.+) for \S+\s*$")
MEMCPY_NAME = re.compile(r"Memcpy(_token_(?P<number>\d+))?")
AT_INFO = re.compile(r"^\[I:")


@dataclass(frozen=True, slots=True)
class MemcpyLine:
    """A log line about an inserted copy."""

    op_type: str
    tensor: str


def is_at_info(lines: Iterable[str]) -> bool:
    """Whether the log includes INFO, so that a missing line was not written."""
    return any(AT_INFO.match(line) for line in lines)


def lines_by_node(lines: Iterable[str], names: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Log lines that contain a node's name as a separate word, by node."""
    wanted = frozenset(name for name in names if name)
    spaced = [name for name in wanted if len(name.split()) > 1]  # a word has no blanks in it
    found: dict[str, list[str]] = {}
    for line in lines:
        text = PREFIX.sub("", line)
        words = text.split()
        about = wanted.intersection(words).union(wanted.intersection(word.strip("'\",.;:()[]") for word in words))
        for name in about.union(name for name in spaced if name in text):
            found.setdefault(name, []).append(line)
    return {name: tuple(each) for name, each in found.items()}


def lines_about_the_graph(lines: Iterable[str], patterns: Iterable[LogPattern]) -> tuple[str, ...]:
    """Log lines that match a pattern without a node name."""
    expressions = [re.compile(pattern.pattern) for pattern in patterns if "(?P<node>" not in pattern.pattern]
    return tuple(line for line in lines if any(each.search(line) for each in expressions)) if expressions else ()


def memcpy_lines(lines: Iterable[str], order: Sequence[str], op_types: Mapping[str, str]) -> dict[str, MemcpyLine]:
    """The log line about each Memcpy node of `order`. `op_types`: of executed nodes and of file nodes.

    A line does not name its node, but nodes are numbered in the order of insertion: Memcpy, Memcpy_token_0 and so on.
    Empty when the numbers of lines and nodes differ, e.g. with copies inside control flow.
    """
    added = [match for line in lines if (match := MEMCPY_ADDED.search(line))]
    named = [
        (match["number"], name)
        for name in inserted_copies(order, op_types)
        if (match := MEMCPY_NAME.fullmatch(name)) is not None
    ]
    if len(added) != len(named):
        return {}
    named.sort(key=lambda entry: -1 if entry[0] is None else int(entry[0]))
    joined = {name: MemcpyLine(line["op"], line["tensor"]) for (_, name), line in zip(named, added, strict=True)}
    fits = all(op_types.get(name, line.op_type) == line.op_type for name, line in joined.items())
    return joined if fits else {}


def inserted_copies(order: Iterable[str], op_types: Mapping[str, str | None]) -> tuple[str, ...]:
    """Nodes of the order with the name of a copy, unless their known operator is another one."""
    return tuple(
        name for name in order if MEMCPY_NAME.fullmatch(name) and (op_types.get(name) or "Memcpy").startswith("Memcpy")
    )
