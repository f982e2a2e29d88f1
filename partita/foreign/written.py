"""A contract that the user wrote down: what the inference cannot know, or got wrong. See docs/foreign.md.

max_length = 2048

[ports]
ids = "tokens"
out = "logits"

[[states]]
past = "cache_k_{layer}"
present = "new_k_{layer}"
kind = "key"
grows = 2
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from partita.capped import read_capped
from partita.errors import UsageError
from partita.foreign.states import Kind, layer_in
from partita.package.contract import Record, Role
from partita.package.folder import refuse_absent

LAYER = "{layer}"
LARGEST = 1 << 31
"""More than this no size of a tensor is."""


class WrittenFile(Record):
    """An ONNX file, and the steps that it is for."""

    file: str = Field(min_length=1)
    phase: Literal["any", "prefill", "decode"] = "any"


class WrittenStates(Record):
    """States of one kind. {layer} stands for a number, in both names."""

    past: str = Field(min_length=1)
    present: str = Field(min_length=1)
    kind: Kind
    grows: int | Literal[False] | None = None
    """The axis along which they grow; False: none. Not given: as it is inferred."""
    shape: tuple[int | str, ...] | None = None
    """Sizes, where the graph leaves them open; B stands for the batch and N for the most tokens."""
    window: int | None = Field(default=None, ge=1, le=LARGEST)
    in_place: bool | None = None
    """Past and present may be one buffer; not given: as it is inferred."""


class Written(Record):
    """All that can be written down; what is not given is inferred."""

    files: tuple[WrittenFile, ...] = ()
    """Relative to the folder."""
    ports: Mapping[str, Role] = {}
    """Role of inputs and outputs by name."""
    states: tuple[WrittenStates, ...] = ()
    max_length: int | None = Field(default=None, ge=1, le=1 << 24)
    batch_size: int | None = Field(default=None, ge=1, le=1 << 16)
    vocab_size: int | None = Field(default=None, ge=1, le=LARGEST)
    appends_chunks: bool | None = None

    def state(self, name: str) -> tuple[WrittenStates, int] | None:
        """The states that an input is one of, and its layer."""
        for states in self.states:
            layer = layer_in(states.past, name, LAYER)
            if layer is not None:
                return states, layer
        return None


NOTHING = Written()


def read_written(path: Path) -> Written:
    """Read a contract. Raises UsageError for what is no TOML or has fields that a contract has not, PackageError when
    the file may not be read.
    """
    if not path.is_file():
        raise UsageError(f"`contract={path}`: no such file")
    refuse_absent(path)
    try:
        raw = tomllib.loads(read_capped(path))
        # By way of JSON types can be strict and arrays be tuples: "3" is no number, and true is none either.
        return Written.model_validate_json(json.dumps(raw, default=str), strict=True)
    except RecursionError as error:
        raise UsageError(f"`contract={path}`: it is nested too deep for a contract") from error
    except ValidationError as error:
        first = error.errors()[0]
        raise UsageError(f"`contract={path}`: {_place(first['loc'])}: {first['msg']}") from error
    except ValueError as error:  # tomllib raises its own kind, and this one for numbers of thousands of digits
        raise UsageError(f"`contract={path}`: it is no TOML: {error}") from error


def _place(parts: Sequence[int | str]) -> str:
    """Where in the file: states.0.kind."""
    return ".".join(map(str, parts)) or "the file"
