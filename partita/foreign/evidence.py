"""Facts about a model from config.json or genai_config.json, which must not contradict the graph, and from the user.

The schema of onnxruntime-genai's genai_config.json has the fields that are used; defaults are those of its config.h. A
contract file of the user has facts that cannot be inferred. See docs/foreign.md.

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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from partita.errors import PackageError, UsageError
from partita.foreign.layouts import GENAI_CONFIG
from partita.foreign.states import Kind, Pair, layer_in
from partita.package.contract import CONTEXT_LENGTHS, Record, Role
from partita.package.folder import GET_AGAIN, refuse_absent
from partita.remedies import DECODERS_ONLY, Remedy
from partita.untrusted_files import read_capped, read_json_value

CONFIG = "config.json"
LAYERS = ("decoder_layers", "num_hidden_layers", "n_layer", "n_layers", "num_layers")
HEADS = ("decoder_attention_heads", "num_attention_heads", "n_head", "n_heads", "num_heads")
"""Decoder keys first: encoder-decoder configurations use the plain name for the encoder."""
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
HIDDEN = ("hidden_size", "n_embd", "d_model")
WINDOWS = ("sliding_window", "attention_chunk_size", "window_size", "attention_window_size")
UNEVEN = ("layer_types", "layers_block_type", "num_kv_shared_layers", "attn_layer_period", "hybrid_override_pattern")
"""Keys of models in which some layers have no keys and values of their own."""
CAUSAL = ("CausalLM", "LMHead", "ForCausal")
OTHERS = ("encoder", "vision", "speech", "embedding")
"""Sections of genai_config.json for parts other than a text decoder."""
WITHOUT_SLIDING = Remedy("export the model without it, or run the folder with onnxruntime-genai")


@dataclass(frozen=True, slots=True)
class Evidence:
    """The facts of a configuration. 0 and empty: unknown."""

    source: str = ""
    """The file."""
    model_type: str = ""
    architecture: str = ""
    layers: int = 0
    own_cache_per_layer: bool = True
    """Every layer has keys and values of its own."""
    heads: int = 0
    kv_heads: int = 0
    head_size: int = 0
    vocab_size: int = 0
    max_length: int = 0
    """Maximum tokens."""
    usual_length: int = 0
    """Default maximum tokens."""
    window: int = 0
    window_layers: frozenset[int] | None = None
    """None: all."""
    slides_inputs: bool = False
    """Prompts are to be fed in padded windows of one size."""
    file: str = ""
    """The ONNX file that it names."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Role, or kind of state with its direction -> name of inputs or outputs; %d stands for the layer."""

    @property
    def is_causal(self) -> bool:
        """Whether the architecture name is that of a decoder."""
        return any(word in self.architecture for word in CAUSAL)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises PackageError when it is damaged or too large."""
    refuse_absent(path)
    try:
        raw = read_json_value(path)
    except (ValueError, OSError) as error:
        raise PackageError(f"{path}: damaged, not JSON ({error})", remedy=GET_AGAIN) from error
    if not isinstance(raw, dict):
        raise PackageError(f"{path}: damaged, not a JSON object", remedy=GET_AGAIN)
    return raw


def read_evidence(folder: Path) -> Evidence:
    """The facts of a configuration, genai_config.json first. Raises PackageError, also for other models."""
    if (folder / GENAI_CONFIG).is_file():
        return genai_evidence(folder / GENAI_CONFIG, read_json(folder / GENAI_CONFIG))
    if (folder / CONFIG).is_file():
        return config_evidence(folder / CONFIG, read_json(folder / CONFIG))
    return Evidence()


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
    head_size = _whole(text.get("head_dim")) or (hidden // heads if heads and hidden % heads == 0 else 0)
    return Evidence(
        source=path.name,
        model_type=str(raw.get("model_type", "")),
        architecture=architecture,
        layers=_first(text, LAYERS),
        own_cache_per_layer=not any(text.get(key) for key in UNEVEN),
        heads=heads,
        kv_heads=1 if text.get("multi_query") is True else _first(text, KV_HEADS) or heads,
        head_size=head_size,
        vocab_size=_whole(text.get("vocab_size")),
        max_length=_first(text, CONTEXT_LENGTHS),
        window=_window(text),
    )


def _window(text: Mapping[str, Any]) -> int:
    """The sliding window or chunk of some layers; 0 without one."""
    kinds = text.get("layer_types") or text.get("attention_layers")
    if isinstance(kinds, list) and not any(word in str(kinds) for word in ("sliding", "chunk", "local")):
        return 0
    first = 0 if isinstance(kinds, list) else _whole(text.get("max_window_layers"))  # the first layer with a window
    nowhere = not text.get("use_sliding_window", True) or 0 < _first(text, LAYERS) <= first
    return 0 if nowhere else _first(text, WINDOWS)


def genai_evidence(path: Path, raw: dict[str, Any]) -> Evidence:
    """The facts of genai_config.json. Raises PackageError for models other than one text decoder."""
    config = read_genai(path, raw)
    model, decoder = config.model, config.model.decoder
    others = [name for name in OTHERS if getattr(model, name) is not None]
    if others:
        raise PackageError(
            f"{path}: the model {model.type!r} has a component {others[0]!r} besides its decoder, which "
            "Partita does not support",
            remedy=DECODERS_ONLY,
        )
    if decoder.pipeline:
        raise PackageError(
            f"{path}: the decoder is a pipeline of several ONNX files, which Partita does not support",
            remedy=DECODERS_ONLY,
        )
    window = decoder.sliding_window or SlidingWindow(slide_key_value_cache=False, slide_inputs=False)
    if window.slide_key_value_cache:
        raise PackageError(
            f"{path}: sliding_window has slide_key_value_cache, which is true by default: the runtime slides a window "
            "over the cache, which Partita does not support",
            remedy=WITHOUT_SLIDING,
        )
    return Evidence(
        source=path.name,
        model_type=model.type,
        layers=decoder.num_hidden_layers,
        own_cache_per_layer=not any("conv" in key or "recurrent" in key for key in decoder.inputs),
        heads=decoder.num_attention_heads,
        kv_heads=decoder.num_key_value_heads,
        head_size=decoder.head_size,
        vocab_size=model.vocab_size,
        max_length=model.context_length,
        usual_length=config.search.max_length,
        window=window.window_size,
        window_layers=None if window.layers is None else frozenset(window.layers),
        slides_inputs=window.slide_inputs,
        file=decoder.filename,
        names={**decoder.inputs, **decoder.outputs},
    )


def _first(raw: Mapping[str, Any], names: Sequence[str]) -> int:
    """The first of these numbers that exists."""
    return next((value for name in names if (value := _whole(raw.get(name)))), 0)


def _whole(value: object) -> int:
    """A positive integer; 0 for anything else, including true."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def contradiction(evidence: Evidence, file: str, pairs: Sequence[Pair], vocab: int) -> str:
    """The first contradiction of configuration and graph, or empty."""
    layers = _layers(evidence, pairs)
    more, fewer = layers > evidence.layers, layers < evidence.layers and evidence.own_cache_per_layer
    if evidence.layers and layers and (more or fewer):
        return f"it has {evidence.layers} layers, but {file} has a cache of {layers}"
    if evidence.vocab_size and vocab != evidence.vocab_size:
        return f"its vocabulary has {evidence.vocab_size:,} tokens, but the logits of {file} have {vocab:,}"
    return ""


def _layers(evidence: Evidence, pairs: Sequence[Pair]) -> int:
    """Number of layers in a cache, or in the configuration where the cache does not show it."""
    found = len({pair.layer for pair in pairs})
    counted_through = found == len(pairs) == 2 * evidence.layers and all(pair.kind == "key" for pair in pairs)
    in_one = found == 1 and any(evidence.layers in (pair.past.shape or ())[:2] for pair in pairs)
    stacked = found == 1 and any(2 * evidence.layers in (pair.past.shape or ())[:1] for pair in pairs)
    deep = all(len(pair.past.shape or ()) > 4 for pair in pairs)
    return evidence.layers if counted_through or (deep and (in_one or stacked)) else found


Count = Annotated[
    int, BeforeValidator(lambda value: 0 if value is None or (type(value) is int and value < 0) else value), Field(ge=0)
]
"""A size; 0: unknown, for which some exporters write null or a negative number."""


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
            problem = f"section {first['loc'][-1]!r} is missing, so the file does not describe a decoder"
        else:
            problem = f"damaged, {place}: {first['msg']}"
        raise PackageError(f"{path}: {problem}", remedy=GET_AGAIN) from error


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
    """Read a contract file. Raises UsageError for invalid TOML or fields, PackageError if unreadable."""
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
        place = ".".join(map(str, first["loc"])) or "the file"  # states.0.kind
        raise UsageError(f"`contract={path}`: {place}: {first['msg']}") from error
    except ValueError as error:  # tomllib raises ValueError for numbers with thousands of digits
        raise UsageError(f"`contract={path}`: not TOML: {error}") from error
