"""Schema of onnxruntime-genai's genai_config.json, for the fields that are used. Defaults are those of its config.h."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from partita.errors import PackageError
from partita.package.folder import GET_AGAIN


def _unknown_to_zero(value: object) -> object:
    """Convert null and negative numbers, by which some exporters mean unknown, to 0."""
    return 0 if value is None or (type(value) is int and value < 0) else value


Count = Annotated[int, BeforeValidator(_unknown_to_zero), Field(ge=0)]
"""A size; 0: unknown."""


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)


class SlidingWindow(_Section):
    """A window that the runtime is to slide over the cache, the inputs, or both."""

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
    """The model. Sections other than decoder show that it is more than a text decoder."""

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
    """The parsed file. Raises PackageError, which names the field, where it is invalid."""
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
