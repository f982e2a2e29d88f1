"""Conversion of a checkpoint to llama.cpp tensors: names, values and row order for rotary embeddings."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from benchmarks.peers.gguf_write import Safetensors, arranged, metadata, planned

HEADS, KV_HEADS, SIZE = 4, 2, 8
SMALL = {
    "vocab_size": 40,
    "hidden_size": HEADS * SIZE,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": SIZE,
    "max_position_embeddings": 64,
}
MIXTURE = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}


def saved(folder: Path, model_type: str, **more):
    config = AutoConfig.for_model(model_type, **SMALL, **more)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return model, json.loads((folder / "config.json").read_text("utf-8")), Safetensors(folder / "model.safetensors")


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("llama"), "llama", tie_word_embeddings=False)


def test_every_llama_tensor_is_planned_once(llama):
    model, config, source = llama
    plans = planned(list(source), config)
    assert sorted(part for plan in plans for part in plan.parts) == sorted(model.state_dict())
    assert len({plan.name for plan in plans}) == len(plans) == 2 * 9 + 3
    assert plans[0].name == "token_embd.weight"
    assert {plan.name for plan in plans if plan.wide} == {
        "output_norm.weight",
        *(f"blk.{layer}.{norm}_norm.weight" for layer in range(2) for norm in ("attn", "ffn")),
    }


def turned_in_pairs(rows: np.ndarray, position: int) -> np.ndarray:
    """Heads [H, D] as llama.cpp turns them in a llama: each pair of neighbours by one angle."""
    angles = position * 10000.0 ** (-np.arange(0, SIZE, 2) / SIZE)
    even, odd = rows[:, ::2], rows[:, 1::2]
    turned = np.empty_like(rows)
    turned[:, ::2] = even * np.cos(angles) - odd * np.sin(angles)
    turned[:, 1::2] = odd * np.cos(angles) + even * np.sin(angles)
    return turned


def test_attention_scores_match_transformers(llama):
    model, config, source = llama
    plans = {plan.name: plan for plan in planned(list(source), config)}
    state = np.random.default_rng(0).standard_normal((2, HEADS * SIZE)).astype(np.float32)
    query = arranged(plans["blk.1.attn_q.weight"], source) @ state[0]
    key = arranged(plans["blk.1.attn_k.weight"], source) @ state[1]
    turned_query = turned_in_pairs(query.reshape(HEADS, SIZE), 5)
    turned_key = turned_in_pairs(key.reshape(KV_HEADS, SIZE), 2)
    scores = [turned_query[head] @ turned_key[head // 2] for head in range(HEADS)]

    layer = model.model.layers[1].self_attn.float()
    cos, sin = LlamaRotaryEmbedding(model.config)(torch.zeros(1), torch.arange(6)[None])
    with torch.no_grad():
        q = layer.q_proj(torch.from_numpy(state[0])).view(1, HEADS, 1, SIZE)
        k = layer.k_proj(torch.from_numpy(state[1])).view(1, KV_HEADS, 1, SIZE)
        q, _ = apply_rotary_pos_emb(q, q, cos[:, 5:6], sin[:, 5:6])
        k, _ = apply_rotary_pos_emb(k, k, cos[:, 2:3], sin[:, 2:3])
    expected = (q[0, :, 0] * k[0, :, 0].repeat_interleave(2, 0)).sum(-1)
    np.testing.assert_allclose(scores, expected.numpy(), rtol=1e-4, atol=1e-5)


def test_qwen2_rows_are_not_permuted(tmp_path):
    _, config, source = saved(tmp_path, "qwen2", tie_word_embeddings=True)
    plans = planned(list(source), config)
    assert all(plan.heads is None for plan in plans)
    assert "output.weight" not in {plan.name for plan in plans}
    assert {"blk.0.attn_q.bias", "blk.1.attn_v.bias"} <= {plan.name for plan in plans if plan.wide}


def test_experts_are_stacked_in_order(tmp_path):
    model, config, source = saved(tmp_path, "qwen3_moe", **MIXTURE)
    plans = {plan.name: plan for plan in planned(list(source), config)}
    stack = arranged(plans["blk.1.ffn_down_exps.weight"], source)
    expected = model.state_dict()["model.layers.1.mlp.experts.down_proj"].float().numpy()
    assert np.array_equal(stack, expected)
    assert plans["blk.0.ffn_gate_inp.weight"].wide and not plans["blk.0.ffn_up_exps.weight"].wide
    found = metadata(config, 1)
    assert (found["qwen3moe.expert_count"], found["qwen3moe.expert_used_count"]) == (4, 2)
