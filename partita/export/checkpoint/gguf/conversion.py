"""Open a GGUF file as a checkpoint folder, with config and tokenizer in transformers' formats.

The folder is temporary, contains a link to the file, and lasts as long as the checkpoint object.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, modeling_gguf_pytorch_utils

from partita.errors import PartitaError, UnsupportedModelError
from partita.export.checkpoint.gguf import dequantised
from partita.export.checkpoint.gguf.header import MAGIC, GgufTensor, Header, read_header
from partita.export.checkpoint.gguf.settings import complete_config, mapped_as
from partita.export.checkpoint.gguf.weights import weights_of
from partita.export.checkpoint.stored_formats import QuantisedTensors, StoredFloats
from partita.export.checkpoint.weight_files import LAYOUTS, few
from partita.export.trace.fake_model import quiet, translate_errors

SUFFIX = ".gguf"
FACTORS = "rope_freqs.weight"
"""Divisors of the rotary embedding's frequencies, as in llama 3.1."""
SPLITS_AS_GPT2 = frozenset(
    (
        *("gpt-2", "phi-2", "jina-es", "jina-de", "jina-v1-en", "jina-v2-es", "jina-v2-de", "jina-v2-code"),
        *("roberta-bpe", "gigachat", "a.x-4.0", "mellum", "modern-bert", "mpt", "olmo", "jais", "trillion"),
        "granite-docling",
    )
)
"""llama.cpp's names of pre-tokenizers that split text as GPT-2 does (llama-vocab.cpp).

transformers uses GPT-2's split for every unknown name."""


class Scratch:
    """A temporary folder, removed with the object or at exit."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="partita-gguf-"))
        weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class ConvertedFile:
    """A GGUF file and the folder made from it."""

    header: Header
    folder: Path
    scratch: Scratch
    """Removes the folder when it is garbage-collected."""
    notes: tuple[str, ...]

    @property
    def file(self) -> str:
        """The name of the link to the GGUF file in the folder."""
        return self.header.path.name


def gguf_file(given: Path) -> Path | None:
    """The GGUF file at `given`, or the only weights there, or None. Raises UnsupportedModelError for several."""
    if given.is_file() and (given.suffix == SUFFIX or _begins_as_one(given)):
        return given
    if not given.is_dir() or any((given / name).is_file() for layout in LAYOUTS for name in layout):
        return None
    files = sorted(given.glob(f"*{SUFFIX}"))
    if len(files) > 1:
        raise UnsupportedModelError(
            f"{given}: {len(files)} GGUF files and no other weights: {few([path.name for path in files])}; give one of "
            "them"
        )
    return files[0] if files else None


def _begins_as_one(path: Path) -> bool:
    """Whether a file of any name starts with the magic bytes of GGUF."""
    try:
        with path.open("rb") as stream:
            return stream.read(len(MAGIC)) == MAGIC
    except OSError:
        return False  # reported where the file is read


def prepare(path: Path) -> ConvertedFile:
    """Write config and tokenizer of a GGUF file into a temporary folder. Raises as `read_header` does."""
    import gguf  # noqa: F401 - an ImportError is told with the extra that brings it

    header = read_header(path)
    known = modeling_gguf_pytorch_utils.GGUF_SUPPORTED_ARCHITECTURES
    if mapped_as(header.architecture) not in known:
        raise UnsupportedModelError(
            f"{path}: transformers cannot read GGUF files of architecture {header.architecture[:80]}; it "
            f"reads {', '.join(sorted(known))}; export the checkpoint that the file was converted from"
        )
    scratch = Scratch()
    folder = scratch.folder
    (folder / path.name).symlink_to(path.resolve())
    with quiet(), translate_errors(f"{path}: reading the config of {header.architecture}"):
        config = AutoConfig.from_pretrained(str(folder), gguf_file=path.name, local_files_only=True)
        raw = config.to_dict()
    raw, notes = complete_config(header, raw)
    if FACTORS in header.tensors:
        raw |= _with_factors(header, raw)
    (folder / "config.json").write_text(json.dumps(raw, default=str), encoding="utf-8")
    return ConvertedFile(header, folder, scratch, (*notes, *_tokenizer(header, folder, path.name)))


def read(prepared: ConvertedFile, config: PreTrainedConfig) -> QuantisedTensors:
    """The weights of a GGUF file as a quantised checkpoint. Raises as `weights_of` does."""
    with quiet(), translate_errors(f"{prepared.header.path}: finding its tensors in the model"):
        weights = weights_of(prepared.header, config)
    packed = {name: weight for name, weight in weights.items() if not isinstance(weight, StoredFloats)}
    tensors = {name: weight.info for name, weight in weights.items()}
    return QuantisedTensors(_method(prepared.header), tensors, packed)


def _method(header: Header) -> str:
    """The method name: GGUF with the types of its matrices, the most frequent first."""
    counts: dict[str, int] = {}
    for tensor in header.tensors.values():
        if len(tensor.shape) > 1:
            counts[tensor.type.name] = counts.get(tensor.type.name, 0) + int(np.prod(tensor.shape))
    return f"GGUF {', '.join(sorted(counts, key=lambda name: -counts[name]))}"


def _with_factors(header: Header, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of the rotary embedding with the frequency factors of the file, the same at every length."""
    tensor: GgufTensor = header.tensors[FACTORS]
    stored = np.memmap(header.path, np.uint8, "r", offset=tensor.start, shape=(1, tensor.size_bytes))
    factors = dequantised(stored, tensor.type.number).reshape(-1).astype(float).tolist()
    rope = raw.get("rope_parameters")
    if not isinstance(rope, dict) or rope.get("rope_type", "default") != "default":
        raise UnsupportedModelError(f"{header.path}: {FACTORS} and a rotary embedding of another type")
    most = raw.get("max_position_embeddings")
    # transformers has factors for longrope only; with both equal, and attention_factor 1, it computes as llama.cpp
    changed = {"rope_type": "longrope", "short_factor": factors, "long_factor": factors, "attention_factor": 1.0}
    return {"rope_parameters": {**rope, **changed, "factor": 1.0, "original_max_position_embeddings": most}}


def _tokenizer(header: Header, folder: Path, file: str) -> tuple[str, ...]:
    """Write the tokenizer of the file into `folder`. Returns a note where transformers cannot load it or differs."""
    try:
        with quiet(), translate_errors("reading the tokenizer"):
            tokenizer = AutoTokenizer.from_pretrained(str(folder), gguf_file=file, local_files_only=True)
            tokenizer.save_pretrained(str(folder))
    except PartitaError as error:
        return (f"transformers cannot build a tokenizer from the GGUF file: {error.message[:200]}",)
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    split, known = header.settings.get("tokenizer.ggml.pre"), {*SPLITS_AS_GPT2, *GGUF_PRE_TOKENIZER_SPLITS}
    if header.settings.get("tokenizer.ggml.model") != "gpt2" or split in known:
        return ()
    how = "names no pre-tokenizer" if split is None else f"names the pre-tokenizer {str(split)[:40]!r}"
    return (
        f"the GGUF file {how} (tokenizer.ggml.pre), but transformers splits text as GPT-2 does: some "
        "texts get other tokens than in training; pass token ids, or export the checkpoint that the file "
        "was converted from",
    )
