"""Switchable adapters: without one the package computes the base model, with one the merged model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import partita
from partita.errors import PackageError, ParityError, UsageError
from partita.export.checkpoint.description import open_checkpoint
from partita.export.verify.known_answer import load
from partita.package.folder import adapter_file, answer_file, read_manifest, record_file, write_manifest
from tests.adapters import ATTENTION, save_adapter
from tests.conftest import Exported, TinyCheckpoint
from tests.export.checkpoint.adapters.test_merge import logits, merged_model

EVERY = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
PROMPT = [5, 9, 33, 120, 7]


@pytest.fixture(scope="module")
def adapters(tiny_checkpoint: TinyCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two adapters of one checkpoint, of other ranks and modules."""
    folder, checkpoint = tmp_path_factory.mktemp("adapters"), tiny_checkpoint("llama")
    return {
        "loud": save_adapter(folder / "loud", checkpoint, EVERY),
        "small": save_adapter(folder / "small", checkpoint, ("q_proj", "down_proj"), rank=2, seed=1),
    }


def tokens_of(package: Path, adapter: str | None) -> list[int]:
    with partita.load(package, providers="cpu") as model:
        answer = model.generate([PROMPT], max_new_tokens=8, adapter=adapter, stop_token_ids=[]).run()
        return list(answer.results[0].tokens)


def greedy(model: Any) -> list[int]:
    """What a model of transformers goes on with."""
    import torch

    tokens = torch.tensor([PROMPT])
    with torch.no_grad():
        for _ in range(8):
            last = model(input_ids=tokens, use_cache=False).logits[0, -1]
            tokens = torch.cat([tokens, last.argmax().reshape(1, 1)], dim=1)
    return [int(token) for token in tokens[0, len(PROMPT) :]]


def seal(package: Path) -> None:
    """Record the files as they are."""
    manifest = read_manifest(package)
    files = tuple(record_file(package, record.name) for record in manifest.files)
    write_manifest(package, manifest.model_copy(update={"files": files}))


def test_switchable_adapters_match_merged_models(
    tiny_checkpoint: TinyCheckpoint, exported: Exported, adapters: dict[str, Path]
) -> None:
    checkpoint = tiny_checkpoint("llama")
    package = exported(checkpoint, with_adapters=adapters)
    manifest = read_manifest(package)
    steps = {step.step.partition(": ")[0] for step in manifest.verification.steps}
    assert manifest.verification.status == "verified" and {"prefill", "loud", "small"} <= steps
    base = load(open_checkpoint(str(checkpoint)))
    assert tokens_of(package, None) == greedy(base)
    for name, folder in adapters.items():
        model, found = merged_model(checkpoint, folder), load_file(package / answer_file(name))
        np.testing.assert_allclose(found["prefill_logits"], logits(model, found["prompt"]), atol=2e-4, rtol=2e-4)
        assert tokens_of(package, name) == greedy(model) != greedy(base)
    # The weights are there once, and an adapter is small beside them.
    sizes = {record.name: record.size_bytes for record in manifest.files}
    assert sizes["model.onnx.data"] < 1.01 * 4 * manifest.source.parameters + 4096 * 64
    assert 0 < sizes[adapter_file("small")] < sizes[adapter_file("loud")] < sizes["model.onnx.data"] / 2


def test_loaded_model_switches_adapters_and_reports_the_last(
    tiny_checkpoint: TinyCheckpoint, exported: Exported, adapters: dict[str, Path]
) -> None:
    package = exported(tiny_checkpoint("llama"), with_adapters=adapters)
    with partita.load(package, providers="cpu") as model:
        assert model.adapters == ("loud", "small")
        first = {name: model.generate([PROMPT], max_new_tokens=8, adapter=name).run().tokens for name in (None, "loud")}
        again = {name: model.generate([PROMPT], max_new_tokens=8, adapter=name).run().tokens for name in (None, "loud")}
        assert again == first and first[None] != first["loud"]
        report = model.report()
        assert report.request.options["adapter"] == "loud"
        with pytest.raises(UsageError, match=r"`adapter=other`: .* choose one of loud, small"):
            model.generate([PROMPT], adapter="other")
        assert model.verify().status == "verified"


def test_replaced_or_damaged_adapter_file_is_detected(
    tiny_checkpoint: TinyCheckpoint, exported: Exported, adapters: dict[str, Path], own_copy: Any
) -> None:
    package = own_copy(exported(tiny_checkpoint("llama"), with_adapters=adapters))
    (package / adapter_file("loud")).write_bytes((package / adapter_file("small")).read_bytes())
    with pytest.raises(PackageError, match=r"adapter-loud\.onnx_adapter: .* bytes, the manifest states"):
        partita.load(package, providers="cpu")
    seal(package)
    with partita.load(package, providers="cpu") as model, pytest.raises(ParityError, match="loud: prefill"):
        model.verify()
    (package / adapter_file("loud")).write_bytes(b"nothing of the kind")
    seal(package)
    with partita.load(package, providers="cpu") as model, pytest.raises(PackageError, match="damaged"):
        model.generate([PROMPT], adapter="loud")
