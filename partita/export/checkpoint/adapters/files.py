"""Tensors of a PEFT adapter by module, checked for NaN and infinity."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from partita.errors import CheckpointError
from partita.export.checkpoint.adapters.config import AdapterConfig, read_config
from partita.export.checkpoint.adapters.recipes import AdapterTensor
from partita.export.checkpoint.weight_files import OpenFiles, TensorInfo, few, list_tensors
from partita.export.graph.element_types import CHECKPOINT
from partita.export.weights.origins import blocks
from partita.package.folder import COMPANIONS, check_folder

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

    down: AdapterTensor | None = None
    """A."""
    up: AdapterTensor | None = None
    """B."""
    bias: AdapterTensor | None = None
    magnitude: AdapterTensor | None = None
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
    whole: Mapping[str, AdapterTensor]
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

    def others(self) -> str:
        """Everything it changes other than MatMuls, in words; empty where nothing."""
        parts = []
        if any(matrices.embedding for matrices in self.modules.values()):
            parts.append("an embedding")
        if any(matrices.magnitude for matrices in self.modules.values()):
            parts.append("magnitudes (DoRA)")
        if any(matrices.bias for matrices in self.modules.values()):
            parts.append("biases (lora_bias)")
        if self.whole:
            parts.append(f"whole parameters ({few(sorted(self.whole))})")
        return ", ".join(parts)


def read_adapter(folder: Path) -> Adapter:
    """Read the adapter in `folder`.

    Raises CheckpointError when it is missing or damaged, UnsupportedModelError for an unsupported type.
    """
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
    with OpenFiles(folder) as files:
        for info in tensors:
            for region in blocks(info.shape, PIECE):
                if not bool(torch.isfinite(files.read(info, region)).all()):
                    raise CheckpointError(
                        f"{folder / info.file}: tensor {info.name} contains NaN or infinity; the adapter "
                        "is damaged: save it again, or download it again"
                    )


def _by_module(folder: Path, file: str, config: AdapterConfig, tensors: list[TensorInfo]) -> Adapter:
    """The adapter with its tensors by module. Raises CheckpointError for unknown tensor names."""
    modules: dict[str, Matrices] = {}
    whole: dict[str, AdapterTensor] = {}
    odd = [info.name for info in tensors if not info.name.startswith(PREFIX)]
    odd += [f"{info.name} ({info.dtype})" for info in tensors if info.dtype not in CHECKPOINT]
    if odd:
        raise CheckpointError(
            f"{folder / file}: not weights of an adapter saved by peft: names must begin with {PREFIX} "
            f"and types must be floats: {few(odd)}"
        )
    for info in tensors:
        tensor, name = AdapterTensor(folder, info), info.name.removeprefix(PREFIX)
        if ORIGINAL.search(name):
            continue
        if found := MATRIX.fullmatch(name):
            module, embedding, letter, kind = found.groups()
            field = "bias" if kind == "bias" else {"A": "down", "B": "up"}[letter]
        elif found := MAGNITUDE.fullmatch(name):
            module, embedding, field = found[1], None, "magnitude"
        else:
            whole[WHOLE.sub("", name)] = tensor
            continue
        known = modules.get(module, Matrices())
        changed: dict[str, Any] = {field: tensor, "embedding": known.embedding or embedding is not None}
        modules[module] = replace(known, **changed)
    broken = [name for name, each in modules.items() if _problem(each, config.rank_of(name), dora=config.dora)]
    if broken:
        first = broken[0]
        problem = _problem(modules[first], config.rank_of(first), dora=config.dora)
        others = f"; and {few(broken[1:])}" if broken[1:] else ""
        raise CheckpointError(f"{folder / file}: does not fit adapter_config.json: {first} {problem}{others}")
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
