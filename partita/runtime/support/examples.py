"""Examples of operators, one per form: what is there, of which type and shape, with which attributes.

`examples.jsonl` is made from the backend tests of the onnx package (tools/examples.py); `recipes.jsonl` is written by
hand for operators that have no test there, ONNX Runtime's own among them. Data alone: what a form needs to be legal,
never who takes it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

FILES = ("examples.jsonl", "recipes.jsonl")


@dataclass(frozen=True, slots=True)
class Port:
    """One input of an example."""

    kind: str
    """As schemas spell it."""
    shape: tuple[int, ...]
    """Of the tensor, or of the tensors in it."""
    values: tuple[Any, ...] | None
    """Its elements, where there are few: shapes, axes and scales have to make sense."""

    @property
    def is_tensor(self) -> bool:
        """Not a sequence, an optional or a map."""
        return self.kind.startswith("tensor(")


@dataclass(frozen=True, slots=True)
class Example:
    """One form of one operator."""

    domain: str
    name: str
    since: int
    """The version of the operator that it is an example of."""
    inputs: tuple[Port | None, ...]
    """None for one that is left out."""
    outputs: tuple[bool, ...]
    attributes: Mapping[str, Any]
    node: str
    """The whole node in base64, where it has bodies or attributes that JSON has no words for; else empty."""


@cache
def examples() -> Mapping[tuple[str, str], tuple[Example, ...]]:
    """Every example, by domain and name of the operator, those of the newest version first."""
    found: dict[tuple[str, str], list[Example]] = {}
    for name in FILES:
        for line in files(__package__).joinpath(name).read_text(encoding="utf-8").splitlines():
            if line and not line.startswith("#"):
                example = read(json.loads(line))
                found.setdefault((example.domain, example.name), []).append(example)
    return {key: tuple(sorted(listed, key=lambda entry: -entry.since)) for key, listed in found.items()}


def read(raw: Mapping[str, Any]) -> Example:
    """An example from a line of the file."""
    return Example(
        domain=raw["domain"],
        name=raw["op"],
        since=raw["since"],
        inputs=tuple(None if port is None else _read_port(port) for port in raw["inputs"]),
        outputs=tuple(map(bool, raw["outputs"])),
        attributes=raw.get("attributes", {}),
        node=raw.get("node", ""),
    )


def _read_port(raw: Mapping[str, Any]) -> Port:
    values = raw.get("values")
    return Port(raw["type"], tuple(raw["shape"]), None if values is None else tuple(values))
