"""PEFT adapters, merged into the weights or switchable. Here: config and tensors, and weights changed by an adapter.

LoRA (arXiv 2106.09685)   W + s B A                          A [r, K], B [N, r], W [N, K]
DoRA (arXiv 2402.09353)   m / |W + s B A| (W + s B A)        m [N]; |.| of each row
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated

import torch
from pydantic import BaseModel, Field, FiniteFloat, ValidationError

from partita.errors import CheckpointError, UnsupportedModelError
from partita.export.checkpoint.weight_files import SHOWN_CHARACTERS, OpenFiles, few, list_tensors, read_json, unreadable
from partita.export.weights import CHECKPOINT
from partita.export.weights.origins import DerivedOrigin, Reader, Region, TensorInfo, blocks
from partita.package.folder import AdapterRecord, check_folder, record_file


@dataclass(frozen=True)
class LowRank(DerivedOrigin):
    """A tensor of the checkpoint [N, K], or [K, N] if `transposed`, plus the product of two matrices, float32.

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
            files.computed[self] = self._factors(self.magnitude, files)
        (start, stop) = region[1 if self.transposed else 0]
        factors = files.computed[self][start:stop]
        return self._sum(region, files) * (factors if self.transposed else factors.unsqueeze(-1))

    def _sum(self, region: Region, files: Reader) -> torch.Tensor:
        """W + s B A in `region`."""
        rows, columns = (slice(*span) for span in (reversed(region) if self.transposed else region))
        added = self.up.read_all(files).float()[rows] @ self.down.read_all(files).float()[:, columns] * self.scale
        return self.source.read(region, files).to(torch.float32) + (added.T if self.transposed else added)

    def _factors(self, magnitude: TensorInfo, files: Reader) -> torch.Tensor:
        """m / |W + s B A| [N], computed a few rows at a time."""
        squares = torch.zeros(self.up.shape[0])
        height, width = self.shape
        step = max(1, PIECE // width)
        for start in range(0, height, step):
            rows = (start, min(start + step, height))
            part = self._sum((rows, (0, width)), files).square()
            if self.transposed:
                squares += part.sum(0)
            else:
                squares[rows[0] : rows[1]] = part.sum(1)
        return magnitude.read_all(files).float().reshape(-1) / squares.sqrt()


CONFIG = "adapter_config.json"
WITHOUT_EFFECT = frozenset(
    (
        *("peft_type", "bias", "modules_to_save"),  # the tensors state what the last two change
        *("auto_mapping", "peft_version", "revision", "task_type", "inference_mode", "target_modules"),
        *("exclude_modules", "lora_dropout", "fan_in_fan_out", "layers_to_transform", "layers_pattern"),
        *("megatron_core", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "qalora_group_size"),
        "runtime_config",
    )
)
"""Training settings, and settings that the tensors state."""
START = "init_lora_weights"
STARTS = (None, True, False, "gaussian", "eva", "orthogonal")
"""Values of `START`; others, e.g. pissa, also changed the weights of the model."""
ALTERNATIVE = "merge it with peft (merge_and_unload) and export the merged model"
MOST_CHARACTERS = 500
Rank = Annotated[int, Field(gt=0, le=1 << 20)]


class AdapterConfig(BaseModel, strict=True, frozen=True):
    """The settings of adapter_config.json that the export uses."""

    r: Rank = 8
    lora_alpha: FiniteFloat = 8.0
    rank_pattern: dict[str, Rank] = {}
    """Pattern of module names -> rank."""
    alpha_pattern: dict[str, FiniteFloat] = {}
    use_rslora: bool = False
    """Scaled by alpha / sqrt(rank) (rsLoRA, arXiv 2312.03732) in place of alpha / rank."""
    use_dora: bool = False
    base_model_name_or_path: str = ""

    def rank_of(self, module: str) -> int:
        """The rank of the adapter of a module."""
        return next((rank for pattern, rank in self.rank_pattern.items() if _matches(pattern, module)), self.r)

    def scale(self, module: str) -> float:
        """The factor s of s B A."""
        rank = self.rank_of(module)
        alphas = (alpha for pattern, alpha in self.alpha_pattern.items() if _matches(pattern, module))
        alpha = next(alphas, self.lora_alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


PATTERN = re.compile(r"\^?(?:[\w-]|\\?\.|\.\*)+")
"""Supported patterns of module names: the whole name, if it begins with ^, or the end of one, with .* for any text."""


def _matches(pattern: str, module: str) -> bool:
    """Whether the regular expression `pattern`, one of `PATTERN`, matches the end of a module's name, as in peft."""
    glob = pattern.replace("\\.", ".").replace(".*", "*")
    return fnmatchcase(module, glob.removeprefix("^")) or fnmatchcase(module, f"*.{glob}")


def read_config(folder: Path) -> AdapterConfig:
    """Read adapter_config.json. Raises CheckpointError when damaged, UnsupportedModelError for other types."""
    path = folder / CONFIG
    if not path.is_file():
        raise CheckpointError(f"{folder}: not an adapter: {CONFIG} is missing")
    raw = {key: value for key, value in read_json(path).items() if value is not None}
    if "peft_type" not in raw:
        raise CheckpointError(f"{path}: damaged: peft_type is missing")
    if (kind := str(raw["peft_type"])[:40].upper()) != "LORA":
        raise UnsupportedModelError(
            f"{path}: adapter type {kind}: only LoRA and DoRA are supported; if it modifies weights, {ALTERNATIVE}"
        )
    try:
        config = AdapterConfig.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part)[:SHOWN_CHARACTERS] for part in first["loc"])
        value = ascii(first["input"])[:SHOWN_CHARACTERS]
        raise CheckpointError(f"{path}: damaged: {where} is {value} ({first['msg']})") from error
    unknown = {key for key, value in raw.items() if value} - {*AdapterConfig.model_fields, *WITHOUT_EFFECT, START}
    if raw.get(START) not in STARTS:
        unknown.add(f"{START} {str(raw[START])[:40]}")
    for pattern in (*config.rank_pattern, *config.alpha_pattern):
        if len(pattern) > MOST_CHARACTERS or not PATTERN.fullmatch(pattern):
            unknown.add(f"the pattern {pattern[:SHOWN_CHARACTERS]!r}")
    if unknown:
        raise UnsupportedModelError(
            f"{path}: {few(sorted(unknown))} is set, which is not supported and may change the result of the adapter; "
            f"{ALTERNATIVE}"
        )
    return config


FILES = ("adapter_model.safetensors", "adapter_model.bin")
PIECE = 1 << 22
"""Elements read in one step."""
PREFIX = "base_model.model."
"""The prefix of module names in peft."""
PART = re.compile(
    r"(?P<module>.+)\.lora_(?:(?P<embedding>embedding_)?(?P<letter>[AB])|magnitude_vector)(?:\.default)?(?:\.weight)?"
)
WHOLE = re.compile(r"\.(modules_to_save(\.default)?|base_layer)(?=\.)")
"""Parts that peft adds to the name of a parameter that it saves whole."""
ORIGINAL = re.compile(r"\.original_module(?=\.)")
"""Part of the name of a parameter that `modules_to_save` replaces; peft saves it and does not use it."""


@dataclass(frozen=True, slots=True)
class Matrices:
    """The tensors of an adapter for one module."""

    down: TensorInfo
    """A [r, K]."""
    up: TensorInfo
    """B [N, r]."""
    magnitude: TensorInfo | None = None
    embedding: bool = False

    @property
    def rank(self) -> int:
        """r, the first axis of A."""
        return self.down.shape[0]


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
        raise unreadable(error, folder) from error
    found = _by_module(folder, file, config, tensors)
    with OpenFiles() as files:
        for info in tensors:
            if not all(bool(files.read(info, region).isfinite().all()) for region in blocks(info.shape, PIECE)):
                raise CheckpointError(
                    f"{info.file}: tensor {info.name} contains NaN or infinity; the adapter is damaged: save it again, "
                    "or download it again"
                )
    return found


def _by_module(folder: Path, file: str, config: AdapterConfig, tensors: list[TensorInfo]) -> Adapter:
    """The adapter with its tensors by module. Raises CheckpointError for unknown tensor names."""
    odd = [info.name for info in tensors if not info.name.startswith(PREFIX)]
    odd += [f"{info.name} ({info.dtype})" for info in tensors if info.dtype not in CHECKPOINT]
    if odd:
        raise CheckpointError(
            f"{folder / file}: not weights of an adapter saved by peft: names must begin with {PREFIX} "
            f"and types must be floats: {few(odd)}"
        )
    parts: dict[str, dict[str, TensorInfo]] = {}
    embeddings: set[str] = set()
    whole: dict[str, TensorInfo] = {}
    for info in tensors:
        name = info.name.removeprefix(PREFIX)
        if ORIGINAL.search(name):
            continue
        if found := PART.fullmatch(name):
            parts.setdefault(found["module"], {})[found["letter"] or "magnitude"] = info
            if found["embedding"]:
                embeddings.add(found["module"])
        else:
            whole[WHOLE.sub("", name)] = info
    problems = {name: _problem(each, config.rank_of(name), dora=config.use_dora) for name, each in parts.items()}
    if broken := [f"{name} {problem}" for name, problem in problems.items() if problem]:
        raise CheckpointError(f"{folder / file}: does not fit adapter_config.json: {few(broken, '; ')}")
    if not parts and not whole:
        raise CheckpointError(f"{folder / file}: the adapter has no weights")
    modules = {
        name: Matrices(each["A"], each["B"], each.get("magnitude"), name in embeddings) for name, each in parts.items()
    }
    return Adapter(folder, file, config, modules, whole)


def _problem(parts: Mapping[str, TensorInfo], rank: int, *, dora: bool) -> str:
    """The defect of the tensors of a module; empty where there is none."""
    if missing := [f"lora_{letter}" for letter in "AB" if letter not in parts]:
        return f"has no {' and no '.join(missing)}"
    down, up = parts["A"].shape, parts["B"].shape
    if len(down) != 2 or len(up) != 2 or down[0] != rank or up[1] != rank:
        return f"has lora_A {list(down)} and lora_B {list(up)}, but its rank is {rank}"
    if dora != ("magnitude" in parts):
        return "has no lora_magnitude_vector" if dora else "has a lora_magnitude_vector, but use_dora is false"
    return ""


def adapter_record(adapter: Adapter, name: str, *, merged: bool) -> AdapterRecord:
    """The record of `adapter` under the name that runs use, with hashes of its files."""
    return AdapterRecord(
        name=name,
        merged=merged,
        kind="dora" if adapter.config.use_dora else "lora",
        ranks=tuple(sorted({matrices.rank for matrices in adapter.modules.values()})),
        modules=len(adapter.modules),
        replaced_parameters=tuple(sorted(adapter.replaced_tensors)),
        base_model=adapter.config.base_model_name_or_path,
        source=tuple(record_file(adapter.folder, file) for file in (CONFIG, adapter.file)),
    )
