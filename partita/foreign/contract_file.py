"""A contract file of the user, for facts that cannot be inferred. See docs/foreign.md.

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

from partita.errors import UsageError
from partita.foreign.states import Kind, layer_in
from partita.package.contract import Record, Role
from partita.package.folder import refuse_absent
from partita.untrusted_files import read_capped

LAYER = "{layer}"
LARGEST = 1 << 31
"""Maximum size of a tensor's axis."""


class WrittenFile(Record):
    """An ONNX file, and its phase."""

    file: str = Field(min_length=1)
    phase: Literal["any", "prefill", "decode"] = "any"


class WrittenStates(Record):
    """States of one kind. {layer} stands for a number, in both names."""

    past: str = Field(min_length=1)
    present: str = Field(min_length=1)
    kind: Kind
    grows: int | Literal[False] | None = None
    """The growing axis; False: none. Default: inferred."""
    shape: tuple[int | str, ...] | None = None
    """Sizes, where the graph leaves them open; B is the batch size and N the maximum tokens."""
    window: int | None = Field(default=None, ge=1, le=LARGEST)
    in_place: bool | None = None
    """Past and present may share a buffer; default: inferred."""


class Written(Record):
    """A contract file; missing fields are inferred."""

    files: tuple[WrittenFile, ...] = ()
    """Relative to the folder."""
    ports: Mapping[str, Role] = {}
    """Name of an input or output -> role."""
    states: tuple[WrittenStates, ...] = ()
    max_length: int | None = Field(default=None, ge=1, le=1 << 24)
    batch_size: int | None = Field(default=None, ge=1, le=1 << 16)
    vocab_size: int | None = Field(default=None, ge=1, le=LARGEST)
    appends_chunks: bool | None = None

    def state(self, name: str) -> tuple[WrittenStates, int] | None:
        """The states that an input belongs to, and its layer."""
        for states in self.states:
            layer = layer_in(states.past, name, LAYER)
            if layer is not None:
                return states, layer
        return None


NOTHING = Written()


def read_written(path: Path) -> Written:
    """Read a contract file.

    Raises UsageError for invalid TOML or unknown fields, PackageError for an unreadable file.
    """
    if not path.is_file():
        raise UsageError(f"`contract={path}`: no such file")
    refuse_absent(path)
    try:
        raw = tomllib.loads(read_capped(path))
        # Through JSON, so that types are strict and arrays become tuples.
        return Written.model_validate_json(json.dumps(raw, default=str), strict=True)
    except RecursionError as error:
        raise UsageError(f"`contract={path}`: nested too deeply") from error
    except ValidationError as error:
        first = error.errors()[0]
        raise UsageError(f"`contract={path}`: {_place(first['loc'])}: {first['msg']}") from error
    except ValueError as error:  # tomllib raises ValueError for numbers with thousands of digits
        raise UsageError(f"`contract={path}`: not TOML: {error}") from error


def _place(parts: Sequence[int | str]) -> str:
    """The location in the file: states.0.kind."""
    return ".".join(map(str, parts)) or "the file"
