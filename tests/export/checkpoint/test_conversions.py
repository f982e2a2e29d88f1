"""Weights that transformers merges or splits on load: bit-identical results, read as a stream."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import (
    Chunk,
    ConversionOps,
    PermuteForRope,
    Split,
    Transpose,
    WeightConverter,
)

from partita.export.checkpoint import naming
from partita.export.checkpoint.description import Checkpoint, open_checkpoint
from partita.export.checkpoint.naming import Sources, match_names
from partita.export.checkpoint.weight_files import OpenFiles
from partita.export.weights import sources as weight_sources
from partita.export.weights.origins import ComputedOrigin, TensorInfo
from partita.export.weights.sources import StoredPart
from tests.checkpoints import edit_tensors
from tests.conftest import TinyCheckpoint
from tests.export.nets import float_source

Copy = Callable[[Path], Path]
SMALL: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 24}
HEADS = ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
GROUPED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1}
EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 12},
    "qwen2_moe": {"num_experts": 4, "shared_expert_intermediate_size": 24},
    "deepseek_v3": {**dict.fromkeys(("q_lora_rank", "kv_lora_rank", *HEADS), 8), **GROUPED, "num_key_value_heads": 4},
    "gpt_oss": {"num_local_experts": 4, "head_dim": 8},
    "jamba": {"num_experts": 4, "mamba_d_state": 8, "attn_layer_period": 2, "attn_layer_offset": 1},
}
STACK = "model.layers.0.mlp.experts.gate_up_proj"  # [12, 96, 32] in the mixtral above


def matched(folder: Path) -> tuple[Checkpoint, Sources]:
    """The checkpoint, matched with its model, of which nothing but names and shapes is there."""
    checkpoint = open_checkpoint(str(folder))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(checkpoint.config)
    return checkpoint, match_names(model, checkpoint.tensors)


def read(sources: Sources, name: str) -> torch.Tensor:
    """The values of a parameter, from the tensors of the checkpoint."""
    origin = sources.of(name)
    assert origin is not None, name
    with OpenFiles() as files:
        return origin.read_all(files)


def loaded(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the model as transformers loads it."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return dict(model.state_dict())


def mixtral(tiny_checkpoint: TinyCheckpoint) -> Path:
    return tiny_checkpoint("mixtral", tokenizer=False, **SMALL, **EXPERTS["mixtral"])


def stack_of(folder: Path) -> Any:
    """The stacked experts of a layer as a weight of a graph."""
    checkpoint, sources = matched(folder)
    origin = sources.of(STACK)
    assert origin is not None
    return StoredPart(float_source(checkpoint, origin))


@pytest.mark.parametrize("stacked", [False, True], ids=["as_saved", "as_in_the_model"])
@pytest.mark.parametrize("model_type", sorted(EXPERTS))
def test_converted_tensors_equal_those_loaded_by_transformers(
    tiny_checkpoint: TinyCheckpoint, own_copy: Copy, model_type: str, stacked: bool
) -> None:
    folder = own_copy(tiny_checkpoint(model_type, tokenizer=False, **SMALL, **EXPERTS[model_type]))
    expected = loaded(folder)
    if stacked:
        tensors = {name: value.clone() for name, value in expected.items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _, sources = matched(folder)
    for name, value in expected.items():
        assert torch.equal(read(sources, name), value), name
    assert not sources.unmatched_tensors and not sources.failures


def test_stacked_experts_are_read_individually(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    usual = OpenFiles.read

    def recorded(self: OpenFiles, *arguments: Any) -> torch.Tensor:
        piece = usual(self, *arguments)
        sizes.append(piece.nbytes)
        return piece

    monkeypatch.setattr(OpenFiles, "read", recorded)
    one_expert = 96 * 32 * 4
    monkeypatch.setattr(weight_sources, "SLICE_BYTES", one_expert)
    weight = stack_of(mixtral(tiny_checkpoint))
    assert [piece.nbytes for _, piece in weight.source.pieces()] == [one_expert] * 12
    assert sizes == [one_expert // 2] * 24
    turned = weight.permuted((0, 2, 1)).interleaved(2)
    assert max(piece.nbytes for _, piece in turned.source.pieces()) == one_expert


@pytest.mark.parametrize("limit", [1, 1000, 1 << 20])
def test_permuted_and_interleaved_stacks_match_torch(
    tiny_checkpoint: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    """For any slice size, including less than one row."""
    folder = tiny_checkpoint("mixtral", tokenizer=False, hidden_size=16, intermediate_size=6, num_local_experts=3)
    weight, expected = stack_of(folder), loaded(folder)[STACK]
    gate, up = expected.chunk(2, dim=1)
    mixed = torch.stack([gate, up], dim=2).flatten(1, 2)
    monkeypatch.setattr(weight_sources, "SLICE_BYTES", limit)
    for made, wanted in (
        (weight, expected),
        (weight.permuted((0, 2, 1)), expected.permute(0, 2, 1)),
        (weight.permuted((2, 0, 1)).permuted((1, 2, 0)), expected),
        (weight.interleaved(1), mixed),
        (weight.interleaved(1).permuted((1, 2, 0)), mixed.permute(1, 2, 0)),
        (weight.permuted((0, 2, 1)).interleaved(2), mixed.permute(0, 2, 1)),
    ):
        assert torch.equal(torch.from_numpy(made.numpy()), wanted)


QKV = {name: f"model.layers.0.self_attn.{name}_proj.weight" for name in "qkv"}
ONE_TO_MANY: dict[str, list[ConversionOps]] = {
    "chunk": [Chunk(dim=0)],
    "split": [Split(dim=0)],
    "rope": [Chunk(dim=0), PermuteForRope(permute_layer_names=["q_proj", "k_proj"])],
    "transpose": [Transpose(0, 1), Chunk(dim=0)],
}


@pytest.mark.parametrize("kind", sorted(ONE_TO_MANY))
def test_fused_projection_is_split_like_transformers(
    tiny_checkpoint: TinyCheckpoint, own_copy: Copy, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Uses transformers' own operations: on real tensors in the reference, without data here."""

    def rules(*_: Any, **__: Any) -> list[WeightConverter]:
        targets = [f"self_attn.{name}_proj.weight" for name in "qkv"]
        return [WeightConverter("self_attn.qkv.weight", targets, list(ONE_TO_MANY[kind]))]

    def fuse(tensors: dict[str, torch.Tensor]) -> None:
        for layer in range(2):
            fused = torch.cat([tensors.pop(name.replace("0", str(layer))) for name in QKV.values()])
            tensors[f"model.layers.{layer}.self_attn.qkv.weight"] = fused.T if kind == "transpose" else fused

    folder = own_copy(tiny_checkpoint("llama", num_key_value_heads=4, tokenizer=False))
    edit_tensors(folder, fuse)
    monkeypatch.setattr(naming, "get_model_conversion_mapping", rules)
    monkeypatch.setattr("transformers.modeling_utils.get_model_conversion_mapping", rules)
    expected = loaded(folder)
    _, sources = matched(folder)
    for name in QKV.values():
        assert torch.equal(read(sources, name), expected[name]), name
    origin = sources.of(QKV["q"])
    in_parts = not isinstance(getattr(origin, "source", origin), ComputedOrigin)
    assert in_parts == (kind in ("chunk", "split", "transpose"))


def test_renamed_tensor_maps_to_a_single_stored_tensor(tiny_checkpoint: TinyCheckpoint) -> None:
    _, sources = matched(tiny_checkpoint("gpt_neox", tokenizer=False))
    head = sources.of("lm_head.weight")
    assert isinstance(head, TensorInfo) and head.name == "embed_out.weight"


def test_missing_expert_tensors_fail_or_shrink_the_stack(tiny_checkpoint: TinyCheckpoint, own_copy: Copy) -> None:
    """One missing projection makes stacking fail; one missing expert gives a smaller stack."""
    folder = own_copy(mixtral(tiny_checkpoint))
    expert = "model.layers.0.block_sparse_moe.experts.3"
    edit_tensors(folder, lambda tensors: tensors.pop(f"{expert}.w3.weight"))
    _, sources = matched(folder)
    assert sources.failures == {STACK: "tensors of the shapes [11, 48, 32] and [12, 48, 32] do not fit together"}
    edit_tensors(folder, lambda tensors: tensors.pop(f"{expert}.w1.weight"))
    origin = matched(folder)[1].of(STACK)
    assert origin is not None and origin.shape == (11, 96, 32)
