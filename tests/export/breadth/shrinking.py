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


def named(value: Any, names: str) -> dict[str, Any]:
    """One value for several settings."""
    return dict.fromkeys(names.split(), value)


SETTINGS: dict[str, Any] = {
    # Tokens
    **named(VOCAB, "vocab_size vocab_size_per_layer_input decoder_vocab_size unpadded_vocab_size"),
    **named(1, "bos_token_id decoder_start_token_id"),
    "eos_token_id": 2,
    "pad_token_id": 0,
    "forced_eos_token_id": None,
    # Positions
    **named(
        256,
        "max_position_embeddings n_positions n_ctx max_seq_len context_length model_max_length max_target_positions",
    ),
    "max_source_positions": 64,
    "rotary_dim": 8,
    # Widths
    **named(64, "hidden_size d_model n_embd emb_dim embedding_dim word_embed_proj_dim lru_width attention_hidden_size"),
    **named(32, "embedding_size input_embedding_size"),
    "output_embedding_size": 48,
    "hidden_size_per_layer_input": 16,
    **named(
        96,
        "intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim dff dim_ff ffn_hidden_size "
        "dense_intermediate_size intermediate_size_mlp d_inner feed_forward_size",
    ),
    # Heads
    **named(
        4,
        "num_attention_heads n_head n_heads num_heads attention_heads decoder_attention_heads "
        "encoder_attention_heads num_decoder_attention_heads num_encoder_attention_heads "
        "swa_num_attention_heads",
    ),
    **named(2, "num_key_value_heads num_kv_heads swa_num_key_value_heads num_query_groups"),
    **named(16, "head_dim swa_head_dim kv_channels d_head dim_head attention_head_size attention_head_dim"),
    # Keys and values of low rank: keys are wider than values
    **named(24, "q_lora_rank qk_head_dim o_lora_rank"),
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    **named(16, "qk_nope_head_dim v_head_dim"),
    "o_groups": 2,
    # Sparse attention: fewer keys than the prompts have, and heads enough that no two keys score alike
    **named(16, "index_head_dim index_n_heads"),
    "index_topk": 8,
    "index_block_size": 4,
    "index_topk_blocks": 2,
    # Windows, shorter than the prompts
    **named(
        8,
        "sliding_window attention_window_size attention_chunk_size window_size local_attention "
        "sliding_window_size keep_window_size d_rel",
    ),
    "rel_extent": 16,
    # Experts: the second layer has some where the first is dense
    **named(8, "num_experts num_local_experts n_routed_experts moe_num_experts"),
    "zero_expert_num": 4,
    **named(2, "num_experts_per_tok num_experts_per_token moe_topk moe_k top_k_experts"),
    **named(48, "moe_intermediate_size expert_ffn_hidden_size"),
    **named(
        40,
        "shared_expert_intermediate_size shared_intermediate_size shared_experts_intermediate_size "
        "moe_shared_expert_intermediate_size",
    ),
    **named(1, "first_k_dense_replace num_dense_layers moe_layer_start_index"),
    "router_hidden_size": 32,
    # Recurrent layers: chunks shorter than the prompts
    **named(8, "mamba_d_state state_size ssm_state_size mamba_n_heads mamba_num_heads mamba_chunk_size chunk_size"),
    **named(16, "mamba_d_head mamba_head_dim mamba_headdim linear_key_head_dim linear_head_dim"),
    **named(2, "mamba_n_groups n_groups mamba_ngroups n_mamba_heads linear_num_key_heads"),
    "mamba_d_ssm": 128,
    **named(4, "mamba_dt_rank time_step_rank linear_num_value_heads linear_num_heads"),
    "linear_value_head_dim": 24,
    # Ranks and the like
    **named(8, "gated_norm_rank laurel_rank adapter_rank"),
    "hc_lowrank": 16,
    # Factors that are not 1
    **named(3.0, "embedding_multiplier embedding_scale"),
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.6,
    **named(0.5, "logits_scaling logit_scale"),
    "query_pre_attn_scalar": 24,
    **named(4.0, "attn_logit_softcapping output_logit_soft_cap"),
    **named(2.0, "final_logit_softcapping logits_soft_cap lm_head_multiplier logits_mup_width_multiplier"),
    **named(
        1.5,
        "route_scale routed_scaling_factor router_scaling_factor moe_routed_scaling_factor attention_in_multiplier",
    ),
    **named(0.7, "attention_out_multiplier mlp_beta_factor"),
    **named(0.8, "key_multiplier ssm_out_multiplier full_attn_beta_factor"),
    **named(1.2, "ssm_in_multiplier linear_attn_alpha_factor"),
    "mlp_multipliers": [1.5, 0.7],
    "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7],
    "scale_emb": 3,
    "dim_model_base": 32,
    "full_attn_alpha_factor": 1.3,
    "linear_attn_beta_factor": 0.9,
    "mlp_alpha_factor": 1.1,
    # Biases and norms
    **named(
        True,
        "attention_bias mlp_bias use_bias use_qkv_bias mamba_proj_bias conv_bias lm_head_bias norm_bias "
        "attention_out_bias projectors_bias add_bias_linear use_qk_norm qk_layernorm mup_enabled",
    ),
    # What is an encoder unless told otherwise
    "is_decoder": True,
}

_LAYER_COUNTS = (
    *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"),
    *("num_decoder_layers", "num_encoder_layers", "num_blocks"),
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
