"""Malicious or heavily damaged folders: one-line errors, before anything large is read."""

from __future__ import annotations

import json
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from partita import untrusted_files
from partita.errors import CheckpointError, PackageError
from partita.export.checkpoint.adapters import read_config
from partita.export.checkpoint.description import open_checkpoint
from partita.export.checkpoint.weight_files import OpenFiles, list_tensors
from partita.foreign.evidence import read_evidence
from partita.runtime.generate.text.tokens import load_text, stop_token_ids
from tests.checkpoints import edit_config, edit_tensors
from tests.conftest import TinyCheckpoint
from tests.export.test_bad_checkpoints import INDEX, Copy, refuse

NORM, WEIGHTS, BIN = "model.norm.weight", "model.safetensors", "pytorch_model.bin"
Said = Callable[[], str]


def header(content: dict[str, Any] | bytes, claimed: int | None = None) -> bytes:
    """A safetensors file without data."""
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    return struct.pack("<Q", len(text) if claimed is None else claimed) + text


def empty(*shape: int) -> dict[str, Any]:
    return {NORM: {"dtype": "F32", "shape": list(shape), "data_offsets": [0, 0]}}


@pytest.fixture
def said(llama: Path, tmp_path: Path) -> Said:
    """The error of its export, which is short."""

    def error() -> str:
        text = str(refuse(llama, tmp_path / "made" / "out", max_length=64))
        assert len(text) < 1000
        return text

    return error


FILES: dict[str, tuple[bytes, str]] = {
    "larger_than_memory": (header(empty(2**62, 2**62)), "damaged"),
    "large_and_empty": (header(empty(2**62, 0)), "the weight files have 1 tensors"),
    "negative": (header(empty(-1)), "damaged"),
    "header_larger_than_the_file": (header(b"{}", claimed=2**62), "damaged"),
    "no_tensors": (header({}), "the weight files have 0 tensors"),
    "nothing": (b"", "damaged"),
}


@pytest.mark.parametrize("kind", sorted(FILES))
def test_malformed_safetensors_headers_are_rejected(llama: Path, said: Said, kind: str) -> None:
    content, words = FILES[kind]
    (llama / WEIGHTS).write_bytes(content)
    assert words in said()


@pytest.mark.parametrize("name", ["evil\n\x1b[31mred", "..", "x" * 100_000, "model.layers.²"], ids=lambda n: n[:9])
def test_invalid_tensor_names_are_rejected(llama: Path, said: Said, name: str) -> None:
    edit_tensors(llama, lambda tensors: tensors.update({name: torch.ones(1)}))
    assert f"contains a tensor with the invalid name {name[:120]!r}" in said()


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        *((INDEX, json.dumps({"weight_map": {"x": name}}), "") for name in ("a\nb.safetensors", "a" * 5000, 3)),
        (INDEX, '{"weight_map": [1]}', "weight_map is missing"),
        *((name, "[" * 200_000, f"{name}: damaged: not JSON (") for name in ("config.json", INDEX)),
        ("config.json", '{"vocab_size":' + "9" * 5000 + "}", "config.json: damaged: not JSON ("),
    ],
    ids=["control", "long", "number", "list", "nested_config", "nested_index", "digits"],
)
def test_invalid_json_files_give_short_errors(llama: Path, said: Said, name: str, text: str, words: str) -> None:
    (llama / name).write_text(text)
    if name == INDEX:
        (llama / WEIGHTS).unlink()
    assert words in said()


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "layers": ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1,000,000,000"),
    **{
        key: ({key: 1 << 31}, f"do not match: {key} is 2,147,483,648, but the weight files have")
        for key in ("vocab_size", "num_key_value_heads", "intermediate_size")
    },
    "architectures": ({"architectures": [3]}, "the checkpoint contains 3, which has no language-model head"),
    "model_type": ({"model_type": ["llama"]}, "cannot read config.json of model type ['llama']"),
}


@pytest.mark.parametrize("kind", sorted(CONFIGS))
def test_invalid_config_values_are_rejected(llama: Path, said: Said, kind: str) -> None:
    """Sizes are checked before the model is built, which could need any amount of memory."""
    changes, words = CONFIGS[kind]
    edit_config(llama, **changes)
    assert words in said()


def test_expert_count_beyond_stored_weights_is_rejected(
    tiny_checkpoint: TinyCheckpoint, own_copy: Copy, tmp_path: Path
) -> None:
    folder = own_copy(tiny_checkpoint("mixtral", tokenizer=False, num_local_experts=4))
    error = refuse(edit_config(folder, num_local_experts=10**9), tmp_path / "made" / "out")
    assert "num_local_experts is 1,000,000,000" in str(error)


MADE: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "sparse": (lambda: torch.eye(8).to_sparse(), "something other than named tensors"),
    "meta": (lambda: torch.ones(64, device="meta"), "something other than named tensors"),
    # four bytes in the file for a tensor of 128 TiB
    "expanded": (lambda: torch.ones(1).expand(2**45), f"{NORM} is [35184372088832], but config.json requires [64]"),
}


@pytest.mark.parametrize("kind", sorted(MADE))
def test_non_plain_tensors_in_bin_files_are_rejected(llama: Path, said: Said, kind: str) -> None:
    make, words = MADE[kind]
    torch.save({**load_file(llama / WEIGHTS), NORM: make()}, llama / BIN)
    (llama / WEIGHTS).unlink()
    assert words in said()


def test_compressed_bin_files_are_read_and_damaged_ones_rejected(tmp_path: Path) -> None:
    plain = tmp_path / "plain.bin"
    torch.save({"a": torch.arange(1 << 12, dtype=torch.float32), "b": torch.zeros(1 << 20)}, plain)
    with zipfile.ZipFile(plain) as read, zipfile.ZipFile(tmp_path / "packed.bin", "w", zipfile.ZIP_DEFLATED) as packed:
        for name in read.namelist():
            packed.writestr(name, read.read(name))
    for name in ("plain.bin", "packed.bin"):
        (info, _) = list_tensors(tmp_path, name)
        with OpenFiles() as files:
            assert files.read(info, ((5, 7),)).tolist() == [5.0, 6.0]
    raw = bytearray(plain.read_bytes())
    (tmp_path / "cut.bin").write_bytes(raw[: len(raw) // 2])
    place, size = raw.rindex(b"PK\x01\x02", 0, raw.rindex(b"data/1")), (1 << 22).to_bytes(4, "little")
    assert raw[place + 20 : place + 28] == size * 2
    raw[place + 20 : place + 28] = (1 << 31).to_bytes(4, "little") * 2  # a record longer than the file
    (tmp_path / "long.bin").write_bytes(raw)
    for name in ("cut", "long"):
        with pytest.raises(CheckpointError, match=rf"{name}\.bin: cannot be read as plain weights"):
            list_tensors(tmp_path, f"{name}.bin")


OTHERS: dict[str, Callable[[Path], object]] = {
    "adapter_config.json": read_config,
    "genai_config.json": read_evidence,
    "tokenizer.json": load_text,
    "generation_config.json": stop_token_ids,
}


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", INDEX, *OTHERS])
def test_oversized_json_is_rejected_by_every_reader(name: str, llama: Path, tmp_path: Path) -> None:
    place = tmp_path if name in OTHERS else llama
    with (place / name).open("ab") as stream:
        stream.truncate(untrusted_files.LARGEST_BYTES + 1)
    (llama / WEIGHTS).unlink()
    with pytest.raises((CheckpointError, PackageError), match="134,217,729 bytes, above the limit of 134,217,728 by"):
        OTHERS.get(name, lambda place: open_checkpoint(str(place)))(place)
