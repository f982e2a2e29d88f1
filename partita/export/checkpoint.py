"""Find, validate and describe a Hugging Face checkpoint; read its tensors piece by piece.

Knows folders, hub ids, config.json, weight files and their indexes. Loads no model and no whole file: tensors are read
in slices, and each safetensors file is opened anew per tensor so that the pages of the last one do not stay in memory.
Remote code is never run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from partita.errors import CheckpointError, UnsupportedModelError, UsageError

COMPANIONS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
)
"""Files copied into the package as they are, where the checkpoint has them."""
HUB_PATTERNS = [
    *COMPANIONS,
    "*.safetensors",
    "*.safetensors.index.json",
    "pytorch_model*.bin",
    "pytorch_model.bin.index.json",
]
SAFETENSORS_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
TORCH_NAMES = {torch.float64: "float64", torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of the checkpoint: which file holds it, its shape, its dtype (ONNX spelling, or the file's own if not
    float).
    """

    name: str
    file: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint whose config and weight files were found and are readable."""

    folder: Path
    given: str
    """Folder name or hub id, as the user wrote it."""
    config: PreTrainedConfig
    architecture: str
    tensors: Mapping[str, TensorInfo]
    files: tuple[str, ...]
    """Weight files, sorted."""

    @property
    def model_type(self) -> str:
        """transformers' name of the architecture, e.g. llama."""
        return str(self.config.model_type)

    @property
    def dtype(self) -> str:
        """dtype of most weights, by element count."""
        counts: dict[str, int] = {}
        for info in self.tensors.values():
            counts[info.dtype] = counts.get(info.dtype, 0) + _elements(info.shape)
        return max(counts, key=lambda name: counts[name])

    def companions(self) -> tuple[str, ...]:
        """Names of the files to copy into the package."""
        return tuple(name for name in COMPANIONS if (self.folder / name).is_file())


def open_checkpoint(given: str) -> Checkpoint:
    """Open the checkpoint at `given`, a folder or a hub id.

    Raises CheckpointError when it is missing or damaged, UnsupportedModelError when its model cannot be exported.
    """
    folder = _locate(given)
    try:
        config = _read_config(folder)
        _refuse_by_config(folder, config)
        tensors, files = _index(folder)
    except OSError as error:
        raise CheckpointError(f"{error.filename or folder}: cannot be read ({error.strerror or error})") from error
    name = Path(given).name if Path(given).is_dir() else given
    return Checkpoint(folder, name, config, _architecture(config), tensors, files)


def _elements(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _locate(given: str) -> Path:
    if not given:
        raise UsageError("CHECKPOINT is empty; give a checkpoint folder or a hub id")
    path = Path(given)
    if path.is_dir():
        return path
    if path.exists():
        raise CheckpointError(f"{given}: a file, not a checkpoint folder; give the folder that holds config.json")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", given) or given.startswith("."):
        raise CheckpointError(f"{given}: no such folder, and not a hub id of the form owner/name")
    try:
        return Path(snapshot_download(given, allow_patterns=HUB_PATTERNS))
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, OSError) as error:
        raise CheckpointError(
            f"{given}: no such folder, and the Hugging Face hub did not give it ({_first_line(error)}); check the "
            "name and "
            "the network, or download it elsewhere and give the folder"
        ) from error


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)[:200]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror or error})") from error
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path}: damaged, it is not JSON ({error})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: damaged, it holds no JSON object")
    return value


def _read_config(folder: Path) -> PreTrainedConfig:
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{folder}: not a checkpoint, it has no config.json")
    raw = _read_json(path)
    quantised = raw.get("quantization_config")
    if quantised:
        method = quantised.get("quant_method", "unknown method") if isinstance(quantised, dict) else "unknown method"
        raise UnsupportedModelError(
            f"{folder}: the checkpoint is quantised ({method}); quantised checkpoints cannot be exported yet, "
            "export the original one"
        )
    model_type = raw.get("model_type")
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # validation errors of configs share no base class
        if "auto_map" in raw:
            raise UnsupportedModelError(
                f"{folder}: model type {model_type!r} needs Python code from the checkpoint, which Partita does not run"
            ) from error
        raise UnsupportedModelError(
            f"{folder}: the installed transformers cannot read config.json of model type {model_type!r} "
            f"({_first_line(error)}); a newer transformers may know it"
        ) from error
    return config


def _architecture(config: PreTrainedConfig) -> str:
    names = getattr(config, "architectures", None) or []
    return str(names[0]) if names else str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type, ""))


def _refuse_by_config(folder: Path, config: PreTrainedConfig) -> None:
    """Refuse, by name, what is not a decoder with a language-model head."""
    kind, architecture = config.model_type, _architecture(config)
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"{folder}: {architecture or kind} is an encoder-decoder; Partita exports decoders only"
        )
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise UnsupportedModelError(
            f"{folder}: {architecture or kind} (model type {kind!r}) is not a causal language model"
        )
    expected = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]
    accepted = {expected} if isinstance(expected, str) else set(expected)
    if architecture and architecture not in accepted and not re.search(r"CausalLM|LMHead", architecture):
        raise UnsupportedModelError(
            f"{folder}: the checkpoint holds {architecture}, which has no language-model head; Partita needs one "
            f"saved as {expected}"
        )


def _index(folder: Path) -> tuple[dict[str, TensorInfo], tuple[str, ...]]:
    """Every tensor of the checkpoint, and its weight files."""
    for single, index in (
        ("model.safetensors", "model.safetensors.index.json"),
        ("pytorch_model.bin", "pytorch_model.bin.index.json"),
    ):
        if (folder / index).is_file():
            return _read_sharded(folder, index)
        if (folder / single).is_file():
            tensors = {info.name: info for info in _list_tensors(folder, single)}
            return tensors, (single,)
    others = sorted(p.name for p in folder.glob("*.safetensors"))
    hint = f"; it has {', '.join(others[:3])} but no index" if others else ""
    raise CheckpointError(
        f"{folder}: config.json is there but no weights (model.safetensors or pytorch_model.bin){hint}"
    )


def _read_sharded(folder: Path, index: str) -> tuple[dict[str, TensorInfo], tuple[str, ...]]:
    weight_map = _read_json(folder / index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(v, str) for v in weight_map.values()):
        raise CheckpointError(f"{folder / index}: damaged, it has no weight_map")
    files = tuple(sorted(set(weight_map.values())))
    tensors: dict[str, TensorInfo] = {}
    for name in files:
        if Path(name).name != name or name in ("", ".", ".."):
            raise CheckpointError(
                f"{folder / index}: names the shard {name!r} outside the checkpoint folder; refusing to follow it"
            )
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder / name}: this shard is missing; download the checkpoint again")
        held = {info.name: info for info in _list_tensors(folder, name)}
        for tensor in (t for t, file in weight_map.items() if file == name):
            if tensor not in held:
                raise CheckpointError(f"{folder / name}: lacks tensor {tensor}, which {index} says it holds")
            tensors[tensor] = held[tensor]
    return tensors, files


def _list_tensors(folder: Path, file: str) -> list[TensorInfo]:
    """Names, shapes and dtypes of one weight file."""
    path = folder / file
    if file.endswith(".bin"):
        return [
            TensorInfo(name, file, tuple(t.shape), TORCH_NAMES.get(t.dtype, str(t.dtype)))
            for name, t in _load_bin(path).items()
        ]
    try:
        with safe_open(str(path), framework="pt") as handle:
            found = []
            for name in handle.keys():  # noqa: SIM118 - safe_open is no dict
                part = handle.get_slice(name)
                dtype = str(part.get_dtype())
                found.append(TensorInfo(name, file, tuple(part.get_shape()), SAFETENSORS_DTYPES.get(dtype, dtype)))
            return found
    except (SafetensorError, OSError) as error:
        size = path.stat().st_size
        raise CheckpointError(
            f"{path}: damaged or cut off at {size:,} bytes ({_first_line(error)}); download the checkpoint again"
        ) from error


def _load_bin(path: Path) -> dict[str, torch.Tensor]:
    """Memory-mapped tensors of a .bin file; weights only, so no code in the file is run."""
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        raise CheckpointError(
            f"{path}: cannot be read as plain weights ({_first_line(error)}); use safetensors files"
        ) from error
    if not isinstance(loaded, dict) or not all(isinstance(v, torch.Tensor) for v in loaded.values()):
        raise CheckpointError(f"{path}: holds something other than named tensors; use safetensors files")
    return loaded


class OpenFiles:
    """Reads regions of tensors. Use as a context manager; what was computed from them is kept until its end.

    A safetensors file is opened anew for each region, so that the pages of the last one do not stay in memory.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.computed: dict[Any, torch.Tensor] = {}
        self._loaded: dict[str, dict[str, torch.Tensor]] = {}

    def __enter__(self) -> OpenFiles:
        return self

    def __exit__(self, *details: Any) -> None:
        self.computed.clear()
        self._loaded.clear()

    def read(self, info: TensorInfo, region: tuple[tuple[int, int], ...]) -> torch.Tensor:
        """The elements of a tensor in `region`, start and stop on every axis. Raises CheckpointError."""
        path = self.folder / info.file
        index: Any = tuple(slice(start, stop) for start, stop in region) or ...
        if info.file.endswith(".bin"):
            if info.file not in self._loaded:
                self._loaded[info.file] = _load_bin(path)
            return self._loaded[info.file][info.name][index]
        try:
            with safe_open(str(path), framework="pt") as handle:
                return torch.as_tensor(handle.get_slice(info.name)[index])
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path}: cannot be read ({_first_line(error)})") from error


def source_files(checkpoint: Checkpoint) -> list[tuple[str, int]]:
    """Weight files with their sizes in bytes."""
    return [(name, (checkpoint.folder / name).stat().st_size) for name in checkpoint.files]
