"""genai_config.json of onnxruntime-genai, as far as it is read: checked as a whole before anything is made of it.

Fields that are not read are not looked at. What is left out has the default of onnxruntime-genai's own config.h.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from partita.errors import PackageError
from partita.package.folder import GET_AGAIN


def _known(value: object) -> object:
    """Sizes that are not known are written as null or a negative number by some exporters."""
    return 0 if value is None or (type(value) is int and value < 0) else value


Count = Annotated[int, BeforeValidator(_known), Field(ge=0)]
"""A size; 0: not known."""


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)


class SlidingWindow(_Section):
    """A window that the runtime is to slide over cache, inputs, or both."""

    window_size: Count = 0
    slide_key_value_cache: bool = True
    slide_inputs: bool = True
    layers: list[int] | None = None


class Decoder(_Section):
    """The graph of the decoder."""

    filename: str = ""
    head_size: Count = 0
    num_hidden_layers: Count = 0
    num_attention_heads: Count = 0
    num_key_value_heads: Count = 0
    inputs: dict[str, str] = {}
    outputs: dict[str, str] = {}
    sliding_window: SlidingWindow | None = None
    pipeline: list[Any] | dict[str, Any] | None = None


class Model(_Section):
    """What it is a model of. Sections for anything but text show that it is more than a decoder."""

    type: str = ""
    context_length: Count = 0
    vocab_size: Count = 0
    decoder: Decoder
    encoder: dict[str, Any] | None = None
    vision: dict[str, Any] | None = None
    speech: dict[str, Any] | None = None
    embedding: dict[str, Any] | None = None


class Search(_Section):
    """Defaults of a generation."""

    max_length: Count = 0


class GenaiConfig(_Section):
    """The file."""

    model: Model
    search: Search = Search()


def read_genai(path: Path, raw: dict[str, Any]) -> GenaiConfig:
    """What was read of the file. Raises PackageError, which names the field, where something is not what it must be."""
    try:
        return GenaiConfig.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        if first["type"] == "missing":
            said = f"has no section {first['loc'][-1]!r}, so it does not describe a decoder"
        else:
            said = f"damaged, {place}: {first['msg']}"
        raise PackageError(f"{path}: {said}", remedy=GET_AGAIN) from error
