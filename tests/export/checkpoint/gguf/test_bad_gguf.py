"""Damaged, truncated, unsupported or oversized GGUF files: one-line errors without large allocations."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers.gguf_write import planned
from partita.errors import CheckpointError, UnsupportedModelError
from partita.export.checkpoint.description import open_checkpoint
from tests.conftest import TinyCheckpoint, require
from tests.export.test_bad_checkpoints import refuse
from tests.gguf_files import save_gguf

ARCHITECTURE = (b"general.architecture", 8, struct.pack("<Q", 5) + b"llama")


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def tensor(name: bytes = b"a.weight", shape: tuple[int, ...] = (32,), kind: int = 0, offset: int = 0) -> bytes:
    sizes = b"".join(struct.pack("<Q", size) for size in shape)
    return text(name) + struct.pack("<I", len(shape)) + sizes + struct.pack("<IQ", kind, offset)


def file_of(settings: Any = (ARCHITECTURE,), tensors: Any = (), *, version: int = 3, counts: Any = None) -> bytes:
    """A GGUF file by hand."""
    wanted = counts or (len(tensors), len(settings))
    head = b"GGUF" + struct.pack("<IQQ", version, *wanted)
    head += b"".join(text(name) + struct.pack("<I", kind) + value for name, kind, value in settings)
    head += b"".join(tensors)
    return head + b"\0" * (-len(head) % 32 + 256)


def tokens(*names: bytes) -> tuple[bytes, int, bytes]:
    """The setting that a vocabulary is."""
    return b"tokenizer.ggml.tokens", 9, struct.pack("<IQ", 8, len(names)) + b"".join(map(text, names))


HUGE = 1 << 60
LONG = struct.pack("<IQ", 0, 1 << 20) + bytes(1 << 20)
DAMAGED: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "not a GGUF file"),
    "not one": (b"PK\3\4" + b"\0" * 64, "does not begin with the bytes GGUF"),
    "pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "a Git LFS pointer"),
    "long text": (file_of([(b"general.architecture", 8, struct.pack("<Q", HUGE))]), f"needs {HUGE:,} bytes at"),
    "arrays in arrays": (
        file_of([(b"a", 9, struct.pack("<IQ", 9, 1) * 8), ARCHITECTURE]),
        "'a' has the unknown type 9",
    ),
    "no architecture": (file_of([]), "general.architecture is missing"),
    "alignment": (file_of([ARCHITECTURE, (b"general.alignment", 4, bytes(4))]), "its general.alignment is 0"),
    "name": (file_of(tensors=[tensor(b"a..b")]), "a tensor with the invalid name 'a..b'"),
    "half a block": (file_of(tensors=[tensor(shape=(40,), kind=2)]), "has rows that are not a multiple of 32"),
    "absurd size": (file_of(tensors=[tensor(shape=(HUGE, 1 << 40))]), "ends after the file"),
    "over each other": (
        file_of(tensors=[tensor(), tensor(b"b.weight", offset=64)]),
        "tensor b.weight [32] of F32, at byte 64 of the data, does not follow the tensors before it, which end at 128",
    ),
    "a setting twice": (file_of([ARCHITECTURE, ARCHITECTURE]), "two settings named general.archit"),
    "a token twice": (
        file_of([ARCHITECTURE, tokens(b"a", b"", b"", b"b", b"a")]),
        "its vocabulary contains 'a' twice, as 0 and as 4",
    ),
    "a token that is no text": (file_of([ARCHITECTURE, tokens(b"\xff")]), "a string in its header before"),
    "tokens of no type": (
        file_of([ARCHITECTURE, tokens(b"a", b"b"), (b"tokenizer.ggml.token_type", 9, struct.pack("<IQi", 5, 1, 1))]),
        "it has 2 tokens, but another number of tokenizer.ggml.token_type",
    ),
}
UNSUPPORTED: dict[str, tuple[bytes, str]] = {
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0) + b"\0" * 64, "big-endian is not supported"),
    "version 1": (file_of(version=1), "GGUF version 1 is not supported, only little-endian of version 2 or 3"),
    "many tensors": (file_of(counts=(HUGE, 1)), f"its header declares {HUGE + 1:,} tensors, settings and array values"),
    "many values": (
        file_of((ARCHITECTURE, *((b"a%d" % index, 9, LONG) for index in range(3)))),
        "array values, but at most 2,097,152 are supported",
    ),
    "split": (file_of([ARCHITECTURE, (b"split.count", 2, struct.pack("<H", 3))]), "one of 3 parts of a split file"),
    "unknown type": (file_of(tensors=[tensor(kind=99)]), "has the type 99"),
    "other architecture": (
        file_of([(b"general.architecture", 8, text(b"mystery"))]),
        "transformers cannot read GGUF files of architecture mystery",
    ),
}


@pytest.mark.parametrize("case", [*DAMAGED, *UNSUPPORTED])
def test_damaged_or_unsupported_files_raise_error(case: str, tmp_path: Path) -> None:
    require("gguf")
    raw, said = {**DAMAGED, **UNSUPPORTED}[case]
    (tmp_path / "model.gguf").write_bytes(raw)
    with pytest.raises(CheckpointError if case in DAMAGED else UnsupportedModelError) as caught:
        open_checkpoint(str(tmp_path / "model.gguf"))
    assert said in str(caught.value) and "model.gguf: " in str(caught.value)


def test_truncated_file_raises_error(tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> None:
    require("gguf")
    from partita.export.checkpoint.gguf import read_header

    whole = save_gguf(tmp_path / "whole.gguf", tiny_checkpoint("llama"), "Q8_0").read_bytes()
    file = tmp_path / "model.gguf"
    file.write_bytes(whole)
    assert read_header(file).architecture == "llama"
    for size in (*range(24, 4000, 97), len(whole) // 2, len(whole) - 64):
        file.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match="damaged or truncated"):
            read_header(file)


def test_contradicting_settings_and_tensors_raise_error(tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> None:
    require("gguf")
    checkpoint = tiny_checkpoint("llama")
    file = save_gguf(tmp_path / "model.gguf", checkpoint, llama__feed_forward_length=48)
    error = refuse(file, tmp_path / "out")
    assert "settings and tensors do not match" in str(error) and "its settings require [48, 64]" in str(error)
    file = save_gguf(tmp_path / "headless.gguf", checkpoint, llama__attention__head_count_kv=3)
    error = refuse(file, tmp_path / "out")
    assert "do not match: transformers' reader makes no weight from blk.0.attn_k.weight, which is [32, 64]" in str(
        error
    )
    file = save_gguf(tmp_path / "deep.gguf", checkpoint, llama__block_count=1 << 30)
    assert "num_hidden_layers is 1,073,741,824" in str(refuse(file, tmp_path / "out"))


def test_data_ignored_by_transformers_raises_error(tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> None:
    require("gguf")
    checkpoint = tiny_checkpoint("llama")
    file = save_gguf(
        tmp_path / "scaled.gguf", checkpoint, llama__rope__scaling__type="yarn", llama__rope__scaling__factor=4.0
    )
    error = refuse(file, tmp_path / "out")
    assert "it has rope.scaling.factor = 4.0, rope.scaling.type = yarn, which transformers' reader" in str(error)
    with_bias = tiny_checkpoint("qwen2")
    file = save_gguf(tmp_path / "bias.gguf", with_bias)
    raw = file.read_bytes().replace(b"qwen2", b"qwen3")
    file.write_bytes(raw)
    error = refuse(file, tmp_path / "out")
    assert isinstance(error, UnsupportedModelError) and "ignores blk.0.attn_k.bias" in str(error)


def test_missing_expert_tensor_raises_error(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without this check, the missing half of the experts would be zeros."""
    require("gguf")
    sizes: Any = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1}

    def without(names: Any, config: Any) -> Any:
        return [plan for plan in planned(names, config) if plan.name != "blk.1.ffn_up_exps.weight"]

    monkeypatch.setattr("tests.gguf_files.planned", without)
    error = refuse(save_gguf(tmp_path / "model.gguf", tiny_checkpoint("qwen3_moe", **sizes)), tmp_path / "out")
    assert isinstance(error, CheckpointError) and (
        "it contains blk.1.ffn_gate_exps.weight, a part of model.layers.1.mlp.experts.gate_up_proj, but lacks "
        "blk.1.ffn_up_exps; download it again" in str(error)
    )


def test_folder_with_several_gguf_files_raises_error(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(UnsupportedModelError, match=r"2 GGUF files and no other weights: a\.gguf, b\.gguf; give one"):
        open_checkpoint(str(tmp_path))
