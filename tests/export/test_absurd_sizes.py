"""Files that are larger than they look, or than anything of their kind: refused by name, before they are read."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from partita import untrusted_files
from partita.errors import CheckpointError, PackageError
from partita.export.checkpoint.adapters.files import read_config
from partita.export.checkpoint.description import open_checkpoint
from partita.export.checkpoint.weight_files import OpenFiles, list_tensors
from partita.foreign.evidence import read_evidence
from partita.runtime.generate.text.tokens import load_text, stop_token_ids
from tests.conftest import TinyCheckpoint

Change = Callable[[zipfile.ZipInfo], int]


def packed_again(source: Path, target: Path, how: Change) -> Path:
    """An archive of torch with its records compressed as `how` says."""
    with zipfile.ZipFile(source) as read, zipfile.ZipFile(target, "w") as written:
        for entry in read.infolist():
            written.writestr(entry.filename, read.read(entry), how(entry), 1)
    return target


@pytest.mark.parametrize("name", ["pytorch_model.bin", "adapter_model.bin"])
def test_a_compressed_record_is_no_weight(name: str, tmp_path: Path) -> None:
    torch.save({"a": torch.arange(1 << 12, dtype=torch.float32), "b": torch.randn(1 << 14)}, tmp_path / "plain")
    packed_again(
        tmp_path / "plain",
        tmp_path / name,
        lambda entry: 8 if entry.filename.endswith("data/0") else zipfile.ZIP_STORED,
    )
    with pytest.raises(CheckpointError, match=rf"{name}: its records are compressed.*data/0; save it again with torch"):
        list_tensors(tmp_path, name)
    (info, _) = list_tensors(tmp_path, packed_again(tmp_path / "plain", tmp_path / "b.bin", lambda entry: 0).name)
    with OpenFiles(tmp_path) as files:
        assert files.read(info, ((5, 7),)).tolist() == [5.0, 6.0]


def test_a_bomb_is_refused_before_anything_is_allocated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"a": torch.zeros(1 << 20)}, tmp_path / "plain")
    bomb = packed_again(tmp_path / "plain", tmp_path / "bomb.bin", lambda entry: zipfile.ZIP_DEFLATED)
    monkeypatch.setattr(torch, "load", lambda *args, **more: pytest.fail("torch is given the file"))
    with pytest.raises(CheckpointError, match="its records are compressed"):
        list_tensors(tmp_path, bomb.name)
    # Records that say they are stored, and are longer than the file.
    raw = bytearray((tmp_path / "plain").read_bytes())
    at = raw.rindex(b"data/0") - raw[: raw.rindex(b"data/0")][::-1].index(b"KP"[::1]) - 2
    size = (1 << 22).to_bytes(4, "little")
    assert raw[at : at + 4] == b"PK\x01\x02" and raw[at + 20 : at + 28] == size * 2
    raw[at + 20 : at + 28] = (1 << 31).to_bytes(4, "little") * 2
    (tmp_path / "long.bin").write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"long\.bin: damaged: its directory lists 2,147,\d+,\d+ bytes of rec"):
        list_tensors(tmp_path, "long.bin")
    (tmp_path / "cut.bin").write_bytes(raw[: len(raw) // 2])
    with pytest.raises(CheckpointError, match=r"cut\.bin: damaged or truncated at"):
        list_tensors(tmp_path, "cut.bin")


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors.index.json"]
)
def test_a_text_of_absurd_size_in_a_checkpoint(name: str, tiny_checkpoint: TinyCheckpoint, own_copy: Any) -> None:
    folder = own_copy(tiny_checkpoint("llama"))
    path = folder / name
    with path.open("ab") as stream:
        stream.truncate(untrusted_files.LARGEST_BYTES + 1)
    if "index" in name:
        (folder / "model.safetensors").unlink()
    said = f"{name}: damaged: 134,217,729 bytes, above the limit of 134,217,728 bytes"
    with pytest.raises(CheckpointError, match=said):
        open_checkpoint(str(folder))


@pytest.mark.parametrize("key", ["vocab_size", "num_key_value_heads", "intermediate_size"])
def test_a_size_for_which_there_are_no_bytes(key: str, tiny_checkpoint: TinyCheckpoint, own_copy: Any) -> None:
    """The model was built first, which took as much memory as the setting asked for, or failed for want of it."""
    folder = own_copy(tiny_checkpoint("llama"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, key: 1 << 31}))
    with pytest.raises(CheckpointError, match=rf"do not match: {key} is 2,147,483,648, but the weight files have"):
        open_checkpoint(str(folder))


def test_a_text_of_absurd_size_elsewhere(tmp_path: Path) -> None:
    for name in ("adapter_config.json", "genai_config.json", "tokenizer.json", "generation_config.json"):
        with (tmp_path / name).open("wb") as stream:
            stream.truncate(untrusted_files.LARGEST_BYTES + 1)
    said = "134,217,729 bytes, above the limit of 134,217,728 bytes"
    with pytest.raises(CheckpointError, match=f"adapter_config.json: .*{said}"):
        read_config(tmp_path)
    with pytest.raises(PackageError, match=f"genai_config.json: .*{said}"):
        read_evidence(tmp_path)
    with pytest.raises(PackageError, match=said):
        load_text(tmp_path)
    with pytest.raises(PackageError, match=said):
        stop_token_ids(tmp_path)
