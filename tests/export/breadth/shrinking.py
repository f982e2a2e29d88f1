"""Any config of transformers made tiny: every size becomes small, every factor is not 1, every bias is on.

The tables below go by attribute name and know no model; what a model type needs besides is data, in `recipes.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

VOCAB = 288
"""Token ids; the prompts of the tests need 283."""

LAYERS = 2
MIXED_LAYERS = 4
"""Layers of a config with a list of kinds per layer: enough for most patterns to show every kind."""

SETTINGS: dict[str, Any] = {
    # Tokens
    "vocab_size": VOCAB,
    "vocab_size_per_layer_input": VOCAB,
    "decoder_vocab_size": VOCAB,
    "unpadded_vocab_size": VOCAB,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": None,
    # Positions
    "max_position_embeddings": 256,
    "n_positions": 256,
    "n_ctx": 256,
    "max_seq_len": 256,
    "context_length": 256,
    "model_max_length": 256,
    "max_target_positions": 256,
    "max_source_positions": 64,
    "rotary_dim": 8,
    # Widths
    "hidden_size": 64,
    "d_model": 64,
    "n_embd": 64,
    "emb_dim": 64,
    "embedding_dim": 64,
    "word_embed_proj_dim": 64,
    "lru_width": 64,
    "embedding_size": 32,
    "input_embedding_size": 32,
    "output_embedding_size": 48,
    "hidden_size_per_layer_input": 16,
    "attention_hidden_size": 64,
    "intermediate_size": 96,
    "ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "encoder_ffn_dim": 96,
    "dff": 96,
    "dim_ff": 96,
    "ffn_hidden_size": 96,
    "dense_intermediate_size": 96,
    "intermediate_size_mlp": 96,
    "d_inner": 96,
    "feed_forward_size": 96,
    # Heads
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_heads": 4,
    "attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_attention_heads": 4,
    "num_decoder_attention_heads": 4,
    "num_encoder_attention_heads": 4,
    "swa_num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_kv_heads": 2,
    "swa_num_key_value_heads": 2,
    "num_query_groups": 2,
    "head_dim": 16,
    "swa_head_dim": 16,
    "kv_channels": 16,
    "d_head": 16,
    "dim_head": 16,
    "attention_head_size": 16,
    "attention_head_dim": 16,
    # Keys and values of low rank: keys are wider than values
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "qk_head_dim": 24,
    "v_head_dim": 16,
    "o_lora_rank": 24,
    "o_groups": 2,
    # Sparse attention: fewer keys than the prompts have, and heads enough that no two keys score alike
    "index_head_dim": 16,
    "index_n_heads": 16,
    "index_topk": 8,
    "index_block_size": 4,
    "index_topk_blocks": 2,
    # Windows, shorter than the prompts
    "sliding_window": 8,
    "attention_window_size": 8,
    "attention_chunk_size": 8,
    "window_size": 8,
    "local_attention": 8,
    "sliding_window_size": 8,
    "keep_window_size": 8,
    "rel_extent": 16,
    "d_rel": 8,
    # Experts: the second layer has some where the first is dense
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "moe_num_experts": 8,
    "zero_expert_num": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "top_k_experts": 2,
    "moe_intermediate_size": 48,
    "expert_ffn_hidden_size": 48,
    "shared_expert_intermediate_size": 40,
    "shared_intermediate_size": 40,
    "shared_experts_intermediate_size": 40,
    "moe_shared_expert_intermediate_size": 40,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "moe_layer_start_index": 1,
    "router_hidden_size": 32,
    # Recurrent layers: chunks shorter than the prompts
    "mamba_d_state": 8,
    "state_size": 8,
    "ssm_state_size": 8,
    "mamba_d_head": 16,
    "mamba_head_dim": 16,
    "mamba_headdim": 16,
    "mamba_n_heads": 8,
    "mamba_num_heads": 8,
    "mamba_n_groups": 2,
    "n_groups": 2,
    "mamba_ngroups": 2,
    "mamba_d_ssm": 128,
    "mamba_dt_rank": 4,
    "time_step_rank": 4,
    "n_mamba_heads": 2,
    "mamba_chunk_size": 8,
    "chunk_size": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_num_heads": 4,
    "linear_head_dim": 16,
    # Ranks and the like
    "gated_norm_rank": 8,
    "laurel_rank": 8,
    "adapter_rank": 8,
    "hc_lowrank": 16,
    # Factors that are not 1
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.6,
    "logits_scaling": 0.5,
    "logit_scale": 0.5,
    "query_pre_attn_scalar": 24,
    "attn_logit_softcapping": 4.0,
    "final_logit_softcapping": 2.0,
    "logits_soft_cap": 2.0,
    "output_logit_soft_cap": 4.0,
    "route_scale": 1.5,
    "routed_scaling_factor": 1.5,
    "router_scaling_factor": 1.5,
    "moe_routed_scaling_factor": 1.5,
    "attention_in_multiplier": 1.5,
    "attention_out_multiplier": 0.7,
    "key_multiplier": 0.8,
    "lm_head_multiplier": 2.0,
    "ssm_in_multiplier": 1.2,
    "ssm_out_multiplier": 0.8,
    "mlp_multipliers": [1.5, 0.7],
    "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7],
    "scale_emb": 3,
    "dim_model_base": 32,
    "embedding_scale": 3.0,
    "full_attn_alpha_factor": 1.3,
    "full_attn_beta_factor": 0.8,
    "linear_attn_alpha_factor": 1.2,
    "linear_attn_beta_factor": 0.9,
    "mlp_alpha_factor": 1.1,
    "mlp_beta_factor": 0.7,
    "logits_mup_width_multiplier": 2.0,
    # Biases and norms
    "attention_bias": True,
    "mlp_bias": True,
    "use_bias": True,
    "use_qkv_bias": True,
    "mamba_proj_bias": True,
    "conv_bias": True,
    "lm_head_bias": True,
    "norm_bias": True,
    "attention_out_bias": True,
    "projectors_bias": True,
    "add_bias_linear": True,
    "use_qk_norm": True,
    "qk_layernorm": True,
    "mup_enabled": True,
    # What is an encoder unless told otherwise
    "is_decoder": True,
}

_LAYER_COUNTS = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "decoder_layers",
    "encoder_layers",
    "num_decoder_layers",
    "num_encoder_layers",
    "num_blocks",
)

_GROUPS: dict[str, int] = {"n_group": 2, "topk_group": 1, "num_expert_group": 2}
"""Groups of experts, where the model has more than one."""


def shrink(config: Any, overrides: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Settings that make a tiny model of the type of `config`, a default config; sub-configs are shrunk likewise.

    What is None by default stays None: it is a part that the model does without. What is not named in the tables keeps
    its default. `overrides`: settings by model type, which win.
    """
    known = config.to_dict()
    layers = MIXED_LAYERS if _is_mixed(known) else LAYERS
    settings = {name: value for name, value in SETTINGS.items() if known.get(name) is not None}
    settings |= {name: layers for name in _LAYER_COUNTS if known.get(name) is not None}
    settings |= {name: value for name, value in _GROUPS.items() if (known.get(name) or 1) > 1}
    if known.get("kv_lora_rank") is not None:
        # Keys and values of every query head come out of the latent; what is rotated has a width of its own.
        settings["num_key_value_heads"] = settings["num_attention_heads"]
        settings["head_dim"] = settings["qk_rope_head_dim"]
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if part is not None:
            settings[name] = {**shrink(part, overrides), "model_type": part.model_type}
    return merge(settings, overrides.get(config.model_type, {}))


def merge(settings: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """`settings` with `overrides`, in nested configs too; an override of `...` leaves the default of the model."""
    merged = dict(settings)
    for name, value in overrides.items():
        if value is ...:
            merged.pop(name, None)
        elif isinstance(value, Mapping) and isinstance(merged.get(name), Mapping):
            merged[name] = merge(merged[name], value)
        else:
            merged[name] = value
    return merged


def _is_mixed(known: Mapping[str, Any]) -> bool:
    """Whether the layers of a config are of more than one kind."""
    lists = [value for name, value in known.items() if name.endswith(("layer_types", "layers_block_type", "layers"))]
    return any(isinstance(value, list) and len(set(map(str, value))) > 1 for value in lists)
