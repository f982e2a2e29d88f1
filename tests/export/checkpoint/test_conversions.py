"""Weights that transformers merges or splits on load: bit-identical results, read as a stream."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import (
    Chunk,
    ConversionOps,
    Interleave,
    PermuteForRope,
    Split,
    Transpose,
    WeightConverter,
)

from partita.export.checkpoint import naming
from partita.export.checkpoint.description import Checkpoint, open_checkpoint
from partita.export.checkpoint.naming import Sources, match_names
from partita.export.checkpoint.weight_files import OpenFiles
from partita.export.progress import Silent, stage
from partita.export.weights import sources as weight_sources
from partita.export.weights.external_data import write_data
from partita.export.weights.origins import ComputedOrigin, TensorInfo
from partita.export.weights.sources import checkpoint_weight
from partita.package.folder import WEIGHTS
from tests.checkpoints import edit_tensors
from tests.conftest import TinyCheckpoint

Copy = Callable[[Path], Path]
SMALL: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 24}
EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 12},
    "qwen2_moe": {"num_experts": 4, "shared_expert_intermediate_size": 24},
    "deepseek_v3": {
        "n_routed_experts": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
        "num_key_value_heads": 4,
        "num_experts_per_tok": 2,
    },
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


def written(checkpoint: Checkpoint, sources: Sources, names: list[str], folder: Path) -> dict[str, bytes]:
    """The bytes of each weight in the data file of a package."""
    made = {}
    for name in names:
        origin = sources.of(name)
        assert origin is not None, name
        weight = checkpoint_weight(checkpoint, origin, ir.DataType.FLOAT, name=name)
        kind = ir.TensorType(weight.dtype)
        made[name] = ir.Value(name=name, shape=weight.shape, type=kind, const_value=weight)
    graph = ir.Graph([], [], nodes=[], initializers=list(made.values()), opset_imports={"": 21})
    folder.mkdir(exist_ok=True)
    with stage(Silent(), "write", {}, 1) as current:
        write_data([ir.Model(graph, ir_version=10)], folder, current)
    data = (folder / WEIGHTS).read_bytes()
    placed = {name: value.const_value for name, value in made.items()}
    return {
        name: data[tensor.offset or 0 :][: tensor.length]
        for name, tensor in placed.items()
        if isinstance(tensor, ir.ExternalTensor)
    }


def loaded(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the model as transformers loads it."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return dict(model.state_dict())


def mixtral(tiny_checkpoint: TinyCheckpoint) -> Path:
    return tiny_checkpoint("mixtral", tokenizer=False, **SMALL, **EXPERTS["mixtral"])


@pytest.mark.parametrize("stacked", [False, True], ids=["as_saved", "as_in_the_model"])
@pytest.mark.parametrize("model_type", sorted(EXPERTS))
def test_converted_tensors_equal_those_loaded_by_transformers(
    tiny_checkpoint: TinyCheckpoint, own_copy: Copy, tmp_path: Path, model_type: str, stacked: bool
) -> None:
    folder = own_copy(tiny_checkpoint(model_type, tokenizer=False, **SMALL, **EXPERTS[model_type]))
    expected = loaded(folder)
    if stacked:
        tensors = {name: value.clone() for name, value in expected.items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    checkpoint, sources = matched(folder)
    got = written(checkpoint, sources, list(expected), tmp_path / "data")
    assert got == {name: value.numpy().tobytes() for name, value in expected.items()}
    assert not sources.unmatched_tensors and not sources.failures


def test_stacked_experts_are_read_individually(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    read = OpenFiles.read

    def recorded(self: OpenFiles, *arguments: Any) -> torch.Tensor:
        piece = read(self, *arguments)
        sizes.append(piece.nbytes)
        return piece

    monkeypatch.setattr(OpenFiles, "read", recorded)
    one_expert = 96 * 32 * 4
    monkeypatch.setattr(weight_sources, "SLICE_BYTES", one_expert)
    checkpoint, sources = matched(mixtral(tiny_checkpoint))
    origin = sources.of(STACK)
    assert origin is not None and not sizes
    weight: Any = checkpoint_weight(checkpoint, origin, ir.DataType.FLOAT)
    pieces = [piece.nbytes for _, piece in weight.source.pieces()]
    assert pieces == [one_expert] * 12
    assert sizes == [one_expert // 2] * 24
    turned = weight.permuted((0, 2, 1)).interleaved(2)
    assert max(piece.nbytes for _, piece in turned.source.pieces()) == one_expert


@pytest.mark.parametrize("limit", [1, 100, 1000, 1 << 20])
def test_permuted_and_interleaved_stacks_match_torch(
    tiny_checkpoint: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    """For any slice size, including less than one row."""
    folder = tiny_checkpoint("mixtral", tokenizer=False, hidden_size=16, intermediate_size=6, num_local_experts=3)
    checkpoint, sources = matched(folder)
    origin = sources.of(STACK)
    assert origin is not None
    weight: Any = checkpoint_weight(checkpoint, origin, ir.DataType.FLOAT)
    expected = loaded(folder)[STACK]
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
    "interleave": [Interleave(dim=0), Chunk(dim=0)],
    "rope": [Chunk(dim=0), PermuteForRope(permute_layer_names=["q_proj", "k_proj"])],
    "transpose": [Transpose(0, 1), Chunk(dim=0)],
}


@pytest.mark.parametrize("kind", sorted(ONE_TO_MANY))
def test_fused_projection_is_split_like_transformers(
    tiny_checkpoint: TinyCheckpoint, own_copy: Copy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
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
    checkpoint, sources = matched(folder)
    got = written(checkpoint, sources, list(QKV.values()), tmp_path / "data")
    assert got == {name: expected[name].numpy().tobytes() for name in QKV.values()}
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
    assert sources.of(STACK) is None
    assert sources.failures[STACK] == "tensors of the shapes [11, 48, 32] and [12, 48, 32] do not fit together"
    edit_tensors(folder, lambda tensors: tensors.pop(f"{expert}.w1.weight"))
    origin = matched(folder)[1].of(STACK)
    assert origin is not None and origin.shape == (11, 96, 32)
