"""What ONNX Runtime's own log lines say about nodes: where they were placed, and which lines mention which node.

Knows the wording of ONNX Runtime's session log; what a line means for a fallback is up to the reasons.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

PREFIX = re.compile(r"^\[[VIWEF]:[^\]]*\] ?")
ALL_PLACED = re.compile(r"^\s*All nodes placed on \[(?P<provider>[^\]]+)\]\. Number of nodes: (?P<count>\d+)")
SOME_PLACED = re.compile(r"^\s*Node\(s\) placed on \[(?P<provider>[^\]]+)\]\. Number of nodes: \d+")
ONE_NODE = re.compile(r"^\s*\S+ \((?P<name>.*)\)\s*$")


def placements(lines: Iterable[str], plan: Collection[str]) -> dict[str, str]:
    """Provider per node from the verbose `Node placements` block; empty when the log has none.

    `All nodes placed on [X]` speaks for every node of `plan` only when the counts agree.
    """
    placed: dict[str, str] = {}
    current: str | None = None
    for line in lines:
        text = PREFIX.sub("", line)
        if whole := ALL_PLACED.match(text):
            if int(whole["count"]) == len(plan):
                placed.update(dict.fromkeys(plan, whole["provider"]))
            current = None
        elif some := SOME_PLACED.match(text):
            current = some["provider"]
        elif current and (node := ONE_NODE.match(text)):
            placed[node["name"]] = current
        else:
            current = None
    return placed


def lines_by_node(lines: Iterable[str], names: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Log lines that mention a node as a word of its own, per node."""
    wanted = frozenset(name for name in names if name)
    found: dict[str, list[str]] = {}
    for line in lines:
        words = PREFIX.sub("", line).split()
        for name in wanted.intersection(words).union(wanted.intersection(word.strip("'\",.;()") for word in words)):
            found.setdefault(name, []).append(line)
    return {name: tuple(about) for name, about in found.items()}
