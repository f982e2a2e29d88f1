"""Read and validate the header of a GGUF file (ggml, docs/gguf.md): settings, and the location of each tensor.

    magic "GGUF", version u32, number of tensors u64, number of settings u64
    settings: name, type u32, value;  tensors: name, axes u32, sizes u64 each (the fastest first), type u32, offset u64
    padding up to a multiple of general.alignment, then the data

Big-endian files and parts of split files are refused.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from partita.errors import CheckpointError, UnsupportedModelError
from partita.export.checkpoint.gguf import BlockType, block_type
from partita.export.checkpoint.weight_files import SHOWN_CHARACTERS, is_name, refuse_pointer
from partita.observations.text_format import plural

MAGIC = b"GGUF"
VERSIONS = (2, 3)
STRING, ARRAY = 8, 9
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Types of settings -> format characters of struct."""
LEAST_SETTING, LEAST_TENSOR = 8 + 4 + 1, 8 + 4 + 8 + 4 + 8
"""Minimum size in bytes of one setting and one tensor record."""
TOKENS = "tokenizer.ggml.tokens"
ENDS = frozenset(
    (
        *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>"),
        *("<end_of_turn>", "<end_of_utterance>", "<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>"),
        *("<EOT>", "_<EOT>", "[EOT]", "[EOS]"),
    )
)
"""End-of-generation tokens of llama.cpp (llama-vocab.cpp, special_eog_ids)."""
HARMONY = frozenset({"<|return|>", "<|call|>", "<|end|>"})
"""In a vocabulary with all of them, <|end|> ends a message, not the generation."""
PER_TOKEN_ARRAYS = ("tokenizer.ggml.scores", "tokenizer.ggml.token_type")
"""Arrays with one value per token."""
MOST_TENSORS, MOST_SETTINGS, MOST_VALUES = 1 << 14, 1 << 12, 1 << 21
"""Maximum counts; values are those of all arrays together. Real files have fewer than 2,000 tensors, 100 settings and
1.5 million values."""
MOST_AXES, DEEPEST, MOST_ALIGNMENT = 4, 4, 1 << 20
MOST_KEPT = 4096
"""Maximum length of an array that is returned: per-layer arrays are, per-token arrays are not."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor of the file."""

    name: str
    shape: tuple[int, ...]
    """The fastest axis last."""
    type: BlockType
    start: int
    """Offset of its first byte in the file."""

    @property
    def row_bytes(self) -> int:
        """Bytes per row of the last axis."""
        return self.shape[-1] // self.type.block * self.type.size_bytes

    @property
    def size_bytes(self) -> int:
        """Bytes of all rows."""
        return math.prod(self.shape[:-1]) * self.row_bytes


@dataclass(frozen=True, slots=True)
class Header:
    """The contents of the header of a GGUF file."""

    path: Path
    settings: Mapping[str, Any]
    """Name -> number or string; a tuple for a short array of numbers, None for any other array."""
    tensors: Mapping[str, GgufTensor]
    ends: tuple[int, ...] = ()
    """Ids of the end-of-generation tokens of llama.cpp."""

    @property
    def architecture(self) -> str:
        """The architecture's name in llama.cpp."""
        return str(self.settings["general.architecture"])


def read_header(path: Path) -> Header:
    """Read the header of a GGUF file. Raises CheckpointError when damaged, UnsupportedModelError for other formats."""
    refuse_pointer(path)
    size = path.stat().st_size
    if size < 24:
        raise CheckpointError(f"{path}: not a GGUF file: damaged or truncated at {size} bytes")
    with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return _Reader(path, data, size).header()


class _Reader:
    """A parser of the bytes of a header. Reading past the end of the file is an error."""

    def __init__(self, path: Path, data: mmap.mmap, size: int) -> None:
        self.path, self.data, self.size, self.at = path, data, size, 0
        self.counts: dict[str, int] = {}
        self.ends: tuple[int, ...] = ()
        self.values = 0

    def header(self) -> Header:
        """Parse the whole header."""
        if self.take(4) != MAGIC:
            raise CheckpointError(f"{self.path}: damaged: it does not begin with the bytes GGUF")
        version = self.number("I")
        if version & 0xFFFF == 0:
            raise UnsupportedModelError(f"{self.path}: big-endian; convert it with gguf_convert_endian of llama.cpp")
        if version not in VERSIONS:
            raise UnsupportedModelError(
                f"{self.path}: GGUF version {version} is not supported, only "
                f"{' and '.join(map(str, VERSIONS))}; convert the model again with a current llama.cpp"
            )
        tensors, settings = self.number("Q"), self.number("Q")
        for what, count, least, most in (
            ("tensors", tensors, LEAST_TENSOR, MOST_TENSORS),
            ("settings", settings, LEAST_SETTING, MOST_SETTINGS),
        ):
            if count * least > self.size - self.at:
                raise self.damage_error(f"it declares {count:,} {what}, more than fit in its {self.size:,} bytes")
            self._check_count(count, most, what)
        found: dict[str, Any] = {}
        for _ in range(settings):
            name, value = self.setting()
            if name in found:  # readers differ in which of two they use
                raise self.damage_error(f"it has two settings named {name[:SHOWN_CHARACTERS]}")
            found[name] = value
        self._check_settings(found)
        infos = [self.tensor() for _ in range(tensors)]
        start = -(-self.at // self._alignment(found)) * self._alignment(found)
        return Header(self.path, found, self._placed(infos, start, self._alignment(found)), self.ends)

    def damage_error(self, what: str) -> CheckpointError:
        """The error of a damaged file."""
        return CheckpointError(f"{self.path}: damaged or truncated: {what}; download it again")

    def _note_count(self, name: str, count: int) -> None:
        self.counts[name] = count
        self.values += count
        self._check_count(self.values, MOST_VALUES, "values in arrays")

    def _check_count(self, count: int, most: int, what: str) -> None:
        if count > most:
            raise UnsupportedModelError(
                f"{self.path}: it declares {count:,} {what}, but at most {most:,} are supported"
            )

    def take(self, count: int) -> bytes:
        """The next `count` bytes."""
        self.skip(count)
        return self.data[self.at - count : self.at]

    def number(self, kind: str) -> Any:
        """The next number. `kind`: a format character of struct."""
        return struct.unpack(f"<{kind}", self.take(struct.calcsize(f"<{kind}")))[0]

    def text(self) -> str:
        """The next string."""
        raw = self.take(self.number("Q"))
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.damage_error(f"a string in its header at {self.at:,} is not UTF-8") from error

    def setting(self) -> tuple[str, Any]:
        """The next setting."""
        name = self.text()
        return name, self.value(self.number("I"), name)

    def value(self, kind: int, name: str, depth: int = 0) -> Any:
        """The value of a setting; None for an array that is not returned."""
        if kind in SCALARS:
            return self.number(SCALARS[kind])
        if kind == STRING:
            return self.text()
        if kind != ARRAY or depth == DEEPEST:
            raise self.damage_error(f"setting {name[:SHOWN_CHARACTERS]!r} has the unknown type {kind}")
        inner, count = self.number("I"), self.number("Q")
        if inner in SCALARS:
            start = self.at
            self.skip(count * struct.calcsize(f"<{SCALARS[inner]}"))
            self._note_count(name, count)
            kept = depth == 0 and count <= MOST_KEPT
            return struct.unpack_from(f"<{count}{SCALARS[inner]}", self.data, start) if kept else None
        if count * 8 > self.size - self.at:
            raise self.damage_error(f"setting {name[:SHOWN_CHARACTERS]!r} declares {count:,} values")
        self._note_count(name, count)
        if inner == STRING and name == TOKENS:
            self._tokens(count)
            return None
        for _ in range(count):
            self.value(inner, name, depth + 1)  # strings too: the tokenizer cannot be read with one that is not UTF-8
        return None

    def _tokens(self, count: int) -> None:
        """Read the vocabulary. Raises CheckpointError for a token with two ids."""
        seen: dict[str, int] = {}
        for place in range(count):
            token = self.text()
            first = seen.setdefault(token, place)
            if token and first != place:
                shown = token[:SHOWN_CHARACTERS]
                raise self.damage_error(f"its vocabulary contains {shown!r} twice, as {first:,} and as {place:,}")
        ends = ENDS - {"<|end|>"} if seen.keys() >= HARMONY else ENDS
        self.ends = tuple(sorted(seen[text] for text in ends & seen.keys()))

    def skip(self, count: int) -> None:
        """Skip `count` bytes."""
        if count > self.size - self.at:
            raise self.damage_error(f"its header needs {count:,} bytes at {self.at:,}, but the file has {self.size:,}")
        self.at += count

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """Name, shape, type and offset of the next tensor."""
        name = self.text()
        if not is_name(name):
            raise self.damage_error(f"it has a tensor with the invalid name {name[:SHOWN_CHARACTERS]!r}")
        axes = self.number("I")
        if not 1 <= axes <= MOST_AXES:
            raise self.damage_error(f"tensor {name} has {axes:,} axes")
        sizes = [self.number("Q") for _ in range(axes)]
        return name, tuple(reversed(sizes)), self.number("I"), self.number("Q")

    def _check_settings(self, found: Mapping[str, Any]) -> None:
        if not isinstance(found.get("general.architecture"), str):
            raise self.damage_error("general.architecture is missing")
        for name in PER_TOKEN_ARRAYS:
            if self.counts.get(name, self.counts.get(TOKENS)) != self.counts.get(TOKENS):
                raise self.damage_error(
                    f"it has {plural(self.counts.get(TOKENS, 0), 'token')}, but {name} has "
                    f"{self.counts[name]:,} entries"
                )
        split = found.get("split.count")
        if isinstance(split, int) and split > 1:
            raise UnsupportedModelError(
                f"{self.path}: part of a file split into {plural(split, 'part')}; join them with llama-gguf-split"
            )

    def _alignment(self, found: Mapping[str, Any]) -> int:
        given = found.get("general.alignment", 32)
        if not isinstance(given, int) or not 0 < given <= MOST_ALIGNMENT:
            raise self.damage_error(f"its general.alignment is {str(given)[:40]}, which is invalid")
        return given

    def _placed(self, infos: list[tuple[str, tuple[int, ...], int, int]], start: int, alignment: int) -> dict[str, Any]:
        """The tensors with their offsets, all of them inside the file."""
        tensors: dict[str, GgufTensor] = {}
        end = 0
        for name, shape, kind, offset in infos:
            known = block_type(kind)
            if known is None:
                raise UnsupportedModelError(
                    f"{self.path}: tensor {name} has the type {kind}, which the installed package gguf "
                    "does not know or cannot read; install a newer version"
                )
            if name in tensors:
                raise self.damage_error(f"it has two tensors named {name}")
            if shape[-1] % known.block:
                raise self.damage_error(
                    f"tensor {name} has rows of {shape[-1]:,}, but {known.name} uses blocks of {known.block}"
                )
            tensor = GgufTensor(name, shape, known, start + offset)
            if offset % alignment or tensor.start + tensor.size_bytes > self.size:
                raise self.damage_error(
                    f"tensor {name} {list(shape)} of {known.name} ends at byte "
                    f"{tensor.start + tensor.size_bytes:,}, but the file has {self.size:,}"
                )
            if offset != end:  # ggml refuses files with gaps between tensors
                raise self.damage_error(
                    f"tensor {name} begins at byte {offset:,} of the data, but the tensors before it end at {end:,}"
                )
            end += -(-tensor.size_bytes // alignment) * alignment
            tensors[name] = tensor
        return tensors
