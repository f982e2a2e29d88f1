"""What a tiny checkpoint of each model type needs beyond being shrunk: one table, pure data, read by `settings`.

Most types need nothing. The others need layers of every kind they have, the settings that transformers has no default
for, or a seed with which the greedy tokens do not repeat themselves.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.checkpoints import save_random_model
from tests.export.breadth.shrinking import named, shrink

LINEAR, FULL, SLIDING = "linear_attention", "full_attention", "sliding_attention"
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
THREE_ROWS = {"rope_parameters": {**DEFAULT_ROPE, "mrope_section": [2, 3, 3]}}
"""A position has three numbers, which share the 8 frequencies of a head of 16 among them."""

# Settings that win over those of `shrinking`, for a sub-config of that type, too. `...`: as transformers has it.
SPECIAL: dict[str, dict[str, Any]] = {
    "axk2": {"layer_types": ...},
    "bailing_hybrid": {"layer_types": [LINEAR, FULL, LINEAR, FULL]},
    "bamba": {"attn_layer_indices": [1]},
    "blt": {
        "encoder_hash_byte_group_vocab": 300,
        "local_attention_window_len": 8,
        "encoder_config": {"hidden_size_global": 64},
        "decoder_config": {"hidden_size_global": 64},
    },
    "cohere2_moe": {"first_k_dense_replace": 1},
    "cohere_compass_text": {
        "rope_parameters": {FULL: DEFAULT_ROPE, SLIDING: DEFAULT_ROPE},
        "layer_types": [FULL, SLIDING],
        "logit_scale": 0.5,
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 1.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 8, "moe_top_k": 2},
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1, "layer_types": [FULL, SLIDING]},
    "dots3_note_text": {
        **named(32, "head_dim swa_kv_lora_rank swa_head_dim"),
        **named(4, "swa_num_attention_heads swa_num_key_value_heads"),
        **named(24, "swa_q_lora_rank swa_qk_nope_head_dim"),
        "swa_v_head_dim": 16,
    },
    "dots3_note_vision_encoder": {
        "num_hidden_layers": 2,
        "pyramid_num_routed": [0, 4],
        "mlp_bias": False,
        "adapter_in_dim": 64,
        "adapter_out_dim": 64,
    },
    "dots3_note_audio_encoder": {"adapter_input_size": 64, "adapter_out_dim": 64},
    "gemma3_text": {"layer_types": [SLIDING, SLIDING, FULL, SLIDING]},
    "gemma3n_text": {
        "num_hidden_layers": 5,
        "num_kv_shared_layers": 2,
        "layer_types": [SLIDING, FULL, SLIDING, SLIDING, FULL],
        "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0, 0.0],
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "num_layers": 4},
    "granitemoehybrid": {"layer_types": [LINEAR, FULL]},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "inkling2_text": {"layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding", "hybrid"]},
    "inkling2_loop_text": {"layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding", "hybrid"]},
    "inkling_text": {"layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding", "hybrid"]},
    "jamba": {
        "num_hidden_layers": 4,
        **named(2, "attn_layer_period expert_layer_period"),
        **named(1, "attn_layer_offset expert_layer_offset"),
    },
    "kimi_linear": {"layer_types": [LINEAR, FULL, LINEAR, FULL]},
    "kolibri1": {"layer_types": [SLIDING, FULL, SLIDING, FULL]},
    "laguna": {"layer_types": [SLIDING, FULL, SLIDING, FULL]},
    "lfm2": {"num_hidden_layers": 3, "layer_types": ["conv", FULL, "conv"], "full_attn_idxs": ...},
    "lfm2_moe": {"num_hidden_layers": 3, "layer_types": ["conv", FULL, "conv"]},
    "lfm3": {"layer_types": ["conv", SLIDING, FULL, "conv"]},
    "llama4_text": {"interleave_moe_layer_step": 2, "floor_scale": 8},
    "mamba2": {"num_heads": 8},
    "mellum": {"num_hidden_layers": 4, "layer_types": [SLIDING, FULL, SLIDING, FULL]},
    "ministral": {"head_dim": 16, "layer_types": [SLIDING, FULL]},
    "mllama_text_model": {"num_hidden_layers": 3, "cross_attention_layers": [1]},
    "nemotron": {"num_key_value_heads": 2},
    "nemotron_h": {"layers_block_type": [LINEAR, "moe", FULL, "mlp"]},
    # Towers
    "chameleon": {"vocabulary_map": {"<image>": 286, "IMGIMGA": 5}, "image_token_id": 286},
    "florence_vision": {"num_heads": ..., "num_groups": ...},
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": 16}},
    "glm4v_vision": {"out_hidden_size": 64},
    "glm4v_moe_vision": {"out_hidden_size": 64},
    "glm_ocr_vision": {"out_hidden_size": 64},
    "qwen2_vl_vision": {"depth": 2, "embed_dim": 64},
    "granite4_vision": {"deepstack_layer_map": [[-1, 0]], "downsample_rate": "1/2"},
    "granite_docling": {"vision_config": {"out_hidden_size": 64}},
    "inkling2": {"vision_config": {"text_hidden_size": 64}},
    "inkling2_loop": {"vision_config": {"text_hidden_size": 64}},
    "kosmos_2_5_text_model": {"layers": 2},
    "molmo2": {"adapter_config": {"vision_feature_layer": [-1, -2]}},
    "muse_spark": {"audio_config": {"num_hidden_layers": ..., "out_hidden_size": 64}},
    "nemotron_h_omni": {"vision_config": {"video_temporal_patch_size": 2}},
    # Decoders
    "deepseek_ocr2_text": {
        "mlp_layer_types": ["dense", "sparse"],
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
    },
    "ernie4_5_vl_moe_text": {
        "moe_intermediate_size": [48, 32],
        "rope_parameters": {**DEFAULT_ROPE, "mrope_section": [3, 3, 2]},
    },
    "glm5_next_text": {
        "index_kpool": 4,
        "num_key_value_heads": 4,
        "qk_rope_head_dim": 0,
        "head_dim": 0,
        "qk_head_dim": 16,
    },
    "hy_v4_vl_text": {"rope_parameters": {**DEFAULT_ROPE, "mrope_section": [2, 1, 1]}},
    "hunyuan_vl_text": {"head_dim": 16, **THREE_ROWS},
    "step3p5": {
        "sliding_window": 8,
        "layer_types": [FULL, SLIDING, FULL, SLIDING],
        "rope_parameters": {FULL: DEFAULT_ROPE, SLIDING: DEFAULT_ROPE},
    },
    "unlimited_ocr_text": {"num_key_value_heads": 4},
    "qwen2_vl": {"image_token_id": 287},
    **named(
        THREE_ROWS,
        "cosmos3_edge_text glm4v_text glm_ocr_text paddleocr_vl_text qwen2_5_omni_text qwen2_5_vl_text qwen2_vl_text",
    ),
    "glm4v_moe_text": {"rope_parameters": {**DEFAULT_ROPE, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]}},
    "qwen4_exp_text": {
        "eos_token_id": 2,
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
        "layer_types": [LINEAR, "indexed_attention"],
        "num_hidden_layers": 2,
        "ple_layer_ids": [1],
        "ngram_vocab_size_base": 300,
        "ple_embed_dim": 64,
        "split_ngram_parts": 2,
        "make_ngram_vocab_size_divisible_by": 8,
        "heads_per_ngram": 2,
    },
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {
        "axial_pos_shape": [16, 16],
        "axial_pos_embds_dim": [32, 32],
        "attn_layers": ["local", "lsh"],
        "num_hidden_layers": 2,
    },
    "roc_bert": {
        **named(288, "pronunciation_vocab_size shape_vocab_size"),
        **named(16, "pronunciation_embed_dim shape_embed_dim"),
    },
    "xlm": {"causal": True},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "num_hidden_layers": 4,
        "layers_block_type": [LINEAR, "hybrid", LINEAR, "hybrid"],
    },
    "zamba2": {
        "num_key_value_heads": 4,
        **named(..., "attention_hidden_size attention_head_dim mamba_headdim kv_channels num_query_groups"),
        "num_mem_blocks": 2,
        "use_mem_rope": True,
        "use_shared_attention_adapter": True,
        "num_hidden_layers": 4,
        "layers_block_type": [LINEAR, "hybrid", LINEAR, "hybrid"],
    },
    "zaya": {
        "attention_bias": False,  # as published; with a bias its state before the first token is not zeros
        "num_experts_per_tok": 1,
        "num_hidden_layers": 4,
        "sliding_window": 8,
        "layer_types": ["hybrid", "hybrid_sliding", "hybrid", "hybrid_sliding"],
    },
}

# Types that no tiny checkpoint can be made of, and why.
_ASSISTS = "The model takes hidden states and keys of the model that it assists, not tokens alone."
_TIMM = "Its vision tower needs timm, which is not installed."
_LARGE = "No settings were found that make its other parts small."
_DECODER_ONLY = "transformers cannot load it: the causal language model takes the config of the decoder alone."
IMPOSSIBLE: dict[str, str] = {
    "diffusion_gemma": "The model generates blocks by diffusion, not token by token.",
    "emu3": "transformers finds no weights for its decoder in a checkpoint with a vision tower.",
    "evolla": "transformers maps the type to a class that does not exist.",
    "apertus1p5": "Its audio tokens need a large vocabulary. Its decoder is apertus1p5_text.",
    "fast_vlm": _TIMM,
    "gemma3n": f"{_TIMM} Its decoder is gemma3n_text.",
    "gemma4_assistant": _ASSISTS,
    "gemma4_unified_assistant": _ASSISTS,
    "inkling_mm_model": "transformers requires scipy for it, which is not installed.",
    "kyutai_speech_to_text": _LARGE,
    "musicgen": _DECODER_ONLY,
    "musicgen_melody": _DECODER_ONLY,
    "nemo_speechlm": _LARGE,
    "perception_lm": _TIMM,
    "qwen2_5_omni": f"{_LARGE} Its decoder is qwen2_5_omni_thinker.",
    "qwen3_omni_moe": f"{_LARGE} Its decoder is qwen3_omni_moe_thinker.",
    "shieldgemma2": "transformers saves and loads it as an image classifier.",
    "vibevoice_asr": _LARGE,
}

# Seeds other than 0, with which greedy tokens differ from each other; with 3, doge chooses no keys that score alike.
SEEDS: dict[str, int] = {
    **named(1, "git gptj megatron-bert openai-gpt phi"),
    **named(2, "codegen gemma2 gemma3_text rembert roberta-prelayernorm xmod"),
    **named(3, "doge electra marian"),
    **named(4, "bloom"),
    **named(5, "olmo2 xlnet"),
    **named(6, "big_bird data2vec-text roberta roformer"),
    **named(7, "xglm"),
}

# Standard deviations of the weights other than 0.2, where that turns the rounding of float32 into differences of 1e-5
# and more.
STDS: dict[str, float] = {
    **named(0.1, "lara_mini qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_next"),
    **named(0.15, "gemma3n_text hrm_text"),
    **named(0.17, "zamba"),
}


def settings(model_type: str) -> dict[str, Any]:
    """The config settings of a tiny checkpoint of `model_type`."""
    from transformers import AutoConfig

    return shrink(AutoConfig.for_model(model_type), SPECIAL)


def save(folder: Path, model_type: str) -> Path:
    """Write a tiny checkpoint of `model_type`, without a tokenizer, into a new or empty folder; returns the folder."""
    save_random_model(
        folder, model_type, settings(model_type), "float32", SEEDS.get(model_type, 0), STDS.get(model_type, 0.2)
    )
    return folder
