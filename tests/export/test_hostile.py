"""Malicious or heavily damaged folders: one-line error and exit code 1 on the command line."""

from __future__ import annotations

import json
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from partita import untrusted_files
from partita.errors import CheckpointError, PackageError
from partita.export.checkpoint.adapters import read_config
from partita.export.checkpoint.description import open_checkpoint
from partita.export.checkpoint.weight_files import OpenFiles, list_tensors
from partita.foreign.evidence import read_evidence
from partita.runtime.generate.text.tokens import load_text, stop_token_ids
from tests.checkpoints import edit_config, edit_tensors
from tests.conftest import TinyCheckpoint
from tests.export.test_bad_input import Captured, Copy, refused

NORM = "model.norm.weight"
Said = Callable[[], str]


def header(content: dict[str, Any] | bytes, claimed: int | None = None) -> bytes:
    """A safetensors file without data."""
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    return struct.pack("<Q", len(text) if claimed is None else claimed) + text


def empty(*shape: int) -> dict[str, Any]:
    return {NORM: {"dtype": "F32", "shape": list(shape), "data_offsets": [0, 0]}}


@pytest.fixture
def folder(tiny_checkpoint: TinyCheckpoint, own_copy: Copy) -> Path:
    """A checkpoint of one's own."""
    return own_copy(tiny_checkpoint("llama"))


@pytest.fixture
def said(folder: Path, tmp_path: Path, capsys: Captured) -> Said:
    """What an export of it says, which is refused."""
    return lambda: refused(folder, tmp_path, capsys)


FILES: dict[str, tuple[bytes, str]] = {
    "larger_than_memory": (header(empty(2**62, 2**62)), "damaged"),
    "large_and_empty": (header(empty(2**62, 0)), "the weight files have 1 tensors"),
    "overflowing_and_empty": (header(empty(2**63, 2**63, 0)), "damaged"),
    "negative": (header(empty(-1)), "damaged"),
    "header_larger_than_the_file": (header(b"{}", claimed=2**62), "damaged"),
    "header_of_brackets": (header(b"[" * 100_000), "damaged"),
    "no_tensors": (header({}), "the weight files have 0 tensors"),
    "nothing": (b"", "damaged"),
}


@pytest.mark.parametrize("kind", sorted(FILES))
def test_malformed_safetensors_headers_are_rejected(folder: Path, said: Said, kind: str) -> None:
    content, words = FILES[kind]
    (folder / "model.safetensors").write_bytes(content)
    assert words in said()


NAMES = ["evil\n\x1b[31mred", "nul\x00", "", "..", "x" * 100_000, "model.layers.²", "model.layers." + "9" * 5000]


@pytest.mark.parametrize("name", NAMES, ids=["control", "nul", "empty", "dots", "long", "superscript", "digits"])
def test_invalid_tensor_names_are_rejected(folder: Path, said: Said, name: str) -> None:
    edit_tensors(folder, lambda tensors: tensors.update({name: torch.ones(1)}))
    error = said()
    assert f"contains a tensor with the invalid name {name[:120]!r}" in error and len(error) < 1000


def test_tensor_names_equal_to_module_names_are_reported(folder: Path, said: Said) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors |= {"model": torch.ones(1), "model.layers": torch.ones(1), f"{NORM}.weight": torch.ones(2)}
        del tensors[NORM]

    edit_tensors(folder, change)
    error = said()
    assert f"missing from the weight files: {NORM}; not in the model: model, model.layers, {NORM}.weight" in error


@pytest.mark.parametrize("shape", [(0,), (), (64, 1), (0, 0)])
def test_wrong_tensor_shapes_are_rejected(folder: Path, said: Said, shape: tuple[int, ...]) -> None:
    edit_tensors(folder, lambda tensors: tensors.update({NORM: torch.ones(shape)}))
    assert f"{NORM} is {list(shape)}, but config.json requires [64]" in said()


def test_duplicate_tensor_in_two_shards_is_rejected(
    tiny_checkpoint: TinyCheckpoint, own_copy: Copy, tmp_path: Path, capsys: Captured
) -> None:
    """transformers would use the shard it reads last, regardless of the index."""
    folder = own_copy(tiny_checkpoint("llama", shards=2))
    shards = sorted(folder.glob("*.safetensors"))
    first, second = (load_file(path) for path in shards)
    name = next(iter(first))
    save_file({**second, name: first[name] + 1}, shards[1], metadata={"format": "pt"})
    error = refused(folder, tmp_path, capsys)
    assert f"tensor {name} is in both {shards[0].name} and {shards[1].name}" in error


@pytest.mark.parametrize(
    "content",
    [
        {"weight_map": {"x": "a\nb.safetensors"}},
        {"weight_map": {"x": "a" * 5000}},
        {"weight_map": {"x": "config.json"}},
        {"weight_map": [1]},
        {"weight_map": {"x": 3}},
    ],
    ids=["control", "long", "not_weights", "list", "number"],
)
def test_invalid_shard_indexes_give_short_errors(folder: Path, said: Said, content: dict[str, Any]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))
    (folder / "model.safetensors").unlink()
    assert len(said()) < 1000


@pytest.mark.parametrize("text", ["[" * 200_000, '{"a":' * 100_000, '{"vocab_size":' + "9" * 5000 + "}"])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_deeply_nested_json_and_huge_numbers_are_rejected(folder: Path, said: Said, name: str, text: str) -> None:
    (folder / name).write_text(text)
    if "index" in name:
        (folder / "model.safetensors").unlink()
    assert f"{name}: damaged: not JSON (" in said()


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "layers": ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1,000,000,000"),
    "negative_layers": ({"num_hidden_layers": -5}, "num_hidden_layers is -5"),
    "architectures": ({"architectures": [3]}, "the checkpoint contains 3, which has no language-model head"),
    "model_type": ({"model_type": ["llama"]}, "cannot read config.json of model type ['llama']"),
    "rope_factor": ({"rope_parameters": {"rope_type": "linear", "factor": 0}}, "factor is 0, not a number above 0"),
    "rope_of_no_layer": ({"rope_parameters": {"full_attention": "x"}}, "rope settings 'full_attention' are unknown"),
    "quantised_by_what": ({"quantization_config": {"quant_method": "a\nb\x1b"}}, "quantised: a b?"),
}


@pytest.mark.parametrize("kind", sorted(CONFIGS))
def test_invalid_config_values_are_rejected(folder: Path, said: Said, kind: str) -> None:
    changes, words = CONFIGS[kind]
    edit_config(folder, **changes)
    assert words in said()


def test_expert_count_beyond_stored_weights_is_rejected(
    tiny_checkpoint: TinyCheckpoint, own_copy: Copy, tmp_path: Path, capsys: Captured
) -> None:
    folder = own_copy(tiny_checkpoint("mixtral", tokenizer=False, num_local_experts=4))
    assert "num_local_experts is 1,000,000,000" in refused(
        edit_config(folder, num_local_experts=10**9), tmp_path, capsys
    )


MADE: dict[str, Callable[[], torch.Tensor]] = {
    "sparse": lambda: torch.eye(8).to_sparse(),
    "meta": lambda: torch.ones(64, device="meta"),
    "quantised": lambda: torch.quantize_per_tensor(torch.ones(64), 0.1, 0, torch.quint8),
}


@pytest.mark.parametrize("kind", sorted(MADE))
@pytest.mark.filterwarnings("ignore")
def test_non_plain_tensors_in_bin_files_are_rejected(folder: Path, said: Said, kind: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save({**tensors, NORM: MADE[kind]()}, folder / "pytorch_model.bin")
    assert "contains something other than named tensors" in said()


def test_expanded_tensor_in_bin_file_is_rejected(folder: Path, said: Said) -> None:
    """The file has four bytes for a tensor of 128 TiB."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save({**tensors, NORM: torch.ones(1).expand(2**45)}, folder / "pytorch_model.bin")
    assert f"{NORM} is [35184372088832], but config.json requires [64]" in said()


# Files that are larger than they look, or than anything of their kind: refused by name, before they are read


Change = Callable[[zipfile.ZipInfo], int]


def packed_again(source: Path, target: Path, how: Change) -> Path:
    """An archive of torch with its records compressed as `how` says."""
    with zipfile.ZipFile(source) as read, zipfile.ZipFile(target, "w") as written:
        for entry in read.infolist():
            written.writestr(entry.filename, read.read(entry), how(entry), 1)
    return target


@pytest.mark.parametrize("name", ["pytorch_model.bin", "adapter_model.bin"])
def test_compressed_records_in_bin_files_are_rejected(name: str, tmp_path: Path) -> None:
    torch.save({"a": torch.arange(1 << 12, dtype=torch.float32), "b": torch.randn(1 << 14)}, tmp_path / "plain")
    packed_again(
        tmp_path / "plain",
        tmp_path / name,
        lambda entry: 8 if entry.filename.endswith("data/0") else zipfile.ZIP_STORED,
    )
    with pytest.raises(CheckpointError, match=rf"{name}: its directory lists .*compressed.*data/0; save it again"):
        list_tensors(tmp_path, name)
    (info, _) = list_tensors(tmp_path, packed_again(tmp_path / "plain", tmp_path / "b.bin", lambda entry: 0).name)
    with OpenFiles() as files:
        assert files.read(info, ((5, 7),)).tolist() == [5.0, 6.0]


def test_zip_bombs_are_rejected_before_torch_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"a": torch.zeros(1 << 20)}, tmp_path / "plain")
    bomb = packed_again(tmp_path / "plain", tmp_path / "bomb.bin", lambda entry: zipfile.ZIP_DEFLATED)
    monkeypatch.setattr(torch, "load", lambda *args, **more: pytest.fail("torch is given the file"))
    with pytest.raises(CheckpointError, match="compressed or missing"):
        list_tensors(tmp_path, bomb.name)
    # Records that say they are stored, and are longer than the file.
    raw = bytearray((tmp_path / "plain").read_bytes())
    at = raw.rindex(b"data/0") - raw[: raw.rindex(b"data/0")][::-1].index(b"KP"[::1]) - 2
    size = (1 << 22).to_bytes(4, "little")
    assert raw[at : at + 4] == b"PK\x01\x02" and raw[at + 20 : at + 28] == size * 2
    raw[at + 20 : at + 28] = (1 << 31).to_bytes(4, "little") * 2
    (tmp_path / "long.bin").write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"long\.bin: its directory lists 2,147,\d+,\d+ bytes of rec"):
        list_tensors(tmp_path, "long.bin")
    (tmp_path / "cut.bin").write_bytes(raw[: len(raw) // 2])
    with pytest.raises(CheckpointError, match=r"cut\.bin: damaged or truncated at"):
        list_tensors(tmp_path, "cut.bin")


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors.index.json"]
)
def test_oversized_json_in_checkpoint_is_rejected(name: str, folder: Path) -> None:
    path = folder / name
    with path.open("ab") as stream:
        stream.truncate(untrusted_files.LARGEST_BYTES + 1)
    if "index" in name:
        (folder / "model.safetensors").unlink()
    said = f"{name}: damaged: 134,217,729 bytes, above the limit of 134,217,728 bytes"
    with pytest.raises(CheckpointError, match=said):
        open_checkpoint(str(folder))


@pytest.mark.parametrize("key", ["vocab_size", "num_key_value_heads", "intermediate_size"])
def test_config_sizes_beyond_stored_weights_are_rejected(key: str, folder: Path) -> None:
    """Checked before the model is built, which could need any amount of memory."""
    edit_config(folder, **{key: 1 << 31})
    with pytest.raises(CheckpointError, match=rf"do not match: {key} is 2,147,483,648, but the weight files have"):
        open_checkpoint(str(folder))


def test_oversized_json_is_rejected_by_other_readers(tmp_path: Path) -> None:
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
