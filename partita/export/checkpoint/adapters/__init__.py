"""PEFT adapters, merged into the weights or switchable. Here: config and tensors, and weights changed by an adapter.

LoRA (arXiv 2106.09685)   W + s B A                          A [r, K], B [N, r], W [N, K]
DoRA (arXiv 2402.09353)   m / |W + s B A| (W + s B A)        m [N]; |.| of each row
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from partita.errors import CheckpointError, UnsupportedModelError
from partita.export.checkpoint.weight_files import SHOWN_CHARACTERS, OpenFiles, few, list_tensors, matches, read_json
from partita.export.weights import CHECKPOINT
from partita.export.weights.origins import Origin, Reader, Region, TensorInfo, blocks
from partita.package.folder import COMPANIONS, AdapterRecord, check_folder, record_file
from partita.untrusted_files import is_number


@dataclass(frozen=True)
class _Changed(Origin):
    """A tensor of the checkpoint with a change by an adapter, float32."""

    base: TensorInfo
    shape: tuple[int, ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", self.base.shape)

    def tensors(self) -> Iterator[TensorInfo]:
        """The tensor of the checkpoint."""
        yield self.base


@dataclass(frozen=True)
class LowRank(_Changed):
    """A weight [N, K], or [K, N] if `transposed`, plus the product of two low-rank matrices.

    The rows are scaled by magnitudes for DoRA.
    """

    down: TensorInfo
    """A [r, K]."""
    up: TensorInfo
    """B [N, r]."""
    scale: float
    transposed: bool = False
    """The weight is stored as [K, N]: an embedding [V, H], or a Conv1D of GPT-2."""
    magnitude: TensorInfo | None = None
    """m [N] of DoRA."""

    def _read(self, region: Region, files: Reader) -> torch.Tensor:
        if self.magnitude is None:
            return self._sum(region, files)
        if self not in files.computed:
            files.computed[self] = self._factors(files)
        (start, stop) = region[1 if self.transposed else 0]
        factors = files.computed[self][start:stop]
        return self._sum(region, files) * (factors if self.transposed else factors.unsqueeze(-1))

    def _sum(self, region: Region, files: Reader) -> torch.Tensor:
        """W + s B A in `region`."""
        rows, columns = (slice(*span) for span in (reversed(region) if self.transposed else region))
        added = self.up.read_all(files).float()[rows] @ self.down.read_all(files).float()[:, columns] * self.scale
        return self.base.read(region, files).to(torch.float32) + (added.T if self.transposed else added)

    def _factors(self, files: Reader) -> torch.Tensor:
        """m / |W + s B A| [N], computed a few rows at a time."""
        assert self.magnitude is not None
        squares = torch.zeros(self.up.shape[0])
        step = max(1, (1 << 22) // self.base.shape[1])
        for start in range(0, self.base.shape[0], step):
            rows = (start, min(start + step, self.base.shape[0]))
            part = self._sum((rows, (0, self.base.shape[1])), files).square()
            if self.transposed:
                squares += part.sum(0)
            else:
                squares[rows[0] : rows[1]] = part.sum(1)
        return self.magnitude.read_all(files).float().reshape(-1) / squares.sqrt()


@dataclass(frozen=True)
class Shifted(_Changed):
    """A bias plus that of an adapter (lora_bias)."""

    bias: TensorInfo
    scale: float

    def _read(self, region: Region, files: Reader) -> torch.Tensor:
        return self.base.read(region, files).to(torch.float32) + self.bias.read(region, files).float() * self.scale


CONFIG = "adapter_config.json"
HANDLED = frozenset(
    (
        *("peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora", "lora_bias"),
        *("bias", "modules_to_save", "ensure_weight_tying", "base_model_name_or_path", "init_lora_weights"),
    )
)
WITHOUT_EFFECT = frozenset(
    (
        *("auto_mapping", "peft_version", "revision", "task_type", "inference_mode", "target_modules"),
        *("exclude_modules", "lora_dropout", "fan_in_fan_out", "layers_to_transform", "layers_pattern"),
        *("megatron_core", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "qalora_group_size"),
        "runtime_config",
    )
)
"""Training settings, and target settings that the tensor names state."""
CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""LoRA initialisations that change the weights of the base model."""
ALTERNATIVE = "merge it with peft (merge_and_unload) and export the merged model"


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """The settings of adapter_config.json that the export uses."""

    rank: int
    alpha: float
    rank_pattern: tuple[tuple[str, float], ...]
    alpha_pattern: tuple[tuple[str, float], ...]
    rank_stabilised: bool
    """Scaled by alpha / sqrt(rank) (rsLoRA, arXiv 2312.03732) in place of alpha / rank."""
    dora: bool
    keeps_ties: bool
    base_model: str

    def rank_of(self, module: str) -> int:
        """The rank of the adapter of a module."""
        return int(_matched(self.rank_pattern, module, self.rank))

    def scale(self, module: str) -> float:
        """The factor s of s B A."""
        rank = self.rank_of(module)
        alpha = _matched(self.alpha_pattern, module, self.alpha)
        return alpha / (math.sqrt(rank) if self.rank_stabilised else rank)


def _matched(patterns: tuple[tuple[str, float], ...], module: str, default: float) -> float:
    """The value of the first pattern that matches the end of a module's name, as in peft."""
    for pattern, value in patterns:
        if matches(rf"(.*\.)?({pattern})$", module):
            return value
    return default


def read_config(folder: Path) -> AdapterConfig:
    """Read adapter_config.json. Raises CheckpointError when damaged, UnsupportedModelError for other types."""
    path = folder / CONFIG
    if not path.is_file():
        raise CheckpointError(f"{folder}: not an adapter: {CONFIG} is missing")
    raw = read_json(path)
    _refuse_kind(path, raw)
    rank = raw.get("r", 8)
    alpha = raw.get("lora_alpha", 8)
    if not _is_count(rank) or not is_number(alpha):
        raise CheckpointError(f"{path}: damaged: r is {rank!r} and lora_alpha is {alpha!r}"[: 2 * SHOWN_CHARACTERS])
    return AdapterConfig(
        rank=rank,
        alpha=float(alpha),
        rank_pattern=_patterns(path, raw, "rank_pattern"),
        alpha_pattern=_patterns(path, raw, "alpha_pattern"),
        rank_stabilised=bool(raw.get("use_rslora")),
        dora=bool(raw.get("use_dora")),
        keeps_ties=bool(raw.get("ensure_weight_tying")),
        base_model=str(raw.get("base_model_name_or_path") or ""),
    )


def _refuse_kind(path: Path, raw: Mapping[str, Any]) -> None:
    """Refuse adapter types other than LoRA and DoRA, and unsupported settings, by name."""
    kind = str(raw.get("peft_type"))[:40].upper()
    if "peft_type" not in raw:
        raise CheckpointError(f"{path}: damaged: peft_type is missing")
    if kind != "LORA":
        raise UnsupportedModelError(
            f"{path}: adapter type {kind}: only LoRA and DoRA are supported; if it modifies weights, {ALTERNATIVE}"
        )
    began = str(raw.get("init_lora_weights") or "").lower()
    if began.startswith(CHANGES_BASE):
        raise UnsupportedModelError(
            f"{path}: init_lora_weights is {began[:40]}, which also changed the weights of the model; "
            "save it as a plain LoRA (path_initial_model_for_weight_conversion of save_pretrained in peft)"
        )
    for key, value in raw.items():
        if value and key not in HANDLED and key not in WITHOUT_EFFECT:
            raise UnsupportedModelError(
                f"{path}: {key[:SHOWN_CHARACTERS]} is set, which is not supported and may change the result of the "
                f"adapter; {ALTERNATIVE}"
            )
    if raw.get("lora_bias") and raw.get("use_dora"):
        raise UnsupportedModelError(
            f"{path}: lora_bias and use_dora are both set, which peft does not support either; unset one of them"
        )


def _patterns(path: Path, raw: Mapping[str, Any], key: str) -> tuple[tuple[str, float], ...]:
    """Regular expressions on module names, with the rank or alpha of each."""
    found = raw.get(key) or {}
    if not isinstance(found, dict) or not all(is_number(value) for value in found.values()):
        raise CheckpointError(f"{path}: damaged: {key} is not a table of numbers")
    if key == "rank_pattern" and not all(map(_is_count, found.values())):
        raise CheckpointError(f"{path}: damaged: a rank of {key} is not a positive integer")
    for pattern in found:
        try:
            matches(pattern, "")
        except re.error as error:
            raise CheckpointError(
                f"{path}: {key} has {pattern[:SHOWN_CHARACTERS]!r}, which is not a valid pattern ({error})"
            ) from error
    return tuple(found.items())


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= 1 << 20


FILES = ("adapter_model.safetensors", "adapter_model.bin")
PIECE = 1 << 22
"""Elements checked in one step."""
PREFIX = "base_model.model."
"""The prefix of module names in peft."""
MATRIX = re.compile(r"(.+)\.lora_(embedding_)?([AB])(?:\.default)?(?:\.(weight|bias))?")
MAGNITUDE = re.compile(r"(.+)\.lora_magnitude_vector(?:\.default)?(?:\.weight)?")
WHOLE = re.compile(r"\.(modules_to_save(\.default)?|base_layer)(?=\.)")
"""Parts that peft adds to the name of a parameter that it saves whole."""
ORIGINAL = re.compile(r"\.original_module(?=\.)")
"""Part of the name of a parameter that `modules_to_save` replaces; peft saves it and does not use it."""


@dataclass(frozen=True, slots=True)
class Matrices:
    """The tensors of an adapter for one module."""

    down: TensorInfo | None = None
    """A."""
    up: TensorInfo | None = None
    """B."""
    bias: TensorInfo | None = None
    magnitude: TensorInfo | None = None
    embedding: bool = False

    @property
    def rank(self) -> int:
        """r, the first axis of A."""
        return 0 if self.down is None else self.down.shape[0]


SETTINGS = ("config.json", "generation_config.json")
"""Files of the model, ignored in the folder of an adapter."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """A PEFT adapter whose files exist and are readable."""

    folder: Path
    file: str
    config: AdapterConfig
    modules: Mapping[str, Matrices]
    """Module name in the model -> tensors."""
    replaced_tensors: Mapping[str, TensorInfo]
    """Parameter name in the model -> the tensor that replaces it."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The distinct ranks, sorted."""
        return tuple(sorted({matrices.rank for matrices in self.modules.values()}))

    def own_companions(self, base: Path) -> tuple[str, ...]:
        """Tokenizer or template files of the adapter that differ from those of the model in `base`."""
        names = [name for name in COMPANIONS if name not in SETTINGS and (self.folder / name).is_file()]
        return tuple(
            name
            for name in names
            if not (base / name).is_file() or (base / name).read_bytes() != (self.folder / name).read_bytes()
        )

    def other_changes(self) -> str:
        """Everything it changes other than MatMuls, in words; empty where nothing."""
        every = self.modules.values()
        changes = {
            "an embedding": any(each.embedding for each in every),
            "magnitudes (DoRA)": any(each.magnitude for each in every),
            "biases (lora_bias)": any(each.bias for each in every),
            f"whole parameters ({few(sorted(self.replaced_tensors))})": bool(self.replaced_tensors),
        }
        return ", ".join(words for words, is_changed in changes.items() if is_changed)


def read_adapter(folder: Path) -> Adapter:
    """Read an adapter. Raises CheckpointError when it is damaged, UnsupportedModelError for another type."""
    try:
        if not folder.is_dir():
            what = "a file, not a folder" if folder.exists() else "no such folder"
            raise CheckpointError(f"{folder}: {what}; give the folder that contains adapter_config.json")
        check_folder(folder, kind=CheckpointError)
        config = read_config(folder)
        file = next((name for name in FILES if (folder / name).is_file()), None)
        if file is None:
            raise CheckpointError(f"{folder}: adapter_config.json is there, but no weights ({' or '.join(FILES)})")
        tensors = list_tensors(folder, file)
    except OSError as error:
        raise CheckpointError(f"{error.filename or folder}: cannot be read ({error.strerror or error})") from error
    found = _by_module(folder, file, config, tensors)
    _check_numbers(folder, tensors)
    return found


def _check_numbers(folder: Path, tensors: list[TensorInfo]) -> None:
    """Raise CheckpointError for NaN or infinity."""
    with OpenFiles() as files:
        for info in tensors:
            for region in blocks(info.shape, PIECE):
                if not bool(torch.isfinite(files.read(info, region)).all()):
                    raise CheckpointError(
                        f"{info.file}: tensor {info.name} contains NaN or infinity; the adapter "
                        "is damaged: save it again, or download it again"
                    )


def _by_module(folder: Path, file: str, config: AdapterConfig, tensors: list[TensorInfo]) -> Adapter:
    """The adapter with its tensors by module. Raises CheckpointError for unknown tensor names."""
    modules: dict[str, Matrices] = {}
    whole: dict[str, TensorInfo] = {}
    odd = [info.name for info in tensors if not info.name.startswith(PREFIX)]
    odd += [f"{info.name} ({info.dtype})" for info in tensors if info.dtype not in CHECKPOINT]
    if odd:
        raise CheckpointError(
            f"{folder / file}: not weights of an adapter saved by peft: names must begin with {PREFIX} "
            f"and types must be floats: {few(odd)}"
        )
    for info in tensors:
        name = info.name.removeprefix(PREFIX)
        if ORIGINAL.search(name):
            continue
        if found := MATRIX.fullmatch(name):
            module, embedding, letter, kind = found.groups()
            part = "bias" if kind == "bias" else {"A": "down", "B": "up"}[letter]
        elif found := MAGNITUDE.fullmatch(name):
            module, embedding, part = found[1], None, "magnitude"
        else:
            whole[WHOLE.sub("", name)] = info
            continue
        known = modules.get(module, Matrices())
        changed: dict[str, Any] = {part: info, "embedding": known.embedding or embedding is not None}
        modules[module] = replace(known, **changed)
    problems = {name: _problem(each, config.rank_of(name), dora=config.dora) for name, each in modules.items()}
    if broken := [name for name, problem in problems.items() if problem]:
        others = f"; and {few(broken[1:])}" if broken[1:] else ""
        first = f"{broken[0]} {problems[broken[0]]}"
        raise CheckpointError(f"{folder / file}: does not fit adapter_config.json: {first}{others}")
    if not modules and not whole:
        raise CheckpointError(f"{folder / file}: the adapter has no weights")
    return Adapter(folder, file, config, modules, whole)


def _problem(matrices: Matrices, rank: int, *, dora: bool) -> str:
    """The defect of the tensors of a module; empty where there is none."""
    down, up = matrices.down, matrices.up
    if down is None or up is None:
        return f"has no lora_{'A' if down is None else 'B'}"
    if len(down.shape) != 2 or len(up.shape) != 2:
        return f"has lora_A {list(down.shape)} and lora_B {list(up.shape)}, not matrices"
    if down.shape[0] != rank or up.shape[1] != rank:
        return f"has lora_A {list(down.shape)} and lora_B {list(up.shape)}, but its rank is {rank}"
    if dora != (matrices.magnitude is not None):
        return "has no lora_magnitude_vector" if dora else "has a lora_magnitude_vector, but use_dora is false"
    return ""


def adapter_record(adapter: Adapter, name: str, *, merged: bool) -> AdapterRecord:
    """The record of `adapter` under the name that runs use, with hashes of its files."""
    return AdapterRecord(
        name=name,
        merged=merged,
        kind="dora" if adapter.config.dora else "lora",
        ranks=adapter.ranks,
        modules=len(adapter.modules),
        replaced_parameters=tuple(sorted(adapter.replaced_tensors)),
        base_model=adapter.config.base_model,
        source=tuple(record_file(adapter.folder, file) for file in (CONFIG, adapter.file)),
    )
