"""Find, validate and describe a Hugging Face checkpoint: a folder or a hub id.

Neither weights nor remote code are loaded.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig

from partita.errors import CheckpointError, UnsupportedModelError, UsageError
from partita.export.checkpoint import classes, config_values, of_text, stored_formats
from partita.export.checkpoint.gguf import conversion
from partita.export.checkpoint.quantisation_method import METHOD_FILES, DetectedMethod, by_config
from partita.export.checkpoint.stored_formats import QuantisedTensors
from partita.export.checkpoint.weight_files import (
    LAYOUTS,
    check_text_file,
    find_tensors,
    first_line,
    read_json,
    unreadable,
)
from partita.export.hub import HUB_ID, check_model, download, hub_error
from partita.export.progress import Progress
from partita.export.weights.origins import TensorInfo
from partita.package.folder import COMPANIONS, MANIFEST, check_folder, is_of_others

EMBEDDED = "adapter_config.json"
"""An adapter in the folder of a model, which transformers loads with it."""
HUB_PATTERNS = [
    *(*COMPANIONS, *(name for name, _ in METHOD_FILES), EMBEDDED),
    *("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", "pytorch_model.bin.index.json"),
]
HUB_IGNORED = ["*/*", "consolidated*"]
"""Weights that are never read: other models in subfolders, and the same weights in another format."""
HEADS = r"CausalLM|LMHead|ForConditionalGeneration"
"""Names of classes with a language-model head; ForConditionalGeneration is used by multimodal models."""
CONFIG = "config.json"
LAYERS = "num_hidden_layers"
SIZES = ("hidden_size", "vocab_size", LAYERS)
"""Settings of every model that its memory depends on."""
MOST_LAYERS = 1024
EXPERTS = ("num_local_experts", "n_routed_experts", "moe_num_experts", "num_experts")
"""Config keys of the number of experts."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint whose config and weight files exist and are readable."""

    folder: Path
    source_name: str
    """Folder name or hub id, as given by the user."""
    config: PreTrainedConfig
    architecture: str
    tensors: Mapping[str, TensorInfo]
    files: tuple[str, ...]
    """Weight files, sorted."""
    quantised: QuantisedTensors | None = None
    """How its weights are quantised; None when they are floats."""
    without_adapter: Mapping[str, TensorInfo] | None = None
    """Its tensors without the adapter that is merged into `tensors`; None without a merged adapter."""
    file: Path | None = None
    """The GGUF file from which the temporary `folder` was written."""
    notes: tuple[str, ...] = ()
    """Notes for the user."""
    scratch: Any = field(default=None, compare=False, repr=False)
    """Keeps the temporary folder alive."""

    @property
    def location(self) -> Path:
        """The folder, or the GGUF file, for messages."""
        return self.file or self.folder

    @property
    def model_type(self) -> str:
        """transformers' name of the architecture, e.g. llama."""
        return str(self.config.model_type)

    @property
    def dtype(self) -> str:
        """dtype of most weights, by element count."""
        counts: dict[str, int] = {}
        for info in (self.tensors if self.without_adapter is None else self.without_adapter).values():
            counts[info.dtype] = counts.get(info.dtype, 0) + math.prod(info.shape)
        return max(counts, key=lambda name: counts[name])

    def companions(self) -> tuple[str, ...]:
        """Names of the files to copy into the package."""
        return tuple(name for name in COMPANIONS if (self.folder / name).is_file())

    @property
    def tokenizes(self) -> bool:
        """Whether it has tokenizer files."""
        return of_tokenizer(self.companions())


def of_tokenizer(names: Iterable[str]) -> bool:
    """Whether one of the files can load a tokenizer."""
    return any(name.startswith(("tokenizer", "vocab", "spiece", "sentencepiece", "tekken")) for name in names)


def open_checkpoint(given: str, progress: Progress | None = None) -> Checkpoint:
    """Open a folder or a hub id. Raises CheckpointError, UnsupportedModelError when it cannot be exported."""
    try:
        folder = _locate(given, progress)
        check_folder(folder, kind=CheckpointError)
        if (file := conversion.gguf_file(folder)) is not None:
            return _open_gguf(given, file)
        config, found = _read_config(folder)
        for name in COMPANIONS:
            if (folder / name).is_file():
                check_text_file(folder / name)
        tensors, files = find_tensors(folder)
        quantised = None if found is None else stored_formats.read(folder, found, tensors)
        tensors = tensors if quantised is None else dict(quantised.tensors)
        _check_sizes(folder, config, tensors)
    except OSError as error:
        raise unreadable(error, Path(given)) from error
    if (folder / EMBEDDED).is_file():
        raise UnsupportedModelError(
            f"{folder}: the model folder contains an adapter ({EMBEDDED}), which transformers would load "
            "as well; move it to a separate folder, and give that with `adapter` to use it"
        )
    architecture = _architecture(config)
    return Checkpoint(folder, _name_of(given), config, architecture, tensors, files, quantised)


def open_config(given: str, progress: Progress | None = None) -> Checkpoint:
    """The checkpoint of a config.json, of the folder that has it, or of a hub id, without tensors.

    Raises as `open_checkpoint`, and CheckpointError for a config that lacks the sizes of the model.
    """
    path = Path(given)
    if not path.exists():
        path = _download(given, progress, allow_patterns=[CONFIG])
    folder = path if path.is_dir() else path.parent
    if path.is_file() and path.name != CONFIG:
        raise CheckpointError(f"{path}: not a checkpoint; name a folder, a GGUF file or a {CONFIG}")
    try:
        config, method = _read_config(folder)
        _check_has_sizes(folder, config)
    except OSError as error:
        raise unreadable(error, path) from error
    notes = () if method is None else (f"{CONFIG} declares quantised weights, but without the files they are floats",)
    return Checkpoint(folder, _name_of(given), config, _architecture(config), {}, (), notes=notes)


def has_weights(folder: Path) -> bool:
    """Whether a folder has weight files or their index."""
    return any((folder / name).is_file() for layout in LAYOUTS for name in layout)


def _check_has_sizes(folder: Path, config: PreTrainedConfig) -> None:
    """Raise CheckpointError for a config.json that leaves a size to transformers' default."""
    raw = read_json(folder / CONFIG)
    text = config.get_text_config(decoder=True)
    known = {*raw, *(raw["text_config"] if isinstance(raw.get("text_config"), dict) else ())}
    for name in SIZES:
        names = {name, getattr(type(text), "attribute_map", {}).get(name, name)}
        if not names & known:
            raise CheckpointError(f"{folder / CONFIG}: {name} is missing; without it the size of the model is unknown")
    if (layers := getattr(text, LAYERS, 0)) > MOST_LAYERS:
        raise CheckpointError(f"{folder / CONFIG}: {LAYERS} is {layers:,}; at most {MOST_LAYERS:,} are supported")


def _open_gguf(given: str, file: Path) -> Checkpoint:
    """The checkpoint in a GGUF file."""
    header, folder, notes = conversion.prepare(file)
    config, _ = _read_config(folder, file)
    _check_sizes(file, config, header.tensors)  # before the model is built
    found = conversion.read(header, config)
    tensors, quantised = dict(found.tensors), found if found.weights else None
    made = Checkpoint(folder, _name_of(given), config, _architecture(config), tensors, (file.name,), quantised)
    return replace(made, file=file, notes=notes, scratch=header)


def _name_of(given: str) -> str:
    """The name of the file or folder, or the hub id."""
    # Not resolved: a link keeps its own name; `.` and `..` are no names.
    return Path(os.path.abspath(given)).name if Path(given).exists() else given  # noqa: PTH100


def _locate(given: str, progress: Progress | None) -> Path:
    if not given:
        raise UsageError("CHECKPOINT is empty; give a checkpoint folder or a hub id")
    path = Path(given)
    if path.is_dir():
        if not has_weights(path) and (path / MANIFEST).is_file() and not is_of_others(path / MANIFEST):
            raise UsageError(
                f"{given}: already a Partita package; run it with partita generate, or give the "
                "checkpoint it was exported from"
            )
        return path
    if path.is_file() and conversion.gguf_file(path) is not None:
        return path
    if path.exists():
        raise CheckpointError(f"{given}: a file, not a checkpoint folder; give the folder that contains config.json")
    return _download(given, progress, allow_patterns=HUB_PATTERNS, ignore_patterns=HUB_IGNORED)


def _download(given: str, progress: Progress | None, **patterns: list[str]) -> Path:
    """The folder with the files of a hub id that match `patterns`. Raises CheckpointError."""
    if (link := Path(given)).is_symlink():
        raise CheckpointError(f"{given}: a broken symbolic link to {link.readlink()}; download the checkpoint again")
    check_model(given)
    found = HUB_ID.fullmatch(given)
    assert found is not None
    try:
        return download(found["name"], found["revision"], progress, **patterns)
    except Exception as error:  # the hub's client, its HTTP library and its transfer share no base class
        raise hub_error(given, error) from error


def _read_config(folder: Path, file: Path | None = None) -> tuple[PreTrainedConfig, DetectedMethod | None]:
    """The config of a supported decoder, and the quantisation method that it names. `file`: the GGUF file it is of."""
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{folder}: not a checkpoint: config.json is missing")
    raw = read_json(path)
    found = by_config(folder, raw)
    config_values.check_values(folder, raw)
    model_type = raw.get("model_type")
    try:
        config = of_text(config_values.read_config(folder, raw))
    except Exception as error:  # validation errors of configs share no base class
        if raw.get("auto_map"):
            raise _remote_code(folder, f"has no model type {model_type!r}") from error
        is_known = isinstance(model_type, str) and model_type in CONFIG_MAPPING
        raise (CheckpointError if is_known else UnsupportedModelError)(
            f"{folder}: transformers {transformers.__version__} cannot read config.json of model type {model_type!r} "
            f"({first_line(error)}); correct it, or try a newer transformers"
        ) from error
    _refuse_by_config(file or folder, config)
    config_values.check_known(file or folder, config)
    return config, found


def _remote_code(folder: Path, why: str) -> UnsupportedModelError:
    """The error for a model with custom code, which `auto_map` of config.json names."""
    return UnsupportedModelError(
        f"{folder}: the model is custom code in the checkpoint (auto_map in config.json), which Partita does not run; "
        f"transformers {transformers.__version__} {why}; use a transformers release with this architecture, or convert "
        "the checkpoint to a supported model type"
    )


def _architecture(config: PreTrainedConfig) -> str:
    names = getattr(config, "architectures", None)
    if isinstance(names, list | tuple) and names:
        return str(names[0])
    return next(iter(classes(config.model_type)), "")


def _refuse_by_config(folder: Path, config: PreTrainedConfig) -> None:
    """Refuse, by name, models other than decoders with a language-model head."""
    kind, architecture = config.model_type, _architecture(config)
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"{folder}: {architecture or kind} is an encoder-decoder; Partita exports only decoders"
        )
    accepted, auto_map = classes(kind), getattr(config, "auto_map", None)
    if not accepted:
        raise UnsupportedModelError(
            f"{folder}: {architecture or kind} (model type {kind!r}) is not a causal language model"
        )
    if architecture in accepted:
        return
    if isinstance(auto_map, dict) and "AutoModelForCausalLM" in auto_map and not hasattr(transformers, architecture):
        own = f"has {' and '.join(accepted)} for model type {kind!r}, not {architecture[:80]}"
        raise _remote_code(folder, own)
    if not re.search(HEADS, architecture):
        raise UnsupportedModelError(
            f"{folder}: the checkpoint contains {architecture[:80] or 'a model without a name'}, which "
            f"has no language-model head; Partita needs a checkpoint saved as {' or '.join(accepted)}"
        )


def _check_sizes(folder: Path, config: PreTrainedConfig, tensors: Mapping[str, TensorInfo]) -> None:
    """Refuse a config with more layers or experts, or longer axes, than its weights can hold."""
    longest = max((size for info in tensors.values() for size in info.shape), default=0)
    bits = 8 * sum(info.size_bytes for info in tensors.values())  # no element takes less than one
    # A dense doge model has a number of experts in its config and none in its weights.
    experts = EXPERTS if any("expert" in name for name in tensors) else ()
    limits = {LAYERS: len(tensors), **dict.fromkeys(experts, max(longest, len(tensors)))}
    text = config.get_text_config(decoder=True)
    settings = {**text.to_dict(), **{key: getattr(text, key, None) for key in limits}}
    for key, value in settings.items():
        most = limits.get(key, bits if config_values.SIZES.search(key) else None)
        if type(value) is int and most is not None and not 0 <= value <= most:
            raise CheckpointError(
                f"{folder}: weights and config.json do not match: {key} is {value:,}, but the weight files have "
                f"{len(tensors):,} tensors of {bits // 8:,} bytes, and their longest axis is {longest:,}"
            )
