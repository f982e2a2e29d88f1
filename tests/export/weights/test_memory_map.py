"""Memory-mapped parameters of the source model: same values, no resident memory after use, no leftover files."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from partita.errors import ResourceError
from partita.export.checkpoint.description import open_checkpoint
from partita.export.verify import known_answer
from partita.export.weights import memory_map
from tests.conftest import TinyCheckpoint

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows lets go of no part of a mapping")
IDS = torch.arange(3, 20)[None]


@pytest.fixture(autouse=True)
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny models count as large ones."""
    monkeypatch.setattr(memory_map, "LEAST_PARAMETERS", 0)


def resident(model: torch.nn.Module) -> tuple[int, int]:
    """Bytes of parameters that are in a file, and how many of them are resident: from /proc/self/smaps."""
    wanted = {p.data_ptr(): p.numel() * p.element_size() for p in model.parameters() if hasattr(p, memory_map.PAGES)}
    found, start = 0, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            start = int(first.split("-")[0], 16)
        elif first == "Rss:" and start in wanted:
            found += int(line.split()[1]) * 1024
    return sum(wanted.values()), found


@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe"])
def test_memory_mapped_model_matches_and_is_not_resident(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path, model_type: str
) -> None:
    checkpoint = open_checkpoint(str(tiny_checkpoint(model_type, dtype="bfloat16")))
    in_memory = known_answer.load(checkpoint)
    model = known_answer.load(checkpoint, tmp_path)
    assert not any(tmp_path.iterdir())  # the file has no name, so a killed export leaves nothing
    with torch.no_grad():
        assert torch.equal(model(input_ids=IDS).logits, in_memory(input_ids=IDS).logits)
    spilt = {name for name, p in model.named_parameters() if hasattr(p, memory_map.PAGES)}
    assert spilt == dict(in_memory.named_parameters()).keys()  # converted stacks of experts among them
    if sys.platform == "linux":
        size, left = resident(model)
        assert size > 0 and left == 0
        next(model.parameters()).sum()
        assert resident(model)[1] > 0  # else nothing was measured


def test_written_parameter_survives_page_release(tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> None:
    model = known_answer.load(open_checkpoint(str(tiny_checkpoint("llama", tied=True))), tmp_path)
    embedding = model.get_input_embeddings().weight
    assert model.get_output_embeddings().weight is embedding
    with torch.no_grad():
        embedding[1] = 7.0
    memory_map.let_go(model)
    assert bool((embedding[1] == 7.0).all())


def test_full_disk_during_mapping_raises_resource_error(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(ResourceError, match="no space for the float32 weights of the source model.*No space left"):
        known_answer.load(open_checkpoint(str(tiny_checkpoint("llama"))), tmp_path)
    assert memory_map.SYNCHRONOUS_LOADING not in os.environ  # as it was before, also after an error


def test_memory_mapping_reduces_required_memory(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = open_checkpoint(str(tiny_checkpoint("llama", num_hidden_layers=8)))
    tensors = checkpoint.tensors
    every, some = memory_map.resident_parameters(tensors, None), memory_map.resident_parameters(tensors, tmp_path)
    assert some < every / 2
    free = shutil.disk_usage(tmp_path).free
    assert memory_map.resident_parameters(tensors, tmp_path, free) == every  # files written before take the room
    with monkeypatch.context() as full:
        full.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
        assert not any(hasattr(p, memory_map.PAGES) for p in known_answer.load(checkpoint, tmp_path).parameters())
    monkeypatch.setattr(known_answer, "free_bytes", lambda: every * 4.0)
    with pytest.raises(ResourceError, match="needs about.* on the disk of `out`"):
        known_answer.check_memory(every, 0)
    known_answer.check_memory(some, 0)
