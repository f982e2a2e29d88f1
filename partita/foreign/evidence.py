"""Facts about a model from config.json or genai_config.json, which must not contradict the graph, and from the user.

Defaults of onnxruntime-genai's genai_config.json are those of its config.h. A value of another type counts as unknown.
A contract file of the user has facts that cannot be inferred; docs/foreign.md has an example.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from partita.errors import PackageError, UsageError
from partita.foreign.ports import Kind, layer_in
from partita.foreign_paths import CONFIG, GENAI_CONFIG
from partita.package.contract import CONTEXT_LENGTHS, Phase, Record, Role
from partita.package.folder import GET_AGAIN, refuse_absent
from partita.remedies import DECODERS_ONLY, Remedy
from partita.untrusted_files import read_capped, read_json_value

HEADS = ("decoder_attention_heads", "num_attention_heads", "n_head", "n_heads", "num_heads")
"""Decoder keys first: encoder-decoder configurations use the plain name for the encoder."""
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
HIDDEN = ("hidden_size", "n_embd", "d_model")
WINDOWS = ("sliding_window", "attention_chunk_size", "window_size", "attention_window_size")
OTHER_COMPONENTS = ("encoder", "vision", "speech", "embedding")
"""Sections of genai_config.json for parts other than a text decoder."""
WITHOUT_SLIDING = Remedy("export the model without it, or run the folder with onnxruntime-genai")


@dataclass(frozen=True, slots=True)
class Evidence:
    """The facts of a configuration. 0 and empty: unknown."""

    source: str = ""
    """The file."""
    model_type: str = ""
    architecture: str = ""
    kv_heads: int = 0
    head_size: int = 0
    vocab_size: int = 0
    max_length: int = 0
    """Maximum tokens."""
    usual_length: int = 0
    """Default maximum tokens."""
    window: int = 0
    rope_length: int = 0
    """Maximum tokens for the first of two sets of rotary frequencies (LongRoPE)."""
    file: str = ""
    """The ONNX file that it names."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Role, or kind of state with its direction -> name of inputs or outputs; %d stands for the layer."""


def read_json(path: Path, remedy: Remedy = GET_AGAIN) -> dict[str, Any]:
    """The JSON object in a file. Raises PackageError when it is damaged or too large."""
    refuse_absent(path)
    try:
        raw = read_json_value(path)
    except (ValueError, OSError) as error:
        raise PackageError(f"{path}: damaged, not JSON ({error})", remedy=remedy) from error
    if not isinstance(raw, dict):
        raise PackageError(f"{path}: damaged, not a JSON object", remedy=remedy)
    return raw


def read_evidence(folder: Path) -> Evidence:
    """The facts of a configuration, genai_config.json first. Raises PackageError, also for other models."""
    raw = read_json(folder / CONFIG) if (folder / CONFIG).is_file() else None
    if (folder / GENAI_CONFIG).is_file():
        found = genai_evidence(folder / GENAI_CONFIG, read_json(folder / GENAI_CONFIG))
        return found if raw is None else replace(found, rope_length=_rope_length(raw))
    return Evidence() if raw is None else config_evidence(folder / CONFIG, raw)


def config_evidence(path: Path, raw: Mapping[str, Any]) -> Evidence:
    """The facts of transformers' config.json. Raises PackageError for an encoder-decoder."""
    listed = raw.get("architectures")
    architecture = str(listed[0]) if isinstance(listed, list) and listed else ""
    if raw.get("is_encoder_decoder") is True:
        raise PackageError(
            f"{path}: {architecture or raw.get('model_type')} is an encoder-decoder (is_encoder_decoder), "
            "which Partita does not support",
            remedy=DECODERS_ONLY,
        )
    inner = raw.get("text_config")
    text: Mapping[str, Any] = {**raw, **inner} if isinstance(inner, dict) else raw
    heads, hidden = _first(text, HEADS), _first(text, HIDDEN)
    head_size = _positive_integer(text.get("head_dim")) or (hidden // heads if heads and hidden % heads == 0 else 0)
    return Evidence(
        source=path.name,
        model_type=str(raw.get("model_type", "")),
        architecture=architecture,
        kv_heads=1 if text.get("multi_query") is True else _first(text, KV_HEADS) or heads,
        head_size=head_size,
        vocab_size=_positive_integer(text.get("vocab_size")),
        max_length=_first(text, CONTEXT_LENGTHS),
        window=_window(text),
        rope_length=_rope_length(text),
    )


def _rope_length(text: Mapping[str, Any]) -> int:
    """The maximum tokens for the first set of rotary frequencies; 0 where there is one set."""
    rope = _section(text, "rope_parameters") or _section(text, "rope_scaling")
    has_two_sets = rope.get("short_factor") != rope.get("long_factor")
    if rope.get("rope_type", rope.get("type")) not in ("longrope", "su") or not has_two_sets:
        return 0
    return _first({**text, **rope}, ("original_max_position_embeddings",))


def _window(text: Mapping[str, Any]) -> int:
    """The sliding window or chunk of some layers; 0 without one."""
    kinds = text.get("layer_types") or text.get("attention_layers")
    if isinstance(kinds, list) and not any(word in str(kinds) for word in ("sliding", "chunk", "local")):
        return 0
    return _first(text, WINDOWS) if text.get("use_sliding_window", True) else 0


def genai_evidence(path: Path, raw: Mapping[str, Any]) -> Evidence:
    """The facts of genai_config.json. Raises PackageError for models other than one text decoder."""
    model, search = _section(raw, "model"), _section(raw, "search")
    decoder, window = _section(model, "decoder"), _section(_section(model, "decoder"), "sliding_window")
    if not decoder:
        raise PackageError(
            f"{path}: section 'decoder' is missing, so the file does not describe a decoder", remedy=GET_AGAIN
        )
    others = [name for name in OTHER_COMPONENTS if model.get(name) is not None]
    others += ["pipeline"] if decoder.get("pipeline") else []
    if others:
        raise PackageError(
            f"{path}: the model {model.get('type', '')!r} has a section {others[0]!r}; Partita supports only decoders "
            "in one ONNX file",
            remedy=DECODERS_ONLY,
        )
    if window and window.get("slide_key_value_cache", True):
        raise PackageError(
            f"{path}: sliding_window has slide_key_value_cache, which is true by default: the runtime slides a window "
            "over the cache, which Partita does not support",
            remedy=WITHOUT_SLIDING,
        )
    return Evidence(
        source=path.name,
        model_type=str(model.get("type", "")),
        kv_heads=_positive_integer(decoder.get("num_key_value_heads")),
        head_size=_positive_integer(decoder.get("head_size")),
        vocab_size=_positive_integer(model.get("vocab_size")),
        max_length=_positive_integer(model.get("context_length")),
        usual_length=_positive_integer(search.get("max_length")),
        window=_positive_integer(window.get("window_size")),
        file=decoder["filename"] if isinstance(decoder.get("filename"), str) else "",
        names={
            role: name
            for side in ("inputs", "outputs")
            for role, name in _section(decoder, side).items()
            if isinstance(name, str)
        },
    )


def _section(raw: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The object `key`; empty where there is none."""
    found = raw.get(key)
    return found if isinstance(found, Mapping) else {}


def _first(raw: Mapping[str, Any], names: Sequence[str]) -> int:
    """The first of these numbers that exists."""
    return next((value for name in names if (value := _positive_integer(raw.get(name)))), 0)


def _positive_integer(value: object) -> int:
    """A positive integer; 0 for anything else, including true."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


LAYER = "{layer}"
LARGEST = 1 << 31
"""Maximum size of a tensor's axis."""


class WrittenFile(Record):
    """An ONNX file, and its phase."""

    file: str = Field(min_length=1)
    phase: Phase = "any"


class StateSettings(Record):
    """Facts about states. Default: inferred."""

    grows: int | Literal[False] | None = None
    """The growing axis; False: none."""
    shape: tuple[Annotated[int, Field(ge=1, le=LARGEST)] | Literal["B", "N"], ...] | None = None
    """Sizes, where the graph leaves them open; B is the batch size and N the maximum tokens."""
    in_place: bool | None = None
    """Past and present may share a buffer."""


class WrittenStates(StateSettings):
    """States of one kind. {layer} stands for a number, in both names."""

    past: str = Field(min_length=1)
    present: str = Field(min_length=1)
    kind: Kind


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


EMPTY_CONTRACT = Written()


def read_written(path: Path) -> Written:
    """Read a contract file. Raises UsageError for invalid TOML or fields, PackageError if unreadable."""
    try:
        refuse_absent(path)
        raw = tomllib.loads(read_capped(path))
        # Through JSON, so that types are strict and arrays become tuples.
        return Written.model_validate_json(json.dumps(raw, default=str), strict=True)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UsageError(f"`contract={path}`: no such file") from error
    except ValidationError as error:
        errors = error.errors()
        where = errors[0]["loc"]
        same = [each["msg"] for each in errors if each["loc"][:-1] == where[:-1]]  # one for each type of a union
        place = ".".join(map(str, where[:-1] if len(same) > 1 else where)) or "the file"  # states.0.kind
        raise UsageError(f"`contract={path}`: {place}: {' or '.join(same)}") from error
    except (ValueError, RecursionError) as error:  # ValueError also for numbers with thousands of digits
        raise UsageError(f"`contract={path}`: not TOML: {error}") from error
